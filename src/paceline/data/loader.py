"""This rank's micro-batches of any step, a function of the step number and the step's plan."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from paceline.data.mixture import Sequences
from paceline.data.plan import BatchPlan
from paceline.data.stream import Int64s

_LOCATED_AT_ONCE = 4096  # sequences, since computing a permutation has a fixed cost a call


@dataclass(frozen=True)
class MicroBatch:
    """`targets` are `tokens` shifted by one; `positions` count the run's sequences from 0.

    A position does not depend on the world size: it is the key of dropout. `documents` numbers the documents of a
    sequence: equal numbers may attend to each other. None: all may. It stays on the CPU (see GPT.forward).
    """

    tokens: torch.Tensor  # (batch, seq) int64
    targets: torch.Tensor  # (batch, seq) int64
    positions: torch.Tensor  # (batch,) int64
    documents: torch.Tensor | None  # (batch, seq) int32

    @classmethod
    def joined(cls, parts: "Sequence[MicroBatch]") -> "MicroBatch":
        documents = [part.documents for part in parts if part.documents is not None]
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat(documents) if documents else None,
        )

    def pinned(self) -> "MicroBatch":
        """The same in pinned memory, from which CUDA copies asynchronously."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self._each(torch.Tensor.pin_memory), documents=documents)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on the device. CUDA copies asynchronously from pinned memory, which torch keeps until it is done;
        MPS would read memory that was freed meanwhile (pytorch/pytorch#189690)."""
        if device == self.tokens.device:
            return self
        return self._each(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """The same with all but the documents changed."""
        return MicroBatch(change(self.tokens), change(self.targets), change(self.positions), self.documents)


def read_batch(sequences: Sequences, places: Int64s, positions: Int64s) -> MicroBatch:
    """Returns the sequences at these places, each read as T+1 tokens, on the CPU, with their `positions` (n,)."""
    block = sequences.read(places)
    documents = None
    if sequences.document_token is not None:
        begins = block[:, :-1] == sequences.document_token
        documents = torch.from_numpy(np.cumsum(begins, axis=1, dtype=np.int32))
    return MicroBatch(
        torch.from_numpy(block[:, :-1].astype(np.int64)),  # slices first: those of a wide array would be copied again
        torch.from_numpy(block[:, 1:].astype(np.int64)),
        torch.from_numpy(positions),
        documents,
    )


class _Located(NamedTuple):
    """A rank's sequences of some consecutive steps."""

    number: int  # of the group of steps
    in_step: range  # positions within each step
    positions: Int64s
    places: Int64s


class Loader:
    """Reads this rank's own sequences of a step. The cost of a batch does not depend on the world size: only this
    rank's sequences are located and read."""

    def __init__(
        self, sequences: Sequences, plan: BatchPlan, rank: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.sequences, self.rank, self.seed = sequences, rank, seed
        self.device = torch.device(device)
        self._plans = [(0, plan)]  # with the first step of each
        self._located: _Located | None = None

    @property
    def seq_len(self) -> int:
        return self.sequences.seq_len

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a step (0, 1, ...) in order, on the device; empty if the plan gives it
        none. The sequences of a step and of its micro-batches do not depend on the world size."""
        return [batch.to(self.device) for batch in self.host_batches(step)]

    def host_batches(self, step: int) -> list[MicroBatch]:
        """Returns the same before the copy to the device: on the CPU, in pinned memory if the device is CUDA. Any
        thread may call it."""
        plan = self.plan_at(step)
        micro_batches = plan.micro_batches(self.rank)
        if not micro_batches:
            return []
        in_step = range(micro_batches[0].start, micro_batches[-1].stop)  # consecutive for a rank
        number, within = divmod(step, max(1, _LOCATED_AT_ONCE // len(in_step)))
        located = self._located
        if located is None or (located.number, located.in_step) != (number, in_step):
            located = self._located = self._locate(number, in_step, plan.global_batch_size)
        begin = within * len(in_step) - in_step.start
        batches = []
        for part in micro_batches:
            part_here = slice(begin + part.start, begin + part.stop)
            batch = read_batch(self.sequences, located.places[part_here], located.positions[part_here])
            batches.append(batch.pinned() if self.device.type == "cuda" else batch)
        return batches

    def plan_at(self, step: int) -> BatchPlan:
        return next(plan for first, plan in reversed(self._plans) if first <= step)

    def change(self, first: int, plan: BatchPlan) -> None:
        """Sets the plan of step `first` and later ones; none of them may have been read yet."""
        self._plans = [*(known for known in self._plans if known[0] < first), (first, plan)]

    def _locate(self, number: int, in_step: range, global_batch_size: int) -> _Located:
        """Cached, because it is slow for a few sequences."""
        num_steps = max(1, _LOCATED_AT_ONCE // len(in_step))
        steps = np.arange(number * num_steps, (number + 1) * num_steps, dtype=np.int64)
        positions = (steps[:, None] * global_batch_size + np.array(in_step, dtype=np.int64)).ravel()
        return _Located(number, in_step, positions, self.sequences.locate(self.seed, positions))


class FixedBatches:
    """The sequences of every evaluation, always the same."""

    def __init__(self, sequences: Sequences, max_sequences: int, device: torch.device | str = "cpu") -> None:
        self.sequences, self.device = sequences, torch.device(device)
        self._places = sequences.fixed(max_sequences)

    def __len__(self) -> int:
        return len(self._places)

    def micro_batch(self, which: range) -> MicroBatch:
        """Returns the sequences of these numbers, 0..len-1, on the device; `which` is not empty."""
        numbers = np.arange(which.start, which.stop, which.step, dtype=np.int64)
        return read_batch(self.sequences, self._places[numbers], numbers).to(self.device)


class Prefetcher:
    """A loader that makes the next step's micro-batches during a step, in one thread; correct in any order of steps.

    The caller waits for its first step (a run may resume anywhere); each step starts the next one's preparation. The
    thread reads, converts and pins; the caller's thread copies to the device on its own stream. An error in a step is
    raised when that step is requested. `close`, or the end of a `with`, ends the thread.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=_use, initargs=(loader.device,))
        self._pending: dict[int, Future[list[MicroBatch]]] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a step; see `Loader.micro_batches`. For one thread at a time."""
        wanted = self._pending.pop(step, None) or self._thread.submit(self.loader.host_batches, step)
        for skipped in self._pending.values():
            skipped.cancel()
        self._pending = {step + 1: self._thread.submit(self.loader.host_batches, step + 1)}
        return [batch.to(self.loader.device) for batch in wanted.result()]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _use(device: torch.device) -> None:
    """Pinning in a thread without a current device would open a context, and take memory, on the first GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
