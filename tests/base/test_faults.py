"""Faults on demand: what the variable says is what strikes, once, in that life; what it cannot mean is refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.base import faults
from paceline.base.errors import UserError


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test() -> object:
    yield
    faults.install(0, 1, 0, "")


def test_without_the_variable_nothing_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.install(0, 2, 0) == []
    assert all(faults.strike(phase, step) is None for phase in faults.PHASES for step in range(5))


def test_each_rank_gets_its_own_of_several_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "rank=1 step=7 phase=backward kind=nan; rank=0 step=20 phase=save.write kind=full ;; "
        "rank=1 step=8 kind=raise phase=data"
    )
    monkeypatch.setenv(faults.VARIABLE, text)
    assert [fault.kind for fault in faults.install(0, 2, 0)] == ["full"]
    found = faults.install(1, 2, 0)
    assert [(fault.rank, fault.step, fault.phase, fault.kind) for fault in found] == [
        (1, 7, "backward", "nan"),
        (1, 8, "data", "raise"),
    ]


def test_a_fault_strikes_once_at_its_phase_of_its_step() -> None:
    faults.install(0, 1, 0, "rank=0 step=2 phase=backward kind=nan")
    calls = [(phase, step) for step in (1, 2, 2, 3) for phase in ("data", "backward", "update")]
    struck = [call for call in calls if faults.strike(*call) == "nan"]
    assert struck == [("backward", 2)]


def test_several_faults_of_one_phase_all_strike() -> None:
    """Finds: of a sleep and what follows it only the sleep."""
    faults.install(0, 1, 0, "rank=0 step=1 phase=data kind=sleep seconds=0; rank=0 step=1 phase=data kind=raise")
    with pytest.raises(faults.Injected):
        faults.strike("data", 1)


def test_the_exceptions_that_faults_raise() -> None:
    faults.install(0, 1, 0, "rank=0 step=1 phase=forward kind=raise; rank=0 step=1 phase=save.sync kind=full")
    with pytest.raises(faults.Injected, match="forward of step 1"):
        faults.strike("forward", 1)
    with pytest.raises(OSError, match="No space left") as caught:
        faults.strike("save.sync", 1)
    assert caught.value.errno == 28


def test_a_sleep_goes_on_as_if_nothing_had_been_and_leaves_its_mark(tmp_path: Path) -> None:
    mark = tmp_path / "struck"
    faults.install(0, 1, 0, f"rank=0 step=1 phase=reduce kind=sleep seconds=1 mark={mark}")
    assert faults.strike("reduce", 2) is None
    assert not mark.exists()
    before = time.monotonic()
    assert faults.strike("reduce", 1) is None
    assert time.monotonic() - before > 0.9
    assert mark.exists()


@pytest.mark.parametrize(
    ("attempt", "lives"), [("", [0]), ("attempt=0", [0]), ("attempt=2", [2]), ("attempt=any", [0, 1, 2])]
)
def test_a_fault_is_of_one_life_of_the_ranks_or_of_any(attempt: str, lives: list[int]) -> None:
    text = f"rank=0 step=1 phase=data kind=kill {attempt}"
    assert [life for life in range(3) if faults.install(0, 1, life, text)] == lives


def test_a_kind_that_only_one_place_can_do_happens_there() -> None:
    for kind, phase in (("nan", "backward"), ("flip", "publish"), ("flip-state", "check"), ("kill", "data")):
        (fault,) = faults.install(0, 1, 0, f"kind={kind}")
        assert (fault.rank, fault.step, fault.phase) == (0, 1, phase)


def test_a_fault_of_the_first_attempt_does_not_end_a_later_one_of_fewer_ranks() -> None:
    assert [len(faults.install(3, 4, 0, "rank=3 step=1")), faults.install(0, 2, 1, "rank=3 step=1")] == [1, []]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step=3 rnak=1", r"'rnak=1' \(did you mean 'rank'\?\)"),
        (
            "rank",
            "'rank'.* is not NAME=VALUE; the names are rank, step, .*, times, mark",
        ),
        ("rank= step=1", "'rank='"),
        ("phase=bakward", r"no phase 'bakward' \(did you mean 'backward'\?\); there are data, forward"),
        ("kind=explode", "no kind 'explode'.*; there are kill, launcher"),
        ("rank=one", "rank is 'one'; it must be a whole number"),
        ("rank=²", "rank is '²'"),
        ("step=-1", "step is '-1'"),
        ("seconds=soon", "seconds is 'soon'"),
        ("seconds=-1", "seconds is '-1'; it must be a number, 0 or more"),
        ("step=0", "step is 0; the first one is 1"),
        ("rank=2", "rank is 2, in a world of 2; the last one is 1"),
        ("rank=2 attempt=1", "rank is 2, in a world of 2"),
        ("attempt=last", "attempt is 'last'"),
        ("kind=nan phase=forward", "nan happens only at backward, not at forward"),
        ("rank=0 step=1 phase=data; colour=red", "'colour=red'"),
    ],
)
def test_what_a_fault_cannot_mean_is_refused_on_every_rank(text: str, said: str) -> None:
    for rank in range(2):
        with pytest.raises(UserError, match=f"^{faults.VARIABLE}: .*{said}"):
            faults.install(rank, 2, 0, text)


STRIKE = """
import os, sys, time
from paceline.base import faults
faults.install(0, 1, 0)
print(os.getpid(), flush=True)
faults.strike("data", 1)
print("alive", flush=True)
"""


def struck(kind: str, code: str = STRIKE) -> subprocess.Popen[str]:
    environment = {**os.environ, faults.VARIABLE: f"rank=0 step=1 phase=data kind={kind}"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def test_kill_leaves_no_last_words() -> None:
    process = struck("kill")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert said.split() == [str(process.pid)]


def test_stop_leaves_the_process_alive_and_silent_until_it_is_continued() -> None:
    process = struck("stop")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=30)
        assert said.split() == [str(process.pid), "alive"]
    finally:
        process.kill()
        process.wait()


def test_launcher_kills_the_process_that_started_this_one() -> None:
    """Two generations: the child strikes, and it is its parent that dies."""
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {STRIKE!r}]); time.sleep(30)"
    process = struck("launcher", parent)
    assert process.wait(timeout=30) == -signal.SIGKILL
    said, _ = process.communicate(timeout=30)
    assert said.split()[1:] == ["alive"]  # the child saw its parent's end, and went on to its own
