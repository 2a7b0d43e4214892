"""What a script saved comes back: at any world size and strategy the same curve, at its own to the bit; or not at all,
and then it is said."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Call, run_calls, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.base.errors import RunError, UserError
from paceline.checkpoint.steps import list_steps
from paceline.replica.checkpoints import Checkpoints, load_weights
from paceline.replica.replica import Replica
from paceline.replica.share import share
from paceline.sync.replicas import overall
from paceline.world.runtime import World

HALF = 3  # steps before the save, and after it
STRATEGIES = ("ddp", "zero", "fsdp", "local")


class Net(nn.Module):
    """Tied weights, batch statistics that depend on data alone, a table that is not floating."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("allowed", torch.tensor([True, False, True]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.tanh(self.inner(self.embed(tokens[:, :-1]))))
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def optimizers(kind: str, net: Net) -> list[torch.optim.Optimizer]:
    if kind == "sgd":
        return [torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)]
    if kind == "adamw":
        groups = [
            {"params": [p for p in net.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)
        ]
        return [torch.optim.AdamW(groups, lr=0.02)]
    rest = [p for p in net.parameters() if p is not net.inner.weight]
    return [torch.optim.Muon([net.inner.weight], lr=0.02), torch.optim.NAdam(rest, lr=0.02)]


@dataclass
class Script:
    """All that is saved, and the lines that a script has."""

    world: World
    kind: str
    strategy: Any
    dropout: float = 0.0

    def __post_init__(self) -> None:
        net = Net(self.dropout)
        made = optimizers(self.kind, net)
        sizes = {"bucket_mb": 100 / 2**20, "sync_every": 2 * (self.strategy == "local")}
        self.replica = Replica(net, made, self.world, strategy=self.strategy, **sizes)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(made[0], [2, 4, 5], 0.5)
        data = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0))
        self.batches = share(data, self.world, batch_size=6, micro_batch_size=1, seed=3)
        self.noted: dict[str, Any] = {}
        self.state = {"net": self.replica, "schedule": self.schedule, "batches": self.batches, "noted": self.noted}

    def train(self, steps: int = HALF) -> list[float]:
        losses = []
        for step in self.replica.steps(self.batches, max_steps=self.replica.num_steps + steps):
            for tokens in step:
                step.backward(self.replica.model(tokens))
            losses.append(step.finish(max_norm=1.0).loss)
            self.schedule.step()
        return losses

    def checkpoints(self, folder: Path | str, **settings: Any) -> Checkpoints:
        return Checkpoints(folder, **self.state, **settings)

    def digest(self) -> str:
        return overall(self.replica.state_dict())


def first_half(world: World, folder: Path) -> dict[str, Any]:
    """Saves halfway, and goes on: (losses after the save, digest at the end) of the run that nobody interrupts."""
    found = {}
    for strategy in STRATEGIES:
        script = Script(world, "muon", strategy)
        script.train()
        script.noted.update(step=3, by="hand")
        found[strategy] = saved_and_continued(script, folder / strategy)
    script = Script(world, "adamw", "ddp", dropout=0.5)
    torch.manual_seed(100 + world.rank)
    script.train()
    return {**found, "dropout": saved_and_continued(script, folder / "dropout")}


def saved_and_continued(script: Script, path: Path) -> tuple[list[float], str]:
    checkpoints = script.checkpoints(path)
    checkpoints.save()
    found = script.train(), script.digest()
    checkpoints._end()  # as the end of the script: other ranks come to the folder
    return found


def second_half(world: World, folder: Path) -> dict[tuple[str, str], Any]:
    """The same of runs that are restored: by the strategy that saved them, and by the next one."""
    pairs = [(saved, STRATEGIES[(n + more) % 4]) for n, saved in enumerate(STRATEGIES) for more in (0, 1)]
    return {pair: restored(world, folder / pair[0], pair[1]) for pair in pairs}


def with_dropout(world: World, folder: Path) -> Any:
    script = Script(world, "adamw", "ddp", dropout=0.5)
    script.checkpoints(folder / "dropout").restore()
    return script.train(), script.digest()


def restored(world: World, path: Path, strategy: str) -> Any:
    script = Script(world, "muon", strategy)
    checkpoints = script.checkpoints(path)
    assert checkpoints.restore() == 3
    assert script.noted == {"step": 3, "by": "hand"}
    assert (script.replica.num_steps, script.schedule.last_epoch, script.batches.step) == (3, 3, 3)
    checkpoints._end()  # as the end of the script: other ranks come to the folder
    return script.train(), script.digest()


@pytest.mark.long
def test_any_world_and_strategy_goes_on(tmp_path: Path) -> None:
    """Muon and NAdam, also with fsdp and local; other optimizers, ddp and zero are in fuzz.py."""
    calls = {each.__name__: Call(each, tmp_path) for each in (first_half, second_half, with_dropout)}
    two = run_calls(calls, 2)
    straight = two["first_half"][0]
    for found in (*two["second_half"], *run_ranks(second_half, 3, tmp_path)):
        for (saved, strategy), (losses, _) in found.items():
            assert losses == pytest.approx(straight[saved][0], abs=0.2 if "local" in (saved, strategy) else 2e-6)
    for strategy in STRATEGIES:
        assert two["second_half"][0][strategy, strategy] == straight[strategy], "not to the bit"
    assert two["with_dropout"] == [rank["dropout"] for rank in two["first_half"]]


def saved_where_rank_1_differs(world: World, folder: str) -> list[str]:
    """What is said where weights differ, then where another object does, by ranks that are equal again, and where one
    has another tensor."""
    model = nn.Linear(4, 2)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    average = {name: torch.zeros(3) for name in sorted(("weight", "bias"), reverse=world.is_main)}
    checkpoints = Checkpoints(folder, net=replica, average=average)
    replica.train(torch.ones(2, 4), lambda x: model(x).square().mean())
    said = []
    for tensor in (model.bias.data, average["weight"], torch.zeros(2)):
        before = tensor.clone()
        tensor[1] += world.rank
        try:
            checkpoints.save()
            checkpoints.finish()
            said.append("saved")
        except RunError as error:
            said.append(str(error))
        tensor.copy_(before)
    average |= {"of rank 1": torch.zeros(2)} if world.rank else {}
    with pytest.raises(RunError, match="nothing is saved: ranks have different tensors"):
        checkpoints.save()
    return said


class RefusesOnRank1:
    """An object whose `load_state_dict` fails on rank 1, as where its memory is full."""

    def __init__(self, rank: int):
        self._rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._rank == 1:
            raise RuntimeError("no memory")


def restored_where_rank_1_fails(world: World, folder: Path) -> tuple[str, str]:
    model = nn.Linear(4, 2)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    checkpoints = Checkpoints(folder, net=replica, thing=RefusesOnRank1(world.rank))
    checkpoints.save()
    with pytest.raises(UserError) as refused:
        checkpoints.restore()
    return str(refused.value), refused.value.reach


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, list[Any]]:
    """What functions of this file return on each of two ranks."""
    calls = {
        "one rank differs": Call(saved_where_rank_1_differs, str(folder / "differs")),
        "restored amid training": Call(losses_around_a_restore, str(folder / "net")),
        "finished": Call(save_finish_load, folder / "finished", False),
        "failed": Call(save_finish_load, folder / "failed", True),
        "one rank refuses": Call(restored_where_rank_1_fails, folder / "refused"),
    }
    return run_calls(calls, 2)


def test_where_ranks_differ_nothing_is_saved_and_it_is_said(two_ranks: dict[str, list[Any]], folder: Path) -> None:
    weights, others, equal = zip(*two_ranks["one rank differs"], strict=True)
    assert all(
        "replicas are not equal, so nothing is saved: net:bias has 2 different values" in said for said in weights
    )
    assert all("nothing is saved: average.weight has 2 different values" in said for said in others)
    assert equal == ("saved", "saved")
    assert list_steps(folder / "differs/checkpoints") == [1]


def test_all_ranks_say_what_one_object_does_not_take_back(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: an error of one rank that only another one would print, so that nobody does."""
    (said, reach), other = two_ranks["one rank refuses"]
    assert said.endswith("thing does not take back what was saved of it: no memory")
    assert other == (said, reach) == (said, "world")


# ---- one process ----


def kept(world: World, folder: Path, steps: int = 2, **settings: Any) -> Script:
    """A script that saved after each of its steps, and ended."""
    script = Script(world, "adamw", "ddp")
    checkpoints = script.checkpoints(folder, **settings)
    for _ in range(steps):
        script.train(1)
        checkpoints.save()
    checkpoints._end()
    return script


def steps_in(folder: Path) -> list[int]:
    return list_steps(folder / "checkpoints")


def test_nothing_saved_yet_and_saved_before_the_first_step(world: World, tmp_path: Path) -> None:
    script = Script(world, "adamw", "ddp")
    checkpoints = script.checkpoints(tmp_path / "run")
    assert checkpoints.restore() is None
    for at in ([1, 2], [3]):  # no step in between
        script.noted["at"] = at
        checkpoints.save()
    checkpoints._end()
    other = Script(world, "adamw", "ddp")
    assert other.checkpoints(tmp_path / "run").restore() == 0
    assert other.noted == {"at": [3]}
    assert other.train() == script.train()


def test_an_old_folder_is_not_written_to_before_it_is_restored(world: World, tmp_path: Path) -> None:
    """S1: what was just saved was pruned, and `latest` named a folder that was not there."""
    kept(world, tmp_path, 4)
    assert steps_in(tmp_path) == [3, 4]
    again = Script(world, "adamw", "ddp")
    checkpoints = again.checkpoints(tmp_path)
    again.train(1)
    for refused in (lambda: checkpoints.save(), lambda: checkpoints.save_every(1000)):
        with pytest.raises(UserError, match=r"up to step 4.*has not restored.*call checkpoints.restore\(\)"):
            refused()
    assert steps_in(tmp_path) == [3, 4]
    assert checkpoints.restore() == 4
    assert checkpoints.save_every(1)
    assert not checkpoints.save_every(3)
    checkpoints._end()


def test_checkpoints_that_are_made_in_the_middle_of_a_step_save_from_its_end_on(world: World, tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    for step in replica.steps(torch.ones(8, 4), batch_size=4):
        if step.number == 1:
            checkpoints = Checkpoints(tmp_path, net=replica)
            with pytest.raises(UserError, match="this step began before"):
                checkpoints.save()
        for x in step:
            step.backward(model(x).mean())
        step.finish()
        checkpoints.save()
    checkpoints._end()
    assert steps_in(tmp_path) == [1, 2]


def test_a_restore_waits_for_the_save_that_is_under_way(world: World, tmp_path: Path) -> None:
    script = Script(world, "adamw", "ddp")
    checkpoints = script.checkpoints(tmp_path)
    script.train(1)
    checkpoints.before_publishing = lambda: time.sleep(0.2)
    checkpoints.save()
    assert checkpoints.restore() == 1


def test_an_older_step_goes_on_and_what_it_saves_stays(world: World, tmp_path: Path) -> None:
    """S1: checkpoints of another course of the run, with higher steps, pushed out those of this one."""
    kept(world, tmp_path, 4, keep=3)
    flip(next((tmp_path / "checkpoints/step-00000004").glob("weights*")))
    script = Script(world, "adamw", "ddp")
    checkpoints = script.checkpoints(tmp_path)
    assert checkpoints.restore() == 3
    script.train(2)
    checkpoints.save()
    checkpoints._end()
    assert (tmp_path / "checkpoints/latest").read_text().strip() == "step-00000005"
    assert steps_in(tmp_path) == [3, 5]


def test_how_many_stay_is_said_by_arguments(world: World, tmp_path: Path) -> None:
    """S3: two stayed, always, and nobody said so."""
    script = Script(world, "sgd", "ddp")
    checkpoints = script.checkpoints(tmp_path, keep=2, keep_every=4, keep_best=True)
    for step in range(1, 9):
        script.train(1)
        checkpoints.save(val_loss=abs(step - 3.1))
    checkpoints._end()
    assert steps_in(tmp_path) == [3, 4, 7, 8]
    assert (tmp_path / "checkpoints/best").read_text().strip() == "step-00000003"
    with pytest.raises(UserError, match="keep is 1"):
        script.checkpoints(tmp_path, keep=1)


def test_a_step_that_is_saved_twice_has_what_was_given_last(world: World, tmp_path: Path) -> None:
    """With other weights it is written again; with the same it learns its validation loss, and nothing is written."""
    script = Script(world, "sgd", "ddp")
    checkpoints = script.checkpoints(tmp_path, keep_best=True)
    for _ in range(2):
        script.train(1)
        checkpoints.save()
    checkpoints.finish()
    written = (tmp_path / "checkpoints/step-00000002/manifest.json").stat().st_mtime_ns
    checkpoints.save(val_loss=torch.tensor(1.5))
    checkpoints.finish()
    assert (tmp_path / "checkpoints/step-00000002/manifest.json").stat().st_mtime_ns == written
    assert (tmp_path / "checkpoints/best").read_text().strip() == "step-00000002"
    with torch.no_grad():
        script.replica.model.inner.weight.add_(1)
    checkpoints.save()
    checkpoints._end()
    torch.testing.assert_close(load_weights(tmp_path)["inner.weight"], script.replica.state_dict()["inner.weight"])


def test_a_damaged_newest_is_passed_over_and_none_whole_changes_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(world, tmp_path)
    newest, older = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    flip(next(newest.glob("weights*")))
    script = Script(world, "adamw", "ddp")
    assert script.checkpoints(tmp_path).restore() == 1
    assert script.replica.num_steps == 1
    assert "passed over a damaged checkpoint: step-00000002" in capsys.readouterr().out
    flip(next(older.glob("optimizer*")))
    script = Script(world, "adamw", "ddp")
    before = script.digest()
    with pytest.raises(RunError, match=r"no checkpoint in .* is complete, nothing was changed"):
        script.checkpoints(tmp_path).restore()
    assert script.digest() == before
    assert script.batches.step == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_what_does_not_fit_is_refused_and_changes_nothing(world: World, tmp_path: Path) -> None:
    kept(world, tmp_path)

    def refused(script: Script, match: str, **more: Any) -> None:
        before = script.digest()
        with pytest.raises(UserError, match=match):
            Checkpoints(tmp_path, **(script.state | more)).restore()
        assert script.digest() == before

    refused(Script(world, "sgd", "ddp"), r"has the state of \['AdamW'\], and here are \['SGD'\]")
    refused(Script(world, "adamw", "ddp"), "was saved without other", other=nn.Linear(1, 1))
    refused(Script(world, "adamw", "ddp"), "no replica second", second=Script(world, "adamw", "ddp").replica)
    refused(Script(world, "adamw", "ddp"), "batches is a int, which has no state_dict", batches=3)
    script = Script(world, "adamw", "ddp")
    script.replica.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    refused(script, "has 2 parameter groups of AdamW, and here are 3")
    script = Script(world, "adamw", "ddp")
    script.replica.model.add_module("more", nn.Linear(2, 2))
    refused(script, r"another model: more.weight is not there in it and \[2, 2\] here")
    with pytest.raises(UserError, match="schedule does not take back what was saved of it") as refused:
        Checkpoints(tmp_path, **(Script(world, "adamw", "ddp").state | {"schedule": nn.Linear(1, 1)})).restore()
    assert refused.value.reach == "world"


ELSEWHERE = """
import os, torch, paceline
net = torch.nn.Linear(2, 1)
world = paceline.join(paceline.ParallelConfig(device="cpu"))
replica = paceline.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world)
checkpoints = paceline.Checkpoints("run", net=replica)
replica.train(torch.ones(4, 2), lambda x: net(x).mean())
os.chdir("/")
checkpoints.save()
"""


def test_a_folder_is_the_one_that_it_was_when_it_was_named(tmp_path: Path) -> None:
    """Finds: a script that changes its directory, and whose last checkpoint is nowhere, with exit status 0."""
    ended = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(load_weights(tmp_path / "run")) == ["bias", "weight"]


def test_values_that_are_not_json_are_refused_with_the_line(world: World, tmp_path: Path) -> None:
    script = Script(world, "sgd", "ddp")
    for value in ({1, 2}, object(), {"deep": [b"bytes"]}):
        checkpoints = script.checkpoints(tmp_path, metric={"value": value})
        with pytest.raises(UserError, match=r"test_checkpoints.py:\d+: metric cannot be kept"):
            checkpoints.save()
    assert not (tmp_path / "checkpoints").exists()
    assert len(script.replica.copies) == 1, "earlier ones are kept alive"


class StackingMuon(torch.optim.Optimizer):
    """As autoresearch's: the momentum of a group's matrices in one tensor, under the first of them; a step by group."""

    def __init__(self, parameters: Any, lr: float = 0.02):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = group["params"]
            state = self.state[matrices[0]]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            state.setdefault("momentum", torch.zeros_like(gradients)).lerp_(gradients, 0.1)
            state["norm"] = state.get("norm", 0.0) + float(gradients.norm())
            for matrix, update in zip(matrices, state["momentum"], strict=True):
                matrix.sub_(update, alpha=group["lr"] / (1 + state["norm"]))


def stacked(world: World, seed: int, make: Any, strategy: Any = "ddp") -> Replica:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    return Replica(model, make(model.parameters()), world, strategy=strategy)


def stacked_steps(replica: Replica) -> list[float]:
    return [replica.train(torch.ones(2, 3) * k, lambda x: replica.model(x).square().mean()).loss for k in range(3)]


@pytest.mark.parametrize("make", [torch.optim.Adafactor, StackingMuon])
def test_state_of_other_shapes_and_by_group_is_kept(world: World, tmp_path: Path, make: Any) -> None:
    """D7: refused at the first save, after hours."""
    one = stacked(world, 0, make)
    stacked_steps(one)
    checkpoints = Checkpoints(tmp_path, net=one)
    checkpoints.save()
    wanted = stacked_steps(one)
    other = stacked(world, 1, make)
    Checkpoints(tmp_path, net=other).restore()
    assert stacked_steps(other) == wanted


class OfNumpy(torch.optim.Optimizer):
    """Its settings are numbers of numpy and tensors; its state has the name of one of strategy local's."""

    def __init__(self, parameters: Any, lr: float = 0.02, slowness: float = 0.9):
        super().__init__(parameters, {"lr": np.float32(lr), "betas": (torch.tensor(slowness), np.float64(0.5))})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            slowness, part = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0.1) + 1e-9  # more bits than float32 has
                state["outer"] = state.get("outer", 0.0) * slowness + parameter.grad * float(part)
                parameter.sub_(state["outer"], alpha=float(group["lr"]))


def test_settings_of_numpy_and_state_of_any_name_are_kept(world: World, tmp_path: Path) -> None:
    """Finds: a learning rate of numpy that a checkpoint leaves out without a word, betas that fail each save, and a
    state `outer` that a restore leaves out, a float of Python that it rounds to float32."""
    one = stacked(world, 0, lambda parameters: OfNumpy(parameters, 0.05, 0.7))
    stacked_steps(one)
    checkpoints = Checkpoints(tmp_path, net=one)
    checkpoints.save()
    checkpoints.finish()
    wanted = stacked_steps(one)
    other = stacked(world, 1, OfNumpy)
    slowness = other.param_groups()[0]["betas"][0]
    Checkpoints(tmp_path, net=other).restore()
    assert stacked_steps(other) == wanted
    seen = [[state["seen"] for state in replica.optimizers[0].state.values()] for replica in (one, other)]
    assert seen[0] == seen[1]
    assert other.param_groups()[0]["betas"][0] is slowness, "a tensor is filled, since the script may hold it"


def test_state_in_double_precision_is_kept(world: World, tmp_path: Path) -> None:
    """Finds: NAdam's product of momenta is rounded to float32, where torch makes it in the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        test_state_of_other_shapes_and_by_group_is_kept(world, tmp_path, torch.optim.NAdam)
    finally:
        torch.set_default_dtype(torch.float32)


def test_state_by_group_is_refused_when_the_replica_is_made(world: World) -> None:
    """D7: with the strategies that would divide it."""
    for strategy in ("zero", "fsdp"):
        with pytest.raises(
            UserError, match=r"test_checkpoints.py:\d+: .*StackingMuon may keep it otherwise: take.* ddp"
        ):
            stacked(world, 0, StackingMuon, strategy)


def test_state_that_has_no_place_is_named_after_the_first_step(world: World, tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state["all"] = {"count": 1}  # type: ignore[index]

    replica = stacked(world, 0, lambda parameters: Odd(parameters, lr=0.1))
    with pytest.warns(UserWarning, match=r"Odd has state of 'all', which is none of its parameters, so a checkpoint"):
        stacked_steps(replica)
    with pytest.raises(UserError, match=r"test_checkpoints.py:\d+: Odd has state of 'all'"):
        Checkpoints(tmp_path, net=replica).save()


def test_a_folder_in_use_is_refused(world: World, tmp_path: Path) -> None:
    holder = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=1); input()"
    command = [sys.executable, "-c", holder, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UserError, match="is being written by another process"):
            Script(world, "sgd", "ddp").checkpoints(tmp_path)
        process.kill()


def test_what_was_restored_from_one_folder_is_saved_in_another(world: World, tmp_path: Path) -> None:
    first = Script(world, "adamw", "ddp")
    first.train()
    first.checkpoints(tmp_path / "pretrained").save()
    second = Script(world, "adamw", "ddp")
    old = second.checkpoints(tmp_path / "pretrained")
    assert old.restore() == 3
    second.checkpoints(tmp_path / "tuned").save()
    third = Script(world, "adamw", "ddp")
    assert third.checkpoints(tmp_path / "pretrained").restore() == 3
    with pytest.raises(UserError, match=r"pretrained was given to another paceline.Checkpoints since"):
        old.save()


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_odd_tensors_are_trained_and_kept(world: World, tmp_path: Path, strategy: Any) -> None:
    """Double precision, memory formats, batch norms, a buffer without an element, a parameter without one."""

    def made(seed: int) -> Replica:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))
        model = model.to(memory_format=torch.channels_last)
        model.register_buffer("none", torch.zeros(0, 3))
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
        model.register_parameter("exact", nn.Parameter(torch.ones(2, dtype=torch.float64)))
        return Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), world, strategy=strategy)

    def step(replica: Replica, seed: int) -> float:
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        loss_of = lambda x: replica.model(x).square().mean() * replica.model.exact.prod()  # noqa: E731
        return replica.train(x, loss_of, max_norm=1.0).loss

    one = made(0)
    step(one, 0)
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    checkpoints = Checkpoints(tmp_path, net=one)
    checkpoints.save()
    one.model(torch.ones(2, 3, 4, 4))  # a forward may come while weights are still being copied
    checkpoints.finish()
    other = made(1)
    assert Checkpoints(tmp_path, net=other).restore() == 1
    assert overall(other.state_dict()) == overall(before)
    one.model.load_state_dict(before)
    assert step(other, 1) == step(one, 1)


def test_a_buffer_that_repeats_its_elements_is_restored(world: World, tmp_path: Path) -> None:
    """Finds: it is saved, and no restore can fill it."""

    def made(value: float) -> Replica:
        model = nn.Linear(2, 1)
        model.register_buffer("scale", torch.tensor([[value], [2 * value]]).expand(2, 3))
        return Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)

    checkpoints = Checkpoints(tmp_path, net=made(3.0))
    checkpoints.save()
    checkpoints.finish()
    other = made(0.0)
    assert Checkpoints(tmp_path, net=other).restore() == 0
    assert other.model.scale.tolist() == [[3.0] * 3, [6.0] * 3]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_said_and_training_goes_on(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        script = Script(world, "adamw", "ddp")
        checkpoints = script.checkpoints(disk)
        script.train(1)
        checkpoints.save()
        checkpoints.finish()
        fill(disk / "ballast")
        script.train(1)
        checkpoints.save()
        assert len(script.train()) == HALF
        with pytest.raises(RunError, match=r"the last checkpoint could not be saved: .*[Nn]o space"):
            checkpoints.finish()
        assert "the checkpoint of step 2 could not be saved" in capfd.readouterr().err
        (disk / "ballast").unlink()
        checkpoints.save()
        checkpoints._end()
        assert steps_in(disk)[-1] == 5
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", 0) as file:
        while True:
            file.write(bytes(4096))


def losses_around_a_restore(world: World, path: str) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    replica = Replica(net, torch.optim.SGD(net.parameters(), lr=0.5), world, strategy="fsdp", blocks=[net[0]])
    checkpoints = Checkpoints(path, net=replica)
    rows = DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 32), 4)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return (net(x) - 1).square().mean()

    found = [replica.evaluate(rows, loss_of)]
    checkpoints.save()
    replica.train(torch.ones(2, 4), loss_of)
    found.append(replica.evaluate(rows, loss_of))
    checkpoints.restore()
    return [*found, replica.evaluate(rows, loss_of)]


def test_an_evaluation_after_a_restore_reads_the_restored_weights_with_fsdp(two_ranks: dict[str, list[Any]]) -> None:
    for before, trained, restored_loss in two_ranks["restored amid training"]:
        assert trained != before
        assert restored_loss == before


def save_finish_load(world: World, folder: Path, fails: bool) -> Any:
    """By rank: the digest of what it reads right after `finish`, or what `finish` raised."""
    script = Script(world, "adamw", "ddp")
    checkpoints = Checkpoints(folder, net=script.replica)
    checkpoints.restore()
    if world.is_main:
        begin = checkpoints.saver._save_first

        def late(job: Any) -> int:
            time.sleep(0.3)  # rank 1 has written its part long since
            if fails:
                raise OSError("no space")
            return begin(job)

        checkpoints.saver._save_first = late  # type: ignore[method-assign]
    checkpoints.save()
    try:
        checkpoints.finish()
        return overall(load_weights(folder))
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_finish_returns_on_all_ranks_when_the_checkpoint_is_there(two_ranks: dict[str, list[Any]], end: str) -> None:
    """Finds: waiting for the rank's own part, after which rank 1 read nothing, and did not know of a failure."""
    found = two_ranks[end]
    assert found[0] == found[1]
    assert ("no space" in found[0]) == (end == "failed")
