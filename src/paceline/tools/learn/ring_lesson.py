"""`paceline learn ring`: the lesson on every rank, and its display on rank 0.

Each rank computes the gradient of one small linear model on its own rows of data. Data are integers and weights tenths,
so every gradient and partial sum is a number of tenths that is easy to check. After each step ranks share their vectors
for rank 0 to show; the reported bytes are those of the ring's steps only.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from paceline.base import seeds, units
from paceline.tools.learn.ring import Ring, Step, contributors, ring_all_reduce, steps
from paceline.tools.learn.ring_show import LEGEND, Grid, Screen, grid, marked, sentence
from paceline.world.device_clock import DeviceClock
from paceline.world.group import Group
from paceline.world.runtime import World

ROWS_A_RANK = 4
_LARGE_BYTES = 4 << 20
_ELEMENT_BYTES = 4  # float32
_REPEATS = 7


def gradient(rank: int, elements: int) -> torch.Tensor:
    """Returns (elements,) float32: the gradient x^T (x w - y) of sum (x w - y)^2 / 2 over this rank's rows x, y, at
    weights w that all ranks share. Multiples of 0.1, except for rounding."""
    own, common = torch.Generator(), torch.Generator()
    own.manual_seed(seeds.key("learn ring", "rows", rank))
    common.manual_seed(seeds.key("learn ring", "weights"))
    x = torch.randint(-2, 3, (ROWS_A_RANK, elements), generator=own).float()
    y = torch.randint(-3, 4, (ROWS_A_RANK,), generator=own).float()
    w = torch.randint(-9, 10, (elements,), generator=common).float() / 10
    return x.T @ (x @ w - y)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The ring's result; the same on all ranks."""

    largest_difference: float  # from the library's all-reduce, over all elements and ranks
    is_same_everywhere: bool  # all ranks have the same bits
    largest_value: float
    sent_bytes: list[int]  # by rank, counted by the group


def teach(world: World, elements: int, screen: Screen) -> Outcome:
    """Runs the lesson and returns its result. Collective. Raises PeerLost if a rank dies."""
    group = world.group
    _introduce(world, elements, screen)
    own = gradient(world.rank, elements).to(world.device)
    flat = own.clone()
    sent_bytes = _walk(group, Ring(group, flat), own, screen)
    if world.world_size == 1:
        screen.say("There is nobody to send to: the sum over one rank is its own vector.")
    outcome = _compare(group, own, flat, sent_bytes)
    _conclude(outcome, elements, world, screen)
    if world.world_size > 1:
        _race(world, elements, screen)
    screen.say(
        "\nRead next: docs/learn/counting-bytes.md (what this costs, and when it hides behind backward); in the source "
        "tools/learn/ring.py (what ran here) and sync/buckets.py (what training does)."
    )
    return outcome


def _introduce(world: World, elements: int, screen: Screen) -> None:
    size = world.world_size
    is_spread = len({peer.host for peer in world.peers}) > 1
    where = ", ".join(f"{peer.pid}{f' on {peer.host}' * is_spread}" for peer in world.peers)
    if size == 1:
        screen.say(f"One rank, process {where}, with the gradient of {units.plural(elements, 'weight')}.\n", "bold")
        return
    screen.say(
        f"{size} ranks, each a process of its own ({where}), each with the gradient of the same "
        f"{units.plural(elements, 'weight')} from {ROWS_A_RANK} rows of data of its own. Goal: every rank gets the "
        f"sum of all {size}, the gradient of all {ROWS_A_RANK * size} rows. They form a ring, cut the vector into "
        f"{size} chunks, and send only to the right.\n",
        "bold",
    )


def _walk(group: Group, ring: Ring, own: torch.Tensor, screen: Screen) -> int:
    largest = max(sum(column) for column in zip(*group.share(own.abs().tolist()), strict=True))
    screen.fit(largest, group.size)
    plan = steps(group.size)
    sent: list[int] = []
    cells = _cells(group, ring, [])
    if plan:
        screen.say(f"Before the first step ({LEGEND})")
    screen.table(cells)
    for number, step in enumerate(plan, start=1):
        screen.say(sentence(step, number, len(plan)))
        advance = partial(_advance, group, ring, plan[:number], sent)
        cells = screen.change(marked(cells, step, arrived=False), advance)
    return sum(sent)


def _advance(group: Group, ring: Ring, done: list[Step], sent: list[int]) -> Grid:
    """Takes the last of these steps, records the bytes it sent, and returns every rank's values. Collective."""
    group.take_traffic()  # discard the lesson's own
    ring.take(done[-1])
    sent.append(int(group.take_traffic().num_bytes))
    return marked(_cells(group, ring, done), done[-1], arrived=True)


def _cells(group: Group, ring: Ring, done: list[Step]) -> Grid:
    """Returns every rank's values after these steps. Collective."""
    lengths = [chunk.numel() for chunk in ring.chunks]
    rows = group.share([value for chunk in ring.chunks for value in chunk.tolist()])
    split = [[row[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(group.size)] for row in rows]
    return grid(split, contributors(group.size, done))


def _compare(group: Group, own: torch.Tensor, flat: torch.Tensor, sent_bytes: int) -> Outcome:
    """Compares the ring's sum with the library's on every rank. Collective."""
    theirs = own.clone()
    group.all_reduce(theirs)
    facts = group.share([float((flat - theirs).abs().max()), float(theirs.abs().max())])
    vectors = group.share(flat.tolist())
    return Outcome(
        largest_difference=max(row[0] for row in facts),
        is_same_everywhere=all(vector == vectors[0] for vector in vectors),
        largest_value=max(row[1] for row in facts),
        sent_bytes=[row[0] for row in group.share_integers([sent_bytes])],
    )


def _conclude(outcome: Outcome, elements: int, world: World, screen: Screen) -> None:
    size, num_bytes = world.world_size, elements * _ELEMENT_BYTES
    if size > 1:
        same = "the same bits on all ranks" if outcome.is_same_everywhere else "NOT the same bits on all ranks"
        difference = outcome.largest_difference
        order = "" if difference == 0 else ": rounding, for it adds in another order"
        screen.say(
            f"Done: {same}. {world.backend}'s own all-reduce of the same vectors differs from it by at most "
            f"{f'{difference:.1e}' if difference else 0} in values up to {outcome.largest_value:.1f}{order}.",
            "bold",
        )
    mean = sum(outcome.sent_bytes) / size
    by_rank = ", ".join(str(count) for count in outcome.sent_bytes) + (f", on average {mean:g}" if size > 1 else "")
    formula = f"2 x {size - 1}/{size} x {num_bytes} = {2 * (size - 1) / size * num_bytes:g}"
    screen.say(f"Bytes sent, by rank, as the group counted them: {by_rank}. 2 (n-1)/n s is {formula}.")


def _race(world: World, elements: int, screen: Screen) -> None:
    """Times the ring and the library's all-reduce, for this vector and a larger one. Collective."""
    size = world.world_size
    screen.say(f"\nOne all-reduce, median of {_REPEATS}; in brackets what a rank sends a second:")
    for num_bytes in (elements * _ELEMENT_BYTES, _LARGE_BYTES):
        flat = torch.empty(num_bytes // _ELEMENT_BYTES, device=world.device).fill_(0)
        sent = 2 * (size - 1) / size * num_bytes
        runs: dict[str, Callable[[torch.Tensor], None]] = {
            "this ring": partial(ring_all_reduce, world.group),
            world.backend: world.group.all_reduce,
        }
        seconds = {name: _seconds(world, partial(run, flat)) for name, run in runs.items()}
        each = [f"{name} {took * 1e3:.3f} ms ({units.size(sent / took)}/s)" for name, took in seconds.items()]
        screen.say(f"  {units.size(num_bytes):>8}:  {', '.join(each)}")
    screen.say(f"The small one is latency: {2 * (size - 1)} messages, one after the other. The large one is bandwidth.")


def _seconds(world: World, run: Callable[[], None]) -> float:
    """Returns the median over repetitions of the slowest rank's time, after a warm-up. Collective."""
    group, clock = world.group, DeviceClock(world.device)
    run()
    stamps = []
    for _ in range(_REPEATS):
        clock.finish()
        group.barrier()
        start = clock.stamp()
        run()
        stamps.append((start, clock.stamp()))
    clock.finish()
    group.take_traffic()
    each = group.share([clock.ms(start, end) / 1e3 for start, end in stamps])
    return float(statistics.median(max(times) for times in zip(*each, strict=True)))
