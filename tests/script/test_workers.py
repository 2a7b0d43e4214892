"""Workers and ranks that draw the same random numbers are noticed, and `share` makes none."""

import functools
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program import Program
from ranks import run_ranks
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.script.dealing import Ranks
from paceline.script.share import share
from paceline.world.calls import Calls
from paceline.world.group import Group, LocalGroup
from paceline.world.runtime import World


class Draws(Dataset[Any]):
    """What a worker, or the process, draws beside each sample, which is a row of numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        worker = get_worker_info()
        drawn = [int(torch.randint(1 << 40, ())), int(np.random.randint(1 << 40)), random.randrange(1 << 40)]
        return [index, worker.id if worker else -1, *drawn]


class Still(Draws):
    """Draws nothing."""

    def __getitem__(self, index: int) -> list[int]:
        return [index]


class Crop:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)


class Holds(Draws):
    """Draws from a generator that was made with the data set, a copy of which each worker has."""

    def __init__(self, uses: bool = True) -> None:
        self.transforms, self.uses = [Crop()], uses
        self.unused = torch.Generator()

    def __getitem__(self, index: int) -> list[int]:
        return [index, int(self.transforms[0].rng.integers(1 << 40)) if self.uses else 0]


def renew(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.transforms[0].rng = np.random.default_rng(info.seed)


def by_worker(worker: int) -> None:
    np.random.seed(worker)  # a mistake: worker 0 of each rank is alike


def constant(worker: int, number: int) -> None:
    random.seed(number)  # a mistake: all are


def right(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    np.random.seed(info.seed % 2**32)
    random.seed(info.seed)


def rows_of(batch: list[Any]) -> list[list[int]]:
    return [row for micro_batch in batch for row in micro_batch]


def one_pass(loader: DataLoader[Any], world: Ranks, **asked: Any) -> tuple[list[list[int]], list[str]]:
    """All rows of this rank, and what was warned of, with file and line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = share(loader, world, **asked)
        rows = [row for batch in [*batches, *batches] for row in rows_of(batch)]
    return rows, [f"{warning.filename}:{warning.lineno}: {warning.message}" for warning in caught]


@dataclass(frozen=True)
class Seen:
    """By one of two real ranks."""

    sane: tuple[list[list[int]], list[str]]
    persistent: tuple[list[list[int]], list[str]]
    by_worker: list[str]
    constant: list[str]
    right: list[str]
    uneven: tuple[list[list[int]], list[str]]
    in_process: list[str]
    in_lanes: list[str]
    still: list[str]
    holds: list[str]
    holds_in_process: list[str]
    holds_well: list[str]


def loader(num_workers: int = 2, init: Callable[[int], Any] | None = None, **more: Any) -> DataLoader[Any]:
    workers = {"multiprocessing_context": "fork", "worker_init_fn": init} if num_workers else {}
    return DataLoader(Draws(), 4, shuffle=True, collate_fn=list, num_workers=num_workers, **{**workers, **more})


def lanes(lane: int, num_lanes: int) -> Iterator[int]:
    yield from (int(torch.randint(100, ())) for _ in range(2))


def see(world: World) -> Seen:
    torch.manual_seed(7)  # as a script does, so that all ranks build one model
    np.random.seed(7)
    random.seed(7)
    before = torch.get_rng_state()
    sane = one_pass(loader(), world, micro_batch_size=1)
    assert torch.equal(before, torch.get_rng_state())  # feeding draws nothing from the script's generator
    return Seen(
        sane,
        one_pass(loader(persistent_workers=True, prefetch_factor=3), world, micro_batch_size=1),
        one_pass(loader(init=by_worker), world)[1],
        one_pass(loader(init=functools.partial(constant, number=3)), world)[1],
        one_pass(loader(init=right), world)[1],
        one_pass(loader(init=by_worker), world, micro_batch_size=4),  # rank 1 has none
        one_pass(loader(0), world)[1],
        one_pass(lanes, world, batch_size=4)[1],
        one_pass(DataLoader(Still(), 4), world)[1],
        one_pass(DataLoader(Holds(), 4, num_workers=2), world)[1],
        one_pass(DataLoader(Holds(), 4), world)[1],
        [
            *one_pass(DataLoader(Holds(), 4, num_workers=2, worker_init_fn=renew), world)[1],
            *one_pass(DataLoader(Holds(uses=False), 4, num_workers=2), world)[1],
            *one_pass(DataLoader(Holds(uses=False), 4), world)[1],
        ],
    )


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return run_ranks(see, 2)


@pytest.mark.parametrize("which", ["sane", "persistent"])
def test_all_workers_of_all_ranks_and_epochs_draw_differently(seen: list[Seen], which: str) -> None:
    rows = [(rank, *row) for rank, one in enumerate(seen) for row in getattr(one, which)[0]]
    assert sorted(row[1] for row in rows) == sorted([*range(8)] * 2)  # each sample once in each of two epochs
    assert {(row[0], row[2]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for column in (3, 4, 5):
        assert len({row[column] for row in rows}) == 16
    assert [warned for one in seen for warned in getattr(one, which)[1]] == []


def line_of(function: Callable[..., Any]) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno}"


def test_a_worker_init_fn_that_seeds_alike_is_named_once_on_rank_0(seen: list[Seen]) -> None:
    (found,) = seen[0].by_worker
    assert found.startswith(f"{line_of(by_worker)}: ")
    assert f"by_worker ({line_of(by_worker)}) leaves the generator of numpy in the same state" in found
    assert "in worker 0 of rank 0 and worker 0 of rank 1" in found
    assert "np.random.seed(seed % 2**32)" in found
    (found,) = seen[0].constant
    assert f"constant ({line_of(constant)}) leaves the generator of random" in found
    assert "worker 0 of rank 0, worker 1 of rank 0, worker 0 of rank 1 and 1 more" in found
    assert seen[0].right == seen[1].right == []
    assert seen[1].by_worker == seen[1].constant == []


def test_a_rank_without_samples_takes_part(seen: list[Seen]) -> None:
    assert seen[1].uneven[0] == []
    assert len(seen[0].uneven[0]) == 16
    assert seen[0].uneven[1] == []  # of one rank's workers by_worker makes no two alike


def test_a_process_that_draws_as_the_others_do_is_warned(seen: list[Seen]) -> None:
    (found,) = seen[0].in_process
    assert "Draws (" in found
    assert "draws from the generator of torch and numpy and random, which is in the same state on rank 0 and" in found
    assert "torch.manual_seed(seed + world.rank)" in found
    (found,) = seen[0].in_lanes
    assert f"lanes ({line_of(lanes)}) draws from the generator of torch, which" in found
    assert seen[0].still == seen[1].in_process == seen[1].in_lanes == []


def test_a_generator_that_a_data_set_holds_is_named_where_it_is_drawn_from(seen: list[Seen]) -> None:
    line = f"{__file__}:{inspect.getsourcelines(Holds)[1]}"
    (found,) = seen[0].holds
    assert f"Holds ({line}) draws from .transforms[0].rng, a generator of its own in the same state in" in found
    assert "worker 0 of rank 0, worker 1 of rank 0, worker 0 of rank 1 and 1 more" in found
    (found,) = seen[0].holds_in_process
    assert ".transforms[0].rng, a generator of its own in the same state in rank 0 and rank 1" in found
    assert seen[0].holds_well == seen[1].holds == []


@dataclass(frozen=True)
class Alone:
    """A world of one."""

    rank: int = 0
    world_size: int = 1
    group: Group = field(default_factory=lambda: LocalGroup(torch.device("cpu")))
    calls: Calls = field(default_factory=Calls)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_one_process_with_two_workers_seeded_alike_is_warned(method: str) -> None:
    alone = Alone()
    init = functools.partial(constant, number=3)
    rows, warned = one_pass(loader(init=init, multiprocessing_context=method, persistent_workers=True), alone)
    assert len(rows) == 16
    (found,) = warned
    assert "in worker 0 of rank 0 and worker 1 of rank 0" in found
    assert one_pass(loader(0), alone)[1] == []


@pytest.mark.parametrize("persistent", [True, False])
def test_a_pass_left_by_break_is_gone_on_with_whatever_workers_read_ahead(persistent: bool) -> None:
    data = list(range(40))
    ahead = DataLoader(data, 5, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    batches = share(ahead, Alone(), micro_batch_size=1)  # read ahead: 4 micro-batches, no whole step
    found = []
    for stop in (1, 4, 9):
        for batch in batches:
            found += [number for micro_batch in batch for number in micro_batch.tolist()]
            if batches.step == stop:
                break
    assert found == data


STOPPED = """
import os, signal, sys, time
import paceline
from torch.utils.data import DataLoader

class Slow(list):
    def __getitem__(self, index):
        time.sleep(0.02)
        return index

asked = []
world = paceline.join()
batches = paceline.share(DataLoader(Slow(range(40)), 4, num_workers=2), world)
for batch in batches:
    if not asked:
        signal.signal(signal.SIGINT, lambda *_: asked.append(1))
        os.killpg(0, signal.SIGINT)  # Ctrl-C: to this process and to its workers
    last = batch
print("all", batches.epoch, last[0].tolist(), asked)
"""


def test_workers_live_through_a_ctrl_c_that_their_rank_answers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STOPPED)
    with Program(str(tmp_path / "train.py"), command=(sys.executable,)) as program:
        ended = program.wait().require(0)
    assert ended.out == "all 1 [36, 37, 38, 39] [1]\n"
    assert ended.err == ""
