"""Errors: what they exit with, who says them, and what they take a typing mistake for."""

import pytest

from paceline.base.errors import RunError, UserError, nearest


@pytest.mark.parametrize(("typed", "meant"), [("n_layr", "n_layer"), ("stpes", "steps"), ("LR", None), ("zzz", None)])
def test_a_misspelt_word_is_answered_by_the_nearest_one_or_none(typed: str, meant: str | None) -> None:
    assert nearest(typed, ["n_layer", "steps", "lr"]) == (f" (did you mean '{meant}'?)" if meant else "")


def test_nothing_is_near_to_an_empty_list() -> None:
    assert nearest("x", iter([])) == ""


def test_what_the_user_must_change_exits_with_2_and_a_failed_run_with_1() -> None:
    assert (UserError("x").exit_status, UserError("x").reach) == (2, "host")
    assert (RunError("x").exit_status, RunError("x").reach) == (1, "rank")
    assert UserError("x", reach="world").reach == "world"
