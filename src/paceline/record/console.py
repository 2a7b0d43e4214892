"""What people see: one rank speaks. A live line on a terminal, plain lines elsewhere; every rank keeps a log."""

import contextlib
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

_PLAIN_WIDTH = 120  # where no terminal says how wide it is: files, pipes, logs
_terminal_fd = 2  # where stderr went before a rank's log took it over


def cry(text: str) -> None:
    """Writes an error to the terminal, from any rank, in one write so that lines of ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(_terminal_fd, (text.rstrip("\n") + "\n").encode())


class _Terminal(rich.console.Console):
    """A terminal or pipe that may close while training goes on (`paceline train | head`): the log has it all."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Console:
    """Rank 0's voice on the terminal and, for every rank, its log file. Other ranks' stdout and stderr, warnings of
    libraries included, go to their logs."""

    def __init__(self, rank: int):
        self.rank = rank
        self._log: TextIO | None = None
        self._terminal = _Terminal(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        self._progress: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._next_line_s = 0.0

    @property
    def is_terminal(self) -> bool:
        return self._terminal.is_terminal

    def open_log(self, path: Path) -> None:
        """From here on everything also goes to this file, its user's alone; on ranks other than 0, only there.

        Raises UserError where it cannot be written.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log = open(path, "a", buffering=1, opener=partial(os.open, mode=0o600))  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"cannot write the log of this rank, {path}: {error.strerror}; make room for it", reach="rank"
            ) from None
        if self.rank != 0:
            global _terminal_fd
            sys.stdout.flush()
            sys.stderr.flush()
            _terminal_fd = os.dup(2)
            os.dup2(self._log.fileno(), 1)
            os.dup2(self._log.fileno(), 2)

    @property
    def log_file(self) -> TextIO | None:
        """This rank's log, once it is open."""
        return self._log

    def say(self, text: str | rich.table.Table = "", style: str = "") -> None:
        """Prints on rank 0 and keeps it in the log of every rank. Text stays as it is: brackets in a path, or in what
        a model wrote, are no markup."""
        shown = Text(text, style) if isinstance(text, str) else text
        if self.rank == 0:
            self._show(shown)
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk ends no training
                rich.console.Console(file=self._log, width=_PLAIN_WIDTH, highlight=False).print(shown)

    def log(self, text: str) -> None:
        """Keeps a line in this rank's log only."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def _show(self, what: Text | rich.table.Table, soft_wrap: bool = False) -> None:
        """Prints on the terminal, or in the file that takes its place."""
        console = self._progress.console if self._progress else self._terminal
        self._try(partial(console.print, what, soft_wrap=soft_wrap))

    def _try(self, show: Callable[[], None]) -> None:
        """Shows something; where that fails (a terminal that was closed, a full disk), from then on nothing."""
        try:
            show()
        except OSError:
            self._terminal.on_broken_pipe()

    @contextmanager
    def progress(self, total: float | None, *, transient: bool = False) -> Iterator[None]:
        """While it is open, `advance` moves a live line on a terminal, or prints a plain line every few seconds.

        The total may be given later, by `advance`. The live line stays when it is closed, unless it is transient."""
        self._started_s = time.perf_counter()
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
        """Shows where the work is: `completed` in the units of the total, and the facts beside the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=completed, total=total, description=description, facts=facts)
            if self._log is not None:
                self.log(f"{description}  {facts}")
            return
        line = f"{description}  {facts}"
        now = time.perf_counter()
        if self.rank == 0 and now >= self._next_line_s:
            # The first lines at once, then rarer: a log of a week stays readable.
            self._next_line_s = now + min(60.0, max(2.0, (now - self._started_s) / 10))
            self._show(Text(line), soft_wrap=True)
        self.log(line)

    @contextmanager
    def reading(self) -> Iterator["Reading"]:
        """While it is open, its `advance` shows how far a source of known or unknown length has been read.

        Nothing of that stays on a terminal: mostly the data is there already, and nothing is read."""
        with self.progress(None, transient=True):
            yield Reading(self)

    def close(self) -> None:
        """Flushes; the log stays the place where stdout and stderr of the other ranks go."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


class Reading:
    """Tells of bytes being read: how far, how fast, how long still."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first: tuple[float, int] | None = None  # when this process began, and where

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.say(text)

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """`what` has been made of the bytes so far."""
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


def table(title: str, columns: list[str], rows: list[list[str]]) -> rich.table.Table:
    """Returns a small table: the first column left, the others right."""
    made = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def facts(rows: list[tuple[str, str]]) -> rich.table.Table:
    """Returns names, to the right, and what is to be said of them; long texts wrap beside their name."""
    grid = rich.table.Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(name), Text(text))  # Text: brackets in a path are no markup
    return grid


def rate(tokens_per_s: float) -> str:
    """Tokens a second for people."""
    return f"{units.count(round(tokens_per_s))} tok/s"
