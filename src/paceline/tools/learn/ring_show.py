"""Shows the ring lesson: a table after each step, in plain lines, or updated in place on a terminal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import rich.box
import rich.console
import rich.live
import rich.table
from rich.text import Text

from paceline.record.console import Console
from paceline.tools.learn.ring import Step

LEGEND = "0+1: the sum of ranks 0 and 1; all: of all ranks; > sent in this step, < arrived"
_PAUSE_S = 1.5  # on a terminal, to read a line
_PLAIN_WIDTH = 120  # without a terminal


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

    @property
    def width(self) -> int:
        return self._terminal.width if self._console.is_terminal else _PLAIN_WIDTH

    def say(self, text: str, style: str = "") -> None:
        """Prints a permanent line; long ones wrap at words."""
        self._console.say(text, "" if self._is_plain else style)

    def table(self, cells: Grid, shape: "Shape") -> None:
        self._console.say(f"{shape.plain(cells)}\n" if self._is_plain else shape.rich(cells))

    def change(self, before: Grid, work: Callable[[], Grid], shape: "Shape") -> Grid:
        """Returns the cells from `work`, the step of all ranks, and shows them; on a terminal in place of `before`.
        Pauses before `work`: the other ranks wait in it for rank 0."""
        if self._is_plain or not self._speaks:
            self._pause()
            after = work()
            self.table(after, shape)
            return after
        with rich.live.Live(shape.rich(before), console=self._terminal, auto_refresh=False) as live:
            live.refresh()
            self._pause()
            after = work()
            live.update(shape.rich(after), refresh=True)
        return after

    def _pause(self) -> None:
        if self._speaks:
            time.sleep(self._pause_s)


class Shape:
    """The width of a table's cells; the same in all tables of a lesson, so that only changes move."""

    def __init__(self, largest: float, longest: int, num_ranks: int, width: int):
        """largest: of all absolute values to show; longest: elements of the longest chunk."""
        self._digits = len(f"{-abs(largest):.1f}")
        self._tag = min(6, max(len("empty"), 2 * num_ranks - 3))
        self._longest = longest
        room = (width - len("rank 0  ")) // num_ranks - len("  ")
        beside = room - self._tag - len("   >")
        self._is_split = longest * (self._digits + 1) - 1 > beside  # the summed ranks then go below the values
        most = (room - len(" ..") + 1) // (self._digits + 1)
        self._shown = longest if longest * (self._digits + 1) - 1 <= room else max(1, most)

    def text(self, cell: Cell) -> str:
        numbers = " ".join(f"{value:{self._digits}.1f}" for value in cell.values[: self._shown])
        numbers += " .." if len(cell.values) > self._shown else ""
        full = self._shown * (self._digits + 1) - 1 + 3 * (self._longest > self._shown)
        return f"{numbers:<{full}}{chr(10) if self._is_split else '  '}{cell.whose:<{self._tag}} {cell.mark}"

    def plain(self, cells: Grid) -> str:
        texts = [[self.text(cell).split("\n") for cell in row] for row in cells]
        wide = max(len(part) for row in texts for cell in row for part in cell)
        lines = ["        " + "  ".join(f"chunk {i}".ljust(wide) for i in range(len(cells)))]
        for rank, row in enumerate(texts):
            for part in range(len(row[0])):
                head = f"rank {rank}" if part == 0 else ""
                lines.append(f"{head:<8}" + "  ".join(cell[part].ljust(wide) for cell in row))
        return "\n".join(line.rstrip() for line in lines)

    def rich(self, cells: Grid) -> rich.table.Table:
        """Returns the table in colours: yellow for moving chunks, green for complete sums."""
        made = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
        made.add_column("")
        for chunk in range(len(cells)):
            made.add_column(f"chunk {chunk}", no_wrap=True)
        for rank, row in enumerate(cells):
            made.add_row(f"rank {rank}", *(Text(self.text(cell), _style(cell)) for cell in row))
        return made


def _style(cell: Cell) -> str:
    colour = "green" if cell.is_complete else "yellow" if cell.mark != " " else ""
    return f"bold {colour}" if cell.mark != " " else colour
