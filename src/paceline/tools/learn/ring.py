"""The ring all-reduce from messages between neighbours (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", J. Parallel Distrib. Comput. 69, 2009).

n ranks form a ring, and each has a vector of n chunks. In each of 2 (n-1) steps every rank sends one chunk to its right
neighbour and receives one from its left:

  reduce-scatter   n-1 steps: what arrives is added to the rank's own chunk, and that sum is what it sends next. A chunk
                   has then passed all ranks, and each rank has one complete sum, that of chunk rank + 1
  all-gather       n-1 steps: complete chunks go around, and take the place of what was there

So a rank sends 2 (n-1) chunks of s/n bytes: 2 (n-1)/n s, less than twice its vector for any number of ranks. Training
uses the library's collectives instead, in fewer, larger and overlapping buckets (world/group.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.base.ownership import borders
from paceline.world.group import Group

Phase = Literal["reduce-scatter", "all-gather"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: each rank sends one chunk to its right neighbour."""

    phase: Phase
    chunks: tuple[int, ...]  # sent by each rank, by rank

    def arriving(self, rank: int) -> int:
        return self.chunks[rank - 1]


def steps(num_ranks: int) -> list[Step]:
    """Returns the 2 (n-1) steps of an all-reduce on n ranks; none for one rank."""
    plan = []
    for k in range(2 * (num_ranks - 1)):
        phase: Phase = "reduce-scatter" if k < num_ranks - 1 else "all-gather"
        # first its own, then always the one that arrived last
        plan.append(Step(phase=phase, chunks=tuple((rank - k) % num_ranks for rank in range(num_ranks))))
    return plan


def contributors(num_ranks: int, done: Sequence[Step]) -> list[list[list[int]]]:
    """Returns, by rank and chunk, the ranks whose values have been added after these steps, in order."""
    held = [[[rank] for _ in range(num_ranks)] for rank in range(num_ranks)]
    for step in done:
        sent = [held[rank][step.chunks[rank]] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            own = [] if step.phase == "all-gather" else held[rank][step.arriving(rank)]
            held[rank][step.arriving(rank)] = [*sent[rank - 1], *own]
    return held


class Ring:
    """A vector during a ring all-reduce. Every rank makes one of equal length and takes the same steps."""

    def __init__(self, group: Group, flat: torch.Tensor):
        """flat: (elements,), changed in place; on the group's device."""
        edges = borders(flat.numel(), [1.0] * group.size)
        self.chunks = [flat[edges[i] : edges[i + 1]] for i in range(group.size)]  # some empty where elements are few
        self._group = group
        self._arrived = torch.empty_like(max(self.chunks, key=torch.numel))

    def take(self, step: Step) -> None:
        """Sends this rank's chunk of the step, and adds or copies the arriving one. Collective; raises PeerLost."""
        rank, size = self._group.rank, self._group.size
        leaving, place = self.chunks[step.chunks[rank]], self.chunks[step.arriving(rank)]
        is_sum = step.phase == "reduce-scatter"
        arriving = self._arrived[: place.numel()] if is_sum else place
        self._group.start_messages(
            sends={(rank + 1) % size: leaving} if leaving.numel() else {},  # an empty chunk needs no message
            receives={(rank - 1) % size: arriving} if place.numel() else {},
        ).wait()
        if is_sum:
            place.add_(arriving)


def ring_all_reduce(group: Group, flat: torch.Tensor) -> None:
    """Replaces the vector on every rank by its sum over ranks, with the same bits on all. Collective. A rank sends 2
    (n-1)/n s bytes, to the nearest element of a chunk. Raises PeerLost."""
    ring = Ring(group, flat)
    for step in steps(group.size):
        ring.take(step)
