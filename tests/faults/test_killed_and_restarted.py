"""Ranks that die and begin again: the run goes on in its folder, and ends as the one that nobody disturbed."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from program import COLD, TINY, TORCHRUN, Program, digest, losses, rows, run

from paceline.launch.signals import has_handler

SAVING = ("train", *TINY, "--train.device-batch-size", "6", "--checkpoint.every", "10")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(*SAVING, "--nproc", "2", "--out", str(folder)).require(0)
    return folder


@pytest.mark.long
def test_a_run_that_dies_and_stops_and_dies_ends_as_the_undisturbed_one(tmp_path: Path, undisturbed: Path) -> None:
    """A rank dies before anything was saved; a signal stops the second life; resumed, rank 0 dies between two saves."""
    faults = "rank=1 step=4 phase=exchange kind=kill; rank=0 step=15 phase=exchange kind=sleep seconds=3 attempt=1"
    command = (*SAVING, "--nproc", "2", "--max-restarts", "3")
    with Program(*command, env={"PACELINE_FAULTS": faults}, cwd=tmp_path) as program:
        program.wait_for(lambda: "restart 1 of 3" in program._said())
        (folder,) = (tmp_path / "runs").iterdir()
        program.wait_for(lambda: len(rows(folder / "metrics.jsonl")) == 14)
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(75)
        program.wait_until_gone()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
    first, last = ended.err.splitlines()
    assert re.fullmatch(r"rank 1 was killed by SIGKILL \(.*\), after step 3; restart 1 of 3", first)
    assert last == "1 restart; 3 steps were made twice"
    assert "stopped at step 15 (" in ended.out

    with Program(
        *("resume", str(folder), "--nproc", "2", "--max-restarts", "1"),
        env={"PACELINE_FAULTS": "rank=0 step=25 phase=exchange kind=kill"},
    ) as program:
        ended = program.wait().require(0)
    first, last = ended.err.splitlines()
    assert re.fullmatch(r"rank 0 was killed by SIGKILL \(.*\), after step 24; restart 1 of 1", first)
    assert last == "1 restart; 4 steps were made twice"
    assert [row["step"] for row in rows(folder / "events.jsonl") if row["event"] == "resume"] == [15, 20]
    assert losses(folder) == losses(undisturbed)
    assert digest(folder) == digest(undisturbed)


@pytest.mark.long
def test_torchruns_own_restarts_go_on_with_the_folder_until_the_stop_that_was_asked_for(tmp_path: Path) -> None:
    """A static rendezvous, which has no run id, and no --out: only the agent says that these are lives of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = (*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2")
    address = ("--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "paceline")
    with Program(
        *SAVING,
        *("--train.stop-at-step", "30", "--parallel.interface", "lo"),
        command=(*torchrun, *address),
        env={"PACELINE_FAULTS": "rank=1 step=25 phase=exchange kind=kill"},
        cwd=tmp_path,
    ) as program:
        ended = program.wait()
        program.wait_until_gone()
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(losses(folder)) == 30
    events = [row["event"] for row in rows(folder / "events.jsonl") if row["event"] in ("start", "resume", "end")]
    assert events == ["start", "resume", "end"], "the third life began nothing"
    assert "was asked to stop (train.stop-at-step) and is saved: it is not started again" in ended.err


@pytest.mark.long
def test_kill_9_of_the_launcher_ends_ranks_that_have_not_met_yet(tmp_path: Path) -> None:
    with Program("train", *TINY, "--nproc", "2", "--out", str(tmp_path / "run"), env=COLD) as program:
        program.wait_for(lambda: [has_handler(pid, signal.SIGTERM) for pid in program.ranks().values()] == [True] * 2)
        os.kill(program.pid, signal.SIGKILL)
        program.wait_until_gone()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left in ([], ["run", "run/ranks"]), "the same command may be given again"
