"""paceline report"""

import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import replace
from paceline.cli.flags import parse
from paceline.config import load_run
from paceline.model import cost


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Write one HTML page with plots of one or several runs, also while they train. It needs no network."""

    runs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN...")]]
    """The run folders; several runs share one plot."""
    out: str = ""
    """The file to write; empty: report.html in the (first) run folder."""
    open: bool = False
    """Show it in a browser."""


def main(arguments: list[str]) -> int:
    parsed = parse(ReportArguments, ReportArguments(runs=()), arguments, "report")
    if not parsed.runs:
        raise UserError("name the run folders to report on: paceline report RUN...")
    paths = list(dict.fromkeys(Path(run).absolute() for run in parsed.runs))
    # Of a link the file that it names is replaced.
    out = Path(os.path.realpath(parsed.out)) if parsed.out else paths[0] / "report.html"
    if refusal := _refusal(out, paths):
        raise UserError(f"--out is {out}, which {refusal}; name a file to write")
    from paceline.tools.view.report import make_page

    page = make_page(paths, num_parameters)
    try:
        replace(out, page)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; choose another file by --out") from None
    print(f"{out}   {units.size(len(page))}, all in one file: open it in any browser")
    if parsed.open:
        _show(out)
    return 0


def _refusal(out: Path, runs: Sequence[Path]) -> str:
    """Returns why a page cannot be written there; empty: it can. A missing run folder is refused later."""
    # Not Path's methods, which raise if a folder may not be read: that is said later, too.
    if os.path.isdir(out):
        return "is a folder"
    if os.path.exists(out) and not os.path.isfile(out):
        return "is no file"  # root could replace a device
    return "" if os.path.isdir(out.parent) or out.parent in runs else "is in a folder that does not exist"


def num_parameters(run: Path) -> int:
    """Returns the number of a run's parameters; 0 if its config does not say it."""
    try:
        return cost.num_parameters(load_run(run / "config.toml").model).total
    except (UserError, ValueError, ArithmeticError):
        return 0


def _show(page: Path) -> None:
    if not webbrowser.open(page.as_uri()):
        print("there is no browser here that could be started; open the file yourself", file=sys.stderr)
