"""The ring all-reduce, written out: messages between neighbours, and nothing else (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69, 2009).

n ranks stand in a ring, and each has a vector. All cut it into n chunks at the same borders. Then, 2 (n-1) times, each
rank sends one chunk to its right neighbour while one arrives from its left:

  reduce-scatter   n-1 steps: what arrives is added to the rank's own chunk, and that sum is what it sends next. A chunk
                   has then passed all ranks, and each rank has one complete sum, that of chunk rank + 1
  all-gather       n-1 steps: complete chunks go around, and take the place of what was there

Each step moves every chunk over one link. So a rank sends 2 (n-1) chunks of s/n bytes: 2 (n-1)/n s, less than twice its
vector, however many ranks there are. Training does not use this: the library's collectives do the same in fewer, larger
and overlapping pieces (world/group.py).
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
    """One round of messages: each rank sends one chunk to its right neighbour."""

    phase: Phase
    chunks: tuple[int, ...]  # which one each rank sends, by rank

    def arriving(self, rank: int) -> int:
        """Returns the chunk that this rank gets from its left neighbour."""
        return self.chunks[rank - 1]


def steps(num_ranks: int) -> list[Step]:
    """Returns the 2 (n-1) steps of an all-reduce on n ranks; none for one rank, which has the sum already."""
    plan = []
    for k in range(2 * (num_ranks - 1)):
        phase: Phase = "reduce-scatter" if k < num_ranks - 1 else "all-gather"
        # its own first, then always the one that came last
        plan.append(Step(phase=phase, chunks=tuple((rank - k) % num_ranks for rank in range(num_ranks))))
    return plan


def contributors(num_ranks: int, done: Sequence[Step]) -> list[list[list[int]]]:
    """Returns, by rank and chunk, whose values stand there after these steps, in the order in which they were added."""
    held = [[[rank] for _ in range(num_ranks)] for rank in range(num_ranks)]
    for step in done:
        sent = [held[rank][step.chunks[rank]] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            own = [] if step.phase == "all-gather" else held[rank][step.arriving(rank)]
            held[rank][step.arriving(rank)] = [*sent[rank - 1], *own]
    return held


class Ring:
    """A vector on its way around the ring. Every rank makes one, of equal length, and takes the same steps."""

    def __init__(self, group: Group, flat: torch.Tensor):
        """flat: (elements,), changed in place; on the group's device."""
        edges = borders(flat.numel(), [1.0] * group.size)
        self.chunks = [flat[edges[i] : edges[i + 1]] for i in range(group.size)]  # some empty where elements are few
        self._group = group
        self._arrived = torch.empty_like(max(self.chunks, key=torch.numel))

    def take(self, step: Step) -> None:
        """Sends this rank's chunk of the step and puts what arrives in its place. Collective; raises PeerLost."""
        rank, size = self._group.rank, self._group.size
        leaving, place = self.chunks[step.chunks[rank]], self.chunks[step.arriving(rank)]
        is_sum = step.phase == "reduce-scatter"
        arriving = self._arrived[: place.numel()] if is_sum else place
        self._group.start_messages(
            sends={(rank + 1) % size: leaving} if leaving.numel() else {},  # an empty chunk is no message
            receives={(rank - 1) % size: arriving} if place.numel() else {},
        ).wait()
        if is_sum:
            place.add_(arriving)


def ring_all_reduce(group: Group, flat: torch.Tensor) -> None:
    """Replaces the vector, on every rank, by its sum over ranks; every rank gets the same bits. Collective.

    A rank sends 2 (n-1)/n s bytes, to the nearest element of a chunk. Raises PeerLost.
    """
    ring = Ring(group, flat)
    for step in steps(group.size):
        ring.take(step)
