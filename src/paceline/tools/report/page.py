"""One self-contained HTML page of one or more runs.

plotly.js comes from the plotly package, packed by gzip and base64 (2 MB instead of 4.8); the browser unpacks it. jinja2
escapes all texts from run folders. The page's Content-Security-Policy allows only its two scripts, by their hashes, and
no network.
"""

import base64
import dataclasses
import functools
import gzip
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2
import numpy as np
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped, unused-ignore]

from paceline import __version__
from paceline.tools.report import balance, events, plots, rank_plots, tables
from paceline.tools.report.facts import Summary
from paceline.tools.report.plots import Figure, TimeScale
from paceline.tools.report.read import read_run, rows_per_bucket

_MOST_EVENTS = 2000  # rows of the table


def make_page(paths: Sequence[Path], num_parameters: Mapping[Path, int]) -> bytes:
    """Returns the page of the runs in these folders, as UTF-8. num_parameters: of each run's model, if known, to
    compute the bytes that a step must send. Raises UserError if a folder is no run."""
    with np.errstate(all="ignore"):  # missing values are NaN, and so are results from them
        records = [read_run(path) for path in paths]
        names = _distinct([run.path for run in records])
        counts = [num_parameters.get(path, 0) for path in paths]
        return _page(list(map(Summary, records, names, counts))).encode(errors="backslashreplace")


def _page(runs: list[Summary]) -> str:
    scale = plots.time_scale(runs)
    curves = _curves(runs, scale)
    by_run = [
        {name: dataclasses.replace(figure, id=f"run{index}-{name}") for name, figure in _figures_of(run, scale).items()}
        for index, run in enumerate(runs)
    ]
    packed, hash_of_plotly = _plotly()
    js = _asset("page.js")
    drawn = {
        "list": [figure.as_json() for found in (curves, *by_run) for figure in found.values()],
        "axes": {
            "step": {"title": {"text": "step"}, "tickformat": ","},
            "tokens": {"title": {"text": "tokens"}, "tickformat": "~s"},
            "time": {"title": {"text": f"training time, {scale.name}"}, "tickformat": ""},
        },
    }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals |= {
        "plots": plots,
        "rank_plots": rank_plots,
        "tables": tables,
        "events": events,
        "balance": balance,
        "rows_per_bucket": rows_per_bucket,
    }
    return environment.from_string(_asset("page.html")).render(
        policy=f"default-src 'none'; script-src {hash_of_plotly} {_hash(js)}; style-src 'unsafe-inline'; img-src data:",
        css=(resources.files("paceline.tools") / "look.css").read_text(encoding="utf-8") + _asset("page.css"),
        js=js,
        plotly=packed,
        drawn=drawn,
        runs=runs,
        run_names=list(enumerate(run.name for run in runs)),
        said={
            "loss": _said(runs, Summary.loss_text),
            "rate": _said(runs, Summary.rate_text),
            "updates": _said(runs, Summary.update_text),
        },
        curves=curves,
        figures_by_run=by_run,
        num_steps=max(run.records.num_steps for run in runs),
        most_events=_MOST_EVENTS,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
    )


def _said(runs: Sequence[Summary], say: Callable[[Summary], str]) -> list[str]:
    """Returns the sentences about each run, with its name if there are several."""
    return [f"{run.name}: {said}" if len(runs) > 1 else said for run in runs if (said := say(run))]


def _curves(runs: Sequence[Summary], scale: TimeScale) -> dict[str, Figure]:
    """Returns the figures over all runs, by id. They include runs without steps, so that each keeps its colour."""
    if not any(run.records.num_steps for run in runs):
        return {}
    made = [plots.loss(runs, scale), plots.throughput(runs, scale)]
    if any(run.update_text() for run in runs):
        made += [plots.learning_rate(runs, scale), plots.grad_norm(runs, scale)]
    return {figure.id: figure for figure in made}


def _figures_of(run: Summary, scale: TimeScale) -> dict[str, Figure]:
    made = []
    if run.parts():
        made.append(plots.parts(run, scale))
    if np.isfinite(run.work_ms).any():
        made.append(rank_plots.rank_parts(run))
        if run.work_ms.shape[1] > 1:
            made.append(rank_plots.heat_map(run, scale))
    if balance.balance_of(run) and (shares := balance.figure(run, scale)):
        made.append(shares)
    if run.traffic:
        made += (
            [plots.traffic(run, scale)]
            if run.shares_memory
            else [rank_plots.links(run.traffic), plots.traffic(run, scale)]
        )
    if run.events:
        made.append(rank_plots.time_line(run))
    return {figure.id: figure for figure in made}


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Returns the folders' names, with as many parents as needed to distinguish them."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


@functools.cache
def _plotly() -> tuple[str, str]:
    script = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode(), _hash(script)


def _asset(name: str) -> str:
    return (resources.files("paceline.tools.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
