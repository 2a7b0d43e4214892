"""Verbs are compared by their number, and lines named are the script's."""

import _thread
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.world.calls import Calls, caller, first_difference, frame_of, place

VERBS = st.sampled_from(["step", "mean", "save"])


@given(st.lists(st.tuples(VERBS, st.integers(1, 4)), max_size=30), st.data())
def test_ranks_that_call_alike_never_differ_however_far_apart_they_are(
    verbs: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Also where their lines differ, as in two branches of an `if`."""
    reached = data.draw(st.lists(st.integers(0, len(verbs)), min_size=2, max_size=5))
    noted = [[(n + 1, verb, f"train.py:{line * rank}") for n, (verb, line) in enumerate(verbs)][:stop][-8:]
             for rank, stop in enumerate(reached)]  # fmt: skip
    assert first_difference(noted) is None


@given(st.lists(VERBS, min_size=1, max_size=8), st.data())
def test_the_first_difference_is_found_with_what_each_rank_called(verbs: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(verbs) - 1))
    odd = data.draw(st.integers(0, 2))
    lists = [list(enumerate(verbs, 1)) for _ in range(3)]
    lists[odd] = [*lists[odd][:at], (at + 1, "leave")]
    found = first_difference([[(n, verb, f"rank{r}.py:{n}") for n, verb in known] for r, known in enumerate(lists)])
    assert found is not None
    number, called = found
    assert number == at + 1
    assert called == {
        rank: ("leave" if rank == odd else verbs[at], f"rank{rank}.py:{number}") for rank in range(3)
    }  # fmt: skip


def test_the_last_eight_are_kept_with_their_lines() -> None:
    calls = Calls()
    for _ in range(20):
        calls.record("step")
    assert [number for number, _, _ in calls.last()] == list(range(13, 21))
    assert {(verb, where.split(":")[0]) for _, verb, where in calls.last()} == {("step", "test_calls.py")}


def test_a_verb_while_gradients_travel_is_refused_with_its_line() -> None:
    calls, replica = Calls(), object()
    calls.record("Replica.step", replica)
    calls.reducing = replica
    with pytest.raises(UserError, match=r"test_calls.py:\d+: World.mean was called between"):
        calls.record("World.mean")
    calls.record("Replica.step", replica)
    assert [verb for _, verb, _ in calls.last()] == ["Replica.step", "Replica.step"]


def test_a_script_in_a_package_whose_name_begins_with_torch_is_a_script() -> None:
    names: dict[str, Any] = {"place": place}
    recipe = f"{Path(torch.__file__).parent}tune/recipe.py"
    exec(compile("\n\nseen = place()", recipe, "exec"), names)
    assert names["seen"] == "recipe.py:3"


def test_a_thread_without_frames_of_the_script_names_the_main_threads_line() -> None:
    """On GPUs autograd runs hooks in threads of its own."""
    seen: list[str] = []
    done = threading.Lock()
    done.acquire()
    source = "def run():\n    seen.append(place())\n    done.release()"
    names: dict[str, Any] = {"seen": seen, "place": place, "done": done}
    exec(compile(source, caller.__code__.co_filename, "exec"), names)  # its frame is as if in this package
    _thread.start_new_thread(names["run"], ())
    done.acquire()
    assert seen[0] != "the end of its script"


def test_a_frame_is_looked_up_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can block Python 3.11 for ever (cpython issue 106883). Mutation: `sys._current_frames` with it."""
    was_enabled: list[bool] = []
    current_frames = sys._current_frames

    def look_up() -> Any:
        was_enabled.append(gc.isenabled())
        return current_frames()

    monkeypatch.setattr(sys, "_current_frames", look_up)
    frame = frame_of(threading.get_ident())
    assert frame is not None
    assert "look_up" in frame.f_code.co_name
    assert frame_of(0) is None
    assert was_enabled == [False, False]
    assert gc.isenabled()


def test_what_runs_a_script_is_no_line_of_it() -> None:
    """Finds: `<frozen runpy>:88` where a script that `paceline train -- script.py` runs has ended."""
    scope = {"place": place}
    exec(compile("where = place()", "<frozen runpy>", "exec"), scope)
    assert str(scope["where"]).startswith("test_calls.py:")
