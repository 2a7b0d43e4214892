"""No two workers and no two ranks draw the same random numbers, and the script's generators stay equal on all ranks."""

import multiprocessing
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program import TORCHRUN, Program
from ranks import run_ranks
from simulated import SimulatedRank
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.replica.share import share
from paceline.replica.stopping import STOP_SIGNALS, outlive_signals
from paceline.world.runtime import World


class Draws(Dataset[Any]):
    """What a worker, or the process, draws beside each sample, which is a row of numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        worker = get_worker_info()
        drawn = [int(torch.randint(1 << 40, ())), int(np.random.randint(1 << 40)), random.randrange(1 << 40)]
        return [index, worker.id if worker else -1, *drawn]


def by_worker(worker: int) -> None:
    """What many scripts do: alone it is right, among ranks with a number by rank it would be wrong."""
    np.random.seed(worker)
    random.seed(worker)


def loader(num_workers: int = 2, **more: Any) -> DataLoader[Any]:
    workers = {"multiprocessing_context": "fork", **more} if num_workers else {}
    return DataLoader(Draws(), 4, shuffle=True, collate_fn=list, num_workers=num_workers, **workers)


def lanes(lane: int, num_lanes: int) -> Iterator[list[int]]:
    yield from ([4 * step + lane, *Draws()[0][1:]] for step in range(2))


def globals_now() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@dataclass(frozen=True)
class Seen:
    """By one of two real ranks: rows of two passes by how they were read, and the global generators afterwards."""

    rows: dict[str, list[list[int]]]
    generators: tuple[Any, ...]


def see(world: World) -> Seen:
    torch.manual_seed(7)  # as a script does, so that all ranks build one model
    np.random.seed(7)
    random.seed(7)
    sources: dict[str, Any] = {
        "workers": (loader(), {"micro_batch_size": 1}),
        "seeded by worker, persistent": (loader(worker_init_fn=by_worker, persistent_workers=True), {}),
        "uneven": (loader(), {"micro_batch_size": 4}),  # rank 1 has none
        "in process": (loader(0), {}),
        "in process, uneven": (loader(0), {"micro_batch_size": 3}),
        "a data set": (Draws(), {"batch_size": 4, "collate_fn": list}),
        "lanes": (lanes, {"batch_size": 4, "collate_fn": list}),
    }
    found = {}
    for name, (source, asked) in sources.items():
        batches = share(source, world, **asked)
        found[name] = [row for _ in range(2) for micro_batch in batches.flat() for row in micro_batch]
    return Seen(found, globals_now())


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return run_ranks(see, 2)


def test_all_workers_and_ranks_draw_differently_in_all_epochs(seen: list[Seen]) -> None:
    for name in seen[0].rows:
        rows = [(rank, *row) for rank, one in enumerate(seen) for row in one.rows[name]]
        assert sorted(row[1] for row in rows) == sorted([*range(8)] * 2), name  # each sample once in each of two epochs
        for column in (3, 4, 5):
            assert len({row[column] for row in rows}) == 16, name
    where = {(rank, row[1]) for rank, one in enumerate(seen) for row in one.rows["workers"]}
    assert where == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert seen[1].rows["uneven"] == []


def test_reading_leaves_the_generators_of_all_ranks_equal(seen: list[Seen]) -> None:
    assert seen[0].generators == seen[1].generators
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert seen[0].generators[1:] == globals_now()[1:]  # torch's has given the orders


@pytest.mark.long
def test_workers_that_are_spawned_are_given_the_script_s_function() -> None:
    rows = [
        row
        for micro in share(loader(1, multiprocessing_context="spawn", worker_init_fn=by_worker), SimulatedRank()).flat()
        for row in micro
    ]
    np.random.seed(0)
    assert [row[3] for row in rows] == [int(np.random.randint(1 << 40)) for _ in range(8)]


WITHOUT_SIGWAITINFO = """
import os, signal
del signal.sigwaitinfo
from paceline.replica.stopping import STOP_SIGNALS, outlive_signals
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
outlive_signals()
print(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])) & set(STOP_SIGNALS), flush=True)
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_worker_ends_on_a_system_that_does_not_say_who_sent_a_signal() -> None:
    """macOS has no sigwaitinfo."""
    ended = subprocess.run([sys.executable, "-c", WITHOUT_SIGWAITINFO], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "set()\n"), ended.stderr


def _outlive(is_ready: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    outlive_signals()
    is_ready.set()
    time.sleep(100)


@pytest.mark.long
def test_a_worker_of_a_fork_server_ends_by_its_rank() -> None:
    """Workers are a fork server's children by default from Python 3.14 on. Mutation: the rank is the parent process."""
    context = multiprocessing.get_context("forkserver")
    is_ready = context.Event()
    worker = context.Process(target=_outlive, args=(is_ready,), daemon=True)
    worker.start()
    assert is_ready.wait(60)
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.parametrize("persistent", [True, False])
def test_a_pass_that_stopped_is_gone_on_with_whatever_workers_read_ahead(persistent: bool) -> None:
    data = list(range(40))
    ahead = DataLoader(data, 5, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    batches = share(ahead, SimulatedRank(), micro_batch_size=1)  # read ahead: 4 micro-batches, no whole step
    found = []
    for stop in (1, 4, 9):
        for batch in batches.resumed():
            found += [number for micro_batch in batch.draw() for number in micro_batch.tolist()]
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
batches = paceline.share(DataLoader(Slow(range(40)), 4, num_workers=2, multiprocessing_context="fork"), world)
for number, batch in enumerate(batches):
    last = list(batch.draw())
    if number == 1:  # both workers have begun
        signal.signal(signal.SIGINT, lambda *_: asked.append(1))
        os.killpg(0, signal.SIGINT)  # Ctrl-C: to this process and to its workers
print("all", batches.epoch, last[0].tolist(), asked)
"""


def test_workers_live_through_a_ctrl_c_that_their_rank_answers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STOPPED)
    with Program(str(tmp_path / "train.py"), command=(sys.executable,)) as program:
        ended = program.wait().require(0)
    assert ended.out == "all 1 [36, 37, 38, 39] [1]\n"
    assert ended.err == ""


KILLED = """
import os, signal, subprocess, sys
import paceline, psutil, torch
from torch.utils.data import DataLoader, TensorDataset

folder, kind, name, is_persistent = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "persistent"
is_first_time = not os.path.exists(folder)

def kill(process):
    os.kill(process, getattr(signal, name))

def kill_new_process():  # before it has any handler of its own
    if kind == "begins" and replica.num_steps > 4 and is_first_time:
        kill(os.getpid())
        kill(os.getppid())

torch.manual_seed(0)
world = paceline.join(paceline.ParallelConfig(device="cpu", threads=1))
model = torch.nn.Linear(1, 1)
replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), 0.1), world)
checkpoints = paceline.Checkpoints(folder, net=replica)
checkpoints.restore()
os.register_at_fork(after_in_child=kill_new_process)
data = TensorDataset(torch.arange(40.0)[:, None] / 40)
workers = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": is_persistent}
loader = DataLoader(data, 4, shuffle=True, **workers)
for step in replica.steps(loader, epochs=2, stop_on_signals=True):
    if kind == "reads" and step.number == 5 and is_first_time:
        everyone = [*psutil.Process().children(), psutil.Process()]
        subprocess.run(["kill", "-s", name.removeprefix("SIG"), *(str(each.pid) for each in everyone)], check=True)
    for x, in step:
        step.backward(model(x).square().mean())
    world.say("step", step.number, step.finish().loss)
if replica.stop_reason:
    checkpoints.save()
    sys.exit(paceline.EXIT_RESUMABLE)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """By kind of workers, whose passes have other orders: the losses of the script that nobody signals."""
    folder = tmp_path_factory.mktemp("script")
    return {each: losses(folder / f"whole{each}", (0,), ALONE, "never", "SIGTERM", each) for each in ("", "persistent")}


ALONE = (sys.executable,)


def losses(folder: Path, statuses: tuple[int, ...], command: tuple[str, ...], *arguments: str) -> list[float]:
    """Returns the losses of the steps that the script makes in all its starts."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(KILLED)
    found: list[list[str]] = []
    for status in statuses:
        with Program(str(script), str(folder / "run"), *arguments, command=command) as program:
            ended = program.wait()
        is_torchrun = command != ALONE
        ended.require(bool(status) if is_torchrun else status)  # of ranks that end with 75 it makes 1
        found += [line.split() for line in ended.out.splitlines() if line.startswith("step ")]
        assert status == 0 or 5 <= len(found) < 20
    assert [int(number) for _, number, _ in found] == list(range(1, 21))
    return [float(loss) for _, _, loss in found]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "workers"),
    [
        ("SIGTERM", "reads", ""),
        ("SIGINT", "reads", "persistent"),
        ("SIGHUP", "reads", ""),
        ("SIGTERM", "begins", ""),
        ("SIGUSR1", "begins", ""),
    ],
)
def test_a_signal_to_ranks_and_workers_stops_the_run_with_its_state_saved(
    tmp_path: Path, whole: dict[str, list[float]], name: str, kind: str, workers: str
) -> None:
    """Finds: workers that a SIGTERM ends, so that their rank fails before it has saved. "begins": the signal reaches
    workers of the second epoch before they have begun."""
    assert losses(tmp_path / "stopped", (75, 0), ALONE, kind, name, workers) == whole[workers]
    if (name, kind) == ("SIGTERM", "reads"):
        two = *TORCHRUN, "--standalone", "--nproc-per-node", "2"
        found = losses(tmp_path / "two", (75, 0), two, kind, name, workers)
        assert found == pytest.approx(whole[workers], rel=1e-5)
