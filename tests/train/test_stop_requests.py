"""What asks a run to stop."""

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from paceline.base.process import LAUNCHER, STATUS_FOLDER
from paceline.replica.stopping import StopRequest, why_to_stop


@pytest.fixture
def ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_is_a_reason_to_stop_and_afterwards_what_it_was_before(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.vote == 0.0
        os.kill(os.getpid(), number)
        assert why_to_stop([0.0, stop.vote]) == f"{name} on rank 1"
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("ignored")
def test_a_hangup_that_nohup_has_ignored_stays_so() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.vote == 0.0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("name", [LAUNCHER, "TORCHELASTIC_RUN_ID"])
def test_a_time_limit_counts_from_the_start_of_the_launcher(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It starts ranks again, and a queue's limit is its own. This process's parent stands for it."""
    began_s = [psutil.Process(pid).create_time() for pid in (os.getppid(), os.getpid())]
    monkeypatch.setenv(STATUS_FOLDER, "/")
    monkeypatch.setenv(name, str(os.getppid()))
    assert why_to_stop([StopRequest(time.time() - sum(began_s) / 2).vote]) == "train.stop-after on rank 0"
