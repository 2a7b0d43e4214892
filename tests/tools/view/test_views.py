"""What is shown of a run, against what was written: while it runs, after a resume, and of damaged records."""

import json
import math
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_run import PARTS, Simulated

from paceline.base import units
from paceline.record.folder import COMPLETE, RunFolder
from paceline.record.state import read_state
from paceline.tools.view.follow import Views
from paceline.tools.view.measures import Traffic, traffic_text
from paceline.tools.view.view import RunView


def viewed(folder: Path) -> RunView:
    ((_, view),) = Views(folder).update()
    return view


def facts(view: RunView) -> dict[str, str]:
    return {fact.label: fact.value for fact in view.facts}


def test_numbers_of_a_script_have_curves_and_their_last_values(tmp_path: Path) -> None:
    """Mutations: a number that comes later moves the values of all later steps; 0 is no value."""
    made = Simulated(tmp_path / "run")
    for step, logged in enumerate([{"accuracy": 0.5}, {"accuracy": None}, {"accuracy": 0.75, "seconds": 0.0}], 1):
        made.append("metrics.jsonl", made.row(step) | {"unit": "samples"} | logged)
    made.append("metrics.jsonl", {"step": 3, "val_loss": None, "f1": 0.25, "unit": "samples", "elapsed_s": 3.0})
    view = viewed(made.folder)
    columns = [view.curves["steps"][f"logged {name}"]["mean"] for name in ("accuracy", "seconds")]
    assert str(columns) == "[[0.5, nan, 0.75], [nan, nan, 0.0]]"
    assert view.curves["validation"]["logged f1"] == {"mean": [0.25]}
    assert "loss" not in view.curves["validation"], "a name in the legend of no curve"
    assert [fact[:2] for fact in view.facts[-3:]] == [("f1", "0.25"), ("accuracy", "0.75"), ("seconds", "0")]


def test_evaluations_of_one_step_are_one_point_that_has_all_their_numbers(tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run")
    evaluated: list[dict[str, Any]] = [{"val_loss": 2.0, "f1": 0.1}, {"val_loss": None, "f1": 0.5}]
    made.append("metrics.jsonl", {"step": 0, "val_loss": 3.0, "unit": "samples"})
    for step in range(1, 5):
        made.append("metrics.jsonl", made.row(step) | {"unit": "samples"})
    for row in evaluated:
        made.append("metrics.jsonl", {"step": 4, "unit": "samples"} | row)
    view = viewed(made.folder)
    validation = view.curves["validation"]
    assert validation["step"] == [0, 4]
    assert str([validation[name]["mean"] for name in ("loss", "logged f1")]) == "[[3.0, 2.0], [nan, 0.5]]"
    assert (facts(view)["Validation loss"], facts(view)["f1"]) == ("2.000", "0.5")
    assert read_state(RunFolder(made.folder)).evaluation["val_loss"] == 2.0  # as `runs` shows it
    made.append("metrics.jsonl", made.row(5) | {"unit": "samples"})
    made.append("metrics.jsonl", {"step": 5, "val_loss": None, "val_bpb": 0.98, "unit": "samples"})
    view = viewed(made.folder)
    assert ("Validation loss", "2.000", "at step 4") in view.facts
    assert view.tables["loss"].rows[-1][-1] == "2.000"
    assert facts(view)["val_bpb"] == "0.98", "a trainer's name, and here a number of the script"


def test_evaluations_between_rows_and_outside_of_them_have_their_places_on_each_axis(tmp_path: Path) -> None:
    """Mutation: what comes before the first row or after the last one stands beside it."""
    made = Simulated(tmp_path / "run")
    for step in range(10, 51, 10):
        if step % 20 == 0:
            made.append("metrics.jsonl", made.row(step) | {"step_ms": 500.0})
        made.append("metrics.jsonl", {"step": step, "val_loss": 2.0})
    validation = viewed(made.folder).curves["validation"]
    assert validation["tokens"] == [10_000, 20_000, 30_000, 40_000, 50_000]
    assert validation["seconds"] == [5, 10, 15, 20, 25]


def test_a_run_has_come_to_its_last_record_also_if_that_is_no_row(tmp_path: Path) -> None:
    """Mutation: a run that has finished with log.every 10 is at step 20 of 25."""
    made = Simulated(tmp_path / "run", num_steps=25)
    for step in (10, 20):
        made.append("metrics.jsonl", made.row(step))
    made.event("end", step=25, reason=COMPLETE)
    view = viewed(made.folder)
    assert (view.said, view.step, view.frac) == ("finished", "25 of 25", 1.0)


def test_the_config_of_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run")
    made.steps(1)
    runs = Views(made.folder)
    ((_, view),) = runs.update()
    assert view.config["train.steps"] == "500"
    (made.folder / "config.toml").write_text("[train]\nsteps = 600\n")
    made.event("resume", step=1, reached=1, world_size=2)
    ((_, view),) = runs.update()
    assert view.config["train.steps"] == "600"


def test_of_a_script_the_ranks_deal_what_its_rows_count(tmp_path: Path) -> None:
    """Mutation: tokens that a script's ranks were dealt are called sequences."""
    made = Simulated(tmp_path / "run", 2)
    (made.folder / "config.toml").write_text('[run]\nunit = "tokens"\n')
    for step in range(1, 6):
        made.append("metrics.jsonl", made.row(step) | {"unit": "tokens", "rank_sequences": [192, 128]})
    view = viewed(made.folder)
    assert view.tables["shares"].head[1:3] == ["tokens a step", "tokens/s of its own work"]
    assert "the last step had 192, 128 tokens." in view.findings["shares"]


def test_of_64_ranks_the_slowest_is_first_and_bars_add_up_to_the_step(tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run", 64, num_steps=500, slow_rank=37)
    made.steps(150)
    straggler = {"since_step": 130, "phase": "forward", "ms": 121.2, "median_ms": 61.0}
    made.event("straggler", step=140, rank=37, host="node4", **straggler)
    view = viewed(made.folder)
    rows = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()][-100:]
    assert (view.state, view.level, view.step, view.frac) == ("running", "good", "150 of 500", 0.3)
    assert (view.ranks[0].rank, len(view.ranks)) == (37, 5)
    assert view.other_ranks.startswith("and 59 more ranks, which work 19")
    assert len(view.heat["labels"]) == 64
    assert [rank.work_ms for rank in view.ranks] == sorted((rank.work_ms for rank in view.ranks), reverse=True)
    for rank in view.ranks:
        own = {part: fmean(row[f"rank_{part}_ms"][rank.rank] for row in rows) for part in PARTS}
        assert rank.work_ms == pytest.approx(sum(own.values()) - own["exposed_comm"], abs=0.01)
        assert rank.parts["exposed communication"] == pytest.approx(own["exposed_comm"], abs=0.01)
        assert sum(rank.parts.values()) == pytest.approx(fmean(row["step_ms"] for row in rows), abs=0.01)
        assert rank.host == f"node{rank.rank // 8}"
    assert view.findings["ranks"].startswith(
        "Rank 37 (host node4) has been slow since step 130: forward took it 121 ms"
    )
    assert [rank.rank for rank in view.ranks if rank.is_slow] == [37]
    rate = read_state(RunFolder(made.folder)).rate
    assert rate is not None
    assert facts(view)["Throughput"] == units.count(rate.tokens_per_s)  # as `runs` and `report` show it
    left_s = 350 * rate.step_ms / 1e3
    assert facts(view)["Time left"] == f"{round(left_s) // 60}m{round(left_s) % 60:02d}s"
    made.event("straggler over", step=150, rank=37, host="node4", cost_s=1.0)
    over = viewed(made.folder)
    assert over.findings["ranks"].startswith("Rank 37 (host node4) was slow in steps 130 to 150")
    assert not any(rank.is_slow for rank in over.ranks)


def test_waits_that_are_longer_than_the_collectives_are_not_a_multiple_of_them() -> None:
    """Finds: exposed time over that of collectives as it is, "8037% of that time": a rank waits for others, too."""
    said = traffic_text(
        Traffic(1e6, comm_ms=0.5, exposed_ms=40.0, step_ms=80.0, computed_bytes=math.nan, is_in_memory=False)
    )
    assert "100% of that time is exposed, which is 50% of the step" in said


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run")
    made.steps(50)
    runs = Views(made.folder)

    def now() -> RunView:
        ((_, view),) = runs.update()
        return view

    assert now().step == "50 of 500"
    assert not runs.update()  # nothing is new
    made.event("failed", step=50, error="rank 1 was lost")
    view = now()
    assert (view.level, view.said) == ("bad", "failed: rank 1 was lost")
    assert "Time left" not in facts(view)
    RunFolder(made.folder).forget_after(40)
    made.step, made.num_ranks = 40, 3
    made.event("resume", step=40, reached=50, world_size=3, hosts=["a", "b", "c"])
    made.steps(5)
    view = now()
    assert (view.said, view.step, view.resumed) == ("running", "45 of 500", [40])
    assert view.curves["steps"]["step"] == list(range(1, 46))
    assert len(view.ranks) == 3
    assert facts(view)["Ranks"] == "2 → 3"
    assert [event.kind for event in view.events] == ["resume", "failed", "start"]
    made.event("end", step=45, reason="SIGTERM on rank 0")
    view = now()
    assert (view.level, view.said) == ("open", "stopped: SIGTERM on rank 0")


def test_runs_appear_when_they_begin_and_are_only_read(tmp_path: Path) -> None:
    one, folder = Views(tmp_path / "runs" / "one"), Views(tmp_path / "runs")
    assert (one.update(), folder.update(), one.all) == ([], [], [])
    made = Simulated(tmp_path / "runs" / "one")
    made.steps(3)
    (tmp_path / "runs" / "no run").mkdir()
    before = {path: (path.stat(), path.read_bytes()) for path in made.folder.rglob("*") if path.is_file()}
    with filelock.FileLock(tmp_path / "runs" / "one" / "lock"):  # nobody waits for it
        assert [index for index, _ in one.update()] == [0]
        assert [view.name for _, view in folder.update()] == ["one"]
    os.unlink(tmp_path / "runs" / "one" / "lock")
    Simulated(tmp_path / "runs" / "a second").steps(1)
    assert [(index, view.name) for index, view in folder.update()] == [(1, "a second")]
    assert (one.is_one, folder.is_one) == (True, False)
    after = {path: (path.stat(), path.read_bytes()) for path in made.folder.rglob("*") if path.is_file()}
    assert {path: (stat.st_mtime_ns, data) for path, (stat, data) in before.items()} == {
        path: (stat.st_mtime_ns, data) for path, (stat, data) in after.items()
    }


def test_a_new_run_takes_the_place_of_the_oldest_of_32(tmp_path: Path) -> None:
    def begin(number: int) -> None:
        file = tmp_path / f"run-{number}" / "metrics.jsonl"
        file.parent.mkdir()
        file.write_text('{"step": 1, "loss": 2.0}\n')
        os.utime(file, (1e9 + number, 1e9 + number))

    runs = Views(tmp_path)
    for number in range(32):
        begin(number)
    assert [index for index, _ in runs.update()] == list(range(32))
    begin(32)
    assert [(index, view.name) for index, view in runs.update()] == [(0, "run-32")]
    assert [view.name for view in runs.all] == [f"run-{number}" for number in range(1, 33)]


def test_a_process_that_is_gone_or_silent_is_told_of(tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run")
    made.steps(3)
    for name in ("config.toml", "metrics.jsonl", "events.jsonl"):
        os.utime(made.folder / name, (1e9, 1e9))
    assert viewed(made.folder).said.startswith("running, without a new record for")
    (made.folder / "lock.holder").unlink()
    assert viewed(made.folder).said.startswith("stale: no end is recorded")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), st.lists, max_leaves=4
)


@given(damage=st.dictionaries(st.sampled_from(["step", "loss", "step_ms", "val_loss", "rank_data_ms", "world_size",
    "rank_sequences", "tokens", "mfu", "tokens_per_s"]), JSON), event=st.dictionaries(st.sampled_from(["event", "time",
    "step", "rank", "hosts", "reason"]), JSON))  # fmt: skip
def test_damaged_records_are_shown_as_far_as_they_go(
    tmp_path_factory: pytest.TempPathFactory, damage: dict[str, Any], event: dict[str, Any]
) -> None:
    made = Simulated(tmp_path_factory.mktemp("run") / "run")
    made.append("metrics.jsonl", made.row(1) | damage)
    made.append("events.jsonl", {"event": "straggler", "rank": 0} | event)
    view = viewed(made.folder)
    assert json.loads(json.dumps(view.as_json(), allow_nan=False))["name"] == "run"
