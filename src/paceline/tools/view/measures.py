"""What is found in the rows of a run, in numbers and sentences: losses, speed, ranks, communication. Page, report and
terminal say these sentences. Plain text, not escaped.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.base import units
from paceline.base.jsonl import Row
from paceline.record.balance import LISTS, Balance, speeds
from paceline.record.events import starts, text
from paceline.record.rate import usual_rows
from paceline.record.read import number
from paceline.record.stragglers import none_named
from paceline.tools.view.findings import Slow, slow_text
from paceline.tools.view.read import PARTS, Floats, Run, by_rank, work_ms

_MOST_LISTED = 8  # ranks
_CLEARLY = 0.15  # ranks whose speeds differ by less are alike
_GRADIENT_BYTES = 4


def usual_steps(run: Run) -> NDArray[np.bool_]:
    """(rows,): False for the first step of each attempt, which compiles; all True if there are no others."""
    begun = [number(start.get("step")) if start["event"] == "resume" else 0.0 for start in starts(run.events)] or [0.0]
    is_first = np.isin(run.steps["step"], np.array(begun) + 1.0)
    return ~is_first | is_first.all()


def loss_text(run: Run) -> str:
    steps, loss, values = run.steps["step"], run.steps["loss"], run.evaluations["val_loss"]
    is_known = np.isfinite(loss)
    if not is_known.any():
        return "No step has a finite loss." if len(loss) else ""
    known, lowest = loss[is_known], int(np.nanargmin(loss))
    said = f"Loss went from {known[0]:.2f} to {known[-1]:.2f} in {units.count(len(loss))} recorded steps"
    said += f", lowest at step {steps[lowest]:,.0f}" if lowest < len(loss) - 1 else ""
    if np.isfinite(values).any():
        best = int(np.nanargmin(values))
        said += f"; validation is best at step {run.evaluations['step'][best]:,.0f} with {values[best]:.3f}"
    num_missing = int((~is_known).sum())
    return f"{said}." + (f" {units.plural(num_missing, 'step')} without a finite loss." if num_missing else "")


def rate_text(run: Run) -> str:
    chosen = usual_steps(run) & np.isfinite(run.steps["tokens_per_s"])
    rates = run.steps["tokens_per_s"][chosen]
    if not len(rates):
        return ""
    low, middle, high = map(units.count, np.percentile(rates, [5, 50, 95]))
    slowest = int(rates.argmin())
    return (
        f"Half of the steps made {middle} {run.unit} a second or more, nine of ten between {low} and {high}; "
        f"the slowest is step {run.steps['step'][chosen][slowest]:,.0f} with {units.count(rates[slowest])}."
    )


def update_text(run: Run) -> str:
    """Describes learning rate and gradient norm; empty if no row has them."""
    steps, rates, norms = (run.steps[name] for name in ("step", "lr", "grad_norm"))
    known_rates, known_norms = rates[np.isfinite(rates)], norms[np.isfinite(norms)]
    said = []
    if len(known_rates):
        at = int(np.nanargmax(rates))
        said.append(
            f"The learning rate peaks at {rates[at]:.3g} in step {steps[at]:,.0f} and ends at {known_rates[-1]:.3g}."
        )
    if len(known_norms):
        at, clip = int(np.nanargmax(norms)), number(run.config.get("optim.grad-clip"))
        clipped_frac = (known_norms > clip).mean() if clip > 0 else 0.0
        clipped = f"; {clipped_frac:.0%} of the steps are clipped to {clip:g}" if clipped_frac else ""
        said.append(
            f"The gradient norm before clipping is {np.median(known_norms):.3g} in the median and largest in step "
            f"{steps[at]:,.0f} with {norms[at]:.3g}{clipped}."
        )
    return " ".join(said)


def mean_parts(run: Run) -> dict[str, float]:
    """Returns the mean milliseconds of each part of rank 0's usual steps; their sum is the mean step. Empty if no row
    has all parts, or they take no time."""
    usual = usual_steps(run)
    means = {part: _mean(run.steps[column.removeprefix("rank_")][usual]) for part, column in PARTS.items()}
    step_ms = _mean(run.steps["step_ms"][usual])
    other_ms = step_ms - sum(means.values())
    return means | {"other": other_ms} if step_ms > 0 and math.isfinite(other_ms) else {}


def parts_text(run: Run) -> str:
    parts = mean_parts(run)
    step_ms = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    shares = ", ".join(f"{name} {_share(ms, step_ms)}" for name, ms in largest)
    return f"A step of {step_ms:,.3g} ms on average goes into {shares}." if parts else ""


# ---- ranks ----


def newest_rows(run: Run) -> list[Row]:
    """Returns the rows that describe ranks as they are now: those of the run's rate, at its newest world size."""
    rows = usual_rows(list(run.recent), run.events)
    rows = [row for row in rows if work_ms(row)] or rows  # in a large world few rows have lists by rank
    return [row for row in rows if row.get("world_size") == rows[-1].get("world_size")]


def ranks_text(run: Run, stretches: Sequence[Slow]) -> str:
    """Names the ranks that training reported, or says that there is none; empty if that is all, and no times by rank
    are known."""
    said = slow_text(stretches)
    rows = newest_rows(run)
    work = list(zip(*map(work_ms, rows), strict=False))
    if len(work) < 2:
        return said
    means = {rank: _mean(np.array(values)) for rank, values in enumerate(work)}
    said = said or none_named(means, f"In the last {units.plural(len(rows), 'row')}")
    usual = usual_steps(run)
    num_steps = np.diff(run.steps["step"], prepend=0)
    wait_s = float(np.nansum((run.steps["wait_ms"] * num_steps)[usual])) / 1e3
    if wait_s >= 0.05:  # is shown as 0.1 s
        less = f"training would take {units.duration(wait_s)} less."
        said += f" Were each step's slowest rank as fast as its median one, {less}"
    if is_uneven(run):
        said += f" Some ranks compute more {run.dealt} of a step than others, which is a part of that."
    return said


def is_uneven(run: Run) -> bool:
    """Whether ranks have different numbers of sequences in some step."""
    return any(len(set(sequences)) > 1 for sequences in run.ranks.sequences())


def balance_of(run: Run) -> Balance | None:
    """Returns the balance of the newest rows; None if their ranks are alike, or it is not known."""
    rows = []
    for row in newest_rows(run):
        numbers = {name: number(row[name]) for name in ("step_ms", "tokens_per_s")}
        rows.append({name: by_rank(row, name) for name in LISTS} | numbers)
    balance = None
    with suppress(ValueError, ArithmeticError):  # rows that are damaged
        balance = speeds(rows)
    if balance is None or len(balance.sequences) < 2 or not math.isfinite(balance.sum_of_speeds_frac):
        return None
    are_alike = max(balance.tokens_per_s) < (1 + _CLEARLY) * min(balance.tokens_per_s)
    return None if are_alike and len(set(balance.sequences)) == 1 else balance


def balance_text(run: Run, balance: Balance) -> str:
    rows = newest_rows(run)
    last = [f"{count:.0f}" for count in by_rank(rows[-1], "rank_sequences") if math.isfinite(count)]
    at = [event.get("step") for event in run.events if event["event"] == "shares"]
    changed = f" (changed {units.plural(len(at), 'time')}, the last at step {text(at[-1])})" if at else ""
    shown = ", ".join(last[:_MOST_LISTED]) + (" ..." if len(last) > _MOST_LISTED else "")
    said = (
        f"By rank, the last step had {shown} {run.dealt}{changed}. In the last {units.plural(len(rows), 'row')} the "
        f"run reached {balance.sum_of_speeds_frac:.0%} of the sum of its ranks' own speeds."
    )
    if len(set(balance.sequences)) == 1:
        option = "--parallel.shares auto" if run.dealt == "sequences" else 'shares="auto"'
        said += f" The ranks differ in speed and had equal shares; `{option}` divides a step by speed."
    elif balance.equal_step_ms is not None and math.isfinite(balance.equal_step_ms):
        said += f" A step took {balance.step_ms:,.4g} ms on average; with equal shares it would have taken "
        said += f"{balance.equal_step_ms:,.4g} ms."
    return said


# ---- communication ----


@dataclass(frozen=True)
class Traffic:
    """Medians of rank 0's communication in a step at the last world size."""

    num_bytes: float  # sent by the rank
    comm_ms: float  # with a collective under way
    exposed_ms: float  # the part of comm_ms that no compute hides
    step_ms: float
    computed_bytes: float  # of a ring all-reduce of the gradients; NaN if unknown
    is_in_memory: bool  # ranks add in shared memory and send nothing

    @property
    def rate(self) -> str:
        """Bits over the time of collectives."""
        if not self.comm_ms > 0:
            return "no known rate"
        shown = units.count(float(f"{8e3 * self.num_bytes / self.comm_ms:.3g}"))
        return f"{shown[:-1]} {shown[-1]}bit/s" if shown[-1].isalpha() else f"{shown} bit/s"


def traffic_of(run: Run) -> Traffic | None:
    """Returns the traffic; None for one rank, or if it is not recorded."""
    size = run.steps.last("world_size")
    chosen = usual_steps(run) & (run.steps["world_size"] == size)
    names = ("comm_bytes", "comm_ms", "exposed_comm_ms", "step_ms")
    num_bytes, comm_ms, exposed_ms, step_ms = (_median(run.steps[name][chosen]) for name in names)
    if not size > 1 or not math.isfinite(num_bytes + comm_ms + exposed_ms + step_ms):
        return None
    computed = math.nan
    # fsdp gathers the weights for every micro-batch, whose number the records lack; local sends no gradients.
    if run.num_parameters and run.config.get("parallel.strategy") not in ("fsdp", "hsdp", "local"):
        computed = 2 * (size - 1) / size * run.num_parameters * _GRADIENT_BYTES  # nccl-tests, PERFORMANCE.md
    is_in_memory = any(start.get("shares_memory") is True for start in starts(run.events)[-1:])
    return Traffic(num_bytes, comm_ms, exposed_ms, step_ms, computed, is_in_memory)


def traffic_text(traffic: Traffic) -> str:
    size, took = units.size(traffic.num_bytes), f"{traffic.comm_ms:,.3g} ms"
    what = f"A rank sends {size} a step in {took}: {traffic.rate}."
    if traffic.is_in_memory:
        what = f"Ranks add gradients in shared memory, {size} a step in {took}; nothing is sent."
    said = (
        f"{what} {_share(min(traffic.exposed_ms, traffic.comm_ms), traffic.comm_ms)} of that time is exposed, "
        f"which is {_share(traffic.exposed_ms, traffic.step_ms)} of the step."
    )
    if math.isfinite(traffic.computed_bytes) and not traffic.is_in_memory:
        said += f" The model's gradients alone come to {units.size(traffic.computed_bytes)} by the ring's formula."
    return said


def _share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total > 0 and math.isfinite(part) else "an unknown share"


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan
