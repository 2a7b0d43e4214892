"""Assigns the sequences of a step to ranks. Pure arithmetic, so that each rank knows every rank's part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.base.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Assigns each of the sequences 0..global_batch_size-1 of a step to one rank, at any world size.

    Equal shares: a step is divided into consecutive micro-batches of `device_batch_size` sequences; the last may be
    smaller. They do not depend on the world size, so any world computes the same sums. Ranks take consecutive
    micro-batches; low ranks may have one more, and with more ranks than micro-batches the last ranks have none.

    Example: 12 sequences in micro-batches of 5, on 2 ranks:

        position     0 1 2 3 4 | 5 6 7 8 9 | 10 11
        micro-batch  0         | 1         | 2
        rank         0         | 0         | 1        micro_batches(1) == [range(10, 12)]

    On 4 ranks, ranks 0, 1, 2 have one micro-batch each and rank 3 has none.

    With `shares`, rank r takes the next shares[r] sequences, in as few micro-batches as possible of nearly equal size.
    Example: the same with shares (9, 3):

        position     0 1 2 3 | 4 5 6 7 8 | 9 10 11
        rank         0       | 0         | 1
    """

    global_batch_size: int
    device_batch_size: int
    world_size: int
    shares: tuple[int, ...] = ()  # sequences of a step by rank; may be 0. Empty: equal shares
    limits: tuple[int, ...] = ()
    """The most sequences in a micro-batch, by rank, if ranks differ; only with shares. Empty: device_batch_size."""

    def __post_init__(self) -> None:
        for name, value in (
            ("train.global-batch-size", self.global_batch_size),
            ("train.device-batch-size", min([self.device_batch_size, *self.limits])),
            ("the world size", self.world_size),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}; it is at least 1")
        if self.shares and (len(self.shares) != self.world_size or sum(self.shares) != self.global_batch_size):
            raise ValueError(f"shares {self.shares} are not those of {self.global_batch_size} on {self.world_size}")

    def with_shares(self, shares: Sequence[int]) -> "BatchPlan":
        """Returns this plan with other shares."""
        return replace(self, shares=tuple(shares))

    @property
    def passes(self) -> int:
        """The most micro-batches of any rank in a step."""
        ranks = range(self.world_size if self.shares else 1)  # of equal shares low ranks have the most
        return max(map(self.num_micro_batches, ranks))

    def num_micro_batches(self, rank: int) -> int:
        """Micro-batches of this rank in a step; may be 0."""
        if self.shares:
            return -(-self.shares[rank] // self._limit(rank))
        return len(self.micro_batches(rank))

    def num_sequences(self) -> list[int]:
        """Sequences of a step, by rank."""
        return list(self.shares) or [sum(map(len, self.micro_batches(rank))) for rank in range(self.world_size)]

    def micro_batches(self, rank: int) -> list[range]:
        """This rank's micro-batches in order, each the positions of its sequences within the step."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        if self.shares:
            return cut(sum(self.shares[:rank]), self.shares[rank], self._limit(rank))
        size = self.device_batch_size
        in_all = -(-self.global_batch_size // size)
        count, extra = divmod(in_all, self.world_size)
        first = rank * count + min(rank, extra)
        numbers = range(first, first + count + (rank < extra))
        return [range(i * size, min((i + 1) * size, self.global_batch_size)) for i in numbers]

    def _limit(self, rank: int) -> int:
        return self.limits[rank] if self.limits else self.device_batch_size


def cut(start: int, length: int, size: int) -> list[range]:
    """Returns a run of positions as the fewest ranges of at most `size`, whose lengths differ by at most 1."""
    count = -(-length // size)
    borders = [start + index * length // count for index in range(count + 1)] if count else []
    return list(map(range, borders, borders[1:]))


def in_proportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Returns shares of `total` as near as possible to the proportion of the weights; ties go to low ranks."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(shares)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_rest[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)
