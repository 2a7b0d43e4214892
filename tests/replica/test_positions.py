"""A restored position goes to the source that it was saved of, or an error says what to write."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import paceline
from paceline.base.errors import UserError
from paceline.replica.checkpoints import Checkpoints
from paceline.replica.replica import Replica
from paceline.world.runtime import World


def loader(number: int, size: int = 8) -> DataLoader[Any]:
    """Four batches of two numbers; the hundreds say of which loader."""
    return DataLoader(TensorDataset(100 * number + torch.arange(float(size))[:, None]), batch_size=2)


class Stop(Exception):
    """The script was killed."""


class Script:
    """Trains, and saves after step `save_at`, where it then ends."""

    def __init__(self, world: World, folder: str, save_at: int, **objects: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        self.replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.0), world)
        self.checkpoints = Checkpoints(folder, net=self.replica, **objects)
        self.checkpoints.restore()
        self.save_at, self.seen = save_at, list[list[int]]()

    def phase(self, source: Any, **limits: Any) -> None:
        for step in self.replica.steps(source, **limits):
            self.do(step)

    def do(self, step: Any) -> None:
        self.seen.append([])
        for (x,) in step:
            self.seen[-1] += x.flatten().int().tolist()
            step.backward(self.replica.model(x).mean())
        step.finish()
        if self.replica.num_steps == self.save_at:
            self.checkpoints.save()
            self.checkpoints.finish()
            raise Stop


Body = Callable[[Script], None]


def run(world: World, folder: str, body: Body, save_at: int = 0, **objects: Any) -> list[list[int]]:
    script = Script(world, folder, save_at, **objects)
    try:
        body(script)
    except Stop:
        pass
    finally:
        script.checkpoints._end()
    return script.seen


# ---- scripts that resume exactly ----


def anew_each_epoch(script: Script) -> None:
    for epoch in range(3):
        script.phase(loader(epoch), epochs=1)


def curriculum(script: Script) -> None:
    script.phase(loader(1), max_steps=6)
    script.phase(loader(2, size=12), max_steps=11)


def in_turn(script: Script) -> None:
    first, second = loader(1), loader(2)
    for turn in range(5):
        script.phase((first, second)[turn % 2], max_steps=3 * (turn + 1))


EXACT: dict[str, Body] = {"anew each epoch": anew_each_epoch, "curriculum": curriculum, "in turn": in_turn}


def differences(world: World, folder: str, scripts: dict[str, Body], stops: tuple[int, ...]) -> list[str]:
    """Returns where a run that was stopped and resumed differs from one that was never stopped."""
    different = []
    for name, body in scripts.items():
        whole = run(world, f"{folder}/{name}", body)
        for stop in stops:
            parts = run(world, f"{folder}/{name} {stop}", body, stop)
            parts += run(world, f"{folder}/{name} {stop}", body)
            different += [f"{name} {stop}: {whole} {parts}"] if parts != whole else []
    return different


def test_scripts_that_give_their_sources_again_resume_exactly(world: World, tmp_path: Path) -> None:
    """Stopped within a pass, and in a later one."""
    assert differences(world, str(tmp_path), EXACT, (2, 9)) == []
    assert run_ranks(differences, 2, f"{tmp_path}/ranks", {"in turn": in_turn}, (4,)) == [[], []]


# ---- scripts that leave sources out ----


def rest_of_epochs(script: Script) -> None:
    for epoch in range(1 if script.replica.num_steps else 0, 3):
        script.phase(loader(epoch))


def rest_of_curriculum(script: Script) -> None:
    for number, size in ((1, 8), (2, 8))[1 if script.replica.num_steps else 0 :]:
        script.phase(loader(number, size))


def epochs_again(script: Script) -> None:
    for epoch in range(3):
        script.phase(loader(epoch))


def iterators_in_turn(script: Script) -> None:
    of_both = [iter(script.replica.steps(loader(number), max_steps=12)) for number in range(2)]
    for turn in range(script.replica.num_steps, 12):
        script.do(next(of_both[turn % 2]))


@pytest.mark.parametrize("body", [rest_of_epochs, rest_of_curriculum, epochs_again, iterators_in_turn])
def test_scripts_that_give_other_sources_first_are_refused(world: World, tmp_path: Path, body: Body) -> None:
    """Finds: the second epoch's position given to the third epoch's loader."""
    run(world, str(tmp_path), body, 5)
    with pytest.raises(
        UserError, match=r"had been given 2 sources, and this step is made after 1\..*train=paceline\.share"
    ):
        run(world, str(tmp_path), body)


def test_another_size_is_refused(world: World, tmp_path: Path) -> None:
    run(world, str(tmp_path), curriculum, 8)
    script = Script(world, str(tmp_path), 0)
    with pytest.raises(UserError, match=r"num_samples 8, here it is 12.*the same sources in the same order"):
        script.phase(loader(2, size=12), max_steps=11)
    curriculum(script)  # in a notebook's next cell, corrected
    script.checkpoints._end()
    assert script.seen == run(world, str(tmp_path / "straight"), curriculum)[8:]


# ---- shares ----


def test_a_loop_of_its_own_names_what_it_reads(world: World, tmp_path: Path) -> None:
    """Finds: a save after a function without a name ends in a TypeError, because it was asked for its length."""

    def own_loop(script: Script) -> None:
        for _ in range(2):
            for batch in batches:
                script.do(script.replica.step(batch))

    batches = paceline.share(loader(0), world)
    with pytest.raises(UserError, match=r"has no name \(write.*train=batches"):
        run(world, str(tmp_path / "a"), own_loop, 5)
    batches = paceline.share(lambda: (torch.ones(1, 1),), world, micro_batches=1)  # its length is not known
    with pytest.raises(UserError, match=r"has no name \(write.*train=batches"):
        run(world, str(tmp_path / "a"), own_loop, 5)
    batches = paceline.share(loader(0), world)
    first = run(world, str(tmp_path / "b"), own_loop, 5, train=batches)
    batches = paceline.share(loader(0), world)
    rest = run(world, str(tmp_path / "b"), lambda script: script.phase(batches), 0, train=batches)
    assert first + rest == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2
    batches = paceline.share(loader(0), world)  # steps keeps the position of a share without a name
    first = run(world, str(tmp_path / "c"), lambda script: script.phase(batches, epochs=2), 5)
    batches = paceline.share(loader(0), world)
    rest = run(world, str(tmp_path / "c"), lambda script: script.phase(batches, epochs=2))
    assert first + rest == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2


def test_a_batch_of_its_own_has_the_position_of_no_source(world: World, tmp_path: Path) -> None:
    """Finds: between sources that are given again after a restore, a script's own batch counts as one of them, once an
    earlier one is freed."""

    def body(script: Script) -> None:
        for number in range(4):
            if number == 3 and script.replica.num_steps == 16:
                script.do(script.replica.step(paceline.Batch([(torch.full((1, 1), 7.0),)])))
            script.phase(loader(number), epochs=1)

    run(world, str(tmp_path), body, 16)
    assert run(world, str(tmp_path), body) == [[7]]


def test_sources_of_later_steps_begin_anew_when_an_earlier_checkpoint_is_restored(world: World, tmp_path: Path) -> None:
    script, (first, second) = Script(world, str(tmp_path), 0), (loader(1), loader(2))
    script.phase(first, max_steps=3)
    script.checkpoints.save()
    script.phase(first, max_steps=4)
    script.phase(second, max_steps=6)
    assert script.checkpoints.restore() == 3
    script.phase(first, max_steps=4)
    script.phase(second, max_steps=6)
    assert script.seen[-3:] == [[106, 107], [200, 201], [202, 203]]
    script.checkpoints._end()


def test_a_freed_source_begins_anew_when_a_checkpoint_from_before_it_is_restored(world: World, tmp_path: Path) -> None:
    script, first, second = Script(world, str(tmp_path), 0), loader(1), loader(2)
    script.phase(first, max_steps=3)
    script.checkpoints.save()
    script.phase(first)
    script.phase(second)
    batches = paceline.share(loader(3), world)
    for source in (batches, loader(4), loader(5)):  # frees those before
        script.phase(source)
    assert script.checkpoints.restore() == 3
    script.phase(first)
    script.phase(second)
    script.phase(batches, max_steps=10)
    whole = [[2 * step, 2 * step + 1] for step in range(4)]
    wanted = [[100 * number + row for row in rows] for number in (2, 3) for rows in whole]
    assert script.seen[-7:] == [[106, 107], *wanted[:6]]
    script.checkpoints._end()


# ---- evaluations ----


@pytest.mark.parametrize("with_replacement", [False, True])
@pytest.mark.parametrize("of_training", [False, True])
def test_an_evaluation_leaves_the_scripts_own_generator(
    world: World, tmp_path: Path, with_replacement: bool, of_training: bool
) -> None:
    """Mutation: the generator stays where the evaluation put it, so that all later passes have one order. A sampler
    with replacement draws 32 numbers at a time, in the middle of a pass, too."""

    rows = TensorDataset(torch.arange(40.0)[:, None])

    def training() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        sampler = RandomSampler(rows, with_replacement, generator=generator)
        return DataLoader(rows, 10, sampler=sampler, generator=generator)

    plain, shared = training(), training()
    wanted = [x.flatten().int().tolist() for _ in range(4) for (x,) in plain]
    tests = shared if of_training else DataLoader(rows, 20, generator=shared.generator)
    script = Script(world, str(tmp_path), 0)
    for epoch in range(1, 5):
        for step in script.replica.steps(shared, epochs=epoch):
            script.do(step)
            script.replica.evaluate(tests, lambda x: x.mean())
    script.checkpoints._end()
    assert script.seen == wanted


# ---- memory ----


def test_finished_sources_are_freed_and_may_be_given_again(world: World, tmp_path: Path) -> None:
    """Finds: data sets of all epochs kept for ever (38 MB an epoch were)."""
    script = Script(world, str(tmp_path), 0)
    sets = list[weakref.ref[Any]]()
    for epoch in range(4):
        made = loader(epoch)
        sets.append(weakref.ref(made.dataset))
        script.phase(made)
        script.replica.evaluate(loader(epoch), lambda x: x.mean())
    del made
    gc.collect()
    assert [each() is None for each in sets[:-2]] == [True, True]
    kept = [loader(number) for number in range(4)]
    for _ in range(2):
        for each in kept:
            script.phase(each)
    assert script.seen[-32:] == 2 * [
        [100 * number + 2 * step, 100 * number + 2 * step + 1] for number in range(4) for step in range(4)
    ]
    positions = script.replica.sources.kept(lambda share: share.state_dict())["positions"]
    assert [position["epoch"] for position in positions] == [1, 1, 1, 1, 2, 2, 2, 2]
    script.checkpoints._end()
