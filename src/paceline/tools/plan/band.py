"""How sure an efficiency is: a plan for each end of each uncertain input, and what these ends do together."""

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rich.table

from paceline.config import Config
from paceline.record.console import table
from paceline.tools.plan import devices
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device
from paceline.tools.plan.plan import Plan

_MOST = 99.99  # shown of a link whose rate has no upper limit, as passes hid the exchange
Planned = Callable[[Config, Cluster, Device], Plan]


@dataclass(frozen=True, kw_only=True)
class Band:
    """An efficiency with its range. A cause is one input, whose low end gives the one efficiency, its high end the
    other; causes are independent, so their distances add up as the root of the sum of squares."""

    plan: Plan
    low: float
    high: float
    causes: Mapping[str, tuple[float, float]]


def band(found: Plan, config: Config, planned: Planned) -> Band:
    """Returns the band around a plan of this config. planned: makes a plan."""
    cluster, device, middle = found.cluster, found.device, found.efficiency_frac
    causes = {}
    for name, (low, high, _) in device.spreads.items():
        if name != "jitter" or cluster.jitter_frac < 0:  # else the cluster's file has it
            moved = [_moved(name, end, cluster, device) for end in (low, high)]
            at_low, at_high = (planned(config, *each).efficiency_frac for each in moved)
            causes[name] = at_low, at_high
    below = math.hypot(*(max(0.0, middle - min(ends)) for ends in causes.values()))
    above = math.hypot(*(max(0.0, max(ends) - middle) for ends in causes.values()))
    return Band(plan=found, low=middle - below, high=middle + above, causes=causes)


def _moved(name: str, end: float, cluster: Cluster, device: Device) -> tuple[Cluster, Device]:
    """Returns the machines with one input at an end of its range."""
    if name == "jitter":
        return replace(cluster, jitter_frac=end), device
    if name == "exchange":
        return cluster, replace(device, exchange=devices.scaled(device.exchange, end))
    if name == "link":
        faster = replace(device, inner_bytes_per_s=end * device.inner_bytes_per_s)
        return replace(cluster, link_gbit=end * cluster.link_gbit), faster
    return cluster, device.slower(end)


# ---- shown ----


def efficiency_table(bands: Sequence[Band]) -> rich.table.Table:
    """Returns efficiencies by world size, each with its range and the input that widens it most."""
    labels = {each.plan.label for each in bands}
    rows = []
    for each in sorted(bands, key=lambda each: (each.plan.label, each.plan.cluster.num_ranks)):
        spans = {name: abs(high - low) for name, (low, high) in each.causes.items()}
        widest = max(spans, key=lambda name: spans[name], default="")
        numbers = [f"{100 * value:.1f}" for value in (each.plan.efficiency_frac, each.low, each.high)]
        widest = widest if numbers[1] != numbers[2] else ""
        rows.append([str(each.plan.cluster.num_ranks), *numbers, widest, *[each.plan.label][: len(labels) > 1]])
    columns = ["ranks", "efficiency %", "low", "high", "most of it", *["plan"][: len(labels) > 1]]
    return table("Efficiency by world size", columns, rows)


def sources(bands: Sequence[Band]) -> list[str]:
    """Returns what is uncertain, in which range, and where that comes from."""
    spreads = bands[0].plan.device.spreads
    found = []
    for name, (low, high, why) in spreads.items():
        ends = f"{low:.1%} to {high:.1%} of a step" if name == "jitter" else f"x {low:.2f} to {min(high, _MOST):.2f}"
        found.append(f"{name}: {ends}; {why}")
    batch = bands[0].plan.settings.plan.global_batch_size
    alone = f"100%: the tokens/s of all devices, if each trained alone; all worlds make steps of {batch} sequences"
    return [alone, *(found or ["its range is not known: calibrate again"])]


def write_plot(bands: Sequence[Band], path: Path) -> None:
    """Writes a self-contained page: efficiency over world size, a line with its band for each label."""
    from plotly import graph_objects as go  # type: ignore[import-untyped, unused-ignore]

    figure, inks = go.Figure(), itertools.cycle(("0,114,178", "213,94,0", "0,158,115", "204,121,167", "86,180,233"))
    for label in dict.fromkeys(each.plan.label for each in bands):
        chosen = [each for each in bands if each.plan.label == label]
        chosen.sort(key=lambda each: each.plan.cluster.num_ranks)
        ranks, ink, name = [each.plan.cluster.num_ranks for each in chosen], next(inks), html.escape(label)
        edge = {"x": ranks, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(y=[100 * each.low for each in chosen], **edge)
        figure.add_scatter(y=[100 * each.high for each in chosen], fill="tonexty", fillcolor=f"rgba({ink},0.2)", **edge)
        texts = [f"{100 * each.low:.1f} to {100 * each.high:.1f}" for each in chosen]
        figure.add_scatter(
            x=ranks,
            y=[100 * each.plan.efficiency_frac for each in chosen],
            mode="lines+markers",
            name=name or "planned",
            line={"color": f"rgb({ink})"},
            text=texts,
            hovertemplate="%{x} ranks: %{y:.1f}% (%{text})",
        )
    every = sorted({each.plan.cluster.num_ranks for each in bands})
    figure.update_xaxes(type="log", title="ranks", tickvals=every, ticktext=[f"{count:,}" for count in every])
    figure.update_yaxes(title="efficiency, %", rangemode="tozero")
    title = f"Planned efficiency, {html.escape(bands[0].plan.device.name)}"
    said = "<br>".join(map(html.escape, sources(bands)))
    figure.update_layout(title=f"{title}<br><sup>{said}</sup>", margin={"t": 170}, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)
