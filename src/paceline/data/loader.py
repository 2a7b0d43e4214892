"""This rank's micro-batches of any step. The loader has no state: the step's number says everything."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.dataset import TokenStream
from paceline.data.order import sequence_ids
from paceline.data.plan import BatchPlan

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """`targets` are `tokens` one further on; `positions` count the run's sequences from 0.

    A position belongs to a sequence in its step, at any world size: dropout is keyed by it.
    """

    tokens: torch.Tensor  # (batch, seq) int64, on the device
    targets: torch.Tensor  # (batch, seq) int64, on the device
    positions: torch.Tensor  # (batch,) int64, on the device


def read_sequences(
    stream: TokenStream, ids: npt.ArrayLike, seq_len: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens, targets), each (len(ids), seq_len) int64 on the device; reads seq_len + 1 tokens a sequence."""
    wanted = np.asarray(ids, dtype=np.int64)
    block = np.empty((wanted.size, seq_len + 1), dtype=np.int64)
    for row, sequence in enumerate(wanted.tolist()):
        block[row] = stream.read(sequence * seq_len, seq_len + 1)
    moved = _to_device(torch.from_numpy(block), device)
    return moved[:, :-1].contiguous(), moved[:, 1:].contiguous()


def _to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copies, on CUDA without waiting: from pinned memory, which torch keeps until the copy is done."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Loader:
    """Gives this rank its own sequences of a step and reads no others."""

    stream: TokenStream
    plan: BatchPlan
    rank: int
    seed: int
    seq_len: int
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self.stream.num_sequences(self.seq_len)  # refuses a stream shorter than one sequence now and not at step 0

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step (0, 1, ...) in order; an empty list where the plan gives it none.

        The set of sequences of a step, and which of them share a micro-batch, do not depend on the world size.
        """
        num_sequences = self.stream.num_sequences(self.seq_len)
        begin = step * self.plan.global_batch_size
        batches = []
        for places in self.plan.micro_batches(self.rank):
            ids = sequence_ids(self.seed, begin + places.start, len(places), num_sequences)
            tokens, targets = read_sequences(self.stream, ids, self.seq_len, self.device)
            positions = torch.arange(begin + places.start, begin + places.stop, dtype=torch.int64)
            batches.append(MicroBatch(tokens, targets, _to_device(positions, self.device)))
        return batches


def fixed_sequences(stream: TokenStream, seq_len: int, max_sequences: int) -> Int64s:
    """Ids of at most max_sequences sequences, evenly spaced and always the same: what is evaluated on."""
    num_sequences = stream.num_sequences(seq_len)
    count = min(num_sequences, max_sequences)
    if count < 1:
        raise ValueError(f"max_sequences is {max_sequences}; it is at least 1")
    return np.arange(count, dtype=np.int64) * num_sequences // count
