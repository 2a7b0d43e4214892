"""What ranks send to each other in a collective over Gloo.

If hosts have several ranks, these first reduce inside their host, so that over the link between hosts go the bytes of
one rank a host. Exchanges between all pairs would send g times as many with g ranks a host.

Each part of a flat tensor has an owner, and on each host one speaker: the owner itself on its own host, and on another
host the rank with the owner's place there (modulo the ranks of that host). So every rank of a host sends over the link.

  reduce-scatter  each rank sends its part to the speaker of its host, which adds in the order of ranks;
                  the speakers send the sums to the owner, which adds them in the order of hosts
  all-gather      the owner sends its part to the speaker of each other host; each speaker sends it to its host
  all-reduce      one after the other, with parts that give each host an equal share

Hosts are in the order of their first ranks. On one host whose ranks do not share memory (shared.py), or with one rank
on each, every pair of ranks exchanges its parts, and the owner adds them in the order of distance. As the order of
additions is fixed, sums always have the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.world.transfer import Phase


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, in order."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Hosts":
        """Returns the hosts. names: each rank's host, by rank."""
        return cls(tuple(tuple(r for r, other in enumerate(names) if other == name) for name in dict.fromkeys(names)))

    @property
    def has_levels(self) -> bool:
        """Whether there are several hosts, and one of them has several ranks."""
        return 1 < len(self.ranks) < sum(map(len, self.ranks))

    def speakers(self, owner: int) -> list[int]:
        """Returns, by host, the rank that sends and receives the owner's part for its host."""
        place = next(ranks.index(owner) for ranks in self.ranks if owner in ranks)
        return [ranks[place % len(ranks)] if owner not in ranks else owner for ranks in self.ranks]

    def even_shares(self) -> list[float]:
        """Returns a share of a tensor for each rank, by rank, so that each host has an equal one."""
        share = {rank: 1 / len(ranks) for ranks in self.ranks for rank in ranks}
        return [share[rank] for rank in sorted(share)]

    def reduce_scatter(self, rank: int, parts: Sequence[torch.Tensor]) -> list[Phase]:
        """Returns the phases of this rank, after which parts[rank] is the sum over ranks; other parts are undefined."""
        if not self.has_levels:
            flat = Phase([(to, parts[to]) for to in by_distance(rank, 1, len(parts))])
            flat.add_up([rank, *by_distance(rank, -1, len(parts))], rank, parts[rank])
            return [flat]
        here = next(ranks for ranks in self.ranks if rank in ranks)
        inside, between = Phase(), Phase()
        for owner, part in enumerate(parts):
            speakers = self.speakers(owner)
            speaker = next(each for each in speakers if each in here)
            if speaker != rank:
                inside.sends.append((speaker, part))
                continue
            inside.add_up(here, rank, part)
            if owner == rank:
                between.add_up(speakers, rank, part)
            else:
                between.sends.append((owner, part))
        return [inside, between]

    def all_gather(self, rank: int, parts: Sequence[torch.Tensor]) -> list[Phase]:
        """Returns the phases of this rank, after which each part is what its owner had."""
        if not self.has_levels:
            sends = [(to, parts[rank]) for to in by_distance(rank, 1, len(parts))]
            return [Phase(sends, [(source, parts[source]) for source in by_distance(rank, -1, len(parts))])]
        here = next(ranks for ranks in self.ranks if rank in ranks)
        between, inside = Phase(), Phase()
        for owner, part in enumerate(parts):
            speakers = self.speakers(owner)
            speaker = next(each for each in speakers if each in here)
            if owner == rank:
                between.sends += [(other, part) for other in speakers if other != rank]
            elif speaker == rank:
                between.receives.append((owner, part))
            if speaker == rank:
                inside.sends += [(other, part) for other in here if other != rank]
            else:
                inside.receives.append((speaker, part))
        return [between, inside]


def by_distance(rank: int, direction: int, size: int) -> list[int]:
    """Returns the other ranks, nearest first, upwards (1) or downwards (-1), so that not all send to the same rank."""
    return [(rank + direction * distance) % size for distance in range(1, size)]
