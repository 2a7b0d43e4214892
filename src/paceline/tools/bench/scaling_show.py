"""Shows the measurements of `paceline bench scaling`: sentences, tables, JSON."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

import rich.table
import torch

from paceline import __version__
from paceline.base import units
from paceline.base.cores import cpu_name
from paceline.record.console import table
from paceline.tools.bench.scaling import WARM_UP_STEPS, Measurements
from paceline.tools.bench.scaling_rows import Row, tabulate
from paceline.tools.bench.worlds import Kind, Setup
from paceline.world.cores import usable_cores

_MOST_SYNC = 1.05  # more is a measurement of something else
_LEAST_STRAIGHT = 0.9  # of the ideal; below it a sentence names the cause
_COLUMNS = (
    *("world", "tokens/s", "of ideal", "machine", "sync", "step ms", "MB sent"),
    *("computed", "all-reduce", "exposed", "spread", "sequences", "idle, %"),
)
LEGEND = (
    "of ideal: of as many single ranks as there are, each with the same threads on cores of its own; it is machine "
    "(what as many separate runs at once reach) times sync (what being one world costs on top). With --cpu or "
    "--compare: of hosts that exchange nothing. MB sent: by a rank in a step. computed: a rank's bytes at the measured "
    "bandwidth of the link; all-reduce: a collective was under way; exposed: a rank stood still for it; spread: from "
    "the first rank to the last to have their gradients. idle: waiting for other ranks or for the network. "
    "Milliseconds a step."
)


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
        *(where_it_bends(rows) for kind, rows in tables.items() if kind != "variants"),
    ]


# ---- tables, JSON ----


def terminal_table(setup: Setup, kind: Kind, rows: Sequence[Row]) -> rich.table.Table:
    columns, *cells = _filled(rows)
    return table(_title(setup, kind), columns, cells)


def _filled(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the names of the columns that have a value in some row, and the cells below them."""
    cells = list(map(_cells, rows))
    columns = [place for place in range(len(_COLUMNS)) if any(row[place] for row in cells)]
    return [[row[place] for place in columns] for row in (_COLUMNS, *cells)]


def _title(setup: Setup, kind: Kind) -> str:
    if kind == "variants":
        cores = f": {', '.join(setup.cpu)} of a core" if setup.cpu else ""
        return f"{setup.hosts} hosts{cores}, links of {setup.rates[0]}, {setup.batch} sequences a step"
    if kind == "strong":
        return f"Strong scaling: {setup.batch} sequences a step, divided by the ranks"
    return f"Weak scaling: {setup.batch} sequences a step and rank"


def _cells(row: Row) -> list[str]:
    label = row.label + (" *" if row.shares_cores else "")
    if row.problem:
        return [label, "not measured", *[""] * (len(_COLUMNS) - 2)]
    is_variant = row.kind == "variants"
    shown = "{:.1%}".format if is_variant else "{:.0%}".format
    fractions = ["" if f is None else shown(f) for f in (row.efficiency, row.machine, row.synchronisation)]
    cells = [label, f"{row.tokens_per_s:,.0f}", *fractions, f"{row.step_ms:.1f}"]
    sequences = ", ".join(map(str, row.sequences)) if is_variant else ""
    if not row.comm_bytes:
        return [*cells, *[""] * 5, sequences, ""]
    computed = "" if row.computed_comm_ms is None else f"{row.computed_comm_ms:.1f}"
    exposed = f"{row.exposed_ms:.1f} ({row.exposed_frac:.0%})"
    idle = ", ".join(f"{100 * frac:.0f}" for frac in row.idle_frac) if is_variant else ""
    sent = f"{row.comm_bytes / 1e6:.1f}" if is_variant else ""
    cells += [sent, computed, f"{row.comm_ms:.1f}", exposed, f"{row.spread_ms:.1f}"]
    return [*cells, sequences, idle]


def markdown(setup: Setup, measured: Measurements) -> str:
    tables = tabulate(setup, measured)
    lines = []
    for kind, rows in tables.items():
        columns, *cells = _filled(rows)
        aligned = ["---"] + ["---:"] * (len(columns) - 1)
        lines += [f"**{_title(setup, kind)}**", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (columns, aligned, *cells)]
        lines.append("")
    lines += [f"{remark[0].upper()}{remark[1:]}." for remark in remarks(setup, tables)]
    threads = f"{units.plural(setup.threads, 'thread')} a rank, " if setup.threads else ""
    how = (
        f"{_machine()}; {threads}{'pinned' if setup.cores else 'not pinned'}; medians of "
        f"{units.plural(setup.rounds, 'round')} of {setup.steps - WARM_UP_STEPS} steps after {WARM_UP_STEPS} of "
        "warm-up, worlds in turn"
    )
    return "\n".join([*lines, "", f"{how}: `{_command_line()}`", ""])


def as_json(setup: Setup, measured: Measurements) -> str:
    tables = tabulate(setup, measured)
    derived = ("synchronisation", "computed_comm_ms", "exposed_frac", "spread_frac")
    rows = [asdict(row) | {name: getattr(row, name) for name in derived} for kind in tables for row in tables[kind]]
    document = {
        "command": _command_line(),
        "version": __version__,
        "machine": _machine(),
        "rounds": setup.rounds,
        "steps": setup.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "config": asdict(setup.config),
        "seconds": round(measured.seconds, 1),
        "threads": setup.threads,
        "cores": list(setup.cores),
        "cpu": list(setup.cpu),
        "rates": list(setup.rates),
        "rows": rows,
        "sentences": [where_it_bends(rows) for kind, rows in tables.items() if kind != "variants"],
    }
    return json.dumps(document, indent=1) + "\n"


def _command_line() -> str:
    return shlex.join(["paceline", *sys.argv[1:]])


def _machine() -> str:
    return f"{cpu_name()}, {units.plural(usable_cores(), 'core')}, torch {torch.__version__}"
