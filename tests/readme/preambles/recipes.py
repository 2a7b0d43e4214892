"""What a reader of docs/guide/recipes.md has: texts prepared as data/mine, answers.jsonl, and a model's weights."""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from paceline.cli.main import main

is_main = os.environ.get("RANK", "0") == "0"
if is_main:
    Path("texts").mkdir()
    Path("texts/text.md").write_text("Each rank reads its own part of every batch, and nothing else of it. " * 200)
    Path("answers.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8, 56))
    )
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(4, 16), nn.GELU()).state_dict(), "body.pt")
    main(["data", "prepare", "texts", "--out", "data/mine", "--tokenizer", "bytes"])
    Path("ready").touch()
while not Path("ready").exists():
    time.sleep(0.02)
