"""What one host refuses, all hosts are told within seconds: nobody waits for it until the timeout of five minutes."""

import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from program import COLD, Ended, Program

from paceline.base.errors import RunError, UserError
from paceline.world import rendezvous

DEADLINE_S = 150.0  # half of parallel.timeout-s, on a machine that may be busy
SCRIPT = """
import os, paceline
from paceline.world.config import ParallelConfig
paceline.join(ParallelConfig(interface="lo" if os.environ["RANK"] == "0" else "nonesuch"))
"""


def two_hosts(
    *commands: list[str], command: tuple[str, ...] = (sys.executable, "-m", "paceline"), **own: str
) -> list[Ended]:
    """Runs each command as the only rank of its host; the hosts share this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    envs = [{**own, **world, "MASTER_PORT": port, "RANK": str(rank)} for rank in range(2)]
    with (
        Program(*commands[0], command=command, env=envs[0]) as zero,
        Program(*commands[1], command=command, env=envs[1]) as one,
    ):
        return [zero.wait(DEADLINE_S), one.wait(DEADLINE_S)]


def train(out: Path, interface: str) -> list[str]:
    text = out.parent / "text.txt"
    text.write_text("a line of text\n" * 1000)
    flags = ["--data.path", str(text), "--parallel.interface", interface, "--out", str(out)]
    return ["train", "--preset", "tiny", *flags]


@pytest.mark.long
def test_a_run_folder_that_rank_0_refuses_is_refused_on_the_other_host(tmp_path: Path) -> None:
    """The same command, typed twice."""
    out = tmp_path / "run"
    (out / "checkpoints" / "step-00000001").mkdir(parents=True)
    zero, one = two_hosts(train(out, "lo"), train(out, "lo"))
    message = f"--out is {out}, which holds a run already; resume it by"
    assert zero.require(2).err.startswith(f"error: {message}")
    assert one.require(2).err.startswith(f"rank 1: error: rank 0 ({socket.gethostname()}, pid ")
    assert f"cannot train: {message}" in one.err


def test_what_another_host_refuses_reaches_rank_0(tmp_path: Path) -> None:
    zero, one = two_hosts(train(tmp_path / "run", "lo"), train(tmp_path / "run", "nonesuch"))
    message = "parallel.interface is 'nonesuch', and this machine"
    assert one.require(2).err.startswith(f"rank 1: error: {message}")
    assert zero.require(2).err.startswith(f"error: rank 1 ({socket.gethostname()}, pid ")
    assert f"cannot train: {message}" in zero.err


@pytest.mark.long
def test_a_script_is_told_as_training_is(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    zero, one = two_hosts(
        [], [], command=(sys.executable, str(tmp_path / "script.py")), **COLD
    )  # a fork has no excepthook
    assert "error: parallel.interface is 'nonesuch'" in one.require(2).err
    assert "cannot train: parallel.interface is 'nonesuch'" in zero.require(2).err


def test_in_a_group_that_the_script_opened_nobody_is_told_by_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a mistake of one rank waits half a minute for a rank 0 that has met it already, and does not listen."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    opened: list[object] = []

    def open_store(*arguments: object) -> None:
        opened.append(arguments)
        raise RunError("there is no store")

    monkeypatch.setattr(rendezvous, "open_store", open_store)
    monkeypatch.setattr(rendezvous, "_has_met", False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rendezvous.tell_others(UserError("the loss has another shape"))
    finally:
        dist.destroy_process_group()
    assert not opened
    rendezvous.tell_others(UserError("the same, before any group"))
    assert opened
