"""The figures, as plotly's JSON: traces and layouts. What they look like (fonts, themes, sizes) is page.js's and
page.css's; a colour here is a name of the style sheet, with an opacity behind a slash where it has one.

A trace with `xs` instead of `x` has one x for each thing that the page can draw over: step, tokens, time. Labels that
come from records are escaped here, for plotly reads a few HTML tags in them.
"""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from paceline.base import units
from paceline.report.curves import (
    MOST_CELLS,
    MOST_COLUMNS,
    MOST_POINTS,
    Curve,
    Edges,
    buckets,
    in_buckets,
    middles,
    slowness,
)
from paceline.report.facts import PARTS, Slow, Summary, number, text
from paceline.report.read import Floats

Trace = dict[str, Any]

NUM_COLOURS = 8  # Okabe and Ito's, told apart by people who see fewer colours; jfly.uni-koeln.de/color
MOST_BARS = 16  # ranks that have a bar of their own
_DASHES = ("solid", "dash", "dot", "dashdot")
_COLOURS = {
    "data": "var(--data)",
    "forward": "var(--forward)",
    "backward": "var(--backward)",
    "exposed communication": "var(--exposed)",
    "optimizer": "var(--optimizer)",
    "other": "var(--other)",
}
_LINKS = (("100 Mbit/s", 1e8), ("1 Gbit/s", 1e9), ("10 Gbit/s", 1e10), ("100 Gbit/s", 1e11))
# Lanes of the time line from top to bottom: kind, colour, symbol. Others follow in the order they occur.
_KINDS = {
    "start": ("var(--run0)", "circle"),
    "resume": ("var(--run0)", "triangle-right"),
    "restart": ("var(--run0)", "triangle-right"),
    "checkpoint": ("var(--other)", "line-ns-open"),
    "straggler": ("var(--exposed)", "diamond"),
    "straggler over": ("var(--exposed)", "diamond-open"),
    "skipped step": ("var(--data)", "x"),
    "hang": ("var(--bad)", "square"),
    "failed": ("var(--bad)", "x"),
    "end": ("var(--good)", "circle"),
}
_LANE = {"straggler over": "straggler"}


@dataclass(frozen=True)
class Figure:
    """One plot of the page."""

    id: str
    height: int  # CSS pixels
    traces: list[Trace]
    layout: dict[str, Any]
    ranges: dict[str, list[float]] | None = None  # of the upright axis, where the page lets one choose

    def as_json(self) -> dict[str, Any]:
        """What page.js draws."""
        return {
            "id": self.id,
            "height": self.height,
            "traces": self.traces,
            "layout": self.layout,
            "ranges": self.ranges,
        }


@dataclass(frozen=True)
class TimeScale:
    """A unit of time in which all runs of a page are drawn."""

    name: str
    seconds: float

    @classmethod
    def of(cls, summaries: Sequence[Summary]) -> "TimeScale":
        longest_s = max((float(s.training_s[-1]) for s in summaries if len(s.training_s)), default=0.0)
        return cls("h", 3600) if longest_s > 7200 else cls("min", 60) if longest_s > 180 else cls("s", 1)


def loss(summaries: Sequence[Summary], scale: TimeScale) -> Figure:
    """Training loss in buckets, with the evaluations; over all runs."""
    traces = []
    for index, summary in enumerate(summaries):
        records, style = summary.records, _style(index)
        name = _escaped(records.name) if len(summaries) > 1 else "training"
        traces += _curve(summary, "loss", name, style, scale, ".3f")
        if records.evaluations["step"].size:
            name = f"{name}, validation" if len(summaries) > 1 else "validation"
            values, ink = records.evaluation("val_loss"), style["ink"] if len(summaries) > 1 else "var(--run1)"
            marks = {"symbol": "diamond", "size": 6 if len(values) < 60 else 4, "color": ink}
            xs = _xs(summary, records.evaluations["step"], scale)
            traces.append(
                _line(name, xs, values, dash="dot", color=ink, mode="lines+markers", marker=marks)
                | {"hovertemplate": "%{y:.3f}"}
            )
    if len(summaries) == 1:
        traces += _restarts(summaries[0], scale)
    layout = {"yaxis": {"title": {"text": "nats a token"}}, "yaxis2": _HIDDEN_AXIS}
    return Figure("loss", 420, traces, layout, {"close": _close_up(summaries)})


def throughput(summaries: Sequence[Summary], scale: TimeScale) -> Figure:
    """Tokens a second in buckets, over all runs."""
    traces = []
    for index, summary in enumerate(summaries):
        name = _escaped(summary.records.name) if len(summaries) > 1 else "tokens a second"
        traces += _curve(summary, "tokens_per_s", name, _style(index), scale, ".4s")
    axis = {"title": {"text": "tokens a second"}, "rangemode": "tozero", "tickformat": "~s"}
    return Figure("throughput", 300, traces, {"yaxis": axis})


def parts(summary: Summary, scale: TimeScale, prefix: str) -> Figure:
    """Where rank 0's step goes, along the run: stacked means."""
    records = summary.records
    edges = buckets(records.num_steps, MOST_POINTS // 3)  # six layers in a plot: fewer buckets are easier to read
    columns = {name: records.column(column) for name, column, _ in PARTS}
    columns["other"] = records.column("step_ms") - np.sum(list(columns.values()), axis=0)
    xs = _xs(summary, middles(records.steps["step"], edges), scale)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "stackgroup": "step",
            "line": {"width": 0.5, "color": _COLOURS[name]},
            "fillcolor": _COLOURS[name],
            "xs": xs,
            "y": _list(np.maximum(in_buckets(values, edges).mean, 0)),
            "hovertemplate": "%{y:.4g} ms",
        }
        for name, values in columns.items()
    ]
    return Figure(f"{prefix}parts", 340, traces, {"yaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"}})


def rank_parts(summary: Summary, prefix: str) -> Figure:
    """Where the step of each rank goes: a bar a rank, of mean milliseconds."""
    columns = _parts_by_rank(summary)
    whole = np.sum(list(columns.values()), axis=0)
    work = np.nan_to_num(in_buckets(summary.work_ms, buckets(len(summary.work_ms), 1)).mean[0])
    shown = np.sort(np.argsort(-work, kind="stable")[:MOST_BARS])
    names = [_escaped(summary.label(int(rank))) for rank in shown]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": _list(values[shown]),
            "customdata": _list(values[shown] / whole[shown]),
            "marker": {"color": _COLOURS.get(name, _COLOURS["forward"])},
            "hovertemplate": "%{x:.4g} ms, %{customdata:.0%}",
        }
        for name, values in columns.items()
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "hovermode": "y unified",
        "xaxis": {"title": {"text": "ms a step, mean"}},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False, "title": {"text": "rank · host"}},
    }
    return Figure(f"{prefix}ranks", 130 + 34 * len(shown), traces, layout)


def heat_map(summary: Summary, scale: TimeScale, prefix: str) -> Figure:
    """By how much each rank was slower than the step's median rank; the stretches of named stragglers outlined."""
    records, work = summary.records, summary.work_ms
    num_ranks = work.shape[1]
    edges = heat_columns(summary)
    slow = in_buckets(slowness(work), edges)
    views = {"mean": slow.mean, "slowest": slow.high}
    tops = {name: _top(values) for name, values in views.items()}
    ranks = np.arange(num_ranks)
    colours = [[i / 3, f"var(--heat{i})"] for i in range(4)]
    bar = {"orientation": "h", "thickness": 8, "len": 0.5, "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"}
    title = {"text": "slower than the median rank by", "side": "top", "font": {"size": 12}}
    bar |= {"tickformat": ".0%", "title": title, "nticks": 4}
    trace = {
        "type": "heatmap",
        "xs": _xs(summary, middles(records.steps["step"], edges), scale),
        "y": ranks.tolist(),
        "zs": {name: [_list(row, 3) for row in values.T] for name, values in views.items()},
        "zmaxs": tops,
        "zmin": 0,
        "colorscale": colours,
        "colorbar": bar | {"outlinewidth": 0},
        "hovertemplate": "rank %{y}: %{z:.0%} slower<extra></extra>",
    }
    every = math.ceil(num_ranks / 24)
    ticks = [int(rank) for rank in ranks[::every]]
    layout = {
        "hovermode": "closest",
        "margin": {"t": 46},
        "yaxis": {
            "range": [num_ranks - 0.5, -0.5],
            "tickvals": ticks,
            "ticktext": [_escaped(summary.label(rank)) for rank in ticks],
            "showgrid": False,
            "title": {"text": "rank · host"},
        },
    }
    height = 170 + min(560, max(14, 44 - num_ranks) * num_ranks)
    return Figure(f"{prefix}heat", height, [trace, *_outlines(summary, scale)], layout)


def heat_columns(summary: Summary) -> Edges:
    """The buckets of steps that the heat map's columns are."""
    num_ranks = max(1, summary.work_ms.shape[1])
    return buckets(summary.records.num_steps, max(1, min(MOST_COLUMNS, MOST_CELLS // num_ranks)))


def links(summary: Summary, prefix: str) -> Figure:
    """What communication took, beside what the same bytes take on links of known rates."""
    traffic = summary.traffic
    assert traffic is not None
    rows = [
        ("a step", traffic.step_ms, "var(--other)"),
        ("collectives under way", traffic.comm_ms, "var(--run0)"),
        ("exposed", traffic.exposed_ms, "var(--exposed)"),
        *((f"computed at {name}", 8e3 * traffic.num_bytes / rate, "var(--muted)") for name, rate in _LINKS),
    ]
    rows = [row for row in rows if 0 < row[1] < math.inf]
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "y": [name for name, _, _ in rows],
        "x": [_rounded(ms) for _, ms, _ in rows],
        "marker": {
            "size": 12,
            "color": [colour for _, _, colour in rows],
            "symbol": ["diamond-open" if name.startswith("computed") else "circle" for name, _, _ in rows],
            "line": {"width": 2, "color": [colour for _, _, colour in rows]},
        },
        "text": [f"  {_ms(ms)}" for _, ms, _ in rows],
        "textposition": "middle right",
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
    low, high = (math.log10(end((ms for _, ms, _ in rows), default=1.0)) for end in (min, max))
    layout = {
        "xaxis": {
            "type": "log",
            "range": [low - 0.15, high + max(0.8, (high - low) * 0.4)],  # room for the last text
            "title": {"text": "ms a step"},
            "showgrid": True,
            "dtick": 1,
        },
        "yaxis": {"autorange": "reversed", "type": "category"},
        "hovermode": False,
    }
    return Figure(f"{prefix}links", 90 + 34 * len(rows), [trace], layout)


def traffic(summary: Summary, scale: TimeScale, prefix: str) -> Figure:
    """Milliseconds of communication along the run, and the exposed part."""
    under_way = _style(0)
    exposed = {"ink": "var(--exposed)", "dash": "solid"}
    traces = _curve(summary, "comm_ms", "collectives under way", under_way, scale, ".4g", band=False)
    traces += _curve(summary, "exposed_comm_ms", "exposed", exposed, scale, ".4g", band=False)
    layout = {"yaxis": {"title": {"text": "ms a step, mean"}, "rangemode": "tozero"}}
    return Figure(f"{prefix}traffic", 280, traces, layout)


def time_line(summary: Summary, prefix: str) -> Figure:
    """All events by the clock of the machine that wrote them, a lane a kind."""
    timed = [(event, moment) for event in summary.records.events if (moment := _moment(event)) is not None]
    found = dict.fromkeys(_LANE.get(event["event"], event["event"]) for event, _ in timed)
    lanes = [kind for kind in _KINDS if kind in found] + [kind for kind in found if kind not in _KINDS]
    traces: list[Trace] = [_spans(timed)]
    for kind in dict.fromkeys(event["event"] for event, _ in timed):
        colour, symbol = _KINDS.get(kind, ("var(--muted)", "circle"))
        chosen = [(event, moment) for event, moment in timed if event["event"] == kind]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [moment for _, moment in chosen],
                "y": [_escaped(_LANE.get(kind, kind))] * len(chosen),
                "marker": {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2, "color": colour}},
                "hovertext": [_escaped(_told(event)) for event, _ in chosen],
                "hovertemplate": "%{x|%H:%M:%S}  %{hovertext}<extra></extra>",
                "showlegend": False,
                "cliponaxis": False,
            }
        )
    layout = {
        "hovermode": "closest",
        "xaxis": {"type": "date", "title": {"text": "clock of the run"}, "range": _clock_range(timed), "tickangle": 0},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [_escaped(kind) for kind in reversed(lanes)],
            "range": [-0.6, len(lanes) - 0.4],
        },
    }
    return Figure(f"{prefix}events", 90 + 38 * max(1, len(lanes)), traces, layout)


# ---- traces ----

_HIDDEN_AXIS = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}


def _style(index: int) -> dict[str, str]:
    dash = _DASHES[index // NUM_COLOURS % len(_DASHES)]
    return {"ink": f"var(--run{index % NUM_COLOURS})", "dash": dash}


def _curve(
    summary: Summary, column: str, name: str, style: dict[str, str], scale: TimeScale, digits: str, band: bool = True
) -> list[Trace]:
    """A column's mean in buckets over a band from its lowest to its highest: no spike is lost."""
    records = summary.records
    edges = buckets(records.num_steps)
    curve = in_buckets(records.column(column), edges)
    xs = _xs(summary, middles(records.steps["step"], edges), scale)
    is_reduced = records.num_steps > len(edges) - 1
    middle = _line(name, xs, curve.mean, color=style["ink"], dash=style["dash"])
    middle["hovertemplate"] = f"%{{y:{digits}}}"
    if not (band and is_reduced):
        return [middle]
    span = [
        f"{_format(low, digits)} to {_format(high, digits)}" for low, high in zip(curve.low, curve.high, strict=True)
    ]
    middle |= {"customdata": span, "hovertemplate": f"%{{y:{digits}}}  (%{{customdata}})"}
    return [*_band(name, xs, curve, style["ink"]), middle]


def _band(name: str, xs: dict[str, list[Any]], curve: Curve, ink: str) -> list[Trace]:
    edge = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, "connectgaps": True}
    lines = [
        _line(name, xs, values, color=f"{ink}/0.45", dash="solid", width=0.75) | edge
        for values in (curve.low, curve.high)
    ]
    lines[1] |= {"fill": "tonexty", "fillcolor": f"{ink}/0.16"}
    return lines


def _line(name: str, xs: dict[str, list[Any]], values: Floats, **style: Any) -> Trace:
    mode, marker = style.pop("mode", "lines"), style.pop("marker", {})
    line = {"width": 1.75, "shape": "linear"} | style
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "legendgroup": name,
        "line": line,
        "marker": marker,
        "xs": xs,
        "y": _list(values),
    }


def _restarts(summary: Summary, scale: TimeScale) -> list[Trace]:
    steps = [number(life, "step") for life in summary.lives[1:] if life["event"] == "resume"]
    if not steps:
        return []
    xs = _xs(summary, np.repeat(steps, 3), scale)
    for values in xs.values():
        values[2::3] = [None] * len(steps)  # a line for each
    mark = _line(
        "restart", xs, np.tile([0.0, 1.0, math.nan], len(steps)), color="var(--muted)", dash="dash", width=1.25
    )
    return [mark | {"yaxis": "y2", "hoverinfo": "skip"}]


def _outlines(summary: Summary, scale: TimeScale) -> list[Trace]:
    """A frame around the steps of each named stretch, and a mark at its beginning that tells of it."""
    if not summary.slow:
        return []
    steps, heights = [], []
    for slow in summary.slow:
        steps += [slow.since_step, slow.until_step, slow.until_step, slow.since_step, slow.since_step, math.nan]
        heights += [slow.rank - 0.46, slow.rank - 0.46, slow.rank + 0.46, slow.rank + 0.46, slow.rank - 0.46, math.nan]
    frame = _line("straggler", _xs(summary, np.array(steps), scale), np.array(heights), color="var(--ink)", width=1.5)
    return [frame | {"hoverinfo": "skip", "showlegend": False}, _heads(summary.slow, summary, scale)]


def _heads(stretches: Sequence[Slow], summary: Summary, scale: TimeScale) -> Trace:
    begun = np.array([slow.since_step for slow in stretches])
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "straggler",
        "xs": _xs(summary, begun, scale),
        "y": [slow.rank for slow in stretches],
        "marker": {
            "symbol": "triangle-right",
            "size": 12,
            "color": "var(--page)",
            "line": {"width": 1.5, "color": "var(--ink)"},
        },
        "hovertext": [_escaped(str(slow)) for slow in stretches],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }


def _spans(timed: Sequence[tuple[dict[str, Any], str]]) -> Trace:
    """From where a rank was named as slow to where it was as fast as the others again."""
    begun: dict[float, str] = {}
    moments: list[str | None] = []
    for event, moment in timed:
        if event["event"] == "straggler":
            begun.setdefault(number(event, "rank"), moment)
        elif event["event"] == "straggler over" and number(event, "rank") in begun:
            moments += [begun.pop(number(event, "rank")), moment, None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": moments,
        "y": ["straggler" if moment else None for moment in moments],
        "line": {"width": 6, "color": "var(--exposed)/0.35"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _clock_range(timed: Sequence[tuple[dict[str, Any], str]]) -> list[str]:
    """A little more than from the first event to the last; of a single one, the minute around it."""
    moments = [datetime.fromisoformat(moment) for _, moment in timed] or [datetime(2000, 1, 1)]
    first, last = min(moments), max(moments)
    room = max((last - first) * 0.04, timedelta(seconds=2))
    earliest = first - room if first - datetime.min > room else first  # a clock that says the year 1
    latest = last + room if datetime.max - last > room else last
    return [earliest.isoformat(), latest.isoformat()]


def _parts_by_rank(summary: Summary) -> dict[str, Floats]:
    """Mean milliseconds of each part, by rank. Older rows tell of compute, and of what is left, only."""
    records, chosen = summary.records, summary.steady

    def mean(values: Floats) -> Floats:
        known = np.isfinite(values[chosen])
        sums = np.where(known, values[chosen], 0.0).sum(axis=0)
        return np.asarray(sums / np.maximum(known.sum(axis=0), 1))

    step_ms = mean(np.fmax(records.column("step_ms")[:, None], records.by_rank("rank_step_ms")))
    if all(np.isfinite(records.by_rank(column)).any() for _, _, column in PARTS):
        found = {name: mean(records.by_rank(column)) for name, _, column in PARTS}
    else:
        found = {"data, forward, backward": mean(records.by_rank("rank_compute_ms"))}
    return found | {"other": np.maximum(step_ms - np.sum(list(found.values()), axis=0), 0.0)}


# ---- numbers ----


def _xs(summary: Summary, steps: Floats, scale: TimeScale) -> dict[str, list[Any]]:
    """The same places of a run over each x; NaN stays a gap."""
    at, records = summary.records.steps["step"], summary.records
    if not len(at):
        return {"step": _list(steps, 9), "tokens": [None] * len(steps), "time": [None] * len(steps)}
    tokens, seconds = records.column("tokens"), summary.training_s
    return {
        "step": _list(steps, 9),
        "tokens": _list(np.interp(steps, at, tokens), 6),
        "time": _list(np.interp(steps, at, seconds / scale.seconds), 6),
    }


def _list(values: Floats, digits: int = 5) -> list[Any]:
    """JSON's numbers, of so many digits: more cannot be seen, and each costs a byte a point."""
    return [_rounded(value, digits) for value in np.asarray(values, dtype=np.float64).tolist()]


def _rounded(value: float, digits: int = 5) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _format(value: float, digits: str) -> str:
    if not math.isfinite(value):
        return "none"
    return units.count(round(value)) if digits.endswith("s") else f"{value:{digits}}"


def _top(values: Floats) -> float:
    """Where the colours end: one hiccup shall not make all else pale."""
    known = values[np.isfinite(values)]
    return round(max(0.25, float(np.percentile(known, 99.5))), 2) if len(known) else 0.25


def _ms(value: float) -> str:
    return f"{value / 1e3:,.3g} s" if value >= 1000 else f"{value:,.3g} ms"


def _close_up(summaries: Sequence[Summary]) -> list[float]:
    """The range of the losses after the first fifth of each run, but for one in a hundred at either end."""
    later = np.concatenate([loss[len(loss) // 5 :] for s in summaries if len(loss := s.records.column("loss"))])
    known = later[np.isfinite(later)]
    if not len(known):
        return [0.0, 1.0]
    low, high = np.percentile(known, [0.5, 99.0])
    room = max(0.05 * (high - low), 1e-3)
    return [_rounded(low - room) or 0.0, _rounded(high + room) or 0.0]


# ---- words ----


def _escaped(value: str) -> str:
    return html.escape(value, quote=False)


def _moment(event: dict[str, Any]) -> str | None:
    """When it happened, by the clock and in the time zone of who wrote it."""
    try:
        moment = datetime.strptime(text(event.get("time")), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None
    return moment.replace(tzinfo=None).isoformat()


def _told(event: dict[str, Any]) -> str:
    return f"{event['event']}: {details(event)}" if details(event) else str(event["event"])


def details(event: dict[str, Any]) -> str:
    """What an event says besides its kind and time, in a line."""
    silent = ("time", "event", "digest", "state_digests", "version", "torch")
    told = [(name, value) for name, value in event.items() if name not in silent and value is not None]
    return text(", ".join(_detail(name, value) for name, value in told))


def _detail(name: str, value: Any) -> str:
    """`cost_s` 411.5 -> 'cost 411.5 s': the unit stands in the name."""
    words, shown = name.replace("_", " "), _listed(value) if isinstance(value, list) else text(value)
    if name == "bytes" and number({name: value}, name) >= 0:
        return units.size(value)
    for suffix in ("ms", "s"):
        if name.endswith(f"_{suffix}"):
            return f"{words.removesuffix(suffix)}{shown} {suffix}"
    return f"{shown} {words}" if name in ("ms", "seconds") else f"{words} {shown}"


def _listed(values: Sequence[Any]) -> str:
    """`a`, `a`, `b` -> 'a x 2, b': the hosts of many ranks are few."""
    alike = [(shown, len(list(equal))) for shown, equal in itertools.groupby(map(text, values))]
    return ", ".join(f"{shown} x {count}" if count > 1 else shown for shown, count in alike)
