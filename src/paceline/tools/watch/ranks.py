"""Who computes, who waits and who is slow: the mean step of each rank."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from paceline.base.jsonl import Row
from paceline.record.read import number
from paceline.record.rows import StepRow
from paceline.record.stragglers import none_named
from paceline.tools.view.findings import Slow, slow_text
from paceline.tools.watch.view import RankView

_STEP_FIELDS = {field.name for field in dataclasses.fields(StepRow)}
_WORK = ("data", "forward", "backward", "optimizer")  # a rank's other parts are waits


def mean_steps(rows: Iterable[Row], hosts: Sequence[str], slow: Collection[int]) -> list[RankView]:
    """Returns the ranks, the slowest first: the one that works longest, for which the others wait. hosts: by rank.
    slow: those that are named stragglers."""
    found = []
    for row in rows:
        values: dict[str, Any] = {name: _cleaned(row[name]) for name in _STEP_FIELDS & row.keys()}
        with suppress(TypeError, ValueError):  # a row of another version, or a damaged one
            found.append(StepRow(**values).parts())
    if not found:
        return []
    means = {part: _means([parts[part] for parts in found]) for part in found[-1]}
    ranks = []
    for rank in range(min(map(len, means.values()))):
        parts = {part: by_rank[rank] for part, by_rank in means.items()}
        host = hosts[rank] if rank < len(hosts) else ""
        work_ms = sum(parts[part] for part in _WORK)
        if math.isfinite(sum(parts.values())):
            ranks.append(RankView(rank=rank, host=host, work_ms=work_ms, parts=parts, is_slow=rank in slow))
    return sorted(ranks, key=lambda each: -each.work_ms)


def _cleaned(value: Any) -> Any:
    return [number(each) for each in value] if isinstance(value, list) else value


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(fmean(values), 3) for values in zip(*rows, strict=False)]


def said(ranks: Sequence[RankView], slow: Sequence[Slow]) -> str:
    """Describes the slow ranks, or that there is none; empty for one rank."""
    if len(ranks) < 2:
        return ""
    return slow_text(slow) or none_named({each.rank: each.work_ms for each in ranks}, "Of late")
