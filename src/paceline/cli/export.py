"""paceline export"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from paceline.base.errors import UserError, require_at_least
from paceline.cli.flags import parse
from paceline.tools.hub.configs import Dtype


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a run's newest complete checkpoint as a folder that transformers loads, also while the run trains."""

    run: tyro.conf.Positional[str]
    """The run folder."""
    out: str
    """The folder for transformers, new."""
    step: int = -1
    """The checkpoint of this step; -1: the newest complete one."""
    dtype: Dtype = "float32"
    """Number format of the weights; float32 is what they are trained in."""


def main(arguments: list[str]) -> int:
    parsed = parse(ExportArguments, ExportArguments(run="", out=""), arguments, "export")
    if not parsed.run or not parsed.out:
        raise UserError("give what to export and where to: paceline export RUN --out DIR")
    require_at_least(parsed, "--", step=-1)
    from paceline.tools.hub.exporting import export_run

    step = parsed.step if parsed.step >= 0 else None
    for line in export_run(Path(parsed.run), Path(parsed.out), step, parsed.dtype):
        print(line)
    print(f"\nTry next, in Python:\n  transformers.AutoModelForCausalLM.from_pretrained({parsed.out!r})")
    return 0
