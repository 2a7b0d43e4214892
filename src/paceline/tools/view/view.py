"""What to show of a run: for the terminal and, as JSON, for the page. Texts are plain, not escaped."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from paceline.base import units
from paceline.base.jsonl import Row
from paceline.record.balance import Balance
from paceline.record.events import clock, details, hosts, starts, text
from paceline.record.read import number
from paceline.record.state import RunState, read_state
from paceline.tools.view import drawn, findings, measures
from paceline.tools.view.read import LOGGED, WORK, Run, rank_parts

_MOST_EVENTS = 500
_MOST_RANKS, _FEW_RANKS = 8, 5  # more ranks than the first are shown as the slowest few, and a line for the others


class Fact(NamedTuple):
    """A value as text, such as Loss, 2.345, nats a token."""

    label: str
    value: str
    note: str = ""


class Event(NamedTuple):
    time: str
    kind: str
    step: str
    facts: str
    at_s: float  # since 1970 by the run's clock; NaN if unknown


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A rank's mean step over the newest rows, in milliseconds."""

    rank: int
    host: str
    work_ms: float  # data, forward, backward, optimizer
    parts: dict[str, float]  # part -> ms; they add up to the step
    is_slow: bool  # named a straggler, and not over yet


@dataclass(frozen=True, kw_only=True)
class RunView:
    name: str
    state: str = "waiting"  # there is no run yet; else record.state.Kind
    level: str = "open"  # or good, or bad
    said: str = "waiting for the run to begin"  # the state in words
    about: str = ""  # the model, and how it is trained
    unit: str = "tokens"  # what its rows count
    warning: str = ""
    notices: list[str] = field(default_factory=list)
    updated_s: float = math.nan  # when the newest record was written, since 1970
    step: str = ""  # 120 of 500
    frac: float = math.nan  # of the horizon; NaN if unknown
    facts: list[Fact] = field(default_factory=list)
    findings: dict[str, str] = field(default_factory=dict)  # topic -> sentences
    ranks: list[RankView] = field(default_factory=list)  # slowest first; of many the slowest few and those named slow
    other_ranks: str = ""
    heat: dict[str, Any] = field(default_factory=dict)  # steps; mean and most by step and rank; labels; frames
    events: list[Event] = field(default_factory=list)  # newest first
    resumed: list[float] = field(default_factory=list)  # steps
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)  # table -> column -> numbers
    tables: dict[str, drawn.Table] = field(default_factory=dict)  # topic -> table
    config: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON has it: null for NaN."""
        document: dict[str, Any] = _without_nan(dataclasses.asdict(self))
        return document


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    return [_without_nan(each) for each in value] if isinstance(value, list | tuple) else value


def view_of(run: Run) -> RunView:
    """Returns what is known of a run that has been read."""
    state = read_state(run.folder)
    if not state.updated_s:  # there is no file
        return RunView(name=run.name)
    begun = starts(run.events)
    stretches = findings.slow_stretches(run.events, run.steps.last("step"), state.is_running)
    now = findings.not_over(stretches, len(begun))
    level, words = findings.state_text(state)
    step = max(float(np.nan_to_num(run.steps.last("step"))), number(state.step))  # without a row yet: log.every above 1
    frac, left_s = _horizon(run, state, step)
    ranks = _ranks(run, {stretch.rank for stretch in now})
    with np.errstate(all="ignore"):  # missing values are NaN, and so are results from them
        balance = measures.balance_of(run)
        traffic = measures.traffic_of(run)
        return RunView(
            name=run.name,
            state=state.kind,
            level=level,
            said=words,
            about=_about(run),
            unit=run.unit,
            warning=findings.warning(run),
            notices=findings.notices(run),
            updated_s=state.updated_s,
            step=f"{step:,.0f}" + (f" of {state.num_steps:,}" if state.num_steps else ""),
            frac=frac,
            facts=_facts(run, state, left_s),
            findings=_findings(run, balance, traffic, sorted(stretches, key=lambda slow: slow not in now)),
            ranks=ranks[0],
            other_ranks=ranks[1],
            heat=drawn.heat(run, stretches),
            events=[_event(event) for event in reversed(run.events[-_MOST_EVENTS:])],
            resumed=[number(event.get("step")) for event in begun[1:] if event["event"] == "resume"],
            curves=drawn.curves(run),
            tables=drawn.tables(run, balance, traffic),
            config={name: _shown(value) for name, value in run.config.items()},
        )


def _about(run: Run) -> str:
    config, begun = run.config, starts(run.events)
    model = ""
    if "model.n-layer" in config:
        model = f"{config.get('model.arch', 'model')}, {config['model.n-layer']} layers x {config.get('model.n-embd')}"
    words = [model, *(config.get(name) for name in ("optim.name", "parallel.strategy", "train.dtype"))]
    words.append(f"begun {clock(begun[0])[:16]}" if begun and clock(begun[0]) else "")
    return " · ".join(str(word) for word in words if word)


def _horizon(run: Run, state: RunState, step: float) -> tuple[float, float]:
    """Returns the share of the run that is done, and the seconds that are left; NaN if it has no horizon."""
    if state.num_steps:
        step_ms = state.rate.step_ms if state.rate else math.nan
        return step / state.num_steps, max(0.0, state.num_steps - step) * step_ms / 1e3
    seconds = float(np.nan_to_num(run.steps.last("seconds")))
    budget_s = number(run.config.get("train.time-budget"))
    if not budget_s > 0:
        return math.nan, math.nan
    return min(1.0, seconds / budget_s), max(0.0, budget_s - seconds)


def _facts(run: Run, state: RunState, left_s: float) -> list[Fact]:
    """Returns what is known, and not zero. The page shows the first ones large."""
    rate, last = state.rate, run.steps.last
    tokens_per_s, step_ms, mfu = (rate.tokens_per_s, rate.step_ms, rate.mfu) if rate else (math.nan,) * 3
    rows = f"last {units.plural(rate.num_rows, 'row')}" if rate else ""
    with_loss = np.isfinite(run.evaluations["val_loss"])
    at, bits = (max(run.evaluations[name][with_loss][-1:], default=math.nan) for name in ("step", "val_bpb"))
    saved = next((event for event in reversed(run.events) if event["event"] == "checkpoint"), {})
    names = list(dict.fromkeys(hosts(run.events)))
    num_restarts, num_repeated = findings.restarts(run.events)
    left_s = left_s if state.is_running else math.nan
    candidates: list[tuple[str, float, Callable[[float], str], str]] = [
        ("Loss", last("loss"), "{:.3f}".format, "nats a token" if run.unit == "tokens" else ""),
        ("Validation loss", run.evaluations.last("val_loss"), "{:.3f}".format,
         f"at step {at:,.0f}" + (f"; {bits:.3f} bits a byte" if bits > 0 else "")),
        ("Time left", left_s, units.duration, "of training"),
        ("Throughput", tokens_per_s, units.count, f"{run.unit} a second"),
        ("Step", step_ms, units.milliseconds, f"mean of the {rows}"),
        ("MFU", mfu, "{:.1%}".format, "of the ranks' peak"),
        ("Ranks", last("world_size"), lambda _: _world_sizes(run), f"on {units.listed(names, 4)}" if names else ""),
        (run.unit.capitalize(), last("tokens"), units.count, f"in {last('step'):,.0f} steps"),
        ("Training time", last("seconds"), units.duration, "without pauses"),
        ("Checkpoint", number(saved.get("step")), "step {:,.0f}".format, clock(saved)[11:]),
        ("Restarts", num_restarts, "{:.0f}".format, f"{num_repeated} steps repeated" if num_repeated else ""),
        ("Stragglers cost", findings.straggler_cost_s(run.events), units.duration, "of waiting"),
    ]  # fmt: skip
    known = [
        Fact(label, shown(value), note) for label, value, shown, note in candidates if value and math.isfinite(value)
    ]
    logged = {name: run.evaluations.last(name) for name in run.evaluations.logged}
    logged |= {name: last(name) for name in run.steps.logged}
    return known + [Fact(name.removeprefix(LOGGED), f"{value:.4g}") for name, value in logged.items()]


def _world_sizes(run: Run) -> str:
    sizes = [number(start.get("world_size")) for start in starts(run.events)] + [run.steps.last("world_size")]
    changes = [f"{size:.0f}" for size, _ in itertools.groupby(size for size in sizes if size > 0)]
    return " → ".join(changes[-4:])


def _findings(
    run: Run, balance: Balance | None, traffic: measures.Traffic | None, stretches: Sequence[findings.Slow]
) -> dict[str, str]:
    num_restarts, num_repeated = findings.restarts(run.events)
    counts = [(len(run.events), "event"), (num_restarts, "restart"), (num_repeated, "repeated step")]
    happened = ", ".join(units.plural(count, noun) for count, noun in counts if count)
    texts = {
        "loss": measures.loss_text(run),
        "rate": measures.rate_text(run),
        "update": measures.update_text(run),
        "parts": measures.parts_text(run),
        "ranks": measures.ranks_text(run, stretches),
        "shares": measures.balance_text(run, balance) if balance else "",
        "traffic": measures.traffic_text(traffic) if traffic else "",
        "events": f"{happened}." if happened else "",
    }
    return {topic: said for topic, said in texts.items() if said}


# ---- ranks ----


def _ranks(run: Run, slow: set[int]) -> tuple[list[RankView], str]:
    """Returns the ranks that matter, and what the others do. The slowest first: the one that works longest, for which
    the others wait."""
    rows = [rank_parts(row) for row in measures.newest_rows(run)]
    rows = [row for row in rows if row.keys() == rows[-1].keys()]
    if not rows:
        return [], ""
    means = {part: _means([row[part] for row in rows]) for part in rows[-1]}
    names, ranks = hosts(run.events), []
    for rank in range(min(map(len, means.values()))):
        parts = {part: by_rank[rank] for part, by_rank in means.items()}
        if math.isfinite(sum(parts.values())):
            own_ms = sum(parts.get(part, 0.0) for part in (*WORK, "compute"))
            host = names[rank] if rank < len(names) else ""
            ranks.append(RankView(rank=rank, host=host, work_ms=own_ms, parts=parts, is_slow=rank in slow))
    ranks.sort(key=lambda each: -each.work_ms)
    others = [each for each in ranks[_FEW_RANKS:] if not each.is_slow] if len(ranks) > _MOST_RANKS else []
    if not others:
        return ranks, ""
    span = f"{units.milliseconds(others[-1].work_ms)} to {units.milliseconds(others[0].work_ms)}"
    return [each for each in ranks if each not in others], f"and {len(others)} more ranks, which work {span} a step"


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(sum(values) / len(values), 3) for values in zip(*rows, strict=False)]


def _event(event: Row) -> Event:
    at_s = math.nan
    with contextlib.suppress(ValueError, OverflowError):
        at_s = datetime.strptime(text(event.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    step = event.get("step")
    facts = {name: value for name, value in event.items() if name != "step"}
    shown = f"{step:,}" if isinstance(step, int) else text(step)
    return Event(clock(event), text(event["event"]), shown, " ".join(details(facts).split()), at_s)


def _shown(value: Any) -> str:
    """Returns a value of a config as text."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
