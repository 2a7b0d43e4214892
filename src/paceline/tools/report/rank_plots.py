"""Figures of one run that compare ranks, links and events."""

import math
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped, unused-ignore]

from paceline.base.jsonl import Row
from paceline.record.events import details, text
from paceline.record.read import number
from paceline.tools.report.facts import PARTS, Summary, Traffic
from paceline.tools.report.plots import Figure, TimeScale, colour_of, escaped, line, listed, xs_of
from paceline.tools.report.read import MOST_CELLS, MOST_COLUMNS, Floats, buckets, in_buckets, middles, slowness

MOST_BARS = 16  # ranks with a bar each
_LEAST_TOP = 0.5  # of the heat map's scale, so that noise of short steps stays pale
_LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
# The time line's rows from top to bottom: kind, colour, symbol. Other kinds follow in order of occurrence.
_KINDS = {
    "start": ("var(--run0)", "circle"),
    "resume": ("var(--run0)", "triangle-right"),
    "restart": ("var(--run0)", "triangle-right"),
    "checkpoint": ("var(--other)", "line-ns-open"),
    "shares": ("var(--optimizer)", "hexagon"),
    "straggler": ("var(--exposed)", "diamond"),
    "straggler over": ("var(--exposed)", "diamond-open"),
    "skipped step": ("var(--data)", "x"),
    "replicas differ": ("var(--bad)", "diamond"),
    "repaired": ("var(--open)", "diamond-open"),
    "hang": ("var(--bad)", "square"),
    "failed": ("var(--bad)", "x"),
    "end": ("var(--good)", "circle"),
}
_LANE_OF = {"straggler over": "straggler", "repaired": "replicas differ"}


def rank_parts(run: Summary) -> Figure:
    """Mean milliseconds of each part of the step, a bar a rank."""
    columns = _parts_by_rank(run)
    step_ms = np.sum(list(columns.values()), axis=0)
    work = np.nan_to_num(in_buckets(run.work_ms, buckets(len(run.work_ms), 1)).mean[0])
    shown = np.sort(np.argsort(-work, kind="stable")[:MOST_BARS])
    names = [escaped(run.label(int(rank))) for rank in shown]
    traces = [
        go.Bar(
            orientation="h",
            name=name,
            y=names,
            x=listed(values[shown]),
            customdata=listed(values[shown] / step_ms[shown]),
            marker={"color": colour_of(name)},
            hovertemplate="%{x:.4g} ms, %{customdata:.0%}",
        )
        for name, values in columns.items()
    ]
    axis = {"autorange": "reversed", "type": "category", "showgrid": False, "title": "rank · host"}
    bars = {"barmode": "stack", "bargap": 0.35, "hovermode": "y unified", "xaxis": {"title": "ms a step, mean"}}
    return Figure("ranks", 130 + 34 * len(shown), traces, bars | {"yaxis": axis})


def _parts_by_rank(run: Summary) -> dict[str, Floats]:
    """Returns mean milliseconds of each part, by rank. Older rows have compute and the rest only."""
    ranks = run.ranks

    def mean(values: Floats) -> Floats:
        known = np.isfinite(values[run.steady])
        sums = np.where(known, values[run.steady], 0.0).sum(axis=0)
        return np.asarray(sums / np.maximum(known.sum(axis=0), 1))

    step_ms = np.fmax(run.steps["step_ms"][:, None], ranks["rank_step_ms"])
    step_ms = mean(np.where(np.isfinite(run.work_ms), step_ms, np.nan))  # of the steps that had this rank
    found = {name: mean(ranks[column]) for name, _, column in PARTS}
    if not all(np.isfinite(ranks[column]).any() for _, _, column in PARTS):
        found = {"forward, backward, data": mean(ranks["rank_compute_ms"])}
    return found | {"other": np.maximum(step_ms - np.sum(list(found.values()), axis=0), 0.0)}


def heat_map(run: Summary, scale: TimeScale) -> Figure:
    """Each rank's time above the step's median rank; reported stragglers are framed."""
    num_ranks, edges = run.work_ms.shape[1], buckets(run.records.num_steps, most_columns(run))
    slow = in_buckets(slowness(run.work_ms), edges)
    views = {"mean": slow.mean, "slowest": slow.high}
    trace = go.Heatmap(
        y=list(range(num_ranks)),
        meta={
            "xs": xs_of(run, middles(run.steps["step"], edges), scale),
            "zs": {name: [listed(row, 3) for row in values.T] for name, values in views.items()},
            "zmaxs": {name: _top(values) for name, values in views.items()},
        },
        zmin=0,
        colorscale=[[shade / 3, f"var(--heat{shade})"] for shade in range(4)],
        colorbar={
            "orientation": "h",
            "thickness": 8,
            "outlinewidth": 0,
            "len": 0.5,
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
            "tickformat": ".0%",
            "nticks": 4,
            "title": {"text": "slower than the median rank by", "side": "top", "font": {"size": 12}},
        },
        hovertemplate="rank %{y}: %{z:.0%} slower<extra></extra>",
    )
    ticks = list(range(0, num_ranks, math.ceil(num_ranks / 24)))
    axis = {"range": [num_ranks - 0.5, -0.5], "showgrid": False, "title": "rank · host"}
    axis |= {"tickvals": ticks, "ticktext": [escaped(run.label(rank)) for rank in ticks]}
    height = 170 + min(560, max(14, 44 - num_ranks) * num_ranks)
    layout = {"hovermode": "closest", "margin": {"t": 46}, "yaxis": axis}
    return Figure("heat", height, [trace, *_frames(run, scale)], layout)


def most_columns(run: Summary) -> int:
    return max(1, min(MOST_COLUMNS, MOST_CELLS // int(run.work_ms.shape[1])))


def _top(values: Floats) -> float:
    """Returns the top of the colour scale: a single slow step must not make all others pale."""
    known = values[np.isfinite(values)]
    return round(max(_LEAST_TOP, float(np.percentile(known, 99.5))), 2) if len(known) else _LEAST_TOP


def _frames(run: Summary, scale: TimeScale) -> list[Any]:
    """Returns a frame around each straggler's stretch, and a mark at its beginning with a description as hover text."""
    if not run.slow:
        return []
    steps, heights = [], []
    for slow in run.slow:
        low, high = slow.rank - 0.46, slow.rank + 0.46
        steps += [slow.since_step, slow.until_step, slow.until_step, slow.since_step, slow.since_step, math.nan]
        heights += [low, low, high, high, low, math.nan]
    ink = {"color": "var(--ink)", "width": 1.5}
    xs = xs_of(run, np.array(steps), scale)
    frame = line("straggler", xs, np.array(heights), ink, hoverinfo="skip", showlegend=False)
    head = go.Scatter(
        mode="markers",
        y=[slow.rank for slow in run.slow],
        meta={"xs": xs_of(run, np.array([slow.since_step for slow in run.slow]), scale)},
        marker={"symbol": "triangle-right", "size": 12, "color": "var(--page)", "line": ink},
        hovertext=[escaped(slow.text) for slow in run.slow],
        hovertemplate="%{hovertext}<extra></extra>",
        name="straggler",
        showlegend=False,
    )
    return [frame, head]


def links(found: Traffic) -> Figure:
    times = {"a step": found.step_ms, "collectives under way": found.comm_ms, "exposed": found.exposed_ms}
    times |= {f"computed at {name}": 8e3 * found.num_bytes / rate for name, rate in _LINKS.items()}
    times = {name: ms for name, ms in times.items() if 0 < ms < math.inf}
    inks = {"a step": "var(--other)", "collectives under way": "var(--run0)", "exposed": "var(--exposed)"}
    colours = [inks.get(name, "var(--muted)") for name in times]
    trace = go.Scatter(
        mode="markers+text",
        y=list(times),
        x=listed(np.array(list(times.values()))),
        marker={
            "size": 12,
            "color": colours,
            "symbol": ["circle" if name in inks else "diamond-open" for name in times],
            "line": {"width": 2, "color": colours},
        },
        text=[f"  {ms / 1e3:,.3g} s" if ms >= 1000 else f"  {ms:,.3g} ms" for ms in times.values()],
        textposition="middle right",
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
    )
    low, high = (math.log10(end(times.values(), default=1.0)) for end in (min, max))
    room = max(0.8, (high - low) * 0.4)  # for the last text
    xaxis = {"type": "log", "range": [low - 0.15, high + room], "title": "ms a step", "showgrid": True, "dtick": 1}
    yaxis = {"autorange": "reversed", "type": "category"}
    return Figure("links", 90 + 34 * len(times), [trace], {"xaxis": xaxis, "yaxis": yaxis, "hovermode": False})


def time_line(run: Summary) -> Figure:
    timed = [(event, moment) for event in run.events if (moment := _moment(event)) is not None]
    found = dict.fromkeys(_lane(event["event"]) for event, _ in timed)
    lanes = [kind for kind in _KINDS if kind in found] + [kind for kind in found if kind not in _KINDS]
    traces = [_spans(timed)]
    for kind in dict.fromkeys(event["event"] for event, _ in timed):
        colour, symbol = _KINDS.get(kind, ("var(--muted)", "circle"))
        chosen = [(event, moment) for event, moment in timed if event["event"] == kind]
        traces.append(
            go.Scatter(
                mode="markers",
                x=[moment.isoformat() for _, moment in chosen],
                y=[escaped(_lane(kind))] * len(chosen),
                marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2, "color": colour}},
                hovertext=[escaped(f"{kind}: {details(event)}".removesuffix(": ")) for event, _ in chosen],
                hovertemplate="%{x|%H:%M:%S}  %{hovertext}<extra></extra>",
                showlegend=False,
                cliponaxis=False,
            )
        )
    xaxis = {"type": "date", "title": "clock of the run", "range": _clock_range(timed), "tickangle": 0}
    order = {"categoryorder": "array", "categoryarray": [escaped(kind) for kind in reversed(lanes)]}
    yaxis = {"type": "category", "range": [-0.6, len(lanes) - 0.4]} | order
    layout = {"hovermode": "closest", "xaxis": xaxis, "yaxis": yaxis}
    return Figure("events", 90 + 38 * max(1, len(lanes)), traces, layout)


def _lane(kind: str) -> str:
    return _LANE_OF.get(kind, kind)


def _spans(timed: list[tuple[Row, datetime]]) -> Any:
    """Returns lines from the report of a straggler to its recovery."""
    begun: dict[float, datetime] = {}
    moments: list[str | None] = []
    for event, moment in timed:
        rank = number(event.get("rank"))
        if event["event"] == "straggler":
            begun.setdefault(rank, moment)
        elif event["event"] == "straggler over" and rank in begun:
            moments += [begun.pop(rank).isoformat(), moment.isoformat(), None]
    lane = ["straggler" if moment else None for moment in moments]
    style = {"width": 6, "color": "var(--exposed / 0.35)"}
    return go.Scatter(mode="lines", x=moments, y=lane, line=style, hoverinfo="skip", showlegend=False)


def _clock_range(timed: list[tuple[Row, datetime]]) -> list[str]:
    """Returns a range slightly larger than that of the events."""
    moments = [moment for _, moment in timed] or [datetime(2000, 1, 1)]
    first, last = min(moments), max(moments)
    room = max((last - first) * 0.04, timedelta(seconds=2))
    earliest, latest = first - min(room, first - datetime.min), last + min(room, datetime.max - last)
    return [earliest.isoformat(), latest.isoformat()]


def _moment(event: Row) -> datetime | None:
    try:
        return datetime.strptime(text(event.get("time")), "%Y-%m-%dT%H:%M:%S%z").replace(tzinfo=None)
    except ValueError:
        return None
