"""The rows of metrics.jsonl and ranks.jsonl, a contract for tools and people. Names have the units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
ByRank = Sequence[float] | Floats
MOST_LISTED = 8  # ranks whose times stand in each row


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One step. Times are this rank's (rank 0's in the file) unless they are lists by rank."""

    step: int  # 1 after the first update
    loss: float  # nats per token, mean over the whole global batch
    lr: float
    grad_norm: float  # before clipping, of the gradient summed over ranks
    skipped: bool  # the gradient was not finite: no rank updated
    tokens: int  # seen so far by all ranks
    step_ms: float  # from the end of the step before to the end of this one
    tokens_per_s: float
    mfu: float | None  # model FLOP/s over the summed peaks of all ranks
    compute_ms: float  # this rank's work before it first waited for others: data, forward, backward
    data_ms: float
    forward_ms: float
    backward_ms: float
    comm_ms: float  # time with at least one collective under way
    exposed_comm_ms: float  # the part of comm_ms that compute did not hide
    comm_cpu_ms: float  # CPU time of the threads that carry transfers; takes compute's core where there is no other
    optim_ms: float  # clipping and update
    other_ms: float
    comm_bytes: int  # sent by this rank
    world_size: int
    # By rank: in metrics.jsonl in worlds of at most MOST_LISTED ranks, else in ranks.jsonl.
    # data, forward, backward, exposed_comm, optim and the rest of step_ms (other) add up to a rank's step.
    rank_sequences: Sequence[int]  # computed in this step
    rank_step_ms: ByRank  # its own time: until the all-gather before the update, and the update of the step before
    rank_compute_ms: ByRank  # data, forward and backward
    rank_data_ms: ByRank
    rank_forward_ms: ByRank
    rank_backward_ms: ByRank
    rank_exposed_comm_ms: ByRank  # also for the ranks that came later to the all-gather
    rank_optim_ms: ByRank
    codec_ms: float = 0.0  # CPU time of coding messages (parallel.wire int8, int4); the parts contain it

    def parts(self) -> dict[str, Floats]:
        """Returns part -> milliseconds by rank; a rank's parts add up to its step."""
        parts = {
            "data": np.asarray(self.rank_data_ms),
            "forward": np.asarray(self.rank_forward_ms),
            "backward": np.asarray(self.rank_backward_ms),
            "exposed communication": np.asarray(self.rank_exposed_comm_ms),
            "optimizer": np.asarray(self.rank_optim_ms),
        }
        # A rank that began the step before rank 0 did took longer for it.
        other = np.maximum(self.step_ms, self.rank_step_ms) - np.sum(list(parts.values()), axis=0)
        return parts | {"other": other}

    def lists(self) -> dict[str, list[float]]:
        """Returns the lists by rank by name."""
        return {name: np.asarray(getattr(self, name)).tolist() for name in LISTS}

    def recorded(self, slow_ranks: Sequence[int]) -> dict[str, Any]:
        """Returns the row of metrics.jsonl. In a larger world than MOST_LISTED it has [least, median, most] instead of
        the lists by rank, and the ranks that are named slow: its size does not grow with the world."""
        numbers = finite({name: getattr(self, name) for name in NUMBERS})
        if self.world_size <= MOST_LISTED:
            return numbers | self.lists()
        sorted_PR = np.sort([getattr(self, name) for name in LISTS], axis=1)
        spread_P3 = sorted_PR[:, [0, (self.world_size - 1) // 2, -1]].tolist()
        spread = dict(zip([name.removeprefix("rank_") for name in LISTS], spread_P3, strict=True))
        return numbers | {"least_median_most": spread, "slow_ranks": list(slow_ranks)}


LISTS = [field.name for field in fields(StepRow) if field.name.startswith("rank_")]
NUMBERS = [field.name for field in fields(StepRow) if field.name not in LISTS]


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One evaluation over the fixed validation sequences, shared by all ranks."""

    step: int
    val_loss: float  # nats per token
    val_bpb: float | None  # bits per UTF-8 byte; null if the data set does not know the bytes of its tokens
    tokens: int  # trained on so far
    val_tokens: int
    eval_ms: float
    elapsed_s: float  # training time so far

    def recorded(self) -> dict[str, Any]:
        """Returns the row of metrics.jsonl."""
        return finite(vars(self))


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON has them: it has no NaN or infinity, and most readers fail on them: null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
