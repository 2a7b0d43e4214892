"""Curves over a run as plotly's graph objects. page.js adds fonts, sizes and the theme.

A colour is a variable of look.css, `var(--name)` or, with an opacity, `var(--name / 0.2)`, which page.js replaces. A
trace for several x axes (step, tokens, time) has their values in meta["xs"]. plotly interprets some HTML tags in
labels, so labels from records are escaped.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped, unused-ignore]

from paceline.base import units
from paceline.record.events import starts
from paceline.record.read import number
from paceline.tools.report.facts import PARTS, Summary
from paceline.tools.report.read import MOST_POINTS, Floats, buckets, in_buckets, middles

_NUM_COLOURS = 8  # Okabe and Ito's, distinguishable by all kinds of colour vision; jfly.uni-koeln.de/color
MOST_PARTS = MOST_POINTS // 3  # with six layers in a plot, fewer points are easier to read
_DASHES = ("solid", "longdash", "dash", "dot")


@dataclass(frozen=True)
class Figure:
    id: str
    height: int  # CSS pixels
    traces: list[Any]
    layout: dict[str, Any]
    close_up: tuple[float, float] | None = None  # another range of the y axis that the page offers

    def as_json(self) -> dict[str, Any]:
        """Returns page.js's input. Raises ValueError for a property or value that plotly lacks."""
        traces = [trace.to_plotly_json() for trace in self.traces]
        layout = go.Layout(self.layout).to_plotly_json()
        return {"id": self.id, "height": self.height, "traces": traces, "layout": layout, "closeUp": self.close_up}


class TimeScale(NamedTuple):
    """The unit of time on a page."""

    name: str
    seconds: float


def time_scale(runs: Sequence[Summary]) -> TimeScale:
    """Returns a readable unit for the longest run."""
    longest_s = max((float(run.training_s[-1]) for run in runs if len(run.training_s)), default=0.0)
    return TimeScale("h", 3600) if longest_s > 7200 else TimeScale("min", 60) if longest_s > 180 else TimeScale("s", 1)


# ---- over all runs ----


def loss(runs: Sequence[Summary], scale: TimeScale) -> Figure:
    traces = _of_each(runs, "loss", "training", scale, ".3f")
    for index, run in enumerate(runs):
        if len(run.records.evaluations["step"]):
            traces.append(_evaluations(run, index, len(runs), scale))
    if len(runs) == 1:
        traces += _restarts(runs[0], scale)
    hidden = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}
    return Figure("loss", 420, traces, {"yaxis": {"title": "nats a token"}, "yaxis2": hidden}, _close_up(runs))


def throughput(runs: Sequence[Summary], scale: TimeScale) -> Figure:
    traces = _of_each(runs, "tokens_per_s", "tokens a second", scale, ".4s")
    axis = {"title": "tokens a second", "rangemode": "tozero", "tickformat": "~s"}
    return Figure("throughput", 300, traces, {"yaxis": axis})


def learning_rate(runs: Sequence[Summary], scale: TimeScale) -> Figure:
    axis = {"title": "learning rate", "rangemode": "tozero", "tickformat": "~g"}
    return Figure("lr", 240, _of_each(runs, "lr", "learning rate", scale, ".3g"), {"yaxis": axis})


def grad_norm(runs: Sequence[Summary], scale: TimeScale) -> Figure:
    """Gradient norm before clipping; the logarithmic axis has at least half a decade, with marks at 1, 2 and 5."""
    norms = np.concatenate([run.steps["grad_norm"] for run in runs])
    known = np.log10(norms[np.isfinite(norms) & (norms > 0)])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    room = max(0.05, (0.5 - (high - low)) / 2)
    decades = range(math.floor(low - room), math.ceil(high + room))
    marks = [float(f"{factor}e{decade}") for decade in decades for factor in ((1, 2, 5) if high - low < 3 else (1,))]
    axis = {"type": "log", "range": [low - room, high + room], "tickvals": marks, "tickformat": "~g"}
    traces = _of_each(runs, "grad_norm", "gradient norm", scale, ".3g")
    return Figure("grad-norm", 300, traces, {"yaxis": axis | {"title": "norm, before clipping"}})


def _of_each(runs: Sequence[Summary], column: str, name: str, scale: TimeScale, digits: str) -> list[Any]:
    """Returns a column's curve for each run; `name` is the curve's if there is one run."""
    traces = []
    for index, run in enumerate(runs):
        traces += _curve(
            run, column, escaped(run.name) if len(runs) > 1 else name, _style(index, len(runs)), scale, digits
        )
    return traces


def _evaluations(run: Summary, index: int, num_runs: int, scale: TimeScale) -> Any:
    """Validation losses. Later runs have smaller marks, so equal ones look like rings."""
    values = run.records.evaluations["val_loss"]
    name, ink, symbol, size = "validation", "var(--run1)", "diamond", 8.0
    if num_runs > 1:
        name, ink = f"{escaped(run.name)}, validation", ink_of(index)
        symbol, size = "circle", max(6.0, 15.0 - 4 * index)
    if len(values) >= 60:
        size = max(4.0, 0.6 * size)
    mark = {"symbol": symbol, "size": size, "color": ink, "line": {"width": 1.25, "color": "var(--page)"}}
    style = {"color": ink, "dash": "dot"}
    shown = {"mode": "lines+markers", "marker": mark, "hovertemplate": "%{y:.3f}"}
    return line(name, xs_of(run, run.records.evaluations["step"], scale), values, style, **shown)


def _restarts(run: Summary, scale: TimeScale) -> list[Any]:
    steps = [number(start.get("step")) for start in starts(run.events)[1:] if start["event"] == "resume"]
    if not steps:
        return []
    xs = xs_of(run, np.repeat(steps, 3), scale)
    for values in xs.values():
        values[2::3] = [None] * len(steps)  # a line for each
    style = {"color": "var(--muted)", "dash": "dash", "width": 1.25}
    return [line("restart", xs, np.tile([0.0, 1.0, math.nan], len(steps)), style, yaxis="y2", hoverinfo="skip")]


def _close_up(runs: Sequence[Summary]) -> tuple[float, float]:
    """The range of 98% of the losses after the first fifth of each run."""
    later = np.concatenate([values[len(values) // 5 :] for values in (run.steps["loss"] for run in runs)])
    known = later[np.isfinite(later)]
    if not len(known):
        return 0.0, 1.0
    low, high = np.percentile(known, [0.5, 99.0])
    room = max(0.05 * (high - low), 1e-3)
    return float(low - room), float(high + room)


# ---- of one run ----


def parts(run: Summary, scale: TimeScale) -> Figure:
    edges = buckets(run.records.num_steps, MOST_PARTS)
    columns = {name: run.steps[column] for name, column, _ in PARTS}
    columns["other"] = run.steps["step_ms"] - np.sum(list(columns.values()), axis=0)
    xs = xs_of(run, middles(run.steps["step"], edges), scale)
    traces = []
    for name, values in columns.items():
        mean, ink = np.maximum(in_buckets(values, edges).mean, 0), colour_of(name)
        shown = {"stackgroup": "step", "fillcolor": ink, "hovertemplate": "%{y:.4g} ms", "legendgroup": None}
        traces.append(line(name, xs, mean, {"width": 0.5, "color": ink}, **shown))
    return Figure("parts", 340, traces, {"yaxis": {"title": "ms a step", "rangemode": "tozero"}})


def traffic(run: Summary, scale: TimeScale) -> Figure:
    names = {"comm_ms": "collectives under way", "exposed_comm_ms": "exposed"}
    inks = {"comm_ms": "var(--run0)", "exposed_comm_ms": "var(--exposed)"}
    traces = []
    for column, name in names.items():
        traces += _curve(run, column, name, _style(0) | {"color": inks[column]}, scale, ".4g", band=False)
    return Figure("traffic", 280, traces, {"yaxis": {"title": "ms a step, mean", "rangemode": "tozero"}})


# ---- traces ----


def dash_of(index: int) -> str:
    """Returns the dash of a run's curve; dash and colour are unique for up to 32 runs."""
    return _DASHES[(index + index // _NUM_COLOURS) % len(_DASHES)]


def ink_of(index: int) -> str:
    return f"var(--run{index % _NUM_COLOURS})"


def colour_of(part: str) -> str:
    return f"var(--{part.split()[0].rstrip(',')})"


def _style(index: int, num_runs: int = 1) -> dict[str, Any]:
    """Returns a run's line style. Later lines are thinner and dashed, so that equal curves all show."""
    width = 1.75 if num_runs == 1 else 1.75 + min(1.5, 4 / num_runs) * (num_runs - 1 - index)
    return {"color": ink_of(index), "dash": dash_of(index), "width": width}


def _curve(
    run: Summary, column: str, name: str, style: dict[str, Any], scale: TimeScale, digits: str, band: bool = True
) -> list[Any]:
    """Returns a column's mean in buckets, over a band from its lowest to its highest, which keeps spikes."""
    edges = buckets(run.records.num_steps)
    curve = in_buckets(run.steps[column], edges)
    xs = xs_of(run, middles(run.steps["step"], edges), scale)
    if not band or run.records.num_steps == len(edges) - 1:
        mode = "lines" if run.records.num_steps > 1 else "markers"
        return [line(name, xs, curve.mean, style, mode=mode, hovertemplate=f"%{{y:{digits}}}")]
    ink = style["color"].removesuffix(")")
    edge = {"hoverinfo": "skip", "showlegend": False, "connectgaps": True}
    thin = {"color": f"{ink} / 0.45)", "width": 0.75}
    span = [
        f"{_format(low, digits)} to {_format(high, digits)}" for low, high in zip(curve.low, curve.high, strict=True)
    ]
    return [
        line(name, xs, curve.low, thin, **edge),
        line(name, xs, curve.high, thin, fill="tonexty", fillcolor=f"{ink} / 0.16)", **edge),
        line(name, xs, curve.mean, style, customdata=span, hovertemplate=f"%{{y:{digits}}}  (%{{customdata}})"),
    ]


def line(name: str, xs: dict[str, list[Any]], values: Floats, style: dict[str, Any], **more: Any) -> Any:
    shown = {"mode": "lines", "legendgroup": name, "line": {"width": 1.75, "dash": "solid"} | style}
    return go.Scatter(name=name, y=listed(values), meta={"xs": xs}, **(shown | more))


def xs_of(run: Summary, steps: Floats, scale: TimeScale) -> dict[str, list[Any]]:
    """Returns the steps' positions on each x axis; NaN stays a gap."""
    at = run.steps["step"]
    if not len(at):
        return {name: listed(np.full(len(steps), np.nan)) for name in ("step", "tokens", "time")}
    return {
        "step": listed(steps, 9),
        "tokens": listed(np.interp(steps, at, run.steps["tokens"]), 6),
        "time": listed(np.interp(steps, at, run.training_s / scale.seconds), 6),
    }


def listed(values: Floats, digits: int = 5) -> list[Any]:
    """Returns numbers for JSON, null for NaN. More digits are not visible, and each costs a byte a point."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def _format(value: float, digits: str) -> str:
    if not math.isfinite(value):
        return "none"
    return units.count(round(value)) if digits.endswith("s") else f"{value:{digits}}"


def escaped(label: str) -> str:
    return html.escape(label, quote=False)
