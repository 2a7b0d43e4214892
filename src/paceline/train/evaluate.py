"""Validation, shared by all ranks over a fixed set of sequences: the same number at any world size."""

import math
from dataclasses import dataclass

import torch

from paceline.data.blend import Blend
from paceline.data.loader import FixedBatches
from paceline.model.gpt import GPT
from paceline.train.step import At
from paceline.world.group import Group


@dataclass(frozen=True)
class Evaluation:
    """Totals over the whole set."""

    loss: float  # nats per token
    bpb: float | None  # bits per UTF-8 byte of text; None where the data does not say how many bytes a token has
    num_tokens: int

    @property
    def shown(self) -> str:
        """The figures for people."""
        return f"validation loss {self.loss:.4f}" + (f", {self.bpb:.4f} bits per byte" if self.bpb is not None else "")


@torch.no_grad()
def evaluate(
    model: GPT, validation: FixedBatches, blend: Blend, group: Group, *, batch: int, lockstep: bool, at: At
) -> Evaluation:
    """Returns the loss over the fixed validation sequences. Collective; every rank computes its share of them.

    Ranks take every n-th sequence, so a count that the world does not divide leaves some with one fewer, or none; in
    lockstep (a forward communicates) these keep the others company with a pass that counts for nothing.
    Draws from no generator and keeps no state: training goes on as if it had not been. Tokens that stand for no text
    (end of text) count in the nats with zero bytes, so nothing is left out of bits per byte.
    """
    mine = range(group.rank, len(validation), group.size)
    token_bytes = blend.token_bytes
    nats, num_tokens, num_bytes = 0.0, 0, 0
    model.eval()
    most = -(-len(validation) // group.size) if lockstep else len(mine)
    for start in range(0, most, batch):
        at("evaluate")
        which = mine[start : start + batch]
        part = validation.micro_batch(which or range(1))
        loss = float(model(part.tokens, part.targets, documents=part.documents))
        if not which:
            continue
        nats += loss
        num_tokens += part.targets.numel()
        if token_bytes is not None:
            num_bytes += int(token_bytes[part.targets.cpu().numpy()].sum(dtype="int64"))
    model.train()
    rows = group.share([nats, float(num_tokens), float(num_bytes)])  # float64: counts are exact below 2^53
    nats, total, text_bytes = (math.fsum(column) for column in zip(*rows, strict=True))
    bpb = nats / math.log(2) / text_bytes if text_bytes else None
    return Evaluation(nats / total, bpb, int(total))
