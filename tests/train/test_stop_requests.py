"""What asks a run to stop."""

import os
import signal
from collections.abc import Iterator

import pytest

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
