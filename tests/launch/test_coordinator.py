"""What the coordinator of several hosts decides, without hosts."""

import fcntl
import time
from pathlib import Path

import pytest

from paceline.base import clock
from paceline.launch import agent
from paceline.launch.agent import Silence, State
from paceline.launch.nodes import Node, order_for, ranked
from paceline.launch.options import NamedHost


class Agent:
    """A connection that has reported this state."""

    def __init__(self, state: State):
        self.state = state


def node(name: str, newest: int | None) -> Node:
    made = Node(NamedHost(name, "1"))
    made.connection = Agent(State(num_ranks=1, newest=newest))  # type: ignore[assignment]
    return made


def test_the_newest_checkpoint_has_rank_0_then_the_last_one_that_had_it_then_the_first_host() -> None:
    """Mutation: the host with an older checkpoint has rank 0, and the run loses steps."""
    a, b, c = node("a", None), node("b", 20), node("c", 20)
    assert [each.name for each in ranked([a, b, c], None)] == ["b", "a", "c"]
    assert [each.name for each in ranked([a, b, c], c)] == ["c", "a", "b"]
    assert [each.name for each in ranked([a, b, c], a)] == ["b", "a", "c"]
    assert ranked([a], None) == [a]


@pytest.mark.parametrize(
    ("is_lost", "has_failed", "makes_room", "order"),
    [(0, 0, 0, ""), (0, 0, 1, "save"), (0, 1, 1, "fail"), (1, 0, 1, "end"), (1, 1, 0, "end")],
)
def test_what_ranks_are_told(is_lost: int, has_failed: int, makes_room: int, order: str) -> None:
    """Mutation: ranks whose peers are gone are asked to save, and wait for them."""
    assert order_for(bool(is_lost), bool(has_failed), bool(makes_room)) == order


def test_a_folder_that_another_run_writes_does_not_hold_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says who writes there. Finds: `launch` of a run that runs hangs, and hears no signal."""
    monkeypatch.setattr(agent, "_COPY_ENDS_S", 0.1)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        agent._wait_for_writer(tmp_path)


def test_a_pause_of_this_process_is_no_silence_of_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: a launcher that slept takes all hosts for lost when it wakes up."""
    now = time.monotonic()
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    silence = Silence(13.0)
    now += 60
    assert not silence.is_too_long(), "this process slept"
    for second in range(1, 16):
        now += 1
        assert silence.is_too_long() == (second > 12), "a second of the pause counts"
    silence.heard()
    assert not silence.is_too_long()
