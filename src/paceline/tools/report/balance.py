"""How unequal ranks divided the steps: sequences by rank, speeds, and what equal shares would have cost."""

import math

import numpy as np

from paceline.base import units
from paceline.record.balance import Balance, speeds
from paceline.record.events import text as text_of
from paceline.tools.report.facts import Summary
from paceline.tools.report.plots import Figure, TimeScale, dash_of, escaped, ink_of, line, xs_of
from paceline.tools.report.read import buckets, in_buckets, middles

MOST_LINES = 8  # ranks with a curve each: as many as there are colours
_CLEARLY = 0.15  # ranks whose speeds differ by less are alike


def balance_of(run: Summary) -> Balance | None:
    """Returns the balance of the steady steps at the last world size; None if its ranks are alike, or not known."""
    sequences = run.ranks["rank_sequences"]
    known = np.isfinite(sequences)
    num_ranks = int(known[-1].sum()) if len(known) else 0
    chosen = run.steady & (known.sum(axis=1) == num_ranks)
    if num_ranks < 2 or not chosen.any():
        return None
    lists = ("rank_sequences", "rank_compute_ms", "rank_optim_ms", "rank_exposed_comm_ms")
    means = {name: run.ranks[name][chosen, :num_ranks].mean(axis=0) for name in lists}
    step_ms = run.steps["step_ms"][chosen].mean()
    tokens = (run.steps["tokens_per_s"] * run.steps["step_ms"])[chosen].mean()
    own_ms, sequences = means["rank_compute_ms"] + means["rank_optim_ms"], means["rank_sequences"]
    if not (step_ms > 0 and (own_ms > 0).all() and (sequences >= 0).all() and sequences.sum() > 0):
        return None
    row = {name: values.tolist() for name, values in means.items()}
    found = speeds([row | {"step_ms": float(step_ms), "tokens_per_s": float(tokens / step_ms)}])
    if found is None or not math.isfinite(found.sum_of_speeds_frac):
        return None
    are_alike = max(found.tokens_per_s) < (1 + _CLEARLY) * min(found.tokens_per_s)
    return None if are_alike and len(set(found.sequences)) == 1 else found


def text(run: Summary, balance: Balance) -> str:
    last = [f"{count:.0f}" for count in np.nan_to_num(run.ranks["rank_sequences"][-1, : len(balance.sequences)])]
    at = [event.get("step") for event in run.events if event["event"] == "shares"]
    changed = f" (changed {units.plural(len(at), 'time')}, the last at step {text_of(at[-1])})" if at else ""
    shown = ", ".join(last[:MOST_LINES]) + (" ..." if len(last) > MOST_LINES else "")
    said = f"By rank, the last step had {shown} sequences{changed}. "
    said += f"Over all steps the run reached {balance.sum_of_speeds_frac:.0%} of the sum of its ranks' own speeds."
    equal_ms, is_equal = balance.equal_step_ms, len(set(balance.sequences)) == 1
    if is_equal:
        said += " The ranks differ in speed and had equal shares; `--parallel.shares auto` divides a step by speed."
    elif equal_ms is not None and math.isfinite(equal_ms):
        said += f" A step took {balance.step_ms:,.4g} ms on average; with equal shares it would have taken "
        said += f"{equal_ms:,.4g} ms."
    return said


def rows(run: Summary, balance: Balance) -> list[list[str]]:
    columns = zip(balance.sequences, balance.tokens_per_s, balance.idle_frac, strict=True)
    return [
        [run.label(rank), f"{sequences:,.4g}", f"{tokens_per_s:,.0f}", f"{100 * idle:.1f}"]
        for rank, (sequences, tokens_per_s, idle) in enumerate(columns)
    ]


def figure(run: Summary, scale: TimeScale) -> Figure | None:
    """Each rank's sequences of a step; None if they never changed."""
    values = run.ranks["rank_sequences"]
    if not (np.nanmax(values, axis=0) > np.nanmin(values, axis=0)).any():
        return None
    edges = buckets(run.records.num_steps)
    xs = xs_of(run, middles(run.steps["step"], edges), scale)
    traces = [
        line(
            f"rank {escaped(run.label(rank))}",
            xs,
            in_buckets(values[:, rank], edges).mean,
            {"color": ink_of(rank), "dash": dash_of(rank), "shape": "hv"},
            hovertemplate="%{y:.4g}",
        )
        for rank in range(min(MOST_LINES, values.shape[1]))
    ]
    return Figure("shares", 260, traces, {"yaxis": {"title": "sequences a step", "rangemode": "tozero"}})
