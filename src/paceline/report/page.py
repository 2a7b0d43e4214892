"""The page: facts, figures and tables of one or several runs, in one HTML file that asks nobody for anything.

plotly.js comes from the plotly package, packed by gzip and base64 (2 MB instead of 4.8), and is unpacked by the
browser. Whatever stems from a run folder is escaped. Besides, the page's own policy lets only the two scripts run whose
hashes it names, and lets nothing be fetched.
"""

import base64
import dataclasses
import functools
import gzip
import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from paceline import __version__
from paceline.base import units
from paceline.base.errors import UserError
from paceline.report import plots
from paceline.report.curves import buckets
from paceline.report.facts import Summary, text
from paceline.report.markup import UNKNOWN, cell, choice, embedded, escape, findings, table
from paceline.report.plots import Figure, TimeScale
from paceline.report.read import read_run
from paceline.report.sections import RunSections, config_text

_FEW_ROWS = 10  # of a table that need not be folded away
_NUM_TABLE_ROWS = 12  # of the loss, for who cannot see the curve


def make_page(paths: Sequence[Path], num_parameters: Mapping[Path, int]) -> bytes:
    """Returns the page of the runs in these folders, as UTF-8.

    num_parameters: of a run's model, where it is known; what a step has to send is computed from it.
    Raises UserError where a folder is no run, or plotly is not installed.
    """
    library = _plotly()
    with np.errstate(all="ignore"):  # what is missing is NaN, and what is computed from it, too
        runs = [read_run(path) for path in paths]
        names = _distinct([run.path for run in runs])
        named = [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]
        summaries = [Summary(run, num_parameters.get(path)) for run, path in zip(named, paths, strict=True)]
        return _Page(summaries).html(library).encode()


@dataclass(frozen=True)
class _Library:
    packed: str  # base64 of gzip
    hash: str  # of what is unpacked


@functools.cache
def _plotly() -> _Library:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise UserError("the plots of a report need plotly; pip install 'paceline[report]'") from None
    script = get_plotlyjs()
    packed = base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()
    return _Library(packed, _hash(script))


class _Page:
    def __init__(self, summaries: Sequence[Summary]):
        self.summaries = summaries
        self.scale = TimeScale.of(summaries)
        self.figures: list[Figure] = []
        self.names = [summary.records.name for summary in summaries]

    def html(self, library: _Library) -> str:
        body = "".join(self._body())
        script = _asset("page.js")
        policy = (
            f"default-src 'none'; script-src {library.hash} {_hash(script)}; style-src 'unsafe-inline'; img-src data:"
        )
        figures = {
            "list": [figure.as_json() for figure in self.figures],
            "axes": {
                "step": {"title": {"text": "step"}, "tickformat": ","},
                "tokens": {"title": {"text": "tokens"}, "tickformat": "~s"},
                "time": {"title": {"text": f"training time, {self.scale.name}"}, "tickformat": ""},
            },
        }
        return "\n".join(
            [
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
                f"<title>{escape(' · '.join(self.names))} · paceline report</title>",
                f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>",
                body,
                f'<script type="application/json" id="figures">{embedded(figures)}</script>',
                f'<script type="text/plain" id="plotly">{library.packed}</script>',
                f"<script>{script}</script>\n</body>\n</html>\n",
            ]
        )

    def _body(self) -> Iterable[str]:
        yield self._header()
        yield self._controls()
        yield "<main>"
        yield self._curves()
        for index, summary in enumerate(self.summaries):
            title = f'<h2 class="title">{self._swatch(index)}{escape(self.names[index])}</h2>' if self._several else ""
            inner = "".join(RunSections(summary, self.scale, f"run{index}-", self.figure).html())
            yield f'<article class="run" data-run="{index}">{title}{inner}</article>'
        yield "</main>"
        made = time.strftime("%Y-%m-%d %H:%M %Z")
        folders = ", ".join(str(summary.records.path) for summary in self.summaries)
        yield f"<footer>Made by paceline {escape(__version__)} on {escape(made)} from {escape(folders)}</footer>"

    @property
    def _several(self) -> bool:
        return len(self.summaries) > 1

    def figure(self, figure: Figure, label: str, caption: str) -> str:
        """Takes a figure in and returns its place in the page."""
        self.figures.append(figure)
        return (
            f'<div class="plot" id="{figure.id}" role="img" aria-label="{escape(label)}" '
            f'style="min-height:{figure.height}px"></div><p class="caption">{escape(caption)}</p>'
        )

    # ---- head ----

    def _header(self) -> str:
        if self._several:
            title = f"{len(self.summaries)} runs compared"
            facts = self._comparison() + self._differences()
        else:
            title = self.names[0]
            facts = _about(self.summaries[0]) + _facts(self.summaries[0])
        notices = "".join(f'<p class="notice">{escape(said)}</p>' for said in self._notices())
        return (
            f'<header class="top"><p class="eyebrow">paceline report</p><h1>{escape(title)}</h1>{facts}{notices}'
            '<p class="notice" id="no-plots" hidden></p><noscript><p class="notice">The plots need JavaScript. '
            "The figures in words and tables are complete without it.</p></noscript></header>"
        )

    def _notices(self) -> Iterable[str]:
        for name, summary in zip(self.names, self.summaries, strict=True):
            records = summary.records
            whose = f"{name}: " if self._several else ""
            if not records.num_steps:
                yield f"{whose}no step is recorded yet. Make the report again when training has gone on for a while."
            if records.num_unreadable:
                yield f"{whose}{records.num_unreadable} lines of its records could not be read and are left out."
            if not records.config:
                yield f"{whose}its config.toml could not be read."

    def _swatch(self, index: int) -> str:
        return f'<span class="swatch" style="color:var(--run{index % plots.NUM_COLOURS})"></span>'

    def _comparison(self) -> str:
        facts = [{fact.label: fact for fact in summary.facts()} for summary in self.summaries]
        labels = {fact.label: fact.unit for found in facts for fact in found.values()}
        rows = [
            [
                cell(label, unit),
                *(
                    cell(found[label].value, found[label].note, "strong") if label in found else UNKNOWN
                    for found in facts
                ),
            ]
            for label, unit in labels.items()
        ]
        rows.insert(0, ["State", *(escape(summary.status[1]) for summary in self.summaries)])
        head = ["", *(self._swatch(index) + escape(name) for index, name in enumerate(self.names))]
        return f'<div class="scroll">{table(head, rows, "Key figures of each run")}</div>'

    def _differences(self) -> str:
        configs = [summary.records.config for summary in self.summaries]
        fields = sorted({field for config in configs for field in config})
        rows = [
            [
                f"<code>{escape(field)}</code>",
                *(f"<code>{escape(config_text(config, field))}</code>" for config in configs),
            ]
            for field in fields
            if len({config_text(config, field) for config in configs}) > 1
        ]
        if not rows:
            return '<p class="about">Their configs are equal.</p>'
        head = ["", *(self._swatch(index) + escape(name) for index, name in enumerate(self.names))]
        is_short = " open" if len(rows) <= _FEW_ROWS else ""
        said = f"{len(rows)} field{'s'[: len(rows) != 1]} of their configs differ{'s'[: len(rows) == 1]}"
        return (
            f"<details{is_short}><summary>{said}</summary>"
            f'<div class="scroll differs">{table(head, rows, "")}</div></details>'
        )

    def _controls(self) -> str:
        groups = [choice("x", "Draw over", {"step": "step", "tokens": "tokens", "time": "time"})]
        if self._several:
            groups.append(choice("run", "Details of", {str(i): name for i, name in enumerate(self.names)}))
        return f'<div class="controls" data-controls hidden><div>{"".join(groups)}</div></div>'

    # ---- what all runs share ----

    def _curves(self) -> str:
        known = [summary for summary in self.summaries if summary.records.num_steps]
        if not known:
            return ""
        loss = plots.loss(self.summaries, self.scale)  # all of them: a run without a step keeps its colour
        rate = plots.throughput(self.summaries, self.scale)
        said = [
            f"{name}: {summary.loss_text()}" if self._several else summary.loss_text()
            for name, summary in zip(self.names, self.summaries, strict=True)
        ]
        speed = [
            f"{name}: {summary.rate_text()}" if self._several else summary.rate_text()
            for name, summary in zip(self.names, self.summaries, strict=True)
        ]
        tables = "".join(
            f"<details><summary>Loss in figures{f', {escape(name)}' if self._several else ''}</summary>"
            f'<div class="scroll">{_loss_table(summary)}</div></details>'
            for name, summary in zip(self.names, self.summaries, strict=True)
            if summary.records.num_steps
        )
        views = choice("view-loss", "Loss axis", {"all": "all values", "close": "close-up of the later part"})
        views = f'<div class="view" data-controls hidden>{views}</div>'
        marks = "" if self._several else " Diamonds: validation. Upright dashes: where the run went on after a stop."
        return (
            f'<section id="loss-section"><h2>Loss</h2>{findings(said)}{views}'
            f"{self.figure(loss, ' '.join(said), _bucket_text(known) + marks)}{tables}</section>"
            f"<section><h2>Throughput</h2>{findings(speed)}"
            f"{self.figure(rate, ' '.join(speed), _bucket_text(known))}</section>"
        )


def _about(summary: Summary) -> str:
    config = summary.records.config
    words = []
    if "model.n-layer" in config:
        words.append(
            f"{config.get('model.arch', 'model')}, {config['model.n-layer']} layers x {config.get('model.n-embd')}"
        )
    names = ("optim.name", "parallel.strategy", "train.dtype")
    words += [str(config[name]) for name in names if name in config]
    begun = next((text(life.get("time"))[:16].replace("T", " ") for life in summary.lives), "")
    words += [f"begun {begun}"] if begun else []
    kind, state = summary.status
    about = f'<p class="about">{escape(" · ".join(words))}</p>' if words else ""
    return f'{about}<p class="status {kind}">{escape(state)}</p>'


def _facts(summary: Summary) -> str:
    cells = "".join(
        f'<div><dt>{escape(fact.label)}</dt><dd class="value">{escape(fact.value)}</dd>'
        f'<dd class="note">{escape("; ".join(filter(None, (fact.unit, fact.note))))}</dd></div>'
        for fact in summary.facts()
    )
    return f'<dl class="facts">{cells}</dl>'


def _loss_table(summary: Summary) -> str:
    records = summary.records
    count = min(_NUM_TABLE_ROWS, records.num_steps)
    chosen = np.unique(np.linspace(0, records.num_steps - 1, count).round().astype(int))
    steps, loss, tokens = (records.column(name) for name in ("step", "loss", "tokens"))
    at, values = records.evaluations["step"], records.evaluation("val_loss")
    rows = []
    for index in chosen:
        before = np.searchsorted(at, steps[index], side="right") - 1
        validation = float(values[before]) if before >= 0 else math.nan
        rows.append(
            [
                f"{steps[index]:,.0f}",
                units.count(tokens[index]) if math.isfinite(tokens[index]) else UNKNOWN,
                _duration(float(summary.training_s[index])),
                _decimal(float(loss[index])),
                _decimal(validation),
            ]
        )
    return table(["step", "tokens", "training time", "loss", "latest validation"], rows, "")


def _duration(seconds: float) -> str:
    return units.duration(seconds) if math.isfinite(seconds) else UNKNOWN


def _decimal(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else UNKNOWN


def _bucket_text(summaries: Sequence[Summary]) -> str:
    longest = max(summary.records.num_steps for summary in summaries)
    num_rows = math.ceil(longest / (len(buckets(longest)) - 1))
    if num_rows <= 1:
        return "Each recorded step is a point."
    return (
        f"The line is the mean of {num_rows} recorded steps a point (at most); the band reaches from the lowest to the "
        "highest of them, so no spike is lost."
    )


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Names of folders, with as many of their parents as it takes to tell them apart."""
    most = max(len(path.parts) for path in paths)
    for depth in range(1, most + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _asset(name: str) -> str:
    return (resources.files("paceline.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
