"""How the sequences of a step divide over unequal ranks, and what that gains: from rows of metrics.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

_LISTS = ("rank_sequences", "rank_compute_ms", "rank_optim_ms", "rank_exposed_comm_ms")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Means over some steps; lists are by rank."""

    sequences: list[float]  # of a step
    tokens_per_s: list[float]  # of the rank's own work (data, forward, backward, update), without waits
    idle_frac: list[float]  # of the step: the rank waits for other ranks and the network
    sum_of_speeds_frac: float  # the run's tokens/s, divided by the sum of tokens_per_s
    step_ms: float
    equal_step_ms: float | None  # predicted for equal shares; None: a rank computes nothing, so its speed is unknown


def speeds(rows: Iterable[Mapping[str, Any]]) -> Balance | None:
    """Returns the balance over training rows; None if no row has the lists by rank, or all ranks were idle. Only rows
    of the last row's world size count. One row of means gives the same as the rows."""
    found = [row for row in rows if all(row.get(name) for name in _LISTS)]
    found = [row for row in found if len(row["rank_sequences"]) == len(found[-1]["rank_sequences"])]
    if not found:
        return None
    sequences, compute_ms, optim_ms, idle_ms = (_means(row[name] for row in found) for name in _LISTS)
    step_ms = fmean(row["step_ms"] for row in found)
    tokens = fmean(row["tokens_per_s"] * row["step_ms"] / 1e3 for row in found)
    own_ms = [compute + optim for compute, optim in zip(compute_ms, optim_ms, strict=True)]
    if not sum(sequences) or not all(own_ms):
        return None
    tokens_per_s = [tokens * count / sum(sequences) / ms * 1e3 for count, ms in zip(sequences, own_ms, strict=True)]
    equal = sum(sequences) / len(sequences)
    equal_ms = [
        compute * equal / count + optim
        for count, compute, optim in zip(sequences, compute_ms, optim_ms, strict=True)
        if count
    ]
    return Balance(
        sequences=sequences,
        tokens_per_s=tokens_per_s,
        idle_frac=[ms / step_ms for ms in idle_ms],
        sum_of_speeds_frac=tokens / step_ms * 1e3 / sum(tokens_per_s),
        step_ms=step_ms,
        # What the step takes beside the longest rank's own work stays as it is.
        equal_step_ms=step_ms + max(equal_ms) - max(own_ms) if all(sequences) else None,
    )


def _means(lists: Iterable[list[float]]) -> list[float]:
    """Returns the means by rank."""
    return [fmean(values) for values in zip(*lists, strict=True)]


def listed(sequences: Sequence[int]) -> str:
    """Returns the sequences of each rank as text, such as 24+8; of many ranks the least and the most."""
    return "+".join(map(str, sequences)) if len(sequences) <= 8 else f"{min(sequences)} to {max(sequences)}"
