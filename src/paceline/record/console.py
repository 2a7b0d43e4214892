"""The terminal shows rank 0: a live line, or plain lines without a terminal. Every rank writes a log."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

import rich.box
import rich.console
import rich.progress
import rich.table
from rich.text import Text

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.process import discard_output
from paceline.record import output
from paceline.record.output import printable

PLAIN_WIDTH = 100  # of files, pipes and logs


class _Terminal(rich.console.Console):
    """A terminal or pipe that may close while training continues (`paceline train | head`): the log has everything."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


class Console:
    """Rank 0's terminal output, and each rank's log, which has all stdout and stderr of the other ranks."""

    def __init__(self, rank: int):
        self.rank = rank
        self.log_file: TextIO | None = None  # this rank's log, once it is open
        is_tty = sys.stdout is not None and sys.stdout.isatty()  # None: a script's that was closed (`>&-`)
        self._terminal = _Terminal(highlight=False, width=None if is_tty else PLAIN_WIDTH)
        self._progress: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._total: float | None = None
        self._started_s, self._next_line_s = time.perf_counter(), 0.0

    @property
    def is_terminal(self) -> bool:
        """Whether output goes to a terminal that can move its cursor, which one with TERM=dumb cannot."""
        return self._terminal.is_terminal and not self._terminal.is_dumb_terminal

    def open_log(self, path: Path, takes_output: bool = True) -> None:
        """Copies what is said later to this file, readable by its user only. takes_output: with all that ranks other
        than 0 print. Raises UserError if it cannot be written."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            opener = partial(os.open, mode=0o600)
            self.log_file = open(path, "a", buffering=1, encoding="utf-8", opener=opener)  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"cannot write the log of this rank, {path}: {error.strerror}; make room for it", reach="rank"
            ) from None
        output.has_log(path)
        if takes_output and self.rank != 0:
            output.redirect(self.log_file.fileno())

    def say(self, text: str | rich.table.Table = "", style: str = "") -> None:
        """Prints on rank 0, and writes to every rank's log. Brackets are no markup; control characters are escaped."""
        shown = Text(printable(text), style) if isinstance(text, str) else text
        written = plain(shown)
        if self.rank == 0:
            self._show(shown, written)
        if self.log_file is not None:
            with contextlib.suppress(OSError):  # a full disk does not stop training
                self.log_file.write(written)

    def log(self, text: str) -> None:
        """Writes a line to this rank's log only."""
        if self.log_file is not None:
            with contextlib.suppress(OSError):
                self.log_file.write(f"{time.strftime('%H:%M:%S')} {printable(text)}\n")

    def _show(self, what: Text | rich.table.Table, written: str, soft_wrap: bool = False) -> None:
        """Prints to the terminal, and `written` to a pipe or file; stops printing once that fails."""
        console = self._progress.console if self._progress else self._terminal
        if self.is_terminal:
            self._try(partial(console.print, what, soft_wrap=soft_wrap))
        else:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a script's may be Latin-1
            encodable = written.encode(encoding, "backslashreplace").decode(encoding)
            self._try(partial(print, encodable, end="", flush=True))

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError as error:  # a closed terminal, a full disk
            self._terminal.quiet = True
            discard_output(error)

    @contextmanager
    def progress(self, total: float | None, *, transient: bool = False) -> Iterator[None]:
        """While open, `advance` moves a live line on a terminal, or prints a plain line every few seconds. The total
        may be given later, to `advance`. Unless it is transient, the live line stays at the end."""
        self._started_s, self._total = time.perf_counter(), total
        self._next_line_s = 0.0
        if self.rank != 0 or not self.is_terminal:
            yield
            return
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("[bold]{task.description}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.fields[facts]}"),
            console=self._terminal,
            refresh_per_second=8,
            transient=transient,
        )
        self._task = self._progress.add_task("", total=total, facts="")
        self._try(self._progress.start)
        try:
            yield
        finally:
            progress, self._progress = self._progress, None
            self._try(progress.stop)

    def advance(self, completed: float, description: str, facts: str, total: float | None = None) -> None:
        """Shows `completed`, in the units of the total, with the facts beside the bar; the last one in any case."""
        line, now = f"{description}  {facts}", time.perf_counter()
        self.log(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=completed, total=total, description=description, facts=facts)
        elif self.rank == 0 and (now >= self._next_line_s or completed == (total or self._total)):
            # Often at first, then rarely: the log of a week stays readable.
            self._next_line_s = now + min(60.0, max(2.0, (now - self._started_s) / 10))
            self._show(Text(line), plain(Text(line)), soft_wrap=True)

    @contextmanager
    def reading(self) -> Iterator["Reading"]:
        """While open, its `advance` shows how much of a source is read. The live line vanishes at the end."""
        with self.progress(None, transient=True):
            yield Reading(self)

    def close(self) -> None:
        """Flushes the output. The other ranks' stdout and stderr still go to their logs."""
        output.flush()


class Reading:
    """Progress of reading: bytes, speed and remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first: tuple[float, int] | None = None  # when this process began to read, and at which byte

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.say(text)

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """Shows the progress; `what` says what was made of the bytes so far."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now, done_bytes
        seconds, since = now - self._first[0], done_bytes - self._first[1]
        facts = [units.size(done_bytes) + (f" of {units.size(total_bytes)}" if total_bytes else ""), what]
        if seconds > 1 and since:
            facts.append(f"{units.size(since / seconds)}/s")
            if total_bytes:
                facts.append(f"{units.duration((total_bytes - done_bytes) * seconds / since)} left")
        share = f"{done_bytes / total_bytes:4.0%}" if total_bytes else "data"
        self._console.advance(done_bytes, share, "  ".join(filter(None, facts)), total_bytes)


def plain(what: Text | rich.table.Table) -> str:
    """Formats for pipes, files and logs: tables of fixed width, lines not wrapped, no trailing blanks."""
    out = io.StringIO()
    console = rich.console.Console(file=out, width=PLAIN_WIDTH, highlight=False)
    console.print(what, soft_wrap=isinstance(what, Text))
    return printable(without_trailing_blanks(out.getvalue()))


def without_trailing_blanks(text: str) -> str:
    """Returns the same lines, without the blanks that fill a table's last column."""
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))


def table(title: str, columns: list[str], rows: list[list[str]]) -> rich.table.Table:
    """Returns a small table: the first column left-aligned, the others right-aligned."""
    made = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")  # no word is cut
    for row in rows:
        made.add_row(*row)
    return made


def facts(rows: list[tuple[str, str]]) -> rich.table.Table:
    """Returns a table of names and texts without lines; long texts wrap beside their name."""
    grid = rich.table.Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(name), Text(printable(text)))  # Text: brackets in a path are no markup
    return grid
