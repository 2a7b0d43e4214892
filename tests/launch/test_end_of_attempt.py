"""From the ends of ranks to the end of an attempt: the whole table, without a process."""

import json
import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.base.process import Status
from paceline.launch import agent
from paceline.launch.agent import HostRanks
from paceline.launch.attempt import Place
from paceline.launch.ends import Ended, Ends, how_it_ended

DONE, SAVED, FAILED, REFUSED = Status(0), Status(75), Status(1), Status(2)
SUFFERED = Status(1, "rank 1 lost the other ranks")  # because of another rank
KILLED, ENDED = -signal.SIGKILL, -signal.SIGTERM
STOP = {"stop": signal.SIGTERM, "grace_s": 5.0}
HUNG = "rank 1 did not end after the failure of another and was killed"
HUNG_AT_STOP = (
    "rank 1 did not end after SIGTERM, and 5 s without a byte of a save, and was killed; to give a slow disk more time "
    "to save, raise --checkpoint.grace-s"
)
MEMORY = "(the kernel does that when memory runs out)"


def unsaid(what: str, rank: int | None = None) -> Ended:
    """A failure that the launcher has to print."""
    return Ended(status=1, what=what, was_said=False, rank=rank)


# What ranks 0 and 1 reported (None: nothing), how their processes ended (None: killed by the launcher), what else is
# known, and the answer.
TABLE: dict[str, tuple[tuple[Status | None, Status | None], tuple[int | None, int | None], dict[str, Any], Ended]] = {
    "done": ((DONE, DONE), (0, 0), {}, Ended(status=0)),
    "one saved, one done": ((DONE, SAVED), (0, 0), {}, Ended(status=75)),
    "refused": ((REFUSED, SUFFERED), (2, 1), {}, Ended(status=2)),
    "refused beats a death": ((REFUSED, None), (2, -11), {}, Ended(status=2)),
    "killed, and the other lost it": (
        (SUFFERED, None),
        (1, KILLED),
        {},
        unsaid(f"rank 1 was killed by SIGKILL {MEMORY}", 1),
    ),
    "both killed": ((None, None), (KILLED, KILLED), {}, unsaid(f"ranks 0, 1 were killed by SIGKILL {MEMORY}", 0)),
    "no report": ((SUFFERED, None), (1, 3), {}, unsaid("rank 1 ended with exit status 3, and did not report why", 1)),
    "a signal without a name": ((SUFFERED, None), (1, -40), {}, unsaid("rank 1 was killed by signal 40", 1)),
    "a signal beats a status": ((None, None), (1, -11), {}, unsaid("rank 1 was killed by SIGSEGV", 1)),
    "failed": ((SUFFERED, FAILED), (1, 1), {}, Ended(status=1, what="rank 1 failed", rank=1)),
    "killed by the one that names it": ((FAILED, None), (1, KILLED), {}, Ended(status=1, what="rank 0 failed", rank=0)),
    "died, and another failed": ((FAILED, None), (1, -11), {}, unsaid("rank 1 was killed by SIGSEGV", 1)),
    "all lost others": ((SUFFERED, SUFFERED), (1, 1), {}, unsaid("rank 1 lost the other ranks")),
    "hung after a failure": ((FAILED, None), (1, None), {}, Ended(status=1, what="rank 0 failed", rank=0)),
    "hung, and nobody failed": ((DONE, None), (0, None), {}, unsaid(HUNG)),
    "stopped and saved": ((SAVED, SAVED), (0, 0), STOP, Ended(status=75)),
    "stopped while it imports": ((None, None), (ENDED, ENDED), STOP, Ended(status=75, is_early=True)),
    "stopped, rank 0 while it imports": ((None, SAVED), (ENDED, 0), STOP, Ended(status=75, is_early=True)),
    "stopped, rank 1 while it imports": ((SAVED, None), (0, ENDED), STOP, Ended(status=75)),
    "SIGTERM from elsewhere": ((SUFFERED, None), (1, ENDED), {}, unsaid("rank 1 was killed by SIGTERM", 1)),
    "stopped, and failed": ((FAILED, SUFFERED), (1, 1), STOP, Ended(status=1, what="rank 0 failed", rank=0)),
    "killed while it saves": ((SAVED, None), (0, None), STOP, unsaid(HUNG_AT_STOP)),
    "killed by the kernel while it saves": (
        (SUFFERED, None),
        (1, KILLED),
        STOP,
        unsaid(f"rank 1 was killed by SIGKILL {MEMORY}", 1),
    ),
    "killed by the kernel before training": (
        (SUFFERED, None),
        (1, KILLED),
        {**STOP, "has_begun": False},
        Ended(status=75, is_early=True),
    ),
    "host lost while the others save": (
        (None, SUFFERED),
        (None, 1),
        {**STOP, "lost": ("a",)},
        unsaid("rank 1 lost the other ranks"),
    ),
    "host lost, and the others are ended": (
        (None, None),
        (None, None),
        {**STOP, "lost": ("c",)},
        unsaid("rank 0, 1 did not end after the loss of c and was killed"),
    ),
    "killed before training, rank 0 has said it": (
        (SAVED, None),
        (0, None),
        {**STOP, "has_begun": False},
        Ended(status=75),
    ),
    "killed before training, rank 0 itself": (
        (None, SAVED),
        (None, 0),
        {**STOP, "has_begun": False},
        Ended(status=75, is_early=True),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_end_of_an_attempt_follows_from_those_of_its_ranks(case: str) -> None:
    """Mutation: the rules in another order."""
    reports, exits, known, answer = TABLE[case]
    ends = Ends(
        ranks=range(2),
        reports={rank: report for rank, report in enumerate(reports) if report},
        exits={rank: code for rank, code in enumerate(exits) if code is not None},
        **known,
    )
    assert how_it_ended(ends) == answer


def test_an_attempt_whose_hosts_are_all_lost_has_failed() -> None:
    """Finds: `max` of nothing, where the only host of `launch` is lost."""
    assert how_it_ended(Ends(ranks=range(0), reports={}, exits={}, lost=("a",))) == Ended(status=1)


def test_ranks_of_a_host_that_is_lost_are_not_taken_for_killed() -> None:
    """Nobody knows how they ended."""
    known = Ends(ranks=range(2), reports={0: SAVED}, exits={0: 0}, stop=signal.SIGTERM, lost=("b",))
    assert known.killed == []


def test_how_the_last_attempt_failed_is_recorded_when_the_end_comes_with_it(tmp_path: Path) -> None:
    """Finds: events without a failure, so that `runs` calls the run stale."""
    (tmp_path / "events.jsonl").write_text('{"event": "start", "step": 0}\n')
    failed = ("rank 1 was killed by SIGKILL", False)
    told = SimpleNamespace(
        closing=failed, end=1, is_gone=False, place=None, address="127.0.0.1", post=lambda *_, **__: 0
    )
    ranks = cast(HostRanks, SimpleNamespace(folder=tmp_path))
    assert agent.serve(cast(agent.Coordinator, told), ranks, num_ranks=1, port=0) == 1
    event = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["error"], event["by"]) == ("failed", failed[0], "launcher")


def test_the_ends_of_ranks_are_told_with_the_port_of_the_next_attempt(tmp_path: Path) -> None:
    """Finds: all ranks placed at the port of a store that is closed, and the host counts as lost."""
    posts: list[dict[str, Any]] = []
    place = asdict(Place(0, 1, 1, "127.0.0.1", 0, None, 0))
    told = SimpleNamespace(closing=None, end=None, is_gone=False, place=place, address="127.0.0.1")
    told.post = lambda _=None, **changed: posts.append(changed)

    def run(place: Place, _: Any) -> tuple[dict[int, Status], dict[int, int]]:
        assert place.listener
        place.listener.close()
        told.end = 0
        return {0: DONE}, {0: 0}

    ranks = cast(HostRanks, SimpleNamespace(folder=tmp_path, run=run))
    assert agent.serve(cast(agent.Coordinator, told), ranks, num_ranks=1, port=0) == 0
    waiting = [post for post in posts if not post["is_running"]]
    assert all(post.get("port") for post in waiting)
    assert waiting[-1]["exits"] == {"0": 0}
