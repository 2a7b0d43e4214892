"""One definition of a run's rate, whoever shows it."""

from typing import Any

import pytest

from paceline.record.rate import NUM_ROWS, rate_of


def steps(*ms: float, first: int = 1, mfu: float | None = 0.5) -> list[dict[str, Any]]:
    """Training rows of steps of 100 tokens that took so long."""
    return [
        {"step": step, "loss": 2.0, "step_ms": each, "tokens_per_s": 1e5 / each, "mfu": mfu}
        for step, each in enumerate(ms, first)
    ]


def test_tokens_and_time_of_the_usual_steps_are_divided() -> None:
    """A mean or a median of the rows' own tokens/s gives another number, as does counting the slow steps."""
    rows = [*steps(900.0, 10.0, 30.0, 500.0), {"step": 4, "val_loss": 2.0}]
    rate = rate_of(rows, [{"event": "start"}, {"event": "profile", "step": 4}])
    assert rate is not None
    assert (rate.tokens_per_s, rate.mfu, rate.step_ms, rate.num_rows) == pytest.approx((5000.0, 0.5, 20.0, 2))


def test_only_the_newest_attempt_counts_once_it_has_steps() -> None:
    rows, events = steps(90.0, 10.0, 10.0), [{"event": "start"}, {"event": "resume", "step": 3}]
    before, first, after = (rate_of(rows + steps(*ms, first=4), events) for ms in ((), (80.0,), (80.0, 20.0, 20.0)))
    assert [rate and rate.step_ms for rate in (before, first, after)] == pytest.approx([10.0, 80.0, 20.0])


def test_a_long_run_has_the_rate_of_its_newest_rows() -> None:
    rate = rate_of(steps(*[50.0] * 200, *[10.0] * NUM_ROWS, mfu=None), [{"event": "start"}])
    assert rate is not None
    assert rate.step_ms == pytest.approx(10.0)
    assert not rate.mfu > 0
    assert rate_of([{"step": 1, "tokens_per_s": "fast", "step_ms": None}], []) is None
