"""Which fields may change when a run is resumed. No torch here: the command line checks before importing libraries."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from paceline import config
from paceline.config import Config

HORIZONS = (*(f"train.{name.replace('_', '-')}" for name in config.HORIZONS), "train.max-epochs")
_OF_ONE_ATTEMPT = ("train.stop-at-step", "train.stop-after", "train.profile")
# These change how and for how long the run is computed, not what.
_CHANGEABLE_SECTIONS = ("parallel.", "checkpoint.", "log.", "track.")
_CHANGEABLE = (
    *HORIZONS,
    *_OF_ONE_ATTEMPT,
    *("data.path", "data.mix", "train.device-batch-size", "train.dtype", "train.compile", "train.max-skips"),
    *("train.activation-checkpoint", "train.layered-micro-batches", "train.eval-every", "train.eval-sequences"),
    *("train.sample-tokens", "train.sample-prompt"),
)
# These change the sequences of a step, or the model.
_CURVE_SECTIONS = ("model.", "data.")
_CURVE = ("train.seed", "train.global-batch-size", "train.global-batch-tokens")
# Fields that may differ between hosts, beside [track], which only rank 0 uses: where and how a run is computed.
LOCAL = (
    *("parallel.interface", "parallel.threads", "parallel.port", "parallel.device"),
    *("data.path", "data.mix", "train.init-from"),
)

Changes = dict[str, tuple[Any, Any]]  # `section.field-name`, as the user types it -> (before, now)


def changes(before: Mapping[str, Mapping[str, Any]], now: Config) -> Changes:
    """Returns the fields that differ between a checkpoint's config (section -> field -> value) and this one.

    A field that `before` lacks was added by a later version and does not differ. Stops and traces are left out: they
    are for one attempt.
    """
    stored = json.loads(json.dumps(before))  # JSON has no tuples
    changed: Changes = {}
    for section, values in json.loads(json.dumps(dataclasses.asdict(now))).items():
        for field, value in values.items():
            name = f"{section}.{field}".replace("_", "-")
            value_before = stored.get(section, {}).get(field, value)
            if value_before != value and name not in _OF_ONE_ATTEMPT:
                changed[name] = value_before, value
    return changed


def makes_another_run(name: str) -> bool:
    """Whether a field, named as the user types it, changes what is computed."""
    is_free = name.startswith(_CHANGEABLE_SECTIONS) or name in _CHANGEABLE
    return not is_free or name == "parallel.sync-every"  # local steps: another algorithm


def changes_curve(name: str) -> bool:
    """Whether a field, named as the user types it, changes a step's sequences or the model."""
    return makes_another_run(name) and (name.startswith(_CURVE_SECTIONS) or name in _CURVE)
