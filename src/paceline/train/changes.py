"""Which fields may change when a run is resumed. No torch here: the command line checks before importing libraries."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from paceline.config import Config

HORIZONS = ("train.steps", "train.tokens", "train.tokens-per-param", "train.time-budget", "train.max-epochs")
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

Changes = dict[str, tuple[Any, Any]]  # `section.field-name`, as the user types it -> (before, now)


def changes(before: Mapping[str, Mapping[str, Any]], now: Config) -> Changes:
    """Returns the fields that differ between a checkpoint's config (section -> field -> value) and this one.

    A field that `before` lacks was added by a later version and does not differ. Stops and traces are left out: they
    are for one attempt.
    """
    was, will = (json.loads(json.dumps(config)) for config in (before, dataclasses.asdict(now)))  # JSON has no tuples
    found = {
        f"{section}.{name}".replace("_", "-"): (was[section][name], value)
        for section, values in will.items()
        for name, value in values.items()
        if name in was.get(section, {}) and was[section][name] != value
    }
    return {name: values for name, values in found.items() if name not in _OF_ONE_ATTEMPT}


def makes_another_run(name: str) -> bool:
    """Whether a field, named as the user types it, changes what is computed."""
    is_free = name.startswith(_CHANGEABLE_SECTIONS) or name in _CHANGEABLE
    return not is_free or name == "parallel.sync-every"  # local steps: another algorithm


def changes_curve(name: str) -> bool:
    """Whether a field, named as the user types it, changes a step's sequences or the model."""
    return makes_another_run(name) and (name.startswith(_CURVE_SECTIONS) or name in _CURVE)
