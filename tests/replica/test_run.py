"""A script's training is a run: the folder of `paceline train`, the curve of one process, the end of every end."""

import math
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program import Ended, rows, run, start_ranks
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.base.errors import UserError
from paceline.checkpoint.steps import list_steps
from paceline.record.folder import RunFolder
from paceline.record.state import read_state
from paceline.replica.checkpoints import load_weights
from paceline.replica.replica import Replica
from paceline.replica.run import Run
from paceline.replica.script import check_folder, to_toml
from paceline.tools.track.points import Position, Reader
from paceline.tools.view import read as view
from paceline.world.runtime import World

SCRIPT = Path(__file__).with_name("run_script.py")
STEPS, BATCH = 12, 15


def train(folder: Path, *fault: str, ranks: int = 1, env: Mapping[str, str] | None = None) -> list[Ended]:
    """Runs the script to its end on so many ranks."""
    arguments = (str(SCRIPT), str(folder), *fault)
    return start_ranks([arguments] * ranks, [env or {}] * ranks, command=(sys.executable,))


def training_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder / "metrics.jsonl") if "loss" in row]


def events(folder: Path) -> list[str]:
    return [event["event"] for event in rows(folder / "events.jsonl")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    (ended,) = train(folder)
    assert "\nTry next:\n  paceline report " in ended.require(0).out
    return folder


def plain_loop() -> list[tuple[float, float]]:
    """Loss and accuracy of each step, by torch alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(60, 8)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    found = []
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=BATCH):
            scores = net(x)
            loss = cross_entropy(scores, y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            found.append((loss.item(), (scores.argmax(1) == y).float().mean().item()))
    return found


def test_rows_have_what_a_trainers_have_and_the_scripts_numbers(straight: Path) -> None:
    """Mutation: the learning rate of a row is that of the next step."""
    found = training_rows(straight)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["lr"] for row in found] == pytest.approx([1e-2 * 0.5 ** (step // 4) for step in range(STEPS)])
    assert [row["tokens"] for row in found] == [BATCH * step for step in range(1, STEPS + 1)]
    assert {row["unit"] for row in found} == {"samples"}
    assert all(row["rank_sequences"] == [BATCH] for row in found)
    assert all(row["tokens_per_s"] == pytest.approx(BATCH / row["step_ms"] * 1e3) for row in found)
    assert all(row["mfu"] > 0 for row in found)
    losses, accuracies = zip(*plain_loop(), strict=True)
    assert [row["loss"] for row in found] == pytest.approx(losses, abs=1e-5)
    assert [row["accuracy"] for row in found] == pytest.approx(accuracies, abs=1e-6)
    (evaluation,) = [row for row in rows(straight / "metrics.jsonl") if "val_loss" in row]
    assert (evaluation["step"], evaluation["extra"]) == (STEPS, 2.0)
    assert evaluation["val_loss"] < found[-1]["loss"] * 2


def test_the_folder_is_read_by_the_tools_of_runs(straight: Path) -> None:
    state = read_state(RunFolder(straight))
    assert (state.kind, state.step, state.num_steps) == ("ended", STEPS, STEPS)
    assert events(straight)[0] == "start"
    assert events(straight)[-1] == "end"
    config = tomllib.loads((straight / "config.toml").read_text())
    assert config["config"] == {"lr": 0.01, "net.width": 16, "layers": ["linear", "relu"], "seed": "None"}
    assert config["run"]["command"].endswith(f"{SCRIPT} {straight}")
    assert "ended" in run("runs", str(straight)).require(0).out
    assert "finished" in run("watch", str(straight), "--once").require(0).out
    run("report", str(straight), "--out", str(straight.parent / "page.html")).require(0)
    said = run("resume", str(straight)).require(0).out
    assert f"{SCRIPT} {straight}\n" in said
    assert f"\npaceline train --nproc 2 --out {straight} -- {SCRIPT} {straight}\n" in said
    said = run("export", str(straight), "--out", str(straight.parent / "exported")).require(2).err
    assert "run of a script" in said


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_one_that_was_killed_continues_by_the_same_command(straight: Path, tmp_path: Path, ranks: int) -> None:
    """Mutations: a restored run forgets its samples; rows after the checkpoint stay, and are there twice."""
    first, *_ = train(tmp_path / "run", "kill", ranks=ranks)
    assert first.status == -9
    assert list_steps(tmp_path / "run/checkpoints") == [4]
    for ended in train(tmp_path / "run", ranks=ranks):
        ended.require(0)
    wanted, found = training_rows(straight), training_rows(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for name in ("loss", "accuracy", "tokens", "lr"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in wanted], abs=1e-6)
    assert "resume" in events(tmp_path / "run")
    assert list_steps(tmp_path / "run/checkpoints")[-1] == STEPS


def test_one_that_is_asked_to_stop_saves_and_exits_with_75(straight: Path, tmp_path: Path) -> None:
    """Mutation: after a stop the script continues with what follows its loop."""
    for ended in train(tmp_path / "run", "stop", ranks=2):
        ended.require(75)
    state = read_state(RunFolder(tmp_path / "run"))
    assert (state.kind, state.why, state.step) == (
        "stopped",
        "SIGTERM on rank 1",
        7,
    )  # the ranks agree in the next step
    assert list_steps(tmp_path / "run/checkpoints")[-1] == 7
    assert not [row for row in rows(tmp_path / "run/metrics.jsonl") if "val_loss" in row]
    (ended,) = train(tmp_path / "run")
    ended.require(0)
    found = [row["loss"] for row in training_rows(tmp_path / "run")]
    assert found == pytest.approx([row["loss"] for row in training_rows(straight)], abs=1e-6)


def test_one_whose_checkpoints_are_gone_does_not_begin_again(straight: Path, tmp_path: Path) -> None:
    """Mutation: it begins again at step 0, and its rows are erased."""
    shutil.copytree(straight, tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run/checkpoints")
    (ended,) = train(tmp_path / "run")
    assert "is its disk mounted? Nothing was changed" in ended.require(1).err
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("where", ["exit", "exit outside"])
def test_a_script_that_exits_early_is_not_called_complete(tmp_path: Path, where: str) -> None:
    """Mutations: every script that leaves the world has reached its horizon; at exit the status is not known."""
    (ended,) = train(tmp_path / "run", where)
    ended.require(3)
    state = read_state(RunFolder(tmp_path / "run"))
    assert (state.kind, state.why, state.step) == ("stopped", "exit status 3", 6)
    assert list_steps(tmp_path / "run/checkpoints")[-1] == 6


@pytest.mark.long
def test_a_mistake_is_recorded_and_shown_by_its_rank(tmp_path: Path) -> None:
    """Mutation: a failure is recorded after the message, when a launcher has ended the rank."""
    (ended,) = train(tmp_path / "run", "raise")
    assert "ValueError: a mistake of the script" in ended.require(1).err
    state = read_state(RunFolder(tmp_path / "run"))
    assert (state.kind, state.why) == ("failed", "a mistake of the script")
    assert "in strike" in (tmp_path / "run/ranks/rank-00000.log").read_text()
    (ended,) = train(tmp_path / "name", "name")
    assert "run.log was given loss, which a row has already" in ended.require(2).err


@pytest.mark.long
def test_a_slow_rank_and_a_hanging_one_are_named(tmp_path: Path) -> None:
    for ended in train(tmp_path / "slow", "slow", ranks=2):
        ended.require(0)
    named = [event for event in rows(tmp_path / "slow/events.jsonl") if event["event"] == "straggler"]
    assert 1 in [event["rank"] for event in named], "beside others, on a busy machine"
    for ended in train(tmp_path / "hang", "hang", ranks=2):
        ended.require(1)
    (hang,) = [event for event in rows(tmp_path / "hang/events.jsonl") if event["event"] == "hang"]
    assert hang["ranks"] == [1]
    assert " strike" in hang["message"], "with its stack"


def test_a_tracker_gets_the_numbers_of_a_script(straight: Path) -> None:
    points, _ = Reader(RunFolder(straight), Position(), can_forget=False).read(Position())
    values = [name for point in points for name in point.values]
    assert [values.count(name) for name in ("train/loss", "train/accuracy", "eval/extra")] == [STEPS, STEPS, 1]


def test_what_is_no_run_of_a_script_is_refused(tmp_path: Path) -> None:
    """Mutation: a script writes its rows into a trainer's run."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("words")
    with pytest.raises(UserError, match=r"holds files of something else \(thesis.txt\)"):
        check_folder(RunFolder(tmp_path / "full"))
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/config.toml").write_text("[train]\nsteps = 4\n")
    with pytest.raises(UserError, match="is a run of `paceline train`"):
        check_folder(RunFolder(tmp_path / "trained"))
    (tmp_path / "trained/config.toml").write_text("[run]\nunit = 'samples'\n")
    check_folder(RunFolder(tmp_path / "trained"))
    check_folder(RunFolder(tmp_path / "new"))


def twice(world: World, folder: Path) -> list[int]:
    """A notebook's cell that runs again, and did not save: the steps made before and after it."""
    net = nn.Linear(2, 1)
    replica = Replica(net, torch.optim.SGD(net.parameters(), 0.1), world)
    made = []
    for _ in range(2):
        script = Run(folder, net=replica)
        for step in script.steps(TensorDataset(torch.ones(8, 2)), batch_size=4, max_steps=replica.num_steps + 2):
            for (x,) in step:
                step.backward(net(x).mean())
            step.finish()
        made.append(replica.num_steps)
    for _ in range(2):  # a loop of one's own
        result = replica.train(torch.ones(4, 2), lambda x: net(x).mean())
        script.log(twice=2.0)
        script.record(result)
    script.save()
    script.checkpoints.finish()
    return made


def unfrozen(world: World, folder: Path) -> tuple[list[int], bool]:
    """A script that unfreezes its body, and makes replica and run again without a save. Returns the steps made before
    and after it, and whether the weights are as they were."""
    body, head = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1)
    net = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    made, before = [], torch.zeros(1, 2)
    for is_later in (False, True):
        if is_later:
            before = head.weight.detach().clone()
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters())})
        replica = Replica(net, optimizer, world)
        script = Run(folder, net=replica)
        made.append(replica.num_steps)
        is_kept = torch.equal(head.weight, before)
        for step in script.steps(TensorDataset(torch.ones(8, 2)), batch_size=4, max_steps=replica.num_steps + 3):
            for (x,) in step:
                step.backward(net(x).mean())
            step.finish()
            if step.number == 2:
                script.save()
        made.append(replica.num_steps)
    return made, is_kept


def sweep(world: World, folder: Path) -> list[Any]:
    """Two runs, one after the other; and in the body of each step what is logged, saved and evaluated in odd orders."""
    found: list[Any] = []
    for name in ("first", "second"):
        net = nn.Linear(2, 1)
        replica = Replica(net, torch.optim.SGD(net.parameters(), 0.1), world)
        script = Run(folder / name, keep_best=True, net=replica)
        if world.is_main:
            found.append(events(folder / "first")[-1])
        for step in script.steps(TensorDataset(torch.ones(10, 2)), batch_size=4, epochs=2):
            for (x,) in step:
                step.backward(net(x).mean())
            step.finish()
            if world.is_main:
                script.log(early=1.0)
            script.log(rank=world.rank, nan=math.nan, ends=-math.inf if world.is_main else math.inf)
            if step.number == 1:
                script.evaluated(best=5)  # its row comes before the step's
            if step.number == 3:
                script.record(step.result)
            if step.number % 2 == 0:
                script.save()
                script.evaluated(loss=abs(step.number - 4.0), best=math.inf)
                with warnings.catch_warnings(record=True) as caught:
                    script.log(late=1.0)
                found.append(len(caught))
            if step.number == 5:
                break
        with pytest.raises(UserError, match="given rank, a Tensor of shape"):
            script.log(rank=torch.ones(3))
        with pytest.raises(UserError, match="given tokens, which its row has"):
            script.evaluated(tokens=3)
    script.save()
    script.checkpoints.finish()
    return found


def test_rows_are_whole_in_whatever_order_the_body_calls(tmp_path: Path) -> None:
    """Mutations: a row comes after its step's save, and a kill between them loses it; an evaluation before the row
    replaces it on the page; the loss of a step that was saved before is not compared; NaN, which JSON lacks; infinities
    that cannot be added; a run continues while the script makes the next one."""
    (found, other) = run_ranks(sweep, 2, tmp_path)
    assert found == ["start", 1, 1, "end", 1, 1]
    assert other == [0] * 4  # rank 0 warns
    for name in ("first", "second"):
        written = rows(tmp_path / name / "metrics.jsonl")
        assert [row["step"] for row in written] == [1, 1, 2, 2, 3, 4, 4, 5]
        trained = [row for row in written if "loss" in row]
        assert [(row["early"], row["rank"], row["nan"], row["ends"]) for row in trained] == [(1.0, 0.5, None, None)] * 5
        assert not [row for row in written if "late" in row]
        assert [(row["val_loss"], row["best"], row["tokens"]) for row in written if "val_loss" in row] == [
            (None, 5.0, 4),
            (2.0, None, 8),
            (0.0, None, 14),
        ]
        assert (tmp_path / name / "checkpoints/best").read_text() == "step-00000004\n"
        shown = view.Run(tmp_path / name)
        shown.read()
        assert (len(shown.steps), shown.evaluations["val_loss"].tolist()[1:]) == (5, [2.0, 0.0])
        assert [row.get("num_steps") for row in trained] == [6, 6, None, 6, 6], "the third by `record`"
        assert "logged num_steps" not in shown.steps.logged


class Stream(IterableDataset[torch.Tensor]):
    """Ten samples, whose number nobody knows."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(20.0).view(10, 2) / 20)


def two_nets(world: World, folder: Path) -> list[float]:
    """Two replicas in one run, the second with a frozen layer that no checkpoint has; then both restored."""
    found = []
    for epochs in (1, 2):
        torch.manual_seed(0)
        first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        second[0].requires_grad_(False)
        tells, makes = (
            Replica(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1), world)
            for net in (first, second)
        )
        script = Run(folder, frozen=False, tells=tells, makes=makes)
        found.append(float(second[1].weight.detach().sum()))
        for step in script.steps(DataLoader(Stream(), batch_size=4), epochs=epochs):
            for x in step:
                step.backward(first(x).square().mean())
            step.finish()
            update = makes.step(torch.ones(2, 2))
            for x in update:
                update.backward(second(x).square().mean())
            script.log(made=update.finish().loss)
        script.save()
        script.checkpoints.finish()
        found.append(float(second[1].weight.detach().sum()))
    return found


def test_a_run_of_two_models_and_of_unknown_length(tmp_path: Path) -> None:
    """Mutations: frozen weights are saved though they need not be; a number of steps is made up."""
    (made, *_) = run_ranks(two_nets, 2, tmp_path / "run")
    assert made[0] != made[1] == made[2] != made[3], "the second model is restored, too"
    trained = training_rows(tmp_path / "run")
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert all("num_steps" not in row for row in trained)
    assert read_state(RunFolder(tmp_path / "run")).num_steps is None
    shown = view.Run(tmp_path / "run")
    shown.read()
    assert shown.steps["logged made"].tolist() == [row["made"] for row in trained]
    assert sorted(load_weights(tmp_path / "run", "makes")) == ["1.bias", "1.weight"]
    assert sorted(load_weights(tmp_path / "run", "tells")) == ["bias", "weight"]


def test_a_cell_that_runs_again_makes_the_run_again(tmp_path: Path) -> None:
    """Mutation: the earlier object keeps the lock of the folder."""
    assert run_ranks(twice, 1, tmp_path / "run") == [[2, 4]]
    found = training_rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row.get("twice") for row in found] == [None] * 4 + [2.0] * 2


def test_a_run_made_again_after_unfreezing_goes_on_where_it_is(tmp_path: Path) -> None:
    """Finds: it goes back to the save before, without a word, and drops the rows of what followed."""
    assert run_ranks(unfrozen, 2, tmp_path / "run") == [([0, 3, 3, 6], True)] * 2
    found = training_rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in found] == [4, 8, 12, 16, 20, 24]


def evaluated(world: World, folder: Path) -> list[Any]:
    """Evaluations whose loss rank 0 alone has, or another rank has not; what each rank then saves with the step."""
    net = nn.Linear(2, 1)
    replica = Replica(net, torch.optim.SGD(net.parameters(), 0.1), world)
    script = Run(folder, net=replica)
    replica.train(torch.ones(4, 2), lambda x: net(x).mean())
    found = []
    for of_rank_0, of_others in ((0.5, None), (0.25, math.nan), (math.nan, 0.5)):
        script.evaluated(loss=of_rank_0 if world.is_main else of_others)
        found.append(script._val_loss())
    return found


def test_all_ranks_decide_by_the_loss_of_rank_0_what_to_save(tmp_path: Path) -> None:
    """Mutation: at the end rank 0 saves the loss of a step, and the others, which have none, do not."""
    assert run_ranks(evaluated, 2, tmp_path) == [[0.5, 0.25, None]] * 2


CELLS = """
import gc, sys, weakref, torch, paceline

def cell(folder):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    replica = paceline.Replica(net, optimizer, paceline.join(paceline.ParallelConfig(device="cpu")))
    run = paceline.Run(folder, net=replica)
    for step in run.steps(torch.ones(8, 2), batch_size=4, max_steps=replica.num_steps + 2):
        for x in step:
            step.backward(net(x).mean())
        step.finish()
    return [weakref.ref(each) for each in (net, optimizer, replica, run, run.checkpoints)]

first, again = cell("one"), cell("one")
cell("other")
gc.collect()
print([[type(each()).__name__ for each in left if each() is not None] for left in (first, again)])
"""


def test_a_run_that_another_one_replaced_is_freed(tmp_path: Path) -> None:
    """Mutation: what is called when the world is left keeps all runs, with their models and optimizer states."""
    ended = subprocess.run([sys.executable, "-c", CELLS], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "[[], []]" in ended.stdout.splitlines()
    for name in ("one", "other"):
        assert events(tmp_path / name)[-1] == "end"


AT_EXIT = """
import atexit, threading, torch, paceline
from paceline.replica.joining import at_leaving

net = torch.nn.Linear(2, 1)
world = paceline.join(paceline.ParallelConfig(device="cpu"))
replica = paceline.Replica(net, torch.optim.AdamW(net.parameters()), world)
run = paceline.Run("run", net=replica)
for step in run.steps(torch.ones(8, 2), batch_size=4, max_steps=2):
    for x in step:
        step.backward(net(x).mean())
    step.finish()

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
"""


def test_a_run_is_saved_at_the_end_of_a_script_where_no_thread_starts(tmp_path: Path) -> None:
    """Python 3.12 starts none during exit. Mutation: the save is lost, and the exit status 1."""
    script = f"{AT_EXIT}\natexit.register(lambda: setattr(threading.Thread, 'start', refuse))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert events(tmp_path / "run")[-1] == "end"


def test_an_error_at_the_end_of_a_script_has_its_traceback(tmp_path: Path) -> None:
    """Finds: exit status 1 without a word."""
    script = f"{AT_EXIT}\nat_leaving(lambda: 1 / 0)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.count("ZeroDivisionError") == 1


def test_arguments_of_a_run_are_used_or_refused(world: World, tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    replica = Replica(net, torch.optim.SGD(net.parameters(), 0.1), world)
    with pytest.raises(UserError, match="every is 0; it is a number of steps for each row"):
        Run(tmp_path, every=0, net=replica)
    script, data = Run(tmp_path, net=replica), TensorDataset(torch.ones(8, 2))
    with pytest.raises(UserError, match="batch_size is 0"):
        next(script.steps(data, epochs=1, batch_size=0))
    with pytest.raises(UserError, match=r"run\.steps hears signals in any case: leave stop_on_signals= out"):
        next(script.steps(data, stop_on_signals=True, batch_size=4))


class SignDescent:
    """An optimizer without a learning rate."""

    def __init__(self, parameters: Any):
        self.param_groups, self.state = [{"params": list(parameters)}], {}

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad.sign(), alpha=0.01)


def test_a_step_of_an_optimizer_without_a_learning_rate_is_recorded(world: World, tmp_path: Path) -> None:
    """Finds: `run.record` ends in a KeyError, where `run.steps` records 0."""
    net = nn.Linear(2, 1)
    replica = Replica(net, SignDescent(net.parameters()), world)
    script = Run(tmp_path, net=replica)
    script.record(replica.train(torch.ones(4, 2), lambda x: net(x).mean()))
    script.save()  # writes the row
    assert [row["lr"] for row in training_rows(tmp_path)] == [0.0]


def test_numbers_of_numpy_and_torch_are_recorded(world: World, tmp_path: Path) -> None:
    """Finds: a TypeError of JSON, in a later step, where the rows are written."""
    net = nn.Linear(2, 1)
    replica = Replica(net, torch.optim.SGD(net.parameters(), 0.1), world)
    script = Run(tmp_path, net=replica)
    for lr in (np.float32(0.5), torch.tensor(0.25)):
        script.record(replica.train(torch.ones(4, 2), lambda x: net(x).mean()), lr=lr, num_steps=np.int64(9))
    for step in script.steps(torch.ones(8, 2), batch_size=4, max_steps=np.int64(3)):
        for x in step:
            step.backward(net(x).mean())
        step.finish()
    assert [row["lr"] for row in training_rows(tmp_path)] == [0.5, 0.25, 0.1]
    assert [row["num_steps"] for row in training_rows(tmp_path)] == [9, 9, 3]
    for step in script.steps(torch.ones(8, 2), batch_size=4, max_steps=math.inf):
        step.backward(net(next(iter(step))).mean())
        step.finish()
        break
    script.save()
    assert "num_steps" not in training_rows(tmp_path)[-1], "the end is not known"


def test_a_second_loop_by_epochs_adds_its_steps(world: World, tmp_path: Path) -> None:
    """Mutation: the run is at step 5 of 2."""
    net = nn.Linear(2, 1)
    script = Run(tmp_path, net=Replica(net, torch.optim.SGD(net.parameters(), 0.1), world))
    for num_samples, drop_last in ((10, False), (9, True)):
        data = TensorDataset(torch.ones(num_samples, 2))
        for step in script.steps(data, epochs=1, batch_size=4, drop_last=drop_last):
            for (x,) in step:
                step.backward(net(x).mean())
            step.finish()
    assert [row["num_steps"] for row in training_rows(tmp_path)] == [3, 3, 3, 5, 5]


def test_the_command_of_a_script_is_executed_by_its_owner_alone(tmp_path: Path) -> None:
    """Mutations: the command of somebody else's folder runs; it runs in another directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/hello.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:], flush=True)")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)

    def resume(script: dict[str, str], *options: str) -> Ended:
        (folder / "config.toml").write_text(to_toml({"run": script}))
        (folder / "config.toml").chmod(0o600)
        return run("resume", str(folder), *options)

    script = {"command": "python hello.py 'a b'", "directory": str(tmp_path / "home")}
    assert resume(script, "--run").require(0).out == f"{tmp_path / 'home'} ['a b']\n"
    assert "has its settings" in resume(script, "--run", "--step", "4").require(2).err
    assert "execute its command" in resume(script, "--help").require(0).out
    assert "run the cell again" in resume({"command": ""}).require(2).err
    assert "cannot execute python hello.py" in resume(script | {"directory": "/gone"}, "--run").require(2).err
    folder.chmod(0o770)
    assert "others may write it" in resume(script, "--run").require(2).err
    folder.chmod(0o700)
    os.chown(folder / "config.toml", 12345, -1)
    assert "is another user's" in run("resume", str(folder), "--run").require(2).err


def test_settings_that_toml_lacks_are_texts(tmp_path: Path) -> None:
    values = {"a b": float("nan"), "path": tmp_path, "deep": {"er": [1, None, "x\x7f"]}, "on": True, "quote": 'a"b'}
    document = tomllib.loads(to_toml({"config": values}))["config"]
    assert document == {
        "a b": "nan",
        "path": str(tmp_path),
        "deep.er": [1, "None", "x\x7f"],
        "on": True,
        "quote": 'a"b',
    }
