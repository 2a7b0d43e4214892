"""paceline report"""

import sys
import webbrowser
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
    out = Path(parsed.out).absolute() if parsed.out else paths[0] / "report.html"
    if out.is_dir() or (not out.parent.is_dir() and out.parent not in paths):
        what = "is a folder" if out.is_dir() else "is in a folder that does not exist"
        raise UserError(f"--out is {out}, which {what}; name a file to write")
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


def num_parameters(run: Path) -> int:
    """Returns the number of a run's parameters; 0 if its config does not say it."""
    try:
        return cost.num_parameters(load_run(run / "config.toml").model).total
    except (UserError, ValueError, ArithmeticError):
        return 0


def _show(page: Path) -> None:
    if not webbrowser.open(page.as_uri()):
        print("there is no browser here that could be started; open the file yourself", file=sys.stderr)
