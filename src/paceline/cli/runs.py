"""paceline runs"""

import dataclasses
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape

from paceline.base import units
from paceline.base.errors import UserError
from paceline.cli.flags import parse
from paceline.record.console import table
from paceline.record.folder import RunFolder
from paceline.record.output import printable
from paceline.record.read import number
from paceline.record.state import RunState, read_config, read_state

_PIPE_WIDTH = 1000  # a table takes what it needs: a line for each run
_SHOWN = 12  # settings on a run's line
_NOT_COMPARED = ("data.path", "track.name")  # they differ between most runs, and say little


@dataclass(frozen=True, kw_only=True)
class RunsArguments:
    """List the runs in a folder: state, step, loss, tokens/s, age, and the settings that a run does not share with most
    of the others. Newest record last. A run is stale if no end is recorded and its process is gone."""

    folder: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FOLDER")]] = "runs"
    """The folder with run folders; also one run folder."""
    json: bool = False
    """Print a JSON list instead of a table."""


def main(arguments: list[str]) -> int:
    parsed = parse(RunsArguments, RunsArguments(), arguments, "runs")
    runs = _find(Path(parsed.folder))
    states = {path: read_state(RunFolder(path)) for path in runs}
    paths = sorted(runs, key=lambda path: states[path].updated_s)
    configs = {path: read_config(path / "config.toml") for path in paths}
    settings = _differences(configs)
    if parsed.json:
        print(json.dumps([_as_json(path, states[path], settings[path]) for path in paths], indent=2))
        return 0
    columns = ["run", "state", "step", "loss", "val loss", "tokens/s", "age"]
    shown = table("", columns, [[escape(printable(path.absolute().name)), *_cells(states[path])] for path in paths])
    shown.columns[0].overflow = "fold"  # a name is never cut
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(shown)
    texts = {
        path: {
            name: _one_line(value)
            for name, value in settings[path].items()
            if value is not None and not name.startswith("run.")
        }
        for path in paths
    }
    usual = _of_most(list(texts.values()))
    for path in paths:
        settings_here = [f"{name} {value}" for name, value in texts[path].items() if value != usual.get(name)]
        more = [f"{len(settings_here) - _SHOWN} more settings (--json)"] if len(settings_here) > _SHOWN else []
        unread = "" if configs[path] else "its config.toml could not be read"
        facts = [states[path].why, unread, *settings_here[:_SHOWN], *more]
        if text := ", ".join(fact for fact in facts if fact):
            print(printable(f"{path.absolute().name}: {text}"))
    return 0


def _find(folder: Path) -> list[Path]:
    try:
        # Not Path.is_file, which raises: only its user may look into a run folder, and others may share this one.
        runs = [path for path in (folder, *folder.iterdir()) if os.path.isfile(path / "config.toml")]
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}; name the folder that holds run folders") from None
    if not runs:
        raise UserError(f"{folder} holds no run; name the folder that holds run folders, such as runs")
    return runs


def _differences(configs: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    names = [
        name for name in {name: None for config in configs.values() for name in config} if name not in _NOT_COMPARED
    ]
    differing = [name for name in names if len({repr(config.get(name)) for config in configs.values()}) > 1]
    return {path: {name: config.get(name) for name in differing} for path, config in configs.items()}


def _one_line(value: object) -> str:
    return str(value).replace("\n", "\\n")


def _of_most(settings: list[dict[str, str]]) -> dict[str, str]:
    """Returns the fields that have one value in more than half of the runs, with that value."""
    counts = Counter(item for each in settings for item in each.items())
    return {name: value for (name, value), count in counts.items() if 2 * count > len(settings)}


def _rate(state: RunState) -> str:
    unit = state.last.get("unit", "tokens")
    shown = units.count(state.rate.tokens_per_s) if state.rate else ""
    return shown if unit == "tokens" or not shown else f"{shown} {unit}"


def _cells(state: RunState) -> list[str]:
    steps = f"{state.step:,}" + (f" of {state.num_steps:,}" if state.num_steps else "")
    return [
        state.kind,
        steps,
        _text(_number(state.last, "loss")),
        _text(_number(state.evaluation, "val_loss")),
        _rate(state),
        units.duration(max(0.0, time.time() - state.updated_s)),
    ]


def _as_json(path: Path, state: RunState, settings: dict[str, Any]) -> dict[str, Any]:
    rows = ("last", "evaluation", "rate")
    facts = {key: value for key, value in dataclasses.asdict(state).items() if key not in rows}
    return {
        "run": str(path),
        **facts,
        "loss": _number(state.last, "loss"),
        "tokens_per_s": state.rate.tokens_per_s if state.rate else None,
        "val_loss": _number(state.evaluation, "val_loss"),
        "settings": settings,
    }


def _number(row: dict[str, Any], name: str) -> float | None:
    value = number(row.get(name))
    return value if math.isfinite(value) else None


def _text(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
