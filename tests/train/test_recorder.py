"""What is recorded of a step: each millisecond under its name, and other ranks' times by rank 0 alone."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program import rows

from paceline.config import Config
from paceline.record.console import Console
from paceline.record.folder import RunFolder, create
from paceline.record.stragglers import PER_SEQUENCE, PER_STEP, Stragglers
from paceline.replica.result import StepResult, StepTimes
from paceline.train.progress import Progress
from paceline.train.recorder import Recorder


class Unread(list[StepTimes]):
    """Times by rank that nobody may go through."""

    def __iter__(self) -> Any:
        raise AssertionError("went through the times of all ranks")


def times(step_ms: float, exposed_ms: float = 0.0) -> StepTimes:
    return StepTimes(1.0, 20.0, 40.0, 5.0, exposed_ms, exposed_ms, 0.0, 0.0, step_ms)


def result(mine: StepTimes, by_rank: list[StepTimes]) -> StepResult:
    return StepResult(
        loss=2.0,
        grad_norm=1.0,
        weight=64.0,
        weights=[64.0],
        skipped=None,
        stop_reason=None,
        numbers=[],
        times=mine,
        by_rank=by_rank,
    )


def recorded(rank: int, num_ranks: int, folder: RunFolder, step_result: StepResult) -> Recorder:
    """Returns a recorder after two such steps."""
    world = SimpleNamespace(
        rank=rank, is_main=rank == 0, world_size=num_ranks, peers=[SimpleNamespace(host="host")] * num_ranks
    )
    settings = SimpleNamespace(config=Config(), tokens_per_step=64, num_steps=9, share_done=lambda progress: 0.5)
    console = Console(rank)
    made = Recorder(world, folder, console, settings, None)  # type: ignore[arg-type]
    with console.progress(1.0):
        for step in (1, 2):
            made.step(Progress(step=step), step_result, [1] * num_ranks, 0.1, 1.0)
    folder.close()
    return made


@pytest.mark.parametrize(
    ("mine", "before_all_gather", "exposed_ms"),
    [
        # One rank: what it does after the all-gather, such as the update, is no communication.
        (times(80.0), [times(70.0)], [0.0]),
        # Rank 0 waited 6 ms in the all-gather and 4 ms for weights; rank 1 came 5 ms later, and did 10 ms, too.
        (times(90.0, 12.0), [times(70.0, 2.0), times(75.0, 3.0)], [12.0, 8.0]),
    ],
)
def test_only_waiting_for_ranks_is_communication(
    tmp_path: Path, mine: StepTimes, before_all_gather: list[StepTimes], exposed_ms: list[float]
) -> None:
    """Finds: booking what comes after the all-gather as exposed communication, 2.6 to 10% of a step of one rank."""
    folder = create(tmp_path / "run")
    made = recorded(0, len(before_all_gather), folder, result(mine, before_all_gather))
    parts = made.totals.mean_parts()
    assert parts["exposed communication"] == pytest.approx(exposed_ms)
    assert parts["other"] == pytest.approx([mine.step_ms - 66 - ms for ms in exposed_ms])


def test_a_rate_is_of_a_second(tmp_path: Path) -> None:
    """Finds: tokens of a millisecond under the name of a second."""
    folder = create(tmp_path / "run")
    recorded(0, 1, folder, result(times(80.0), [times(70.0)]))
    found = rows(folder.metrics)
    assert [row["step_ms"] for row in found] == [80.0, 80.0]
    assert [row["tokens_per_s"] for row in found] == [64 / 0.08] * 2


def test_ranks_other_than_0_do_not_look_at_all_ranks_times(tmp_path: Path) -> None:
    """35 ms a step of each of 1,024 ranks, for records that rank 0 alone writes."""
    recorded(1, 2, create(tmp_path / "run"), result(times(80.0), Unread([times(70.0)] * 2)))


def test_looking_for_stragglers_costs_little_more_for_many_ranks() -> None:
    """CPU time, not seconds. Finds: a loop over ranks in Python (190 times as much for 128 times as many)."""

    def cpu_s(num_ranks: int) -> float:
        stragglers = Stragglers(num_ranks)
        parts = {phase: [10.0] * num_ranks for phase in (*PER_SEQUENCE, *PER_STEP)}
        for step in range(30):
            stragglers.observe(step, [4] * num_ranks, parts)
        began = time.thread_time()
        for step in range(30, 50):
            stragglers.observe(step, [4] * num_ranks, parts)
        return time.thread_time() - began

    assert cpu_s(1024) < 40 * cpu_s(8)
