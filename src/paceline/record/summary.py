"""The tables at the end of a run: where a step's time went, by part and rank, and which ranks were slow."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.base import units
from paceline.record.balance import Balance, speeds
from paceline.record.console import Console, table
from paceline.record.rate import Rate
from paceline.record.rows import LISTS, StepRow
from paceline.record.stragglers import Stragglers

_UNEQUAL = 1.25  # speeds of ranks whose fastest is faster by this factor
_SUMMED = ("step_ms", "comm_ms", "exposed_comm_ms", "comm_cpu_ms", "comm_bytes")
_MOST_COLUMNS = 4  # ranks shown one by one: a line of 80 characters holds them


class Totals:
    """Sums over this process's steps, without the first, which is warm-up."""

    def __init__(self) -> None:
        self.has_warmed_up = False
        self.num_steps = 0
        self.num_tokens = 0
        self._sums: dict[str, float] = dict.fromkeys(_SUMMED, 0.0)
        self._parts: dict[str, Any] = defaultdict(float)  # sums by rank
        self._lists: dict[str, Any] = defaultdict(float)

    def add(self, row: StepRow) -> None:
        self.num_steps += 1
        for name in _SUMMED:
            self._sums[name] += getattr(row, name)
        self.num_tokens += round(row.tokens_per_s * row.step_ms / 1e3)
        for part, by_rank in row.parts().items():
            self._parts[part] += by_rank
        for name in LISTS:
            self._lists[name] += np.asarray(getattr(row, name), float)

    def mean_parts(self) -> dict[str, list[float]]:
        """Returns part -> milliseconds by rank, mean over the steps."""
        return {part: (by_rank / max(1, self.num_steps)).tolist() for part, by_rank in self._parts.items()}

    def balance(self) -> Balance | None:
        """Returns how the ranks divided the work; None without steps."""
        lists = {name: (by_rank / self.num_steps).tolist() for name, by_rank in self._lists.items()}
        return speeds([{**lists, "step_ms": self.mean("step_ms"), "tokens_per_s": self.tokens_per_s}] if lists else [])

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.sum("step_ms") * 1e3

    def sum(self, name: str) -> float:
        """Returns the sum of a field of StepRow, one of _SUMMED, over the steps."""
        return self._sums[name]

    def mean(self, name: str) -> float:
        """Returns its mean over the steps."""
        return self._sums[name] / max(1, self.num_steps)


def where_time_went(console: Console, totals: Totals, rate: Rate | None, num_ranks: int, unit: str = "tokens") -> None:
    """Prints the mean step by its parts, and the run's rate."""
    if not totals.num_steps:
        return
    step_ms, parts = totals.mean("step_ms"), totals.mean_parts()
    columns, rows = _by_rank(parts, step_ms)
    console.say(table("Where a step's time went, ms", columns, rows))
    line = f"{units.count(rate.tokens_per_s if rate else totals.tokens_per_s)} {unit}/s"
    if rate and rate.mfu > 0:
        line += f", MFU {100 * rate.mfu:.1f}%"
    if num_ranks > 1:
        comm_ms = totals.mean("comm_ms")
        hidden_ms = max(0.0, comm_ms - totals.mean("exposed_comm_ms"))
        line += (
            f"; a rank sends {units.size(totals.mean('comm_bytes'))} a step, {comm_ms:.1f} ms under way, "
            f"{hidden_ms:.1f} ms of it behind compute, {totals.mean('comm_cpu_ms'):.1f} ms of CPU time"
        )
    console.say(line + "\n")


def _by_rank(parts: dict[str, list[float]], step_ms: float) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows: each of a few ranks, or the least, median and most of many; and the mean share."""
    names, shown = _columns(parts)
    rows = [
        [part, *(f"{ms:.1f}" for ms in shown[part]), f"{100 * statistics.fmean(by_rank) / step_ms:.1f}"]
        for part, by_rank in parts.items()
    ]
    rows.append(["step", *[f"{step_ms:.1f}"] * len(names), "100.0"])
    return ["part", *names, "% of step"], rows


def _columns(values: Mapping[str, Sequence[float]]) -> tuple[list[str], dict[str, list[float]]]:
    """Returns the names of the columns, and each row's values: each of a few ranks, or least, median, most."""
    num_ranks = len(next(iter(values.values())))
    if num_ranks <= _MOST_COLUMNS:
        return [f"rank {rank}" for rank in range(num_ranks)], {name: list(by) for name, by in values.items()}
    return ["least", "median", "most"], {name: [min(by), statistics.median(by), max(by)] for name, by in values.items()}


def who_did_what(console: Console, totals: Totals, unit: str = "tokens", dealt: str = "sequences") -> None:
    """Prints each rank's part of the work, if the ranks or their parts are unequal. dealt: what was divided."""
    work = totals.balance()
    if work is None or len(work.sequences) == 1:
        return
    if len(set(work.sequences)) == 1 and max(work.tokens_per_s) < _UNEQUAL * min(work.tokens_per_s):
        return
    names, shown = _columns(
        {
            f"{dealt} a step": work.sequences,
            f"{unit}/s while working": work.tokens_per_s,
            "waiting, % of step": [100 * idle for idle in work.idle_frac],
        }
    )
    formats = ("{:.4g}".format, units.count, "{:.1f}".format)
    rows = [[name, *map(formatted, values)] for formatted, (name, values) in zip(formats, shown.items(), strict=True)]
    console.say(table("The work of each rank", ["", *names], rows))
    line = f"together {work.sum_of_speeds_frac:.1%} of the sum of their speeds"
    if work.equal_step_ms is not None and len(set(work.sequences)) > 1:
        line += f"; a step takes {work.step_ms:.1f} ms, with equal shares {work.equal_step_ms:.1f} ms"
    console.say(line + "\n")


def who_was_slow(console: Console, stragglers: Stragglers, totals: Totals, hosts: list[str]) -> None:
    """Prints which ranks were stragglers, in what, and what waiting for them cost; nothing if none was."""
    for rank, num_steps, phase, cost_s in stragglers.summary():
        console.say(
            f"rank {rank} ({hosts[rank]}) was slow in {num_steps} of {stragglers.num_steps} steps, most of it in "
            f"{phase}: {cost_s:.1f} s more than the median rank",
            style="yellow",
        )
    if stragglers.cost_ms:
        share = stragglers.cost_ms / totals.sum("step_ms")
        console.say(f"waiting for slow ranks: {stragglers.cost_ms / 1e3:.1f} s, {share:.0%} of the time in steps\n")
