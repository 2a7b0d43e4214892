"""Who dies with the process that started it: what a launcher started, and nobody else."""

import os
import subprocess
import sys
import time

import psutil
import pytest

# A parent that starts a child, waits until it has asked, and ends by SIGKILL; the child's pid is what it says.
PARENT = """
import os, signal, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
CHILD = """
import os, time
from paceline.base.process import die_with_parent

die_with_parent(GIVEN)
print("asked", flush=True)
time.sleep(600)  # far longer than the test waits
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    ("given", "launcher", "dies"),
    [
        ("None", {}, False),  # ssh host 'RANK=1 ... nohup ... &'
        ("None", {"TORCHELASTIC_RUN_ID": "none"}, True),
        ("os.getppid()", {}, True),  # as the ranks of --nproc and the processes of benches ask
    ],
    ids=["by hand", "torchrun", "a parent that is given"],
)
def test_a_process_dies_with_its_launcher_and_not_with_a_shell(
    given: str, launcher: dict[str, str], dies: bool
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    world = {"RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PARENT, CHILD.replace("GIVEN", given)]
    ended = subprocess.run(command, env={**environ, **world, **launcher}, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(ended.stdout))
    deadline = time.monotonic() + (60 if dies else 0.5)
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    is_alive = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    if is_alive:
        child.kill()
    assert is_alive != dies
