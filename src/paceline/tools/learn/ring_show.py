"""Shows the ring lesson: a table after each step, in plain lines, or updated in place on a terminal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import rich.box
import rich.console
import rich.live
import rich.table
from rich.text import Text

from paceline.record.console import PLAIN_WIDTH, Console
from paceline.tools.learn.ring import Step

LEGEND = "0+1: the sum of ranks 0 and 1; all: of all ranks; > sent in this step, < arrived"
_PAUSE_S = 1.5  # on a terminal, to read a line


@dataclass(frozen=True)
class Cell:
    """One rank's copy of one chunk."""

    values: Sequence[float]
    ranks: Sequence[int]  # that have been added
    is_complete: bool  # contains all ranks' values
    mark: str = " "  # > sent, < arrived, in this step

    @property
    def whose(self) -> str:
        """0+1, 0+..+4, all."""
        if not self.values:
            return "empty"
        if self.is_complete:
            return "all"
        return "+".join(map(str, self.ranks)) if len(self.ranks) <= 3 else f"{self.ranks[0]}+..+{self.ranks[-1]}"


Grid = list[list[Cell]]  # by rank and chunk


def grid(vectors: Sequence[Sequence[Sequence[float]]], held: Sequence[Sequence[Sequence[int]]]) -> Grid:
    """Returns a table's cells. vectors: values; held: added ranks; each by rank and chunk."""
    size = len(vectors)
    return [
        [Cell(values, ranks, len(ranks) == size) for values, ranks in zip(row, whose, strict=True)]
        for row, whose in zip(vectors, held, strict=True)
    ]


def marked(cells: Grid, step: Step, *, arrived: bool) -> Grid:
    """Returns the cells, marked where the step sends from and, if it is over, where a chunk arrived."""
    found = [[replace(cell, mark=" ") for cell in row] for row in cells]
    for rank, row in enumerate(found):
        sent, place = step.chunks[rank], step.arriving(rank)
        row[sent] = replace(row[sent], mark=">")
        if arrived:
            row[place] = replace(row[place], mark="<")
    return found


def sentence(step: Step, number: int, num_steps: int) -> str:
    """Describes the step in a line; of more than four ranks only the first two."""
    size = len(step.chunks)
    what, does = (
        ("its chunk", "adds it to its own") if step.phase == "reduce-scatter" else ("the complete chunk", "keeps it")
    )
    others = [f"rank {rank}{' sends' * (rank == 1)} chunk {step.chunks[rank]}" for rank in range(1, size)]
    if size > 4:
        others[1:] = ["and so on"]
    first = f"rank 0 sends {what} {step.chunks[0]} to rank 1, which {does}"
    return f"{number} of {num_steps}, {step.phase}: {first}; {', '.join(others)}"


class Screen:
    """Rank 0's display: plain lines, or tables updated in place on a terminal. Other ranks print nothing."""

    def __init__(self, rank: int, *, plain: bool, delay_s: float | None):
        """delay_s: the pause at each step; None: the default for the output."""
        self._speaks = rank == 0
        self._console = Console(rank)
        self._terminal = rich.console.Console(highlight=False)
        self._is_plain = plain or not self._console.is_terminal
        usual_s = _PAUSE_S if self._console.is_terminal else 0.0
        self._pause_s = usual_s if delay_s is None else delay_s

    def say(self, text: str, style: str = "") -> None:
        """Prints a permanent line; long ones wrap at words."""
        self._console.say(text, "" if self._is_plain else style)

    def fit(self, largest: float, num_ranks: int) -> None:
        """Fixes the width of numbers up to `largest` and of lists of ranks, so that only changes move."""
        self._digits = len(f"{-abs(largest):.1f}")
        self._tag = min(len("0+..+4"), max(len("empty"), 2 * num_ranks - 3))

    def table(self, cells: Grid) -> None:
        self._console.say(self._drawn(cells))

    def change(self, before: Grid, work: Callable[[], Grid]) -> Grid:
        """Returns the cells from `work`, the step of all ranks, and shows them; on a terminal in place of `before`.
        Pauses before `work`: the other ranks wait in it for rank 0."""
        if self._is_plain or not self._speaks:
            self._pause()
            after = work()
            self.table(after)
            return after
        with rich.live.Live(self._drawn(before), console=self._terminal, auto_refresh=False) as live:
            live.refresh()
            self._pause()
            after = work()
            live.update(self._drawn(after), refresh=True)
        return after

    def _drawn(self, cells: Grid) -> rich.table.Table:
        """Returns the table, in colours if it is not plain: yellow for moving chunks, green for complete sums."""
        size = len(cells)
        made = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False, header_style="" if self._is_plain else "bold")
        made.add_column("", no_wrap=True)
        for chunk in range(size):
            made.add_column(f"chunk {chunk}")
        width = self._terminal.width if self._console.is_terminal else PLAIN_WIDTH
        room = (width - len("rank 0")) // size - len("      ") - self._tag
        longest = max(len(cell.values) for cell in cells[0])
        most = longest if longest * (self._digits + 1) <= room else max(1, (room - len(" ..")) // (self._digits + 1))
        gap = "\n" if room <= self._digits else "  "  # the summed ranks then go below the values
        for rank, row in enumerate(cells):
            styles = ["" if self._is_plain else _style(cell) for cell in row]
            made.add_row(f"rank {rank}", *map(Text, [self._text(cell, most, gap) for cell in row], styles))
        return made

    def _text(self, cell: Cell, most: int, gap: str) -> str:
        numbers = " ".join(f"{value:{self._digits}.1f}" for value in cell.values[:most])
        return f"{numbers}{' ..' * (len(cell.values) > most)}{gap}{cell.whose:<{self._tag}} {cell.mark}"

    def _pause(self) -> None:
        if self._speaks:
            time.sleep(self._pause_s)


def _style(cell: Cell) -> str:
    colour = "green" if cell.is_complete else "yellow" if cell.mark != " " else ""
    return f"bold {colour}" if cell.mark != " " else colour
