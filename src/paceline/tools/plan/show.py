"""The tables of `paceline plan`, and its JSON."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import rich.box
import rich.table
from rich.text import Text

from paceline.base import units
from paceline.record.console import Console, facts, table
from paceline.tools.plan.plan import Plan

_ALONE = "the tokens/s of all devices, if each trains alone"


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans that fit, the fastest first; then the others."""
    return sorted(plans, key=lambda plan: (not plan.fits, -plan.tokens_per_s * plan.goodput_frac))


def show(plans: Sequence[Plan], console: Console, *, explain: bool = False) -> None:
    if len(plans) > 1:
        console.say(_comparison(ranked(plans)))
        batches = sorted({plan.settings.plan.global_batch_size for plan in plans})
        steps = "all worlds make steps" if len(batches) == 1 else "worlds make steps"
        console.say(f"efficiency: of {_ALONE}; {steps} of {' or '.join(map(str, batches))} sequences\n")
        console.say(_sure(max(plans, key=lambda plan: plan.device.error_frac)), style="dim")
    for plan in plans if explain or len(plans) == 1 else ():
        _details(plan, console, explain)


def _details(plan: Plan, console: Console, explain: bool) -> None:
    console.say(facts(_facts(plan)))
    console.say(table("Memory of a rank", ["kind", "size", "%"], _memory_rows(plan)))
    step_ms = 1e3 * plan.step_s
    rows = [[part, f"{1e3 * s:.2f}", f"{1e5 * s / step_ms:.1f}"] for part, s in plan.parts.items() if s]
    rows.append(["step", f"{step_ms:.2f}", "100.0"])
    console.say(table("A step of rank 0, ms", ["part", "ms", "%"], rows))
    console.say(_sure(plan), style="dim")
    if explain:
        console.say(_explanation(plan))


def _facts(plan: Plan) -> list[tuple[str, str]]:
    settings, cluster = plan.settings, plan.cluster
    config, batch = settings.config, settings.plan
    hosts = f"{cluster.num_ranks} x {plan.device.name} on {units.plural(cluster.hosts, 'host')}"
    rows = [
        (plan.label or "plan", f"{hosts}; {plan.step.path.flags}, {config.train.dtype}"),
        ("batch", f"{batch.global_batch_size} sequences of {config.data.seq_len} tokens, in micro-batches of up to "
                  f"{batch.device_batch_size}"),
        ("memory", _fits_text(plan)),
        ("speed", f"{units.count(plan.tokens_per_s)} tokens/s" + (f", MFU {plan.mfu:.1%}" if plan.mfu else "")),
        ("efficiency", f"{plan.efficiency_frac:.1%} of {_ALONE}"),
        ("bound by", f"{plan.bound} of a step"),
        ("the run", _run_text(plan)),
    ]  # fmt: skip
    if not math.isinf(plan.best_interval_s):
        failures = f"{plan.goodput_frac:.2%} of the time makes progress; save every "
        rows.append(("failures", f"{failures}{units.duration(plan.best_interval_s)} (Young and Daly)"))
    return rows


def _fits_text(plan: Plan) -> str:
    needed, there = units.size(sum(plan.memory.values())), units.size(plan.device.memory_bytes)
    if plan.fits:
        return f"{needed} of {there} a rank"
    advice = "a smaller --train.device-batch-size, --train.activation-checkpoint, or --parallel.strategy zero or fsdp"
    return f"{needed} needed, and a rank has {there}: DOES NOT FIT; try {advice}"


def _run_text(plan: Plan) -> str:
    steps = f"{plan.settings.num_steps:,} steps, " if plan.settings.num_steps else ""
    text = f"{steps}{units.duration(plan.seconds)}, {plan.device_hours:.3g} device hours"
    if plan.kwh:
        text += f", {plan.kwh:.3g} kWh"
    return text + (f", {plan.money:,.2f} at {plan.cluster.price:g} an hour" if plan.cluster.price else "")


def _memory_rows(plan: Plan) -> list[list[str]]:
    total = sum(plan.memory.values())
    rows = [[kind, units.size(size), f"{size / total:.0%}"] for kind, size in plan.memory.items() if size]
    return [*rows, ["together", units.size(total), "100%"]]


def _comparison(plans: Sequence[Plan]) -> rich.table.Table:
    shown: dict[str, Callable[[Plan], str]] = {
        "plan": lambda plan: re.sub(r"(?<!\S)[a-z]+\.(?=[a-z])", "", plan.label),
        "ranks": lambda plan: str(plan.cluster.num_ranks),
        "memory": lambda plan: units.size(sum(plan.memory.values())),
        "tokens/s": lambda plan: units.count(plan.tokens_per_s),
        "MFU %": lambda plan: f"{100 * plan.mfu:.1f}" if plan.mfu else "",
        "efficiency": lambda plan: f"{plan.efficiency_frac:.1%}",
        "run": lambda plan: units.duration(plan.seconds),
        "price": lambda plan: f"{plan.money:,.0f}",
        "bound by": lambda plan: plan.bound if plan.fits else "does not fit",
    }
    if not any(plan.money for plan in plans):
        del shown["price"]
    if not any(plan.label for plan in plans):
        del shown["plan"]
    made = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in shown:
        is_text = name in ("plan", "bound by")
        made.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=name != "plan",
            overflow="fold",
            min_width={"plan": 13, "bound by": 19}.get(name, 0),
        )
    for plan in plans:
        made.add_row(*(Text(cell(plan)) for cell in shown.values()))
    return made


def _sure(plan: Plan) -> str:
    return f"devices: {plan.device.source}; times may be off by {plan.device.error_frac:.0%}"


def _explanation(plan: Plan) -> rich.table.Table:
    made = rich.table.Table(title="Every number", title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for column in ("what", "value", "how"):
        made.add_column(column, overflow="fold")
    for row in plan.explained:
        made.add_row(*map(Text, row))
    return made


_NUMBERS = ("label", "fits", "tokens_per_s", "mfu", "efficiency_frac", "goodput_frac", "device_hours", "bound")


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns all numbers, with units in the names; null: infinite, or not known."""
    path = plan.step.path
    return {
        **{name: getattr(plan, name) for name in _NUMBERS},
        "ranks": plan.cluster.num_ranks,
        "cluster": dataclasses.asdict(plan.cluster),
        "device": plan.device.name,
        "source": plan.device.source,
        "flags": path.flags,
        "changes": path.kind,
        "memory_bytes": dict(plan.memory),
        "device_memory_bytes": plan.device.memory_bytes,
        "step_ms": 1e3 * plan.step_s,
        "part_ms": {part: 1e3 * seconds for part, seconds in plan.parts.items()},
        "error_frac": plan.device.error_frac,
        "wire_bytes": plan.step.wire_bytes,
        "best_interval_s": None if math.isinf(plan.best_interval_s) else plan.best_interval_s,
        "run_s": plan.seconds,
        "energy_kwh": plan.kwh,
        "price": plan.money,
        "explained": [list(row) for row in plan.explained],
    }
