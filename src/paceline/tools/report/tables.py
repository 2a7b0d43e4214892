"""The page's tables, as cells of plain text."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.base import units
from paceline.record.read import number
from paceline.tools.report.facts import Fact, Summary, Traffic, count, duration

UNKNOWN = "-"  # in a cell without a value
_NUM_LOSS_ROWS = 12
Cells = list[str]


def comparison(runs: Sequence[Summary]) -> list[tuple[str, str, list[Fact | None]]]:
    """Returns label, unit, and each run's fact; None if a run has no such fact."""
    facts = [{fact.label: fact for fact in run.facts()} for run in runs]
    labels = {fact.label: fact.unit for found in facts for fact in found.values()}
    return [(label, unit, [found.get(label) for found in facts]) for label, unit in labels.items()]


def differences(runs: Sequence[Summary]) -> list[tuple[str, Cells]]:
    fields = sorted({field for run in runs for field in run.records.config})
    values = [(field, [_config_text(run.records.config, field) for run in runs]) for field in fields]
    return [(field, texts) for field, texts in values if len(set(texts)) > 1]


def loss(run: Summary) -> list[Cells]:
    steps, evaluations = run.steps["step"], run.records.evaluations
    rows = []
    for index in np.unique(np.linspace(0, len(steps) - 1, _NUM_LOSS_ROWS).round().astype(int)):
        before = int(np.searchsorted(evaluations["step"], steps[index], side="right")) - 1
        validation = float(evaluations["val_loss"][before]) if before >= 0 else math.nan
        texts = [f"{steps[index]:,.0f}", count(run.steps["tokens"][index]), duration(float(run.training_s[index]))]
        losses = [f"{value:.3f}" if math.isfinite(value) else "" for value in (run.steps["loss"][index], validation)]
        rows.append([text or UNKNOWN for text in (*texts, *losses)])
    return rows


def part_columns(run: Summary) -> list[str]:
    return ["part", "ms", "% of the step", *(["predicted, ms"] if _predicted(run) else [])]


def parts(run: Summary) -> list[Cells]:
    """Returns of each part of rank 0's mean step its name, ms, percentage and, if it was predicted, those ms."""
    found, expected = run.parts(), _predicted(run)
    step_ms = sum(ms for _, ms in found)
    rows = [[name, f"{ms:,.4g}", f"{100 * ms / step_ms:.1f}"] for name, ms in [*found, ("step", step_ms)]]
    return [[*row, f"{expected.get(row[0], 0.0):,.4g}"] for row in rows] if expected else rows


def _predicted(run: Summary) -> dict[str, float]:
    events = [event for event in run.records.events if event["event"] == "prediction"]
    made = events[-1].get("part_ms") if events else None
    known = {name: number(ms) for name, ms in made.items()} if isinstance(made, dict) else {}
    return known | {"step": sum(known.values())} if known and all(map(math.isfinite, known.values())) else {}


def traffic(found: Traffic) -> list[Cells]:
    computed = units.size(found.computed_bytes) if math.isfinite(found.computed_bytes) else "not known"
    return [
        ["sent by a rank in a step", units.size(found.num_bytes)],
        ["computed: gradients, 2 (n-1)/n of 4 bytes a parameter", computed],
        ["collectives under way", f"{found.comm_ms:,.4g} ms"],
        ["exposed: not hidden by compute", f"{found.exposed_ms:,.4g} ms"],
        ["exposed share of it", _percent(found.exposed_ms, found.comm_ms)],
        ["exposed share of the step", _percent(found.exposed_ms, found.step_ms)],
        ["sent bytes over that time", found.rate],
    ]


def config(run: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    values = run.records.config
    sections = itertools.groupby(values, lambda field: field.partition(".")[0])
    return [
        (section, [(field.partition(".")[2], _config_text(values, field)) for field in fields])
        for section, fields in sections
    ]


def _config_text(values: dict[str, Any], field: str) -> str:
    if field not in values:
        return UNKNOWN
    value = values[field]
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.1f}%" if total > 0 else UNKNOWN
