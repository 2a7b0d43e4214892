"""What may change between the parts of a run, and what would make another run of it. No torch here: the command line
asks before it is imported."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from paceline.config import Config

# How it is computed and how long, not what is computed.
_CHANGEABLE_SECTIONS = ("parallel.", "checkpoint.", "log.")
_CHANGEABLE = (
    "data.path",
    "data.mix",
    *(
        f"train.{name}"
        for name in (
            *("steps", "tokens", "tokens-per-param", "time-budget", "device-batch-size", "dtype", "compile"),
            *("activation-checkpoint", "eval-every", "eval-sequences", "sample-tokens", "sample-prompt"),
            *("stop-at-step", "stop-after", "profile", "max-skips"),
        )
    ),
)
# With another value of these, step k would be of other sequences or of another model.
_LAW_SECTIONS = ("model.", "data.")
_LAW = ("train.seed", "train.global-batch-size", "train.global-batch-tokens")
_OF_ONE_PART = ("train.stop-at-step", "train.stop-after", "train.profile")
_HORIZONS = ("train.steps", "train.tokens", "train.tokens-per-param", "train.time-budget")

Changes = dict[str, tuple[Any, Any]]  # `section.field-name`, as the user types it -> (before, now)


def changes(before: Mapping[str, Mapping[str, Any]], now: Config) -> Changes:
    """Returns what differs between a config as a checkpoint has it, section -> field -> value, and this one.

    A field that `before` lacks is of a later version of the program, and does not differ; nor does a stop or a trace,
    which is asked of one part of a run.
    """
    was, will = (json.loads(json.dumps(config)) for config in (before, dataclasses.asdict(now)))  # no tuples in JSON
    found = {
        f"{section}.{name}".replace("_", "-"): (was[section][name], value)
        for section, values in will.items()
        for name, value in values.items()
        if name in was.get(section, {}) and was[section][name] != value
    }
    return {name: values for name, values in found.items() if name not in _OF_ONE_PART}


def makes_another_run(name: str) -> bool:
    """Whether a field, named as the user types it, is no matter of how a run is computed or for how long."""
    return not name.startswith(_CHANGEABLE_SECTIONS) and name not in _CHANGEABLE


def breaks_the_law(name: str) -> bool:
    """Whether another value of this field would give a step other sequences, or be of another model."""
    return makes_another_run(name) and (name.startswith(_LAW_SECTIONS) or name in _LAW)


def is_horizon(name: str) -> bool:
    """Whether this field says how long a run is."""
    return name in _HORIZONS


def shown(found: Changes) -> str:
    """Returns the changes for people."""
    return ", ".join(f"{name} {before!r} -> {now!r}" for name, (before, now) in found.items())
