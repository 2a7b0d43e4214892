"""What a script saved comes back: at any world size and strategy the same curve, at its own to the bit; or not at all,
and then it is said."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from program import Program
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.base.errors import RunError, UserError
from paceline.script.replica import Replica
from paceline.script.share import share
from paceline.sync.replicas import overall
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment, detect
from paceline.world.runtime import World, open_world

HALF = 3  # steps before the save, and after it
KINDS = ("adamw", "sgd", "muon")


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
        self.replica = Replica(net, made, self.world, strategy=self.strategy, bucket_mb=100 / 2**20)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(made[0], [2, 4, 5], 0.5)
        data = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0))
        self.batches = share(data, self.world, batch_size=6, micro_batch_size=1, seed=3)
        self.state = {"schedule": self.schedule, "batches": self.batches}

    def train(self, steps: int = HALF) -> list[float]:
        losses = []
        for batch in self.batches:
            for tokens in self.replica.micro_batches(batch):
                self.replica.backward(self.replica.model(tokens))
            losses.append(self.replica.step(max_norm=1.0).loss)
            self.schedule.step()
            if len(losses) == steps:
                break
        return losses

    def digest(self) -> str:
        return overall(self.replica.state_dict())


def combinations(world_size: int) -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        for strategy in ("ddp", "zero", "fsdp"):
            if strategy != "fsdp" or (kind != "muon" and 6 % world_size == 0):
                yield kind, strategy


def first_half(config: ParallelConfig, env: Environment, folder: str) -> dict[Any, Any]:
    """Saves halfway, and goes on: (losses after the save, digest at the end) of the run that nobody interrupts."""
    world = paceline.join(config)
    found: dict[Any, Any] = {}
    for kind, strategy in combinations(world.world_size):
        script = Script(world, kind, strategy)
        script.train()
        script.replica.save(f"{folder}/{kind}-{strategy}", **script.state, note={"step": 3, "by": "hand"})
        found[kind, strategy] = script.train(), script.digest()
    script = Script(world, "adamw", "ddp", dropout=0.5)
    torch.manual_seed(100 + world.rank)
    script.train()
    script.replica.save(f"{folder}/dropout", **script.state)
    found["dropout"] = script.train(), script.digest()
    return found


def second_half(world: World, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in KINDS:
        for saved in ("ddp", "zero", "fsdp"):
            for _, strategy in (one for one in combinations(world.world_size) if one[0] == kind):
                path = f"{folder}/{kind}-{saved}"
                if Path(path).exists():
                    found[kind, saved, strategy] = restored(world, path, kind, strategy)
    script = Script(world, "adamw", "ddp", dropout=0.5)
    script.replica.restore(f"{folder}/dropout", **script.state)
    let_go(script.replica)
    found["dropout"] = script.train(), script.digest()
    return found


def let_go(replica: Replica) -> None:
    """Of the folder, for the next one of this process; only rank 0 holds it."""
    if replica._keeper._lock is not None:
        replica._keeper._lock.release()


def restored(world: World, path: str, kind: str, strategy: str) -> Any:
    script = Script(world, kind, strategy)
    given = script.replica.restore(path, **script.state)
    assert given == {"note": {"step": 3, "by": "hand"}}
    assert (script.replica.num_steps, script.schedule.last_epoch, script.batches.step) == (3, 3, 3)
    let_go(script.replica)
    return script.train(), script.digest()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(first_half, 2, str(folder), opened=False)[0]


def require_same_curves(found: dict[Any, Any], wanted: dict[Any, Any]) -> int:
    """Returns how many are the same to the bit."""
    num_same = 0
    for key, (losses, digest) in found.items():
        if key != "dropout":
            kind, saved, strategy = key
            assert losses == pytest.approx(wanted[kind, saved][0], abs=2e-6), key
            num_same += saved == strategy and (losses, digest) == wanted[kind, saved]
    return num_same


@pytest.mark.long
def test_one_process_goes_on(saved: tuple[Path, dict[Any, Any]]) -> None:
    folder, wanted = saved
    with alone() as world:
        require_same_curves(second_half(world, str(folder)), wanted)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_world_and_strategy_goes_on(saved: tuple[Path, dict[Any, Any]], world_size: int) -> None:
    folder, wanted = saved
    for found in run_ranks(second_half, world_size, str(folder)):
        num_same = require_same_curves(found, wanted)
        if world_size == 2:
            assert num_same == len(list(combinations(2)))
            assert found["dropout"] == wanted["dropout"]


# ---- one process ----


def alone() -> Any:
    return open_world(ParallelConfig(device="cpu", threads=1), detect())


@pytest.fixture
def world() -> Iterator[World]:
    with alone() as world:
        yield world


def kept(world: World, folder: Path, steps: int = 2) -> Script:
    """A script that saved after each of its steps, and let go of the folder."""
    script = Script(world, "adamw", "ddp")
    for _ in range(steps):
        script.train(1)
        script.replica.save(folder, **script.state)
    release(script.replica)
    return script


def release(replica: Replica) -> None:
    """As the end of the script."""
    replica._keeper._finish()
    let_go(replica)


def test_nothing_saved_yet_and_saved_before_the_first_step(world: World, tmp_path: Path) -> None:
    script = Script(world, "adamw", "ddp")
    assert script.replica.restore(tmp_path / "run", **script.state) is None
    script.replica.save(tmp_path / "run", **script.state, at=(1, 2))
    script.replica.save(tmp_path / "run", **script.state, at=[3])  # no step in between
    release(script.replica)
    other = Script(world, "adamw", "ddp")
    assert other.replica.restore(tmp_path / "run", **other.state) == {"at": [3]}
    assert other.train() == script.train()


def test_a_damaged_newest_is_passed_over_and_none_whole_changes_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(world, tmp_path)
    newest, older = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    flip(next(newest.glob("weights*")))
    script = Script(world, "adamw", "ddp")
    assert script.replica.restore(tmp_path, **script.state) == {}
    assert script.replica.num_steps == 1
    assert "passed over a damaged checkpoint: step-00000002" in capsys.readouterr().out
    release(script.replica)
    flip(next(older.glob("optimizer*")))
    script = Script(world, "adamw", "ddp")
    before = script.digest()
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole, nothing was changed"):
        script.replica.restore(tmp_path, **script.state)
    assert script.digest() == before
    assert script.batches.step == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_what_does_not_fit_is_refused_and_changes_nothing(world: World, tmp_path: Path) -> None:
    kept(world, tmp_path)

    def refused(script: Script, match: str, **state: Any) -> None:
        before = script.digest()
        with pytest.raises(UserError, match=match):
            script.replica.restore(tmp_path, **(state or script.state))
        assert script.digest() == before
        let_go(script.replica)

    refused(Script(world, "sgd", "ddp"), r"has the state of \['AdamW'\], and the script has \['SGD'\]")
    refused(Script(world, "adamw", "ddp"), "without other", other=nn.Linear(1, 1))
    refused(Script(world, "adamw", "ddp"), "batches has no load_state_dict", batches=3)
    script = Script(world, "adamw", "ddp")
    script.replica.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    refused(script, "2 parameter groups of AdamW, the script 3")
    script = Script(world, "adamw", "ddp")
    script.replica.model.add_module("more", nn.Linear(2, 2))
    refused(script, "the checkpoint has no more.weight")


def test_values_that_are_not_json_are_refused_with_the_line(world: World, tmp_path: Path) -> None:
    script = Script(world, "sgd", "ddp")
    for value in (torch.ones(2), {1, 2}, object(), {"deep": [b"bytes"]}):
        with pytest.raises(UserError, match=r"test_keeping.py:\d+: metric cannot be kept"):
            script.replica.save(tmp_path, metric=value)
    assert not (tmp_path / "checkpoints").exists()


def test_an_optimizer_that_cannot_be_kept_is_named_after_its_first_step(world: World, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    replica = Replica(model, torch.optim.Adafactor(model.parameters()), world)
    replica.backward(model(torch.ones(1, 2)).mean(), weight=1)
    with pytest.warns(UserWarning, match="Adafactor's state row_var of weight .* replica.save will refuse"):
        replica.step()
    with pytest.raises(UserError, match=r"test_keeping.py:\d+: Adafactor's state row_var of weight"):
        replica.save(tmp_path)


@pytest.mark.parametrize(
    "name", ["Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop", "SGD"]
)
def test_any_optimizer_and_a_number_of_its_own_go_on_to_the_bit(world: World, tmp_path: Path, name: str) -> None:
    def made(seed: int, strategy: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return Replica(model, optimizer, world, strategy=strategy), schedule

    def steps(replica: Replica, schedule: Any) -> list[float]:
        losses = []
        for _ in range(3):
            loss = (replica.model(torch.ones(2, 4)) * replica.model.scale).square().mean()
            replica.backward(loss, weight=2)
            losses.append(replica.step().loss)
            schedule.step()
        return losses

    one = made(0, "zero")
    steps(*one)
    one[0].save(tmp_path, schedule=one[1])
    wanted = steps(*one)
    release(one[0])
    other = made(1, "ddp")
    other[0].restore(tmp_path, schedule=other[1])
    assert steps(*other) == wanted


def test_a_folder_in_use_is_refused(world: World, tmp_path: Path) -> None:
    holder = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=1); input()"
    command = [sys.executable, "-c", holder, str(tmp_path / ".script.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UserError, match="in use by another process"):
            Script(world, "sgd", "ddp").replica.save(tmp_path)
        process.kill()


def test_what_was_restored_from_one_folder_is_saved_in_another(world: World, tmp_path: Path) -> None:
    first = Script(world, "adamw", "ddp")
    first.train()
    first.replica.save(tmp_path / "pretrained", **first.state)
    second = Script(world, "adamw", "ddp")
    second.replica.restore(tmp_path / "pretrained", **second.state)
    second.replica.save(tmp_path / "tuned")
    third = Script(world, "adamw", "ddp")
    assert third.replica.restore(tmp_path / "pretrained") is not None, "nobody writes there any more"
    with pytest.raises(UserError, match=r"keeps its checkpoints in .*/tuned, not in .*/pretrained"):
        second.replica.save(tmp_path / "pretrained")


def test_a_model_of_double_precision_is_trained_and_kept(world: World, tmp_path: Path) -> None:
    net = nn.Linear(3, 2).double()
    replica = Replica(net, torch.optim.AdamW(net.parameters(), lr=0.1), world)
    replica.backward(net(torch.ones(4, 3, dtype=torch.float64)).square().mean())
    assert replica.step(max_norm=1.0).grad_norm > 0
    replica.save(tmp_path)
    replica._keeper._finish()
    kept = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    with torch.no_grad():
        net.weight.zero_()
    again = Replica(net, torch.optim.AdamW(net.parameters(), lr=0.1), world)
    again.restore(tmp_path)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in again.state_dict().items())


def test_memory_formats_and_statistics_come_back(world: World, tmp_path: Path) -> None:
    def made(seed: int) -> Replica:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))
        model = model.to(memory_format=torch.channels_last)
        return Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), world)

    def step(replica: Replica, seed: int) -> float:
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        replica.backward(replica.model(x).square().mean(), weight=2)
        return replica.step().loss

    one = made(0)
    step(one, 0)
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    one.save(tmp_path)
    one.model(torch.ones(2, 3, 4, 4))  # a forward may come while weights are still being copied
    release(one)
    other = made(1)
    other.restore(tmp_path)
    assert overall(other.state_dict()) == overall(before)
    one.model.load_state_dict(before)
    assert step(other, 1) == step(one, 1)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_said_and_training_goes_on(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        script = kept(world, disk, 1)
        fill(disk / "ballast")
        script.train(1)
        script.replica.save(disk)
        assert len(script.train()) == HALF
        with pytest.raises(RunError, match=r"the last checkpoint could not be saved: .*[Nn]o space"):
            script.replica._keeper._finish()
        assert "the checkpoint of step 2 could not be saved" in capfd.readouterr().err
        (disk / "ballast").unlink()
        script.replica.save(disk)
        script.replica._keeper._finish()
        assert sorted(path.name for path in (disk / "checkpoints").glob("step-*"))[-1] == "step-00000005"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", 0) as file:
        while True:
            file.write(bytes(4096))


# ---- kill -9 ----

SCRIPT = """\
import sys, torch, paceline
world = paceline.join(paceline.ParallelConfig(device="cpu", threads=1))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
replica = paceline.Replica(model, optimizer, world, strategy="zero")
found = replica.restore("run")
world.say("begins", replica.num_steps, found and found["done"])
while replica.num_steps < 60:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(replica.num_steps))
    replica.backward(model(x[world.rank :: 2]).square().mean())
    result = replica.step()
    replica.save("run", done=replica.num_steps)
world.say("ends", result.loss.hex())
"""


@pytest.mark.long
def test_after_kill_9_at_any_moment_it_goes_on_to_the_same_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "../script.py")

    def program(name: str) -> Program:
        (tmp_path / name).mkdir(exist_ok=True)
        return Program(command=command, env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path / name)

    def newest() -> int:
        return max((int(path.name[5:]) for path in tmp_path.glob("killed/run/checkpoints/step-*")), default=0)

    chance = random.Random(4)
    for least in (1, 20):
        with program("killed") as killed:
            killed.wait_for(lambda least=least: newest() >= least)  # type: ignore[misc]
            pids = killed.pids()
            signal.sigtimedwait([], chance.uniform(0, 0.05))
            killed.kill_all(pids)
    with program("killed") as last:
        ended = last.wait(100).require(0)
    begun, done = next(line.split()[1:] for line in ended.out.splitlines() if line.startswith("begins "))
    assert int(begun) >= 20
    assert done == begun
    with program("straight") as straight:
        assert straight.wait(100).require(0).out.split()[-1] == ended.out.split()[-1]
