"""What the page draws and tabulates of a run: curves, the ranks' heat map, figures. Numbers have as many digits as a
screen shows; NaN where a value is missing.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.base import units
from paceline.record.balance import Balance
from paceline.record.events import hosts
from paceline.tools.view import measures
from paceline.tools.view.findings import Slow
from paceline.tools.view.read import PARTS, Floats, Run, buckets, in_buckets, last_of

_MOST_LINES = 8  # ranks with a curve each: as many as there are colours
_NUM_LOSS_ROWS = 12
_WITH_BANDS = ("loss", "tokens_per_s", "grad_norm")
_PART_POINTS = 200  # with six layers in a plot, fewer points are easier to read
_LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]
    caption: str = ""


def heat(run: Run, stretches: Sequence[Slow]) -> dict[str, Any]:
    mean, most = run.ranks.slowness()
    names = hosts(run.events)
    num_ranks = max(map(len, mean), default=0)
    return {
        "steps": run.ranks.steps,
        "mean": [_listed(row, 3) for row in mean],
        "most": [_listed(row, 3) for row in most] if run.ranks.rows_per_stretch > 1 else [],
        "labels": [_label(rank, names) for rank in range(num_ranks)],
        "frames": [[slow.rank, slow.since_step, slow.until_step] for slow in stretches],
        "is_uneven": measures.is_uneven(run),
    } if num_ranks > 1 else {}  # fmt: skip


def _label(rank: int, names: Sequence[str]) -> str:
    return f"{rank} · {names[rank]}" if rank < len(names) else f"{rank}"


def curves(run: Run) -> dict[str, dict[str, Any]]:
    """Returns tables of columns of equal lengths: step, tokens and seconds are the x axes; others have a mean and, if a
    point is several rows and a spike must not be lost, the lowest and the highest of them."""
    steps, evaluations, history = run.steps["step"], run.evaluations, run.ranks
    if not len(steps):
        return {}
    begins = buckets(len(steps))
    data = {"steps": _axes(run, last_of(steps, begins))}
    is_exact = len(begins) == len(steps)
    for name in ("loss", "tokens_per_s", "lr", "grad_norm", "comm_ms", "exposed_comm_ms", *run.steps.logged):
        mean, low, high = in_buckets(run.steps[name], begins)
        if np.isfinite(mean).any():
            data["steps"][name] = {"mean": _listed(mean)}
            if not is_exact and name in _WITH_BANDS:
                data["steps"][name] |= {"low": _listed(low), "high": _listed(high)}
    data["validation"] = _axes(run, evaluations["step"])
    data["validation"] |= {name: {"mean": _listed(evaluations[name])} for name in evaluations.logged}
    if np.isfinite(evaluations["val_loss"]).any():  # a script may evaluate other numbers only
        data["validation"]["loss"] = {"mean": _listed(evaluations["val_loss"])}
    if parts := _parts(run):
        begins = buckets(len(steps), _PART_POINTS)
        data["parts"] = _axes(run, last_of(steps, begins))
        for part, values in parts.items():
            data["parts"][part] = {"mean": _listed(np.maximum(in_buckets(values, begins)[0], 0))}
    sequences = [row[:_MOST_LINES] for row in history.sequences()]
    if len({len(row) for row in sequences}) == 1 and any(row != sequences[0] for row in sequences):
        data["shares"] = _axes(run, np.array(history.steps))
        for rank, counts in enumerate(zip(*sequences, strict=True)):
            data["shares"][f"rank {rank}"] = {"mean": _listed(counts)}
    return data


def _parts(run: Run) -> dict[str, Floats]:
    """Returns each part of rank 0's steps, by row; none if they are not recorded."""
    if not measures.mean_parts(run):
        return {}
    parts = {part: run.steps[column.removeprefix("rank_")] for part, column in PARTS.items()}
    return parts | {"other": run.steps["step_ms"] - np.sum(list(parts.values()), axis=0)}


def _axes(run: Run, at: Floats) -> dict[str, Any]:
    """Returns the places of steps on each x axis. With log.every above 1 evaluations come before the first row and
    after the last one, too: their steps are like the mean one up to that row."""
    columns = (run.steps[name] for name in ("step", "tokens", "seconds"))
    steps, *others = (np.concatenate([[0.0], values, 2 * values[-1:]]) for values in columns)
    tokens, seconds = (_listed(np.interp(at, steps, values), 6) for values in others)
    return {"step": _listed(at, 9), "tokens": tokens, "seconds": seconds}


def _listed(values: "Floats | Sequence[float]", digits: int = 5) -> list[float]:
    """Returns numbers with as many digits as a screen shows: each costs a byte a point."""
    return [float(f"{value:.{digits}g}") for value in values]


# ---- tables ----


def tables(run: Run, balance: Balance | None, traffic: measures.Traffic | None) -> dict[str, Table]:
    parts = measures.mean_parts(run)
    by_name = {"loss": _loss_table(run)}
    if parts and (step_ms := sum(parts.values())):  # 0 in damaged rows
        rows = [[name, f"{ms:,.4g}", f"{100 * ms / step_ms:.1f}"] for name, ms in [*parts.items(), ("step", step_ms)]]
        about = "Mean step of rank 0, first step of each start left out"
        by_name["parts"] = Table(["part", "ms", "% of the step"], rows, about)
    if balance:
        names = hosts(run.events)
        columns = zip(balance.sequences, balance.tokens_per_s, balance.idle_frac, strict=True)
        rows = [
            [_label(rank, names), f"{count:,.4g}", units.count(speed), f"{idle:.1%}"]
            for rank, (count, speed, idle) in enumerate(columns)
        ]
        head = ["rank", f"{run.dealt} a step", f"{run.unit}/s of its own work", "idle"]
        by_name["shares"] = Table(head, rows, "Idle: a rank waits for other ranks or the network")
    if traffic:
        by_name["traffic"] = Table(["a step of rank 0, median", ""], _traffic_rows(traffic))
    return by_name


def _loss_table(run: Run) -> Table:
    steps, tokens, seconds, losses = (run.steps[name] for name in ("step", "tokens", "seconds", "loss"))
    with_loss = np.isfinite(run.evaluations["val_loss"])
    at, validation = (run.evaluations[name][with_loss] for name in ("step", "val_loss"))
    rows = []
    for index in np.unique(np.linspace(0, len(steps) - 1, _NUM_LOSS_ROWS).round().astype(int)) if len(steps) else []:
        before = int(np.searchsorted(at, steps[index], side="right")) - 1
        values = [losses[index], validation[before] if before >= 0 else math.nan]
        shown = [f"{value:.3f}" if math.isfinite(value) else "-" for value in values]
        seen = units.count(tokens[index]) if math.isfinite(tokens[index]) else "-"
        rows.append([f"{steps[index]:,.0f}", seen, units.duration(seconds[index]), *shown])
    return Table(["step", run.unit, "training time", "loss", "latest validation"], rows)


def _traffic_rows(traffic: measures.Traffic) -> list[list[str]]:
    rows = [
        ["bytes added" if traffic.is_in_memory else "bytes sent", units.size(traffic.num_bytes)],
        ["collectives under way", units.milliseconds(traffic.comm_ms)],
        ["exposed: not hidden by compute", units.milliseconds(traffic.exposed_ms)],
    ]
    if traffic.is_in_memory or not traffic.num_bytes:
        return rows
    if math.isfinite(traffic.computed_bytes):
        rows.append(["computed: gradients, 2 (n-1)/n of 4 bytes a parameter", units.size(traffic.computed_bytes)])
    rows.append(["sent bytes over that time", traffic.rate])
    times = {name: 8e3 * traffic.num_bytes / rate for name, rate in _LINKS.items()}
    return rows + [[f"computed: those bytes at {name}", units.milliseconds(ms)] for name, ms in times.items()]
