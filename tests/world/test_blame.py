"""Who is named when ranks wait too long: the order of the answers in blame.py, without ranks or a store."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.world.beats import Beat
from paceline.world.blame import Known, find_blame
from paceline.world.peer import Peer

SILENT_S = STILL_S = 10.0
STUCK = 30.0  # longer than both


def beat(rank: int, **facts: Any) -> Beat:
    """A rank that has stood still for long, in an all-reduce unless `facts` say otherwise."""
    usual = {"state": "runs", "section": "backward", "step": 3, "still_s": STUCK, "waits_for": "an all-reduce"}
    return Beat(**{"number": 1, "stack": [], "error": "", "calls": [], "dead": [], **usual, **facts})  # type: ignore[arg-type]


def known_of(*beats: Beat) -> Known:
    """What rank 0 knows of ranks on hosts of their own, all of which it has just heard of."""
    peers = [
        Peer(rank=rank, host=f"h{rank}", pid=1, local_rank=0, boot_id=f"b{rank}", born_ticks=1)
        for rank in range(len(beats))
    ]
    ages_s = dict.fromkeys(range(1, len(beats)), 0.0)
    return Known(peers, 0, dict(enumerate(beats)), ages_s, missing_store=None, beat_s=1.0)


WAITS, DATA = beat(0), beat(0, section="data", waits_for=None)


@pytest.mark.parametrize(
    ("known", "named", "said"),
    [
        (known_of(WAITS, DATA, WAITS), [1], "rank 1 (h1, pid 1) has made no progress for 30 s; it is in data of step"),
        (known_of(WAITS, replace(DATA, still_s=1.0), WAITS), [], ""),
        (known_of(WAITS, WAITS, WAITS), [None], "all ranks stand still in backward of step 3, waiting in"),
        (known_of(WAITS, WAITS, beat(2, waits_for="a barrier")), [2], "waiting in a barrier, and most ranks in"),
        (known_of(WAITS, WAITS, beat(2, state="failed", error="full")), [2], "ended with an error in backward"),
        (known_of(WAITS, beat(1, dead=[2]), WAITS), [2], "is gone"),
        (replace(known_of(WAITS, WAITS, DATA), ages_s={1: STUCK, 2: 0.0}), [1], "has not answered for at least 30 s"),
        (replace(known_of(WAITS, WAITS, DATA), ages_s={1: 1.0, 2: 0.0}), [2], "has made no progress"),
        (replace(known_of(WAITS, DATA), missing_store="the store"), [None], "the store does not answer"),
        (known_of(beat(0, calls=[(1, "sum", "a.py:1")]), beat(1, calls=[(1, "mean", "a.py:2")])), [None] * 3, "verbs"),
    ],
    ids=[
        *("stands in its data", "is slow", "all wait", "in another collective", "failed", "dead", "silent"),
        *("not silent for long", "no store", "other verbs"),
    ],
)
def test_the_first_answer_that_applies_is_given(known: Known, named: list[int | None], said: str) -> None:
    """Finds: a rank that waits for the others named as the one that stands still; a rank that makes progress named."""
    found = find_blame(known, SILENT_S, STILL_S)
    assert [rank for rank, _ in found] == named
    assert not said or said in found[0][1]


def test_of_many_ranks_the_one_that_called_something_else_is_named_first() -> None:
    """Finds: the line of rank 3, whose call it was, left out, and `and ranks None` in its place."""
    usual = [beat(rank, calls=[(1, "Replica.step", "a.py:1")]) for rank in range(6)]
    usual[3] = beat(3, calls=[(1, "World.mean", "a.py:2")])
    blame = find_blame(known_of(*usual), SILENT_S, STILL_S)
    assert [text for _, text in blame[1:]] == [
        "rank 3 (h3, pid 1) called World.mean at a.py:2",
        "rank 0 (h0, pid 1), rank 1 (h1, pid 1), rank 2 (h2, pid 1) and 2 more called Replica.step at a.py:1",
    ]


def test_ranks_in_as_many_collectives_are_told_by_where_they_are() -> None:
    known = known_of(WAITS, WAITS, beat(2, waits_for="a barrier"), beat(3, waits_for="a barrier"))
    texts = [text for _, text in find_blame(known, SILENT_S, STILL_S)]
    assert texts[0] == "ranks wait in different collectives"
    assert [text.split(" in ")[0] for text in texts[1:]] == [
        "rank 0 (h0, pid 1), rank 1 (h1, pid 1)",
        "rank 2 (h2, pid 1), rank 3 (h3, pid 1)",
    ]
