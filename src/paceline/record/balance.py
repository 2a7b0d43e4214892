"""How the sequences of a step divide over unequal ranks, and what that gains: from rows of metrics.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

LISTS = ("rank_sequences", "rank_compute_ms", "rank_optim_ms", "rank_exposed_comm_ms")


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
    known = [row for row in rows if all(row.get(name) for name in LISTS)]
    known = [row for row in known if len(row["rank_sequences"]) == len(known[-1]["rank_sequences"])]
    if not known:
        return None
    sequences, compute_ms, optim_ms, idle_ms = (np.mean([row[name] for row in known], axis=0) for name in LISTS)
    step_ms = fmean(row["step_ms"] for row in known)
    tokens = fmean(row["tokens_per_s"] * row["step_ms"] / 1e3 for row in known)
    own_ms = compute_ms + optim_ms
    if not sequences.any() or not own_ms.all():
        return None
    tokens_per_s = tokens * sequences / sequences.sum() / own_ms * 1e3
    equal_step_ms = None
    if sequences.all():
        equal_ms = compute_ms * sequences.mean() / sequences + optim_ms
        # What the step takes beside the longest rank's own work stays as it is.
        equal_step_ms = float(step_ms + equal_ms.max() - own_ms.max())
    return Balance(
        sequences=sequences.tolist(),
        tokens_per_s=tokens_per_s.tolist(),
        idle_frac=(idle_ms / step_ms).tolist(),
        sum_of_speeds_frac=float(tokens / step_ms * 1e3 / tokens_per_s.sum()),
        step_ms=step_ms,
        equal_step_ms=equal_step_ms,
    )


def listed(sequences: Sequence[int]) -> str:
    """Returns the sequences of each rank as text, such as 24+8; of many ranks the least and the most."""
    return "+".join(map(str, sequences)) if len(sequences) <= 8 else f"{min(sequences)} to {max(sequences)}"
