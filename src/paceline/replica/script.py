"""What a run folder holds of its script: its command and its settings, in config.toml."""

import json
import math
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.process import STATUS_FOLDER, has_launcher
from paceline.record import folder as run_folder
from paceline.record.folder import RunFolder


def command() -> str:
    """Returns the command that runs this script again; empty where there is none, as in a notebook."""
    script, *arguments = sys.argv or [""]
    if hasattr(sys, "ps1") or script in ("", "-", "-c"):
        return ""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else [script]
    return shlex.join([Path(sys.executable).name, *module, *arguments])


def check_folder(folder: RunFolder) -> None:
    """Raises UserError if the folder holds something that is no run of a script, or its launcher looks at another."""
    launchers = Path(os.environ[STATUS_FOLDER]).parent if has_launcher() else Path("/")
    if not folder.path.is_relative_to(launchers):
        raise UserError(
            f"{folder.path} is the folder of paceline.Run, and --out is {launchers}: give `train` the same folder, in "
            "which the launcher looks for checkpoints and reports of ranks"
        )
    try:
        names = sorted(entry.name for entry in folder.path.iterdir()) if folder.path.exists() else []
        document = tomllib.loads(folder.config.read_text(encoding="utf-8")) if "config.toml" in names else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder.path} as a run folder: {error}") from None
    if "train" in document:
        raise UserError(
            f"{folder.path} is a run of `paceline train`, which `paceline resume` continues; name another folder"
        )
    foreign = [] if "run" in document else [name for name in names if name not in (*run_folder.MADE_HERE, ".lock")]
    if foreign:
        raise UserError(
            f"{folder.path} holds files of something else ({units.listed(foreign)}); name a folder that is empty or "
            "does not exist yet"
        )


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns tables of TOML. Dicts within are written as names with dots; what TOML lacks, as text."""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{_value(str(name))} = {_value(value)}" for name, value in dict(_flat(values)).items()]
        lines.append("")
    return "\n".join(lines)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    is_plain = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    text = json.dumps(value if is_plain else str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.encode(errors="replace").decode()  # a path need not be UTF-8
