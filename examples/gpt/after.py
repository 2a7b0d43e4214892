"""A GPT learns the bytes of a text file, for a fixed time: before.py on one device, after.py on any number of ranks.

python before.py [FILE]                 torchrun --standalone --nproc-per-node 2 after.py [FILE]

TIME_BUDGET seconds of training (60), or STEPS updates; every EVAL_EVERY updates (20) and at the end it prints losses
and a sample, and saves; after.py resumes from there. Without FILE it reads a module of Python's library.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline

TIME_BUDGET = float(os.environ.get("TIME_BUDGET", "60"))
STEPS = int(os.environ.get("STEPS", "0"))
EVAL_EVERY = int(os.environ.get("EVAL_EVERY", "20"))
BATCH, MICRO_BATCH, CONTEXT = 20, 4, 64  # sequences, sequences, bytes
NUM_LAYERS, NUM_HEADS, WIDTH = 3, 4, 96
LR, WARMUP_FRAC, WEIGHT_DECAY, MAX_NORM = 3e-3, 0.05, 0.1, 1.0


class Block(nn.Module):
    """Attention, then a net of two layers, each added to what comes in; (batch, time, WIDTH) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.byte.weight  # tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits of each next byte: (batch, time) to (batch, time, 256)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.byte(ids) + self.place(places))))


def loss_at(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss, nats a byte, of the windows that begin there."""
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(text: torch.Tensor, num_windows: int = 32) -> float:
    """Returns the mean loss of windows that are always the same."""
    return loss_at(text, torch.linspace(0, len(text) - CONTEXT - 1, num_windows).long()).item()


@torch.no_grad()
def sample(num_bytes: int = 60) -> str:
    """Returns a text of the model's own, the same for the same weights."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    chance = torch.Generator().manual_seed(0)
    for _ in range(num_bytes):
        odds = model(ids[:, -CONTEXT:].to(device))[:, -1].softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(odds, 1, generator=chance)], dim=1)
    return bytes(ids[0, 1:].tolist()).decode(errors="replace")


def lr_at(progress: float) -> float:
    """Returns the learning rate: a short rise, then half a cosine to a tenth."""
    rise = min(1.0, (progress + 1e-3) / WARMUP_FRAC)
    return LR * rise * (0.55 + 0.45 * math.cos(math.pi * progress))


device = (world := paceline.join()).device
text = Path(sys.argv[1] if len(sys.argv) > 1 else argparse.__file__).read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
train, validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

torch.manual_seed(1337)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
replica = paceline.Replica(model, optimizer, world)
run = paceline.Run("runs/gpt", unit="bytes", net=replica, at=(at := {"progress": 0.0}))
order = torch.Generator()

step, progress = replica.num_steps, at["progress"]
while progress < 1:
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = lr_at(progress)
    optimizer.zero_grad()
    starts = torch.randint(len(train) - CONTEXT, (BATCH,), generator=order.manual_seed(step))
    batch = paceline.Batch(starts.split(MICRO_BATCH)[world.rank :: world.world_size])
    run.record(replica.train(batch, lambda rows: (loss_at(train, rows.cpu()), len(rows) * CONTEXT), max_norm=MAX_NORM))
    step += 1
    progress = step / STEPS if STEPS else progress + (time.perf_counter() - began) / TIME_BUDGET
    at["progress"] = progress = world.mean(progress)  # clocks differ, and all must stop at the same step
    if step % EVAL_EVERY == 0 or progress >= 1:
        world.say(f"step {step} training {evaluate(train):.7f} validation {evaluate(validation):.7f} {sample()!r}")
        run.save()
