"""Assigns the sequences of a step to ranks. Pure arithmetic, so that each rank knows every rank's part."""

from dataclasses import dataclass

from paceline.base.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Assigns each of the sequences 0..global_batch_size-1 of a step to one rank, at any world size.

    A step is divided into consecutive micro-batches of `device_batch_size` sequences; the last may be smaller. They do
    not depend on the world size, so any world computes the same sums. Ranks take consecutive micro-batches; low ranks
    may have one more, and with more ranks than micro-batches the last ranks have none.

    Example: 12 sequences in micro-batches of 5, on 2 ranks:

        position     0 1 2 3 4 | 5 6 7 8 9 | 10 11
        micro-batch  0         | 1         | 2
        rank         0         | 0         | 1        micro_batches(1) == [range(10, 12)]

    On 4 ranks, ranks 0, 1, 2 have one micro-batch each and rank 3 has none.
    """

    global_batch_size: int
    device_batch_size: int
    world_size: int

    def __post_init__(self) -> None:
        for name, value in (
            ("train.global-batch-size", self.global_batch_size),
            ("train.device-batch-size", self.device_batch_size),
            ("the world size", self.world_size),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}; it is at least 1")

    @property
    def total_micro_batches(self) -> int:
        """Micro-batches in a step, over all ranks."""
        return -(-self.global_batch_size // self.device_batch_size)

    def _run(self, rank: int) -> range:
        """This rank's micro-batches, by number."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        share, extra = divmod(self.total_micro_batches, self.world_size)
        start = rank * share + min(rank, extra)
        return range(start, start + share + (rank < extra))

    def num_micro_batches(self, rank: int) -> int:
        """Micro-batches of this rank in a step; may be 0."""
        return len(self._run(rank))

    def num_sequences(self) -> list[int]:
        """Sequences of a step, by rank."""
        return [sum(map(len, self.micro_batches(rank))) for rank in range(self.world_size)]

    def micro_batches(self, rank: int) -> list[range]:
        """This rank's micro-batches in order, each the positions of its sequences within the step."""
        size = self.device_batch_size
        return [range(i * size, min((i + 1) * size, self.global_batch_size)) for i in self._run(rank)]
