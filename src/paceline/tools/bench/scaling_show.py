"""Shows the measurements of `paceline bench scaling`: rows, sentences, tables, JSON."""

import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import rich.table
import torch

from paceline import __version__
from paceline.base import units
from paceline.base.cores import cpu_name
from paceline.record.console import table
from paceline.tools.bench.scaling import WARM_UP_STEPS, Found, Kind, Sample, Setup, World
from paceline.world.cores import usable_cores

_MOST_SYNC = 1.05  # more is a measurement of something else
_LEAST_STRAIGHT = 0.9  # of the ideal; below it a sentence names the cause
COLUMNS = [
    *("world", "tokens/s", "of ideal", "machine", "sync", "step ms"),
    *("computed", "all-reduce", "exposed", "spread"),
]
LEGEND = (
    "of ideal: of as many single ranks as there are, each with the same threads on cores of its own; it is machine "
    "(what as many separate runs at once reach) times sync (what being one world costs on top). computed: a rank's "
    "bytes at the measured bandwidth of the link; all-reduce: a collective was under way; exposed: a rank stood still "
    "for it; spread: between the first rank and the last to have their gradients. Milliseconds a step."
)


@dataclass(frozen=True, kw_only=True)
class Row(Sample):
    """One world against its ideal: medians over the rounds. If it could not be measured, only `problem` is valid."""

    kind: Kind
    label: str
    ranks: int
    hosts: int
    rate: str
    batch: int
    shares_cores: bool
    problem: str = ""
    rounds_tokens_per_s: tuple[float, ...] = ()
    ideal_tokens_per_s: float = 0.0
    efficiency: float | None = None  # of the ideal, a fraction; None: other kind of device
    machine: float | None = None  # the separate ranks, of the ideal
    link_bytes_per_s: float | None = None

    @property
    def synchronisation(self) -> float | None:
        """The ranks of one world, of the separate ranks, a fraction."""
        return self.efficiency / self.machine if self.efficiency is not None and self.machine else None

    @property
    def computed_comm_ms(self) -> float | None:
        return 1e3 * self.comm_bytes / self.link_bytes_per_s if self.link_bytes_per_s and self.ranks > 1 else None

    @property
    def exposed_frac(self) -> float:
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0

    @property
    def spread_frac(self) -> float:
        return self.spread_ms / self.step_ms if self.step_ms else 0.0


def tabulate(setup: Setup, found: Found) -> dict[Kind, list[Row]]:
    return {kind: [_row(setup, found, kind, world) for world in setup.table(kind)] for kind in setup.kinds}


def _row(setup: Setup, found: Found, kind: Kind, world: World) -> Row:
    row = Row(
        kind=kind,
        label=world.label,
        ranks=world.ranks,
        hosts=world.hosts,
        rate=world.rate,
        batch=world.batch,
        shares_cores=bool(setup.cores) and world.ranks > setup.num_places,
    )
    samples = found.samples.get(world, [])
    if world in found.problems or not samples:
        return replace(row, problem=found.problems.get(world, "not measured"))
    ideals = [min(world.ranks, setup.num_places) * one.tokens_per_s for one in found.samples[setup.alone]]
    apart = found.samples.get(setup.apart(world.ranks), [])
    is_comparable = world.device == setup.device
    return replace(
        row,
        rounds_tokens_per_s=tuple(sample.tokens_per_s for sample in samples),
        ideal_tokens_per_s=statistics.median(ideals),
        efficiency=ratio(samples, ideals) if is_comparable else None,
        machine=ratio(apart, ideals) if is_comparable and apart else None,
        link_bytes_per_s=found.links.get((world.hosts, world.rate)),
        **medians(samples),
    )


def medians(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the median of each measured number."""
    return {
        item.name: float(statistics.median(getattr(sample, item.name) for sample in samples)) for item in fields(Sample)
    }


def ratio(samples: Sequence[Sample], ideals: Sequence[float]) -> float:
    """Returns the median of the ratios, each within a round, since a machine's speed may drift."""
    return statistics.median(sample.tokens_per_s / ideal for sample, ideal in zip(samples, ideals, strict=False))


# ---- words ----


def where_it_bends(rows: Sequence[Row]) -> str:
    """Describes one table: up to which size it follows the ideal, or the main cause of each world's loss."""
    kind = rows[0].kind
    compared = [row for row in rows if row.efficiency is not None and row.ranks > 1 and not row.problem]
    if not compared:
        return f"{kind} scaling: no world of several ranks was measured"
    bent = [row for row in compared if (row.efficiency or 0.0) < _LEAST_STRAIGHT]
    if not bent:
        last = compared[-1]
        return f"{kind} scaling does not bend up to {last.label}: {last.efficiency:.0%} of the ideal"
    reasons = "; ".join(
        f"at {row.label} ({row.efficiency:.0%} of the ideal): {_why_unclear(row) or _cause(row)}" for row in bent
    )
    return f"{kind} scaling bends {reasons}"


def _why_unclear(row: Row) -> str:
    """Returns why the numbers tell no cause: they scatter more than what is lost. Empty if they do not."""
    rates, lost = row.rounds_tokens_per_s, 1 - (row.efficiency or 0.0)
    scatter = (max(rates) - min(rates)) / row.tokens_per_s if rates and row.tokens_per_s else 0.0
    again = "the cause cannot be told; measure again on a quiet machine (`paceline doctor` shows the load)"
    if scatter > lost:
        return f"rounds differ by {scatter:.0%}, more than what is lost: {again}"
    if (row.synchronisation or 0.0) > _MOST_SYNC:
        return f"one world seems {row.synchronisation:.0%} as fast as separate runs, which cannot be: {again}"
    return ""


def _cause(row: Row) -> str:
    if row.shares_cores:
        return f"{row.ranks} ranks share the cores of fewer, so that each more is one more to wait for"
    machine = 1 - (row.machine or 1.0)
    waits = max(0.0, row.exposed_frac - row.spread_frac)
    rest = 1 - (row.efficiency or 0.0) - machine - row.exposed_frac
    what = "the network" if row.hosts > 1 else "the other ranks' gradients"
    causes = {
        f"a step waits {waits:.0%} of its time for {what}: {_all_reduce(row)}": waits,
        f"a step waits {row.spread_frac:.0%} of its time for the rank that is last": row.spread_frac,
        f"it is the machine that the ranks share, not their synchronisation: {row.ranks} separate runs at once reach "
        f"{row.machine or 0:.0%}": machine,
        f"{rest:.0%} of a step go to what ranks neither divide nor wait for: the update, a step's fixed costs, and "
        "carrying gradients on cores that compute": rest,
    }
    return max(causes, key=lambda cause: causes[cause])


def _all_reduce(row: Row) -> str:
    hidden = _ms(max(0.0, row.comm_ms - row.exposed_ms))
    computed = f" ({_ms(row.computed_comm_ms)} by the link's bandwidth)" if row.computed_comm_ms else ""
    size = units.size(row.comm_bytes)
    return f"a rank's {size} take {_ms(row.comm_ms)} ms{computed}, of which compute hides {hidden}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remarks(setup: Setup, tables: dict[Kind, list[Row]]) -> list[str]:
    """Returns the lines below the tables: marks, worlds that could not be measured, and where scaling bends."""
    rows = [row for kind in tables for row in tables[kind]]
    marks = [f"* more ranks than cores: the ideal is that of {setup.num_places}"]
    problems = {row.label: row.problem for row in rows if row.problem}
    return [
        *marks[: any(row.shares_cores for row in rows)],
        *(f"{label} could not be measured: {problem}" for label, problem in problems.items()),
        *map(where_it_bends, tables.values()),
    ]


# ---- tables, JSON ----


def terminal_table(setup: Setup, kind: Kind, rows: Sequence[Row]) -> rich.table.Table:
    return table(_title(setup, kind), COLUMNS, list(map(_cells, rows)))


def _title(setup: Setup, kind: Kind) -> str:
    if kind == "strong":
        return f"Strong scaling: {setup.batch} sequences a step, divided by the ranks"
    return f"Weak scaling: {setup.batch} sequences a step and rank"


def _cells(row: Row) -> list[str]:
    label = row.label + (" *" if row.shares_cores else "")
    if row.problem:
        return [label, "not measured", *[""] * (len(COLUMNS) - 2)]
    fractions = ["" if f is None else f"{f:.0%}" for f in (row.efficiency, row.machine, row.synchronisation)]
    cells = [label, f"{row.tokens_per_s:,.0f}", *fractions, f"{row.step_ms:.1f}"]
    if row.ranks == 1:
        return [*cells, *[""] * 4]
    computed = "" if row.computed_comm_ms is None else f"{row.computed_comm_ms:.1f}"
    exposed = f"{row.exposed_ms:.1f} ({row.exposed_frac:.0%})"
    return [*cells, computed, f"{row.comm_ms:.1f}", exposed, f"{row.spread_ms:.1f}"]


def markdown(setup: Setup, found: Found) -> str:
    tables = tabulate(setup, found)
    lines = []
    for kind, rows in tables.items():
        lines += [f"**{_title(setup, kind)}**", "", *markdown_table(COLUMNS, list(map(_cells, rows))), ""]
    lines += [f"{remark[0].upper()}{remark[1:]}." for remark in remarks(setup, tables)]
    how = (
        f"{machine()}; {units.plural(setup.threads, 'thread')} a rank, "
        f"{'pinned' if setup.cores else 'not pinned'}; {medians_of(setup.rounds, setup.steps)}"
    )
    return "\n".join([*lines, "", f"{how}: `{command_line()}`", ""])


def markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a table: the first column left-aligned, the others right-aligned."""
    cells = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def medians_of(rounds: int, steps: int) -> str:
    return (
        f"medians of {units.plural(rounds, 'round')} of {steps - WARM_UP_STEPS} steps after {WARM_UP_STEPS} of "
        "warm-up, worlds in turn"
    )


def as_json(setup: Setup, found: Found) -> str:
    tables = tabulate(setup, found)
    derived = ("synchronisation", "computed_comm_ms", "exposed_frac", "spread_frac")
    rows = [asdict(row) | {name: getattr(row, name) for name in derived} for kind in tables for row in tables[kind]]
    return document(
        setup,
        seconds=round(found.seconds, 1),
        threads=setup.threads,
        cores=list(setup.cores),
        rows=rows,
        sentences=[where_it_bends(rows) for rows in tables.values()],
    )


def document(setup: Any, **results: Any) -> str:
    """Returns results and what they were measured with as JSON. setup: has config, rounds and steps."""
    measured = {"rounds": setup.rounds, "steps": setup.steps, "warm_up_steps": WARM_UP_STEPS}
    made = {"command": command_line(), "version": __version__, "machine": machine(), **measured}
    return json.dumps(made | {"config": asdict(setup.config)} | results, indent=1) + "\n"


def command_line() -> str:
    return shlex.join(["paceline", *sys.argv[1:]])


def machine() -> str:
    return f"{cpu_name()}, {units.plural(usable_cores(), 'core')}, torch {torch.__version__}"
