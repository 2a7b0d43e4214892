"""The law of `--nproc`: one command, one voice, and its ranks live and die together."""

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from program import Ended, Program, rows, run, steps

from paceline.data.cache import ensure_datasets
from paceline.data.config import DataConfig, Quiet
from paceline.data.dataset import Dataset
from paceline.data.order import ids_at
from paceline.data.shard import HEADER_BYTES

SMALL = ("--train.global-batch-size", "6", "--train.device-batch-size", "2", "--train.sample-tokens", "0")
ENDLESS = ("--preset", "tiny", *SMALL, "--train.steps", "100000", "--train.eval-every", "-1")


def test_memory_of_gpus_is_expandable_unless_the_user_says_otherwise() -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    code = f"""
import os
from paceline import __main__ as command
for own in (None, *{names}):
    for name in {names}:
        os.environ.pop(name, None)
    if own:
        os.environ[own] = "max_split_size_mb:64"
    command.main()
    print(os.environ.get({names[0]!r}))
"""
    command = [sys.executable, "-c", code, "train", "--no-such-flag"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["expandable_segments:True", "max_split_size_mb:64", "None"]


@dataclass(frozen=True)
class Disturbed:
    """What became of a run that was disturbed in mid-training."""

    folder: Path
    ended: Ended
    gone_s: float  # from the command's end until no process of it lived

    @property
    def messages(self) -> list[str]:
        """What is said of its end: not that there are more ranks than cores."""
        return [line for line in self.ended.err.splitlines() if line.strip() and not line.startswith("warning: ")]


def disturbed(folder: Path, nproc: int, disturb: Callable[[Program], None]) -> Disturbed:
    """Starts an endless run and disturbs it; its command has to end."""
    with Program("train", *ENDLESS, "--nproc", str(nproc), "--out", str(folder)) as program:
        program.wait_for(lambda: len(steps(folder)) >= 3)
        assert sorted(program.ranks()) == list(range(nproc))
        disturb(program)
        return Disturbed(folder, program.wait(), program.wait_until_gone())


@pytest.fixture(scope="module")
def without_rank_1(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """A run of 3 ranks of which one was killed."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    return disturbed(folder, 3, lambda program: os.kill(program.ranks()[1], signal.SIGKILL))


@pytest.mark.long
def test_kill_9_of_one_rank_ends_the_command_and_names_it(without_rank_1: Disturbed) -> None:
    ended = without_rank_1.ended
    assert ended.status == 1
    assert "rank 1 was killed by SIGKILL" in without_rank_1.messages[-1]
    assert "Traceback" not in ended.out + ended.err


def test_a_killed_rank_is_said_once(without_rank_1: Disturbed) -> None:
    assert len(without_rank_1.messages) == 1


def test_each_rank_has_a_log_of_its_own(without_rank_1: Disturbed) -> None:
    logs = sorted((without_rank_1.folder / "ranks").glob("*.log"))
    assert [path.name for path in logs] == ["rank-00000.log", "rank-00001.log", "rank-00002.log"]
    for path in logs:
        text = path.read_text()
        assert "3 ranks on cpu" in text
        assert "step 2/100000" in text


def test_rank_0_alone_speaks_and_says_everything_once(without_rank_1: Disturbed) -> None:
    lines = [line for line in without_rank_1.ended.out.splitlines() if line.strip()]
    assert [line for line, count in Counter(lines).items() if count > 1] == []
    for text in ("3 ranks on cpu", "run folder", "step 1/100000"):
        assert sum(text in line for line in lines) == 1


@pytest.mark.long
def test_training_outlives_its_reader(tmp_path: Path) -> None:
    """`paceline train | head`, or a terminal that went away: the log in the run folder goes on, and so does the run."""
    folder = tmp_path / "run"
    script = '"$0" -m paceline train --preset tiny --train.steps 8 --out "$1" | head -n 1; exit ${PIPESTATUS[0]}'
    with Program(command=("bash", "-c", script, sys.executable, str(folder))) as program:
        ended = program.wait()
    assert len(steps(folder)) == 8
    ended.require(0)


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_terminal_that_closes_stops_the_run_with_its_state_saved(tmp_path: Path, nproc: int) -> None:
    """A window that is shut, an ssh that is cut: SIGHUP, and nothing can be written on the terminal any more."""
    folder = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *ENDLESS, "--nproc", str(nproc), "--out", str(folder)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        while len(steps(folder)) < 3:
            assert process.poll() is None
            with contextlib.suppress(BlockingIOError):  # a terminal that nobody reads would hold the run up
                os.read(ours, 1 << 16)
            time.sleep(0.02)
        os.close(ours)
        assert process.wait(30) == 75
    finally:
        process.kill()
        process.wait()
    end = rows(folder / "events.jsonl")[-1]
    assert (end["event"], end["reason"].split()[0]) == ("end", "SIGHUP")
    assert (folder / f"checkpoints/step-{end['step']:08d}/manifest.json").exists()


@pytest.mark.long
def test_kill_9_of_the_launcher_ends_the_ranks(tmp_path: Path) -> None:
    found = disturbed(tmp_path / "run", 2, lambda program: os.kill(program.pid, signal.SIGKILL))
    assert found.ended.status == -signal.SIGKILL


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_together(tmp_path: Path) -> None:
    """Ranks vote: the one that was asked does not leave alone."""
    found = disturbed(tmp_path / "run", 2, lambda program: os.kill(program.ranks()[1], signal.SIGTERM))
    assert found.ended.status == 75
    last_step = len(steps(found.folder))
    assert f"stopped at step {last_step} (" in found.ended.out
    assert "on rank 1)" in found.ended.out
    assert (found.folder / f"checkpoints/step-{last_step:08d}/manifest.json").exists()


@pytest.mark.long
def test_what_was_stopped_before_its_first_step_is_begun_by_the_same_command(tmp_path: Path) -> None:
    """As a queue does. The folder has been made by then; a run that has made a step is another matter."""
    folder = tmp_path / "run"
    command = ("train", "--preset", "tiny", "--train.steps", "2", "--train.sample-tokens", "0", "--out", str(folder))
    with Program(*command) as program:
        program.wait_for(lambda: (folder / "config.toml").exists())
        program.kill_all([program.pid])
    assert not (folder / "metrics.jsonl").exists()
    run(*command).require(0)
    assert len(steps(folder)) == 2
    assert "holds a run already" in run(*command).require(2).err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a network of its own needs root")
def test_without_a_loopback_interface_it_is_refused_at_once(tmp_path: Path) -> None:
    command = ("unshare", "--net", sys.executable, "-m", "paceline")
    with Program("train", *ENDLESS, "--nproc", "2", "--out", str(tmp_path / "run"), command=command) as program:
        ended = program.wait().require(2)
    assert ended.err.startswith(f"error: the loopback interface of {socket.gethostname()}, over which the ranks")
    assert ended.err.endswith("(Network is unreachable); switch it on: ip link set lo up\n")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def with_a_bad_token(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """A run of 2 ranks whose rank 1 meets a token outside the vocabulary from step 6 on; rank 0 never reads one.

    They are written once the run is under way: what is there when data is opened is refused before a step."""
    place = tmp_path_factory.mktemp("bad-token")
    prepared = Path(shutil.copytree(ensure_datasets(DataConfig(tokenizer_vocab=512), Quiet(), 1)[0], place / "data"))
    stream = Dataset.open(prepared).train
    sequences = ids_at(1337, np.arange(5, 400) * 6 + 5, stream.num_sequences(64))  # the last of each step
    path = prepared / stream.shards[0].path.name
    tokens = np.memmap(path, dtype=np.uint16, mode="r+", offset=HEADER_BYTES)
    flags = ("--nproc", "2", "--data.path", str(prepared), "--out", str(place / "run"))
    with Program("train", *ENDLESS, *flags) as program:
        program.wait_for(lambda: (place / "run/metrics.jsonl").exists() and steps(place / "run"))
        tokens[sequences * 64 + 30] = 600
        tokens.flush()
        return Disturbed(place / "run", program.wait(), program.wait_until_gone())


@pytest.mark.long
def test_a_rank_that_fails_names_itself_and_ends_the_others(with_a_bad_token: Disturbed) -> None:
    assert with_a_bad_token.ended.status == 2, "it is the user's data"
    first = next(line for line in with_a_bad_token.messages if line.startswith("rank 1: error: shard "))
    assert "has id 600 at token" in first
    assert "Traceback" not in with_a_bad_token.ended.out + with_a_bad_token.ended.err
    assert "Traceback" in (with_a_bad_token.folder / "ranks/rank-00001.log").read_text()
    assert len(steps(with_a_bad_token.folder)) >= 5
    assert rows(with_a_bad_token.folder / "events.jsonl")[-1]["event"] == "failed"


def test_a_failure_is_said_once(with_a_bad_token: Disturbed) -> None:
    assert len(with_a_bad_token.messages) == 1
