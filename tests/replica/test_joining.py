"""A script joins by one call, and every way it ends is one status and one message.

Torch is imported once: a parent forks one process for each rank of each script, which then joins as any other does.
"""

import json
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from program import Program

PARENT = """\
import gc, json, os, sys
import torch, torch.distributed, paceline
from paceline import Replica, join
from paceline.replica import checkpoints
torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports torch._dynamo, which takes seconds
gc.freeze()  # else each child's collections walk what was imported, and copy its pages
children = {}
for number, script in enumerate(json.loads(open(sys.argv[1]).read())):
    pid = os.fork()
    if not pid:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        os.environ.update(script["env"])
        exec(compile(script["code"], "script.py", "exec"), {"__name__": "__main__"})
        sys.exit()
    children[pid] = number
statuses = [0] * len(children)
for _ in children:
    pid, status = os.wait()
    statuses[children[pid]] = os.waitstatus_to_exitcode(status)
print(json.dumps(statuses))
"""

JOIN = "import os, signal, sys, time, torch, paceline\n"
JOIN += "world = paceline.join(paceline.ParallelConfig(device='cpu', threads=1, timeout_s=20))\n"
LEARN = """
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
rows = torch.arange(40.0).view(20, 2)
def step():
    return replica.train(torch.ones(1, 2) + world.rank, lambda x: model(x).mean())
"""

ALONE = {
    "plain": JOIN + LEARN + "step(); world.say(world.rank, world.world_size, world.is_main)",
    "user error": JOIN + "raise paceline.UserError('that is no good')",
    "run error": JOIN + "raise paceline.RunError('the disk is gone')",
    "wrong config": "import paceline\npaceline.join(paceline.ParallelConfig(device='gpu'))",
    "signals in a thread": JOIN + LEARN + """import threading
def steps():
    try:
        next(replica.steps(rows, batch_size=4, stop_on_signals=True))
    except paceline.UserError as error:
        print(error)
thread = threading.Thread(target=steps); thread.start(); thread.join()""",
    "exception": "import atexit; atexit.register(print, 'handler')\n" + JOIN
    + "atexit.register(print, 'later handler')\nleft = open('left.txt', 'w'); left.write('words')\n[][1]",
    "status kept": JOIN + LEARN + "step(); sys.exit(75)",
    "text of exit": JOIN + "sys.exit('words')",
    "ctrl-c": JOIN + "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)",
    "twice": JOIN + "assert paceline.join() is world\npaceline.join(paceline.ParallelConfig(threads=3))",
    "again": JOIN + LEARN + """step()
world.leave(); world.leave()
with paceline.join(paceline.ParallelConfig(device='cpu', threads=2)) as other:
    assert other is not world and paceline.join() is other
    world = other""" + LEARN.replace("\n", "\n    ") + """
    step()
try:
    with paceline.join() as third:
        raise paceline.UserError('caught')
except paceline.UserError as error:
    print(error, paceline.join() is third)
""",
    "after a failure": """import paceline
for asked in ({'interface': 'nonsense'}, {'expect_ranks': 3}, {'device': 'cuda:77'}, {'device': 'cpu'}):
    try:
        world = paceline.join(paceline.ParallelConfig(**asked))
    except paceline.UserError:
        print('refused')
print(world.world_size)
[][1]""",
    "half an environment": "import os\nos.environ['RANK'] = '0'\n" + JOIN,
    "exit in with": "import sys, torch, paceline\nwith paceline.join() as world:" + LEARN.replace("\n", "\n    ")
    + "\n    kept = paceline.Checkpoints('saved', net=replica); step(); kept.save(); sys.exit(75)",
    "error in with": "import sys, torch, paceline\nwith paceline.join() as world:" + LEARN.replace("\n", "\n    ")
    + "\n    kept = paceline.Checkpoints('saved too', net=replica); step(); kept.save(); [][1]",
    "last save fails": JOIN + LEARN + "kept = paceline.Checkpoints('gone/run', net=replica)\n"
    "step(); kept.save()\nimport shutil; time.sleep(0.5)\nstep(); shutil.rmtree('gone'); kept.save()",
}  # fmt: skip
STOPPING = """
kept = paceline.Checkpoints('stopped', net=replica)
for step in replica.steps(rows, batch_size=4, micro_batch_size=2, max_steps=50, stop_on_signals=True):
    if world.rank == 1 and step.number == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    for x in step:
        step.backward(model(x).mean())
    result = step.finish()
    if kept.save_every(1000):
        print('saved', step.number)
print(replica.num_steps, replica.stop_reason, result.stop_reason)
sys.exit(paceline.EXIT_RESUMABLE)"""
OPEN = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
TOGETHER = {
    "clean": JOIN + LEARN + "step(); r = world.rank; print(world.sum(r), world.gather(r), world.mean(3, r))",
    "status kept": JOIN + LEARN + "step(); sys.exit(75)",
    "exception": JOIN + LEARN + "step()\nif world.rank == 1:\n    {}['missing']\nstep()",
    "handlers": "import atexit\n" + JOIN + LEARN + """
atexit.register(time.sleep, 100)  # a tracker that waits for the others
atexit.register(print, 'handler')
left = open(f'left-{world.rank}.txt', 'w'); left.write('words')
step()
if world.rank == 1:
    raise paceline.UserError('no more')
step()""",
    "user error": JOIN + LEARN + "step()\nif world.rank == 1:\n    replica.train(rows, lambda x: model(x))\nstep()",
    "killed": JOIN + LEARN + "step()\nif world.rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\nstep()",
    "asked to stop": JOIN + LEARN + STOPPING,
    "last save fails beside another": JOIN + LEARN + """
lost, beside = (paceline.Checkpoints(name, net=replica) for name in ('lost', 'beside'))
beside.before_publishing = lambda: time.sleep(0.5)
step()
if world.is_main:
    import shutil; shutil.rmtree('lost')
world.barrier()
lost.save(); beside.save()""",
    "takes its time": JOIN.replace("=20", "=2.5") + "time.sleep(4)\n" + LEARN + "time.sleep(4); step(); print(1)",
    "again": JOIN + LEARN + """step(); world.leave()
assert not torch.distributed.is_initialized()
world = paceline.join()""" + LEARN + "step(); print(world.gather(world.rank))",
    "open group": OPEN + JOIN + LEARN + """step()
print([peer.pid for peer in world.peers].index(os.getpid()), [peer.local_rank for peer in world.peers])
world.leave()
print(dist.is_initialized(), dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout)
world = paceline.join()
print(world.sum(1))""",
    "open group by device, destroyed": OPEN.replace("'gloo'", "'cpu:gloo'") + JOIN + LEARN
    + "step(); print(world.backend, world.sum(1))\ndist.destroy_process_group()",
    "open group, lonely": OPEN + JOIN + LEARN + "step()\nif world.is_main:\n    print(world.mean(1.0))\nstep()",
    "open group, other": OPEN + "import paceline; paceline.join(paceline.ParallelConfig(backend='nccl'))",
    "fewer batches": JOIN + LEARN + "for _ in range(5 - 2 * world.rank):\n    step()",
    "a metric of rank 0": JOIN + LEARN + "step()\nif world.is_main:\n    print(world.mean(1.0))\nstep()",
    "a save of rank 0": JOIN + LEARN
    + "kept = paceline.Checkpoints('run', net=replica)\nstep()\nif world.is_main:\n    kept.save()\nstep()",
    "weights of rank 1": JOIN + LEARN + "step(); step()\nif world.rank == 1:\n    model.weight.data.add_(1)",
    "weights of rank 1, learned on": JOIN + LEARN + "replica.compare_every = 0\nstep()\nif world.rank == 1:\n"
    "    model.weight.data.add_(1)\nreplica.compare_every = 100; replica.has_compared = True; step()",
    "weights to export": JOIN + LEARN
    + "step()\nif world.is_main:\n    with torch.no_grad():\n        model.weight.zero_()",
    "an evaluation of rank 0": JOIN + LEARN + """
tests = paceline.share(rows, world, batch_size=4, shuffle=False)
step()
if world.is_main:
    for x in tests.flat(): model(x)
step()""",
}  # fmt: skip


@dataclass(frozen=True)
class End:
    """How one rank's process ended, and what it said."""

    status: int
    out: str
    err: str


Ends = dict[tuple[str, int], End]  # by script and rank


def run(folder: Path, scripts: dict[str, str], world_size: int) -> Ends:
    """Runs all of them at once: they mostly wait."""
    keys = [(name, rank) for name in scripts for rank in range(world_size)]
    ports = {name: free_port() for name in scripts}
    envs = [environment(rank, ports[name]) if world_size > 1 else {} for name, rank in keys]
    told = [{"code": scripts[name], "env": env} for (name, _), env in zip(keys, envs, strict=True)]
    (folder / "scripts.json").write_text(json.dumps(told))
    with Program("-c", PARENT, "scripts.json", command=(sys.executable,), cwd=folder) as program:
        statuses = json.loads(program.wait().require(0).out)
        program.wait_until_gone()
    said = [((folder / f"out{n}").read_text(), (folder / f"err{n}").read_text()) for n in range(len(keys))]
    return {key: End(status, *texts) for key, status, texts in zip(keys, statuses, said, strict=True)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def ends(folder: Path) -> Ends:
    return run(folder, TOGETHER, 2)


def environment(rank: int, port: int) -> dict[str, str]:
    names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in names.items()}


@pytest.mark.long
def test_a_script_of_one_process_ends_with_a_status_and_a_message(tmp_path: Path) -> None:
    """S7, S10."""
    ends = run(tmp_path, ALONE, 1)
    assert ends["plain", 0] == End(0, "0 1 True\n", "")
    assert ends["user error", 0] == End(2, "", "rank 0: error: that is no good\n")
    wrong, thread = ends["wrong config", 0], ends["signals in a thread", 0]
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    assert wrong.err.startswith("error: parallel.device is 'gpu'; it is one of auto, cpu, cuda, mps")
    assert (thread.status, thread.err) == (0, "")
    assert "signals reach the main thread alone" in thread.out
    assert ends["run error", 0] == End(1, "", "rank 0: error: the disk is gone\n")
    exception = ends["exception", 0]
    assert (exception.status, exception.out) == (1, "later handler\nhandler\n")
    assert 'script.py", line 6, in <module>' in exception.err
    assert exception.err.endswith("IndexError: list index out of range\n")
    assert (tmp_path / "left.txt").read_text() == "words"
    assert ends["status kept", 0] == End(75, "", "")
    assert ends["text of exit", 0] == End(1, "", "words\n")
    assert ends["ctrl-c", 0] == End(130, "", "")
    twice = ends["twice", 0]
    assert twice.status == 2
    assert twice.err.endswith(
        "script.py:4: this process has joined with another ParallelConfig; leave that world first\n"
    )
    assert ends["again", 0] == End(0, "caught False\n", "")
    after = ends["after a failure", 0]
    assert (after.status, after.out) == (1, "refused\nrefused\nrefused\n1\n")
    assert after.err.count("Traceback") == 1
    half = ends["half an environment", 0]
    assert half.status == 2
    assert "WORLD_SIZE" in half.err
    assert "Traceback" not in half.err
    assert ends["exit in with", 0] == End(75, "", "")
    assert (tmp_path / "saved/checkpoints/step-00000001/manifest.json").exists()
    assert ends["error in with", 0].status == 1
    assert (tmp_path / "saved too/checkpoints/step-00000001/manifest.json").exists()
    failed = ends["last save fails", 0]
    assert failed.status == 1
    assert "the last checkpoint could not be saved" in failed.err
    assert "Traceback" not in failed.err


@pytest.mark.long
def test_ranks_leave_together_and_quietly(ends: Ends) -> None:
    """S7."""
    for rank in range(2):
        assert ends["clean", rank] == End(0, "1.0 [0.0, 1.0] 3.0\n", "")
        assert ends["status kept", rank] == End(75, "", "")
        assert ends["takes its time", rank] == End(0, "1\n", "")
        assert ends["again", rank] == End(0, "[0.0, 1.0]\n", "")


@pytest.mark.long
def test_ranks_do_not_leave_with_different_weights(ends: Ends) -> None:
    """What one rank changed after its last step, as for an export, is its own affair, if torch saw the change."""
    for name in ("weights of rank 1", "weights of rank 1, learned on"):
        first, second = (ends[name, rank] for rank in range(2))
        assert (first.status, second.status) == (1, 1)
        assert "replicas are not equal after step 2: weight has 2 different values" in first.err
        assert second.err == ""
    assert [ends["weights to export", rank] for rank in range(2)] == [End(0, "", "")] * 2


@pytest.mark.long
def test_a_process_group_that_is_open_is_joined_and_stays(ends: Ends) -> None:
    """S7: with peers, so that the watchdog knows who waits for whom."""
    for rank in range(2):
        assert ends["open group", rank] == End(0, f"{rank} [0, 1]\nTrue 0:30:00\n2.0\n", "")
        by_device = ends["open group by device, destroyed", rank]  # torch itself warns of its hooks
        assert (by_device.status, by_device.out) == (0, "gloo 2.0\n")
        other = ends["open group, other", rank]
        assert other.status == 2
        assert "a process group of backend gloo is open already, and paceline.join was asked for backend nccl" in (
            ends["open group, other", 0].err
        )


@pytest.mark.long
def test_who_ends_with_an_error_says_it_and_the_others_know(ends: Ends) -> None:
    first, second = (ends["exception", rank] for rank in range(2))
    assert (first.status, second.status) == (1, 1)
    assert second.err.startswith("Traceback")
    assert "KeyError: 'missing'" in second.err
    assert "Traceback" not in first.err
    first, second = (ends["user error", rank] for rank in range(2))
    assert (first.status, second.status) == (1, 2)
    assert f"rank 1: error: script.py:{line('user error', 'lambda x: model(x))')}: the loss is of shape" in second.err
    for name in ("exception", "user error"):
        first = ends[name, 0]
        assert "rank 1 (" in first.err, first.err
        assert "ended with an error" in first.err, first.err
    killed, other = (ends["killed", rank] for rank in range(2))
    assert (killed.status, other.status) == (-signal.SIGKILL, 1)
    assert "rank 0 (" in other.err
    assert "is gone" in other.err


@pytest.mark.long
def test_exit_handlers_of_a_rank_that_fails_get_some_seconds(ends: Ends, folder: Path) -> None:
    """S10."""
    first, second = (ends["handlers", rank] for rank in range(2))
    assert (first.status, second.status) == (1, 2)
    assert second.out == "handler\n"
    assert (folder / "left-1.txt").read_text() == "words"
    assert "Traceback" not in second.err
    assert "rank 1: error: no more" in second.err


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_at_the_same_step_saved(ends: Ends, folder: Path) -> None:
    reason = "SIGTERM on rank 1"
    for rank in range(2):
        assert ends["asked to stop", rank] == End(75, f"saved 7\n7 {reason} {reason}\n", "")
    assert (folder / "stopped/checkpoints/step-00000007/manifest.json").exists()


@pytest.mark.long
def test_a_save_that_fails_loses_no_other_at_the_end_of_a_script(ends: Ends, folder: Path) -> None:
    failed = ends["last save fails beside another", 0]
    assert failed.status == 1
    assert "the last checkpoint could not be saved" in failed.err
    assert (folder / "beside/checkpoints/step-00000001/manifest.json").exists()


LONELY = {  # script -> verb and line of rank 0, of rank 1
    "fewer batches": (("Step.finish", "return replica.train"), None),
    "a metric of rank 0": (("World.mean", "world.mean(1.0)"), ("Step.finish", "return replica.train")),
    "open group, lonely": (("World.mean", "world.mean(1.0)"), ("Step.finish", "return replica.train")),
    "a save of rank 0": (("Checkpoints.save", "kept.save()"), ("Step.finish", "return replica.train")),
    "an evaluation of rank 0": (("share", "in tests.flat()"), ("Step.finish", "return replica.train")),
}


def line(name: str, text: str) -> int:
    """The number of the line of a script with this text."""
    return next(number for number, found in enumerate(TOGETHER[name].splitlines(), 1) if text in found)


@pytest.mark.long
@pytest.mark.parametrize("name", LONELY)
def test_a_rank_that_goes_another_way_is_named_with_its_line(ends: Ends, name: str) -> None:
    """D8."""
    assert [ends[name, rank].status for rank in range(2)] == [1, 1]
    said = ends[name, 0].err + ends[name, 1].err
    assert said.count("ranks called different verbs") == 1, said
    for rank, call in enumerate(LONELY[name]):
        does = (
            "came to the end of its script" if call is None else f"called {call[0]} at script.py:{line(name, call[1])}"
        )
        assert any(text.startswith(f"rank {rank} ") and text.endswith(does) for text in said.splitlines()), said
