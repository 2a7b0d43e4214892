"""The sections of one run's part of the page."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.base import units
from paceline.report import plots
from paceline.report.curves import MOST_POINTS
from paceline.report.facts import Summary, rate_text, text
from paceline.report.markup import UNKNOWN, choice, escape, findings, table
from paceline.report.plots import Figure, TimeScale

_MOST_EVENT_ROWS = 2000


class RunSections:
    """The sections of one run."""

    def __init__(self, summary: Summary, scale: TimeScale, prefix: str, place: Callable[[Figure, str, str], str]):
        """place: takes a figure with its label and caption in, and returns its place in the page. prefix: of ids."""
        self.summary, self.scale, self.prefix, self.place = summary, scale, prefix, place

    def html(self) -> Iterable[str]:
        """The HTML of each section that the records have something for."""
        if self.summary.records.num_steps:
            yield self._parts()
            yield self._ranks()
            yield self._traffic()
        yield self._events()
        yield self._config()

    def _parts(self) -> str:
        summary = self.summary
        found = summary.parts()
        if not found:
            return ""
        along = plots.parts(summary, self.scale, self.prefix)
        num_steps = math.ceil(summary.records.num_steps / (MOST_POINTS // 3))
        caption = "Milliseconds of rank 0's step, one part upon the other; the upper edge is the whole step."
        if num_steps > 1:
            caption += f" Means of up to {num_steps} rows each; single slow steps show in the throughput above."
        step_ms = sum(ms for _, ms in found)
        rows = [[escape(name), f"{ms:,.4g}", f"{100 * ms / step_ms:.1f}"] for name, ms in found]
        rows.append(["step", f"{step_ms:,.4g}", "100.0"])
        in_figures = table(
            ["part", "ms", "% of the step"], rows, "Mean step of rank 0, first step of each start left out"
        )
        said = summary.parts_text()
        return (
            f"<section><h2>Where a step goes</h2>{findings([said])}{self.place(along, said, caption)}"
            f'<details><summary>As a table</summary><div class="scroll">{in_figures}</div></details></section>'
        )

    def _ranks(self) -> str:
        summary = self.summary
        work = summary.work_ms
        if work.shape[1] == 0 or not np.isfinite(work).any():
            return ""
        said = summary.ranks_text()
        bars = plots.rank_parts(summary, self.prefix)
        some = f" The {plots.MOST_BARS} slowest of {work.shape[1]} ranks." if work.shape[1] > plots.MOST_BARS else ""
        caption = "All ranks' steps are equally long; who has little exposed communication is who the others wait for."
        inner = findings([said]) + self.place(bars, said, caption + some)
        if work.shape[1] > 1:
            inner += self._heat_map()
        return f"<section><h2>Rank by rank</h2>{inner}</section>"

    def _heat_map(self) -> str:
        summary = self.summary
        figure = plots.heat_map(summary, self.scale, self.prefix)
        num_rows = math.ceil(summary.records.num_steps / max(1, len(plots.heat_columns(summary)) - 1))
        caption = (
            "A row a rank, time from left to right. Colour: its own work (data, forward, backward, optimizer) against "
            "the median rank's in the same step; of two ranks the faster one is the measure."
        )
        if summary.is_uneven:
            caption += " It is not divided by sequences: a rank that computes more of them shows as slower."
        views = ""
        if num_rows > 1:
            caption += f" A column is the mean, or the maximum, of up to {num_rows} recorded steps."
            views = choice(f"view-{figure.id}", "A column shows", {"mean": "the mean", "slowest": "the slowest step"})
            views = f'<div class="view" data-controls hidden>{views}</div>'
        else:
            views = f'<input type="radio" name="view-{figure.id}" value="mean" checked hidden>'
        named = "".join(f"<li>{escape(_upper(str(slow)))}.</li>" for slow in summary.slow)
        nobody = "No rank was named a straggler"
        caption += " Framed: steps in which a rank was named a straggler." if named else f" {nobody}."
        label = "; ".join(map(str, summary.slow)) or nobody
        return f"<h3>Who was slow, and when</h3>{views}{self.place(figure, label, caption)}" + (
            f'<ul class="caption">{named}</ul>' if named else ""
        )

    def _traffic(self) -> str:
        summary = self.summary
        traffic = summary.traffic
        if traffic is None:
            return ""
        said = summary.traffic_text()
        along = plots.traffic(summary, self.scale, self.prefix)
        beside = plots.links(summary, self.prefix)
        rows = [
            ["sent by a rank in a step", units.size(traffic.num_bytes)],
            ["computed: gradients, 2 (n-1)/n of 4 bytes a parameter", _size(traffic.computed_bytes)],
            ["collectives under way", f"{traffic.comm_ms:,.4g} ms"],
            ["exposed: no compute hid it", f"{traffic.exposed_ms:,.4g} ms"],
            ["exposed share of it", f"{_percent(traffic.exposed_ms, traffic.comm_ms)}"],
            ["exposed share of the step", f"{_percent(traffic.exposed_ms, traffic.step_ms)}"],
            ["sent bytes over that time", rate_text(traffic.bytes_per_s)],
        ]
        in_figures = table(
            ["a step, median", ""], [[escape(name), escape(value)] for name, value in rows], "Communication, rank 0"
        )
        return (
            f"<section><h2>Communication</h2>{findings([said])}"
            + self.place(
                beside,
                said,
                "Filled: measured, medians of rank 0. Hollow: the same bytes over links of known rates, computed. "
                "Collectives count as under way until the last rank has come to them, so the network's own rate is at "
                "least the one above. The scale is logarithmic.",
            )
            + self.place(
                along,
                said,
                "Blue: collectives were under way, waiting for late ranks included; orange: no compute hid it.",
            )
            + f'<details><summary>As a table</summary><div class="scroll">{in_figures}</div></details></section>'
        )

    def _events(self) -> str:
        summary = self.summary
        events = summary.records.events
        if not events:
            return ""
        figure = plots.time_line(summary, self.prefix)
        num_restarts, num_twice = summary.restarts
        said = f"{len(events)} event{'s'[: len(events) != 1]}, {num_restarts} restart{'s'[: num_restarts != 1]}"
        said += f", {num_twice} steps made twice." if num_twice else "."
        rows = [[escape(text(value)) for value in row] for row in _event_rows(events)]
        more = len(rows) - _MOST_EVENT_ROWS
        tail = f'<p class="caption">{more} more are in events.jsonl.</p>' if more > 0 else ""
        in_figures = table(["time", "event", "step", "what it says"], rows[:_MOST_EVENT_ROWS], "", wide=True)
        return (
            f"<section><h2>What happened</h2>{findings([said])}"
            + self.place(figure, said, "A mark an event, by the clock; pauses between them were no training.")
            + f'<div class="scroll tall" tabindex="0" role="region" aria-label="Events">{in_figures}</div>'
            + f"{tail}</section>"
        )

    def _config(self) -> str:
        config = self.summary.records.config
        if not config:
            return ""
        sections: dict[str, list[str]] = {}
        for field in config:
            section, _, name = field.partition(".")
            line = f"<div><dt>{escape(name)}</dt><dd><code>{escape(config_text(config, field))}</code></dd></div>"
            sections.setdefault(section, []).append(line)
        groups = "".join(
            f"<div><h4>{escape(section)}</h4><dl>{''.join(lines)}</dl></div>" for section, lines in sections.items()
        )
        return (
            "<section><h2>Config</h2><p>What was resolved when the run began; enough to run it again.</p>"
            f'<details><summary>All fields</summary><div class="config">{groups}</div></details></section>'
        )


def _event_rows(events: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """A row an event; checkpoints that follow one another share one."""
    rows: list[list[Any]] = []
    run: list[dict[str, Any]] = []
    for event in [*events, {"event": ""}]:
        if run and event["event"] != "checkpoint":
            rows.append(_event_row(run))
            run = []
        if event["event"] == "checkpoint":
            run.append(event)
        elif event["event"]:
            rows.append(_event_row([event]))
    return rows


def _event_row(alike: Sequence[dict[str, Any]]) -> list[Any]:
    first, last = alike[0], alike[-1]
    moment = text(first.get("time"))[:19].replace("T", " ")
    if len(alike) == 1:
        told = {name: value for name, value in first.items() if name != "step"}
        return [moment, first["event"], _step(first), plots.details(told)]
    told = {name: value for name, value in last.items() if name != "step"}
    steps = f"{_step(first)} to {_step(last)}"
    return [moment, first["event"], steps, f"{len(alike)} of them; the last: {plots.details(told)}"]


def _step(event: Mapping[str, Any]) -> str:
    step = event.get("step")
    return f"{step:,}" if isinstance(step, int) else text(step)


def config_text(config: Mapping[str, Any], field: str) -> str:
    if field not in config:
        return UNKNOWN
    value = config[field]
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def _size(num_bytes: float) -> str:
    return units.size(num_bytes) if math.isfinite(num_bytes) else "not known"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole > 0 else UNKNOWN


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
