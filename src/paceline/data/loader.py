"""This rank's micro-batches of any step. The loader has no state: the step's number says everything."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from paceline.data.plan import BatchPlan
from paceline.data.sequences import Places, Sequences
from paceline.data.stream import Int64s

_LOCATED_AT_ONCE = 4096  # sequences: the permutation costs 100 us for 8 of them and 390 us for 4096


@dataclass(frozen=True)
class MicroBatch:
    """`targets` are `tokens` one further on; `positions` count the run's sequences from 0.

    A position belongs to a sequence in its step, at any world size: dropout is keyed by it. `documents` counts the
    documents of a sequence: equal numbers may attend to each other. None: all may.
    """

    tokens: torch.Tensor  # (batch, seq) int64
    targets: torch.Tensor  # (batch, seq) int64
    positions: torch.Tensor  # (batch,) int64
    documents: torch.Tensor | None  # (batch, seq) int32

    def pinned(self) -> "MicroBatch":
        """The same in memory from which CUDA copies while others go on."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return MicroBatch(self.tokens.pin_memory(), self.targets.pin_memory(), self.positions.pin_memory(), documents)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on the device; from pinned memory without waiting, and torch keeps that until the copy is done."""
        if device == self.tokens.device:
            return self
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        return MicroBatch(
            self.tokens.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            documents,
        )


def read_batch(sequences: Sequences, places: Places, positions: Int64s) -> MicroBatch:
    """Returns these sequences, each T+1 tokens read, on the CPU; `positions` (n,) go along."""
    block = sequences.read(places)
    documents = None
    if sequences.document_token is not None:
        begins = block[:, :-1] == sequences.document_token
        documents = torch.from_numpy(np.cumsum(begins, axis=1, dtype=np.int32))
    return MicroBatch(
        torch.from_numpy(block[:, :-1].astype(np.int64)),  # two widenings, and no copy of what is wide already
        torch.from_numpy(block[:, 1:].astype(np.int64)),
        torch.from_numpy(positions),
        documents,
    )


class _Located(NamedTuple):
    """This rank's sequences of some steps, one step after the other."""

    number: int  # of the run of steps
    positions: Int64s
    places: Places


class Loader:
    """Gives this rank its own sequences of a step and reads no others.

    What a batch costs does not depend on the world's size: this rank's sequences alone are located and read.
    """

    def __init__(
        self, sequences: Sequences, plan: BatchPlan, rank: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.sequences, self.plan, self.rank, self.seed = sequences, plan, rank, seed
        self.device = torch.device(device)
        self._in_step = plan.micro_batches(rank)
        self._first = self._in_step[0].start if self._in_step else 0
        self._per_step = self._in_step[-1].stop - self._first if self._in_step else 0  # a rank's places are consecutive
        self._num_steps = max(1, _LOCATED_AT_ONCE // max(1, self._per_step))
        self._located = _Located(-1, np.empty(0, np.int64), Places(np.empty(0, np.int64), np.empty(0, np.int64)))

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.sequences.seq_len

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step (0, 1, ...) in order, on the device; empty where the plan gives it none.

        The set of sequences of a step, and which of them share a micro-batch, do not depend on the world size.
        """
        return [batch.to(self.device) for batch in self.host_batches(step)]

    def host_batches(self, step: int) -> list[MicroBatch]:
        """The same before they go to the device: on the CPU, in pinned memory where the device is CUDA.

        Any thread may call it.
        """
        number, within = divmod(step, self._num_steps)
        located = self._located
        if located.number != number:
            located = self._located = self._locate(number)
        begin = within * self._per_step - self._first
        batches = []
        for in_step in self._in_step:
            mine = slice(begin + in_step.start, begin + in_step.stop)
            batch = read_batch(self.sequences, located.places[mine], located.positions[mine])
            batches.append(batch.pinned() if self.device.type == "cuda" else batch)
        return batches

    def _locate(self, number: int) -> _Located:
        """Remembered, because it is dear for a few sequences; a pure function, so it is no state."""
        steps = np.arange(number * self._num_steps, (number + 1) * self._num_steps, dtype=np.int64)
        in_step = np.arange(self._first, self._first + self._per_step, dtype=np.int64)
        positions = (steps[:, None] * self.plan.global_batch_size + in_step).ravel()
        return _Located(number, positions, self.sequences.locate(self.seed, positions))


class FixedBatches:
    """The sequences that are evaluated on: the same ones every time."""

    def __init__(self, sequences: Sequences, max_sequences: int, device: torch.device | str = "cpu") -> None:
        self.sequences, self.device = sequences, torch.device(device)
        self._places = sequences.fixed(max_sequences)

    def __len__(self) -> int:
        """Sequences in all."""
        return len(self._places)

    def micro_batch(self, which: range) -> MicroBatch:
        """Returns the sequences of these numbers, 0..len-1, on the device; not empty."""
        numbers = np.arange(which.start, which.stop, which.step, dtype=np.int64)
        return read_batch(self.sequences, self._places[numbers], numbers).to(self.device)
