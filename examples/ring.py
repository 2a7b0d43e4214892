"""`paceline learn ring`: the ring all-reduce from messages between neighbours, and the lesson that shows it.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69, 2009.

n ranks form a ring, and each has a vector of n chunks. In each of 2 (n-1) steps every rank sends one chunk to its right
neighbour and receives one from its left:

  reduce-scatter   n-1 steps: what arrives is added to the rank's own chunk, and that sum is what it sends next. A chunk
                   has then passed all ranks, and each rank has one complete sum, that of chunk rank + 1
  all-gather       n-1 steps: complete chunks go around, and take the place of what was there

So a rank sends 2 (n-1) chunks of s/n bytes: 2 (n-1)/n s, less than twice its vector for any number of ranks. Training
uses the library's collectives instead, in fewer, larger and overlapping buckets (world/group.py).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import rich.box
import rich.console
import rich.live
import rich.table
import torch
from rich.text import Text

from paceline.base import seeds, units
from paceline.base.ownership import borders
from paceline.record.console import PLAIN_WIDTH, Console
from paceline.tools.plan.stopwatch import Stopwatch
from paceline.world.group import Group
from paceline.world.runtime import World

Phase = Literal["reduce-scatter", "all-gather"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: each rank sends one chunk to its right neighbour."""

    phase: Phase
    chunks: tuple[int, ...]  # sent by each rank, by rank

    def arriving(self, rank: int) -> int:
        return self.chunks[rank - 1]


def steps(num_ranks: int) -> list[Step]:
    """Returns the 2 (n-1) steps of an all-reduce on n ranks; none for one rank."""
    plan = []
    for k in range(2 * (num_ranks - 1)):
        phase: Phase = "reduce-scatter" if k < num_ranks - 1 else "all-gather"
        # first its own, then always the one that arrived last
        plan.append(Step(phase=phase, chunks=tuple((rank - k) % num_ranks for rank in range(num_ranks))))
    return plan


def contributors(num_ranks: int, done: Sequence[Step]) -> list[list[list[int]]]:
    """Returns, by rank and chunk, the ranks whose values have been added after these steps, in order."""
    held = [[[rank] for _ in range(num_ranks)] for rank in range(num_ranks)]
    for step in done:
        sent = [held[rank][step.chunks[rank]] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            own = [] if step.phase == "all-gather" else held[rank][step.arriving(rank)]
            held[rank][step.arriving(rank)] = [*sent[rank - 1], *own]
    return held


class Ring:
    """A vector during a ring all-reduce. Every rank makes one of equal length and takes the same steps."""

    def __init__(self, group: Group, flat: torch.Tensor):
        """flat: (elements,), changed in place; on the group's device."""
        edges = borders(flat.numel(), [1.0] * group.size)
        self.chunks = [flat[edges[i] : edges[i + 1]] for i in range(group.size)]  # some empty where elements are few
        self._group = group
        self._arrived = torch.empty_like(max(self.chunks, key=torch.numel))

    def take(self, step: Step) -> None:
        """Sends this rank's chunk of the step, and adds or copies the arriving one. Collective; raises PeerLost."""
        rank, size = self._group.rank, self._group.size
        leaving, place = self.chunks[step.chunks[rank]], self.chunks[step.arriving(rank)]
        is_sum = step.phase == "reduce-scatter"
        arriving = self._arrived[: place.numel()] if is_sum else place
        self._group.start_messages(
            sends={(rank + 1) % size: leaving} if leaving.numel() else {},  # an empty chunk needs no message
            receives={(rank - 1) % size: arriving} if place.numel() else {},
        ).wait()
        if is_sum:
            place.add_(arriving)


def ring_all_reduce(group: Group, flat: torch.Tensor) -> None:
    """Replaces the vector on every rank by its sum over ranks, with the same bits on all. Collective. A rank sends 2
    (n-1)/n s bytes, to the nearest element of a chunk. Raises PeerLost."""
    ring = Ring(group, flat)
    for step in steps(group.size):
        ring.take(step)


# ---- the lesson ----

_ROWS_A_RANK = 4
_LARGE_BYTES = 4 << 20
_ELEMENT_BYTES = 4  # float32
_REPEATS = 7
_PAUSE_S = 1.5  # at each step on a terminal, to read a line
_LEGEND = "0+1: the sum of ranks 0 and 1; all: of all ranks; > sent in this step, < arrived"


def gradient(rank: int, elements: int) -> torch.Tensor:
    """Returns (elements,) float32: the gradient x^T (x w - y) of sum (x w - y)^2 / 2 over this rank's rows x, y, at
    weights w that all ranks share. Data are integers and weights tenths, so sums are tenths that are easy to check."""
    own, common = torch.Generator(), torch.Generator()
    own.manual_seed(seeds.key("learn ring", "rows", rank))
    common.manual_seed(seeds.key("learn ring", "weights"))
    x = torch.randint(-2, 3, (_ROWS_A_RANK, elements), generator=own).float()
    y = torch.randint(-3, 4, (_ROWS_A_RANK,), generator=own).float()
    w = torch.randint(-9, 10, (elements,), generator=common).float() / 10
    return x.T @ (x @ w - y)


def teach(world: World, elements: int, *, plain: bool, delay_s: float | None) -> None:
    """Runs the lesson on every rank; rank 0 shows it. plain: lines without colours also on a terminal. delay_s: the
    pause at each step; None: the default for the output. Collective. Raises PeerLost if a rank dies."""
    group, size = world.group, world.world_size
    own = gradient(world.rank, elements).to(world.device)
    flat = own.clone()
    ring, plan = Ring(group, flat), steps(size)
    largest = max(sum(column) for column in zip(*group.share(own.abs().tolist()), strict=True))
    screen = _Screen(world.rank, size, largest, plain=plain, delay_s=delay_s)
    screen.say(_introduction(world, elements), "bold")
    if plan:
        screen.say(f"Before the first step ({_LEGEND})")
    table = _Table(_shared(group, ring), contributors(size, []))
    screen.show(table)
    sent_bytes = 0
    for number, step in enumerate(plan, start=1):
        screen.say(_sentence(step, number, len(plan)))
        table = replace(table, step=step)

        def advance(done: Sequence[Step] = plan[:number]) -> _Table:
            nonlocal sent_bytes
            group.take_traffic()  # discard the lesson's own
            ring.take(done[-1])
            sent_bytes += int(group.take_traffic().num_bytes)
            return _Table(_shared(group, ring), contributors(size, done), done[-1], has_arrived=True)

        table = screen.change(table, advance)
    _conclude(world, own, flat, sent_bytes, screen)
    if size > 1:
        _race(world, elements, screen)
    screen.say(
        "\nRead next: docs/learn/counting-bytes.md (what this costs, and when it hides behind backward); in the source "
        "examples/ring.py (what ran here) and sync/buckets.py (what training does)."
    )


def _shared(group: Group, ring: Ring) -> list[list[list[float]]]:
    """Returns every rank's values, by rank and chunk. Collective."""
    ends = list(itertools.accumulate(chunk.numel() for chunk in ring.chunks))
    rows = group.share([value for chunk in ring.chunks for value in chunk.tolist()])
    return [[row[begin:end] for begin, end in zip([0, *ends], ends, strict=False)] for row in rows]


def _introduction(world: World, elements: int) -> str:
    size = world.world_size
    is_spread = len({peer.host for peer in world.peers}) > 1
    where = ", ".join(f"{peer.pid}{f' on {peer.host}' * is_spread}" for peer in world.peers)
    weights = units.plural(elements, "weight")
    if size == 1:
        return f"One rank, process {where}, with the gradient of {weights}.\n"
    return (
        f"{size} ranks, each a process of its own ({where}), each with the gradient of the same {weights} from "
        f"{_ROWS_A_RANK} rows of data of its own. Goal: every rank gets the sum of all {size}, the gradient of all "
        f"{_ROWS_A_RANK * size} rows. They form a ring, cut the vector into {size} chunks, and send only to the "
        "right.\n"
    )


def _sentence(step: Step, number: int, num_steps: int) -> str:
    """Describes the step in a line; of more than four ranks only the first two."""
    size, is_sum = len(step.chunks), step.phase == "reduce-scatter"
    what, does = ("its chunk", "adds it to its own") if is_sum else ("the complete chunk", "keeps it")
    others = [f"rank {rank}{' sends' * (rank == 1)} chunk {step.chunks[rank]}" for rank in range(1, size)]
    if size > 4:
        others[1:] = ["and so on"]
    first = f"rank 0 sends {what} {step.chunks[0]} to rank 1, which {does}"
    return f"{number} of {num_steps}, {step.phase}: {first}; {', '.join(others)}"


def _conclude(world: World, own: torch.Tensor, flat: torch.Tensor, sent_bytes: int, screen: "_Screen") -> None:
    """Compares the ring's sum with the library's on every rank, and the bytes with the formula. Collective."""
    group, size, num_bytes = world.group, world.world_size, own.numel() * _ELEMENT_BYTES
    theirs = own.clone()
    group.all_reduce(theirs)
    own_facts = [float((flat - theirs).abs().max()), float(theirs.abs().max())]
    difference, largest = map(max, zip(*group.share(own_facts), strict=True))
    vectors = group.share(flat.tolist())
    sent = [row[0] for row in group.share_integers([sent_bytes])]
    by_rank = ", ".join(map(str, sent))
    if size == 1:
        screen.say("There is nobody to send to: the sum over one rank is its own vector.")
    else:
        is_same = all(vector == vectors[0] for vector in vectors)
        screen.say(
            f"Done: {'the same' if is_same else 'NOT the same'} bits on all ranks. {world.backend}'s own all-reduce of "
            f"the same vectors differs from it by at most {f'{difference:.1e}' if difference else 0} in values up to "
            f"{largest:.1f}{': rounding, for it adds in another order' if difference else ''}.",
            "bold",
        )
        by_rank += f", on average {sum(sent) / size:g}"
    formula = f"2 x {size - 1}/{size} x {num_bytes} = {2 * (size - 1) / size * num_bytes:g}"
    screen.say(f"Bytes sent, by rank, as the group counted them: {by_rank}. 2 (n-1)/n s is {formula}.")


def _race(world: World, elements: int, screen: "_Screen") -> None:
    """Times the ring and the library's all-reduce, for this vector and a larger one. Collective."""
    size, watch = world.world_size, Stopwatch(world.group, world.device)
    screen.say(f"\nOne all-reduce, median of {_REPEATS}; in brackets what a rank sends a second:")
    for num_bytes in (elements * _ELEMENT_BYTES, _LARGE_BYTES):
        flat = torch.zeros(num_bytes // _ELEMENT_BYTES, device=world.device)
        ways = {
            "this ring": partial(ring_all_reduce, world.group, flat),
            world.backend: partial(world.group.all_reduce, flat),
        }
        seconds = {name: statistics.median(watch.seconds(run, 1 + _REPEATS)[1:]) for name, run in ways.items()}
        sent = 2 * (size - 1) / size * num_bytes
        each = [f"{name} {took * 1e3:.3f} ms ({units.size(sent / took)}/s)" for name, took in seconds.items()]
        screen.say(f"  {units.size(num_bytes):>8}:  {', '.join(each)}")
    screen.say(f"The small one is latency: {2 * (size - 1)} messages, one after the other. The large one is bandwidth.")


# ---- rank 0's display ----


@dataclass(frozen=True)
class _Table:
    """What every rank has, before or after a step."""

    values: list[list[list[float]]]  # by rank and chunk
    ranks: list[list[list[int]]]  # that have been added, by rank and chunk
    step: Step | None = None  # marked: what is sent and, if it is over, what arrived
    has_arrived: bool = False

    def mark(self, rank: int, chunk: int) -> str:
        if self.step and self.has_arrived and chunk == self.step.arriving(rank):
            return "<"
        return ">" if self.step and chunk == self.step.chunks[rank] else " "

    def whose(self, rank: int, chunk: int) -> str:
        """0+1, 0+..+4, all."""
        ranks = self.ranks[rank][chunk]
        if not self.values[rank][chunk]:
            return "empty"
        if len(ranks) == len(self.ranks):
            return "all"
        return "+".join(map(str, ranks)) if len(ranks) <= 3 else f"{ranks[0]}+..+{ranks[-1]}"


class _Screen:
    """Plain lines, or tables updated in place on a terminal. Ranks but the first print nothing."""

    def __init__(self, rank: int, num_ranks: int, largest: float, *, plain: bool, delay_s: float | None):
        """largest: of all values, so that the width of numbers never changes."""
        self._console, self._terminal = Console(rank), rich.console.Console(highlight=False)
        self._is_plain = plain or not self._console.is_terminal
        usual_s = _PAUSE_S if self._console.is_terminal else 0.0
        self._pause_s = (usual_s if delay_s is None else delay_s) if rank == 0 else 0.0
        self._moves = rank == 0 and not self._is_plain
        self._digits = len(f"{-abs(largest):.1f}")
        self._tag = min(len("0+..+4"), max(len("empty"), 2 * num_ranks - 3))

    def say(self, text: str, style: str = "") -> None:
        """Prints a permanent line; long ones wrap at words."""
        self._console.say(text, "" if self._is_plain else style)

    def show(self, table: _Table) -> None:
        self._console.say(self._drawn(table))

    def change(self, before: _Table, work: Callable[[], _Table]) -> _Table:
        """Returns the table from `work`, the step of all ranks, and shows it; on a terminal in place of `before`.
        Pauses before `work`: the other ranks wait in it for rank 0."""
        if not self._moves:
            time.sleep(self._pause_s)
            after = work()
            self.show(after)
            return after
        with rich.live.Live(self._drawn(before), console=self._terminal, auto_refresh=False) as live:
            live.refresh()
            time.sleep(self._pause_s)
            after = work()
            live.update(self._drawn(after), refresh=True)
        return after

    def _drawn(self, table: _Table) -> rich.table.Table:
        """Returns the table, in colours if it is not plain: yellow for moving chunks, green for complete sums."""
        size = len(table.values)
        made = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False, header_style="" if self._is_plain else "bold")
        made.add_column("", no_wrap=True)
        for chunk in range(size):
            made.add_column(f"chunk {chunk}")
        width = self._terminal.width if self._console.is_terminal else PLAIN_WIDTH
        room = (width - len("rank 0")) // size - len("      ") - self._tag
        longest = max(map(len, table.values[0]))
        most = longest if longest * (self._digits + 1) <= room else max(1, (room - len(" ..")) // (self._digits + 1))
        gap = "\n" if room <= self._digits else "  "  # the summed ranks then go below the values
        for rank in range(size):
            made.add_row(f"rank {rank}", *(self._cell(table, rank, chunk, most, gap) for chunk in range(size)))
        return made

    def _cell(self, table: _Table, rank: int, chunk: int, most: int, gap: str) -> Text:
        values, whose, mark = table.values[rank][chunk], table.whose(rank, chunk), table.mark(rank, chunk)
        numbers = " ".join(f"{value:{self._digits}.1f}" for value in values[:most])
        text = f"{numbers}{' ..' * (len(values) > most)}{gap}{whose:<{self._tag}} {mark}"
        is_complete = len(table.ranks[rank][chunk]) == len(table.ranks)
        colour = "green" if is_complete else "yellow" if mark != " " else ""
        return Text(text, "" if self._is_plain else f"bold {colour}" if mark != " " else colour)
