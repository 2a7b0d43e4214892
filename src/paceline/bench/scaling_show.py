"""The table of scaling for people and programs: on a terminal, as Markdown, as JSON, and as a plot of its own."""

import dataclasses
import html
import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import rich.table

from paceline import __version__
from paceline.base import units
from paceline.bench.scaling import WARM_UP_STEPS, Kind, Row, Scaling
from paceline.record.console import table

COLUMNS = [
    "world",
    "tokens/s",
    "of the ideal",
    "machine",
    "synchronisation",
    "step, ms",
    "all-reduce, ms: computed",
    "measured",
    "exposed",
    "spread, ms",
]
_TERMINAL_COLUMNS = [
    "world",
    "tokens/s",
    "of ideal",
    "machine",
    "sync",
    "step ms",
    "computed",
    "all-reduce",
    "exposed",
    "spread",
]
LEGEND = (
    "of ideal: of as many single ranks as there are, each with the same threads on cores of its own; it is machine "
    "(what as many separate runs at once reach) times sync (what being one world costs on top). computed: a rank's "
    "bytes at the measured bandwidth of the link; all-reduce: a collective was under way; exposed: a rank stood still "
    "for it; spread: between the first rank and the last to have their gradients. Milliseconds a step."
)
# Okabe and Ito's colours, which people with any colour vision tell apart.
_INK = {"together": "#0072B2", "hosts": "#D55E00", "apart": "#999999", "ideal": "#000000"}


def title(scaling: Scaling, kind: Kind) -> str:
    """What one kind keeps."""
    setup = scaling.setup
    if kind == "strong":
        return f"Strong scaling: {setup.batch} sequences a step, divided by the ranks"
    return f"Weak scaling: {setup.batch} sequences a step and rank"


def terminal_table(scaling: Scaling, kind: Kind) -> rich.table.Table:
    """Returns the table for a terminal."""
    return table(title(scaling, kind), _TERMINAL_COLUMNS, [_cells(row) for row in scaling.of(kind)])


def remarks(scaling: Scaling) -> list[str]:
    """Returns what stands below the tables: marks, worlds that could not be measured, and where it bends."""
    found = []
    if any(row.shares_cores for row in scaling.rows):
        found.append(f"* more ranks than cores: the ideal is that of {scaling.setup.num_places}")
    problems = {row.label: row.problem for row in scaling.rows if row.problem}
    found += [f"{label} could not be measured: {problem}" for label, problem in problems.items()]
    return [*found, *scaling.sentences()]


def markdown(scaling: Scaling) -> str:
    """Returns tables, remarks, and all it takes to measure the same again."""
    setup = scaling.setup
    lines = []
    for kind in setup.kinds:
        lines += [f"**{title(scaling, kind)}**", "", _line(COLUMNS), _line(["---"] + ["---:"] * (len(COLUMNS) - 1))]
        lines += [_line(_cells(row)) for row in scaling.of(kind)] + [""]
    lines += [_sentence(remark) for remark in remarks(scaling)]
    how = (
        f"{scaling.machine}; {units.count(setup.threads)} thread{'s'[: setup.threads > 1]} a rank, "
        f"{'pinned' if setup.cores else 'not pinned'}; medians of {setup.rounds} round{'s'[: setup.rounds > 1]} of "
        f"{setup.steps - WARM_UP_STEPS} steps after {WARM_UP_STEPS} of warm-up, worlds in turn"
    )
    return "\n".join([*lines, "", f"{how}: `{_command()}`", ""])


def as_json(scaling: Scaling) -> str:
    """Returns everything that was found, with units in the names."""
    setup = scaling.setup
    made = {
        "command": _command(),
        "version": __version__,
        "machine": scaling.machine,
        "seconds": round(scaling.seconds, 1),
        "threads": setup.threads,
        "cores": list(setup.cores),
        "rounds": setup.rounds,
        "steps": setup.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "config": dataclasses.asdict(setup.config),
        "rows": [row.as_json() for row in scaling.rows],
        "sentences": scaling.sentences(),
    }
    return json.dumps(made, indent=1) + "\n"


def plot_html(scaling: Scaling) -> str:
    """Returns a page with one plot for each kind: tokens/s over ranks, and the ideal line. It needs no network."""
    parts: list[str] = []
    for kind, sentence in zip(scaling.setup.kinds, scaling.sentences(), strict=True):
        figure = _figure(scaling, kind)
        plot = figure.to_html(
            include_plotlyjs=not parts, full_html=False, config={"displayModeBar": False, "responsive": True}
        )
        heading = html.escape(title(scaling, kind))
        parts.append(f"<section><h2>{heading}</h2>{plot}<p>{html.escape(_sentence(sentence))}</p></section>")
    return _PAGE.format(
        sections="\n".join(parts), machine=html.escape(scaling.machine), command=html.escape(_command())
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Scaling</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 0 auto; max-width: 1280px; padding: 24px }}
main {{ display: flex; flex-wrap: wrap; gap: 32px }}
section {{ width: 100% }}
@media (min-width: 900px) {{ section {{ width: calc(50% - 16px) }} }}
h1 {{ font-size: 28px }} h2 {{ font-size: 18px; font-weight: 600 }}
footer {{ color: #666; font-size: 14px; overflow-wrap: anywhere }}
</style></head><body>
<h1>What more ranks bring</h1>
<main>
{sections}
</main>
<footer>{machine}. {command}</footer>
</body></html>
"""


def _figure(scaling: Scaling, kind: Kind) -> Any:
    """plotly is an extra, so it is not imported with this file."""
    objects = importlib.import_module("plotly.graph_objects")
    figure = objects.Figure([objects.Scatter(**line) for line in _lines(scaling, kind)])
    most = max(row.ranks for row in scaling.of(kind))
    figure.update_xaxes(title_text="ranks", tickvals=sorted({row.ranks for row in scaling.of(kind)}))
    figure.update_xaxes(range=[0, most * 1.08], gridcolor="#e5e5e5", zeroline=False)
    figure.update_yaxes(title_text="tokens a second", rangemode="tozero", gridcolor="#e5e5e5", zeroline=False)
    figure.update_layout(
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 14},
        legend={"orientation": "h", "y": -0.18},
        margin={"t": 8, "l": 8, "r": 8, "b": 8},
        height=440,
    )
    return figure


def _lines(scaling: Scaling, kind: Kind) -> list[dict[str, Any]]:
    """The lines and points of one plot, as plotly's scatter takes them."""
    rows = [row for row in scaling.of(kind) if row.efficiency is not None and not row.problem]
    here = [row for row in rows if row.hosts == 1]
    away = [row for row in rows if row.hosts > 1]
    apart = [row for row in here if row.machine or row.ranks == 1]
    ideals = {row.ranks: row.ideal_tokens_per_s for row in sorted(rows, key=lambda row: row.ranks)}
    lines = [
        _line_of("the ideal", list(ideals), list(ideals.values()), _INK["ideal"], "dash"),
        _line_of(
            "separate runs at once",
            [row.ranks for row in apart],
            [row.ideal_tokens_per_s * (row.machine or 1.0) for row in apart],
            _INK["apart"],
            "dot",
        ),
        _line_of("ranks of one world", *_points(here), _INK["together"], "solid"),
    ]
    if away:
        hosts = _line_of("hosts of a lab", *_points(away), _INK["hosts"], "solid")
        labels = [html.escape(row.label) + "  " for row in away]
        lines.append(hosts | {"mode": "markers+text", "text": labels, "textposition": "middle left"})
    return lines


def _points(rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    return [row.ranks for row in rows], [row.tokens_per_s for row in rows]


def _line_of(name: str, ranks: list[int], tokens_per_s: list[float], color: str, dash: str) -> dict[str, Any]:
    return {
        "name": name,
        "x": ranks,
        "y": tokens_per_s,
        "mode": "lines+markers",
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {"size": 9},
        "hovertemplate": "%{y:,.0f} tokens/s on %{x}",
    }


def _cells(row: Row) -> list[str]:
    label = row.label + (" *" if row.shares_cores else "")
    if row.problem:
        return [label, "not measured", *[""] * (len(COLUMNS) - 2)]
    fractions = (row.efficiency, row.machine, row.synchronisation)
    shown = ["" if value is None else f"{value:.0%}" for value in fractions]
    is_one = row.ranks == 1
    times = ["" if is_one or ms is None else f"{ms:.1f}" for ms in (row.computed_comm_ms, row.comm_ms)]
    rest = [""] * 2 if is_one else [f"{row.exposed_ms:.1f} ({row.exposed_frac:.0%})", f"{row.spread_ms:.1f}"]
    return [label, f"{row.tokens_per_s:,.0f}", *shown, f"{row.step_ms:.1f}", *times, *rest]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sentence(remark: str) -> str:
    return f"{remark[0].upper()}{remark[1:]}."


def _command() -> str:
    return shlex.join(["paceline", *sys.argv[1:]])
