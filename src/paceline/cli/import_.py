"""paceline import"""

import shlex
from dataclasses import dataclass
from pathlib import Path

import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import parse


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Make a run folder from a model trained elsewhere: GPT-2, Llama, Qwen3 as transformers saves it, or nanoGPT's."""

    source: tyro.conf.Positional[str]
    """A folder with config.json and model.safetensors, ORG/NAME on the Hugging Face hub, or nanoGPT's ckpt.pt."""
    out: str
    """The run folder, new."""


def main(arguments: list[str]) -> int:
    parsed = parse(ImportArguments, ImportArguments(source="", out=""), arguments, "import")
    if not parsed.source or not parsed.out:
        raise UserError("give what to import and where to: paceline import SRC --out DIR")
    from paceline.tools.hub.importing import import_model

    for line in import_model(parsed.source, Path(parsed.out)):
        print(line)
    out = shlex.quote(parsed.out)
    sample = f"\n  paceline sample {out}" if (Path(parsed.out) / "tokenizer.json").exists() else ""
    print(f"\nTry next:{sample}\n  paceline train --init-from {out} --data.path DIR --train.steps 100")
    return 0
