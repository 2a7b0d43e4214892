"""The tables at the end of a run: where a step's time went, by part and rank, and which ranks were slow."""

import statistics
from collections import defaultdict

from paceline.base import units
from paceline.record.console import Console, table
from paceline.record.rows import StepRow
from paceline.record.stragglers import Stragglers

_MOST_COLUMNS = 4  # ranks shown one by one: a line of 80 characters holds them


class Totals:
    """Sums over this process's steps, without the first, which is warm-up."""

    def __init__(self) -> None:
        self.has_warmed_up = False
        self.num_steps = 0
        self.num_tokens = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._parts: dict[str, list[float]] = {}

    def add(self, row: StepRow) -> None:
        self.num_steps += 1
        for name, value in vars(row).items():
            if isinstance(value, int | float):
                self._sums[name] += value
        for part, by_rank in row.parts().items():
            so_far = self._parts.get(part, [0.0] * len(by_rank))
            self._parts[part] = [before + ms for before, ms in zip(so_far, by_rank, strict=True)]
        self.num_tokens += round(row.tokens_per_s * row.step_ms / 1e3)

    def mean_parts(self) -> dict[str, list[float]]:
        """Returns part -> milliseconds by rank, mean over the steps."""
        return {part: [ms / max(1, self.num_steps) for ms in by_rank] for part, by_rank in self._parts.items()}

    def sum(self, name: str) -> float:
        """Returns the sum of a numeric field of StepRow over the steps."""
        return self._sums[name]

    def mean(self, name: str) -> float:
        """Returns the mean of a numeric field of StepRow over the steps."""
        return self._sums[name] / max(1, self.num_steps)


def where_time_went(console: Console, totals: Totals, num_ranks: int) -> None:
    """Prints the mean step by its parts."""
    if not totals.num_steps:
        return
    step_ms, parts = totals.mean("step_ms"), totals.mean_parts()
    columns, rows = _by_rank(parts, step_ms)
    console.say(table("Where a step's time went, ms", columns, rows))
    line = f"{units.count(round(totals.num_tokens / totals.sum('step_ms') * 1e3))} tokens/s"
    if totals.sum("mfu"):
        line += f", MFU {100 * totals.mean('mfu'):.1f}%"
    if num_ranks > 1:
        comm_ms = totals.mean("comm_ms")
        hidden_ms = max(0.0, comm_ms - totals.mean("exposed_comm_ms"))
        line += (
            f"; all-reduce: {units.size(totals.mean('comm_bytes'))} of gradients a step, {comm_ms:.1f} ms under way, "
            f"{hidden_ms:.1f} ms of it behind backward"
        )
    console.say(line + "\n")


def _by_rank(parts: dict[str, list[float]], step_ms: float) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows: each of a few ranks, or the least, median and most of many; and the mean share."""
    num_ranks = len(parts["data"])
    if num_ranks <= _MOST_COLUMNS:
        names, shown = [f"rank {rank}" for rank in range(num_ranks)], parts
    else:
        names = ["least", "median", "most"]
        shown = {part: [min(by), statistics.median(by), max(by)] for part, by in parts.items()}
    rows = [
        [part, *(f"{ms:.1f}" for ms in shown[part]), f"{100 * statistics.fmean(by_rank) / step_ms:.1f}"]
        for part, by_rank in parts.items()
    ]
    rows.append(["step", *[f"{step_ms:.1f}"] * len(names), "100.0"])
    return ["part", *names, "% of step"], rows


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
