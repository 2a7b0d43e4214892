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
import json, os, sys
import torch, torch.distributed, paceline
from paceline import Replica, join
from paceline.script import keeping
torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports torch._dynamo, which takes seconds
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
def step():
    replica.backward(model(torch.ones(1, 2)).mean())
    return replica.step()
"""

ALONE = {
    "plain": JOIN + LEARN + "step(); world.say(world.rank, world.world_size, world.is_main)",
    "user error": JOIN + "raise paceline.UserError('that is no good')",
    "run error": JOIN + "raise paceline.RunError('the disk is gone')",
    "exception": JOIN + "print('printed before')\n[][1]",
    "status kept": JOIN + LEARN + "step(); sys.exit(75)",
    "text of exit": JOIN + "sys.exit('words')",
    "ctrl-c": JOIN + "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)",
    "twice": JOIN + "paceline.join()",
    "half an environment": "import os\nos.environ['RANK'] = '0'\n" + JOIN,
    "last save fails": JOIN + LEARN + "step(); replica.save('gone/run')\nimport shutil; time.sleep(0.5)\n"
    "step(); shutil.rmtree('gone'); replica.save('gone/run')",
}  # fmt: skip
TOGETHER = {
    "clean": JOIN + LEARN + "step(); r = world.rank; print(world.total(r), world.gather(r), world.mean(3, r))",
    "status kept": JOIN + LEARN + "step(); sys.exit(75)",
    "exception": JOIN + LEARN + "step()\nif world.rank == 1:\n    {}['missing']\nstep()",
    "user error": JOIN + LEARN + "step()\nif world.rank == 1:\n    replica.backward(model(torch.ones(1, 2)))\nstep()",
    "killed": JOIN + LEARN + "step()\nif world.rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\nstep()",
    "asked to stop": JOIN + LEARN + """
replica.stop_requested()
number = 0
while not replica.stop_requested():
    number += 1
    if world.rank == 1 and number == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    step()
print(number, replica.stop_requested())
sys.exit(75)""",
    "takes its time": JOIN.replace("=20", "=2.5") + "time.sleep(4)\n" + LEARN + "time.sleep(4); step(); print(1)",
    "fewer batches": JOIN + LEARN + "for _ in range(5 - 2 * world.rank):\n    step()",
    "a metric of rank 0": JOIN + LEARN + "step()\nif world.is_main:\n    print(world.mean(1.0))\nstep()",
    "a save of rank 0": JOIN + LEARN + "step()\nif world.is_main:\n    replica.save('run')\nstep()",
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
        statuses = json.loads(program.wait(100).require(0).out)
        program.wait_until_gone()
    said = [((folder / f"out{n}").read_text(), (folder / f"err{n}").read_text()) for n in range(len(keys))]
    return {key: End(status, *texts) for key, status, texts in zip(keys, statuses, said, strict=True)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run(tmp_path_factory.mktemp("scripts"), TOGETHER, 2)


def environment(rank: int, port: int) -> dict[str, str]:
    names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in names.items()}


def test_a_script_of_one_process_ends_with_a_status_and_a_message(tmp_path: Path) -> None:
    ends = run(tmp_path, ALONE, 1)
    assert ends["plain", 0] == End(0, "0 1 True\n", "")
    assert ends["user error", 0] == End(2, "", "rank 0: error: that is no good\n")
    assert ends["run error", 0] == End(1, "", "rank 0: error: the disk is gone\n")
    exception = ends["exception", 0]
    assert (exception.status, exception.out) == (1, "printed before\n")
    assert 'script.py", line 4, in <module>' in exception.err
    assert exception.err.endswith("IndexError: list index out of range\n")
    assert ends["status kept", 0] == End(75, "", "")
    assert ends["text of exit", 0] == End(1, "", "words\n")
    assert ends["ctrl-c", 0] == End(130, "", "")
    twice = ends["twice", 0]
    assert twice.status == 2
    assert "join() was called before" in twice.err
    half = ends["half an environment", 0]
    assert half.status == 2
    assert "WORLD_SIZE" in half.err
    assert "Traceback" not in half.err
    failed = ends["last save fails", 0]
    assert failed.status == 1
    assert "the last checkpoint could not be saved" in failed.err


@pytest.mark.long
def test_ranks_leave_together_and_quietly(ends: Ends) -> None:
    for rank in range(2):
        assert ends["clean", rank] == End(0, "1.0 [0.0, 1.0] 3.0\n", "")
        assert ends["status kept", rank] == End(75, "", "")
        assert ends["takes its time", rank] == End(0, "1\n", "")


@pytest.mark.long
def test_who_ends_with_an_error_says_it_and_the_others_know(ends: Ends) -> None:
    first, second = (ends["exception", rank] for rank in range(2))
    assert (first.status, second.status) == (1, 1)
    assert second.err.startswith("Traceback")
    assert "KeyError: 'missing'" in second.err
    assert "Traceback" not in first.err
    first, second = (ends["user error", rank] for rank in range(2))
    assert (first.status, second.status) == (1, 2)
    assert second.err.startswith("rank 1: error: script.py:12: the loss is of shape [1, 1]")
    for name in ("exception", "user error"):
        first = ends[name, 0]
        assert "rank 1 (" in first.err, first.err
        assert "ended with an error" in first.err, first.err
    killed, other = (ends["killed", rank] for rank in range(2))
    assert (killed.status, other.status) == (-signal.SIGKILL, 1)
    assert "rank 0 (" in other.err
    assert "is gone" in other.err


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_at_the_same_step(ends: Ends) -> None:
    for rank in range(2):
        assert ends["asked to stop", rank] == End(75, "5 SIGTERM on rank 1\n", "")


LONELY = {
    "fewer batches": ("rank 1 {} came to the end of its script", "rank 0 {} called Replica.step at script.py:9"),
    "a metric of rank 0": (
        "rank 0 {} called World.mean at script.py:12",
        "rank 1 {} called Replica.step at script.py:9",
    ),
    "a save of rank 0": (
        "rank 0 {} called Replica.save at script.py:12",
        "rank 1 {} called Replica.step at script.py:9",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LONELY)
def test_a_rank_that_goes_another_way_is_named_with_its_line(ends: Ends, name: str) -> None:
    assert [ends[name, rank].status for rank in range(2)] == [1, 1]
    said = ends[name, 0].err + ends[name, 1].err
    assert said.count("ranks called different verbs") == 1, said
    for part in LONELY[name]:
        begin, end = part.split("{}")
        assert any(line.startswith(begin) and line.endswith(end) for line in said.splitlines()), said


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TOGETHER["clean"].replace("print(", "world.say("))
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    with Program(command=command) as program:
        ended = program.wait().require(0)
        program.wait_until_gone()
    assert ended.out == "1.0 [0.0, 1.0] 3.0\n"
    assert "Warning" not in ended.err
