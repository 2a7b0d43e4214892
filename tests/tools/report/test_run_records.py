"""Records as they are found: of resumed runs, cut short, older, or not what they should be."""

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.base.errors import UserError
from paceline.record.rows import StepRow
from paceline.record.stragglers import Slow, Stragglers
from paceline.tools.report.facts import Summary
from paceline.tools.report.page import make_page
from paceline.tools.report.read import Records, buckets, in_buckets, lower_median, read_run, slowness
from paceline.tools.watch.run import Run


def folder(path: Path, rows: list[Any], events: list[Any] = ()) -> Path:  # type: ignore[assignment]
    """A run folder with these lines; what is text stands there as it is."""
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text("")
    for name, lines in (("metrics", rows), ("events", events)):
        texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
        (path / f"{name}.jsonl").write_text("".join(texts))
    return path


def row(step: int, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": 100 * step, "step_ms": 10.0, "world_size": 1} | more


def read(path: Path, *args: Any) -> Records:
    return read_run(folder(path / "run", *args))


def test_a_step_that_was_made_again_stands_there_once(tmp_path: Path) -> None:
    first = [row(step, 9.0, rank_step_ms=[9.0]) for step in range(1, 25)]
    again = [row(step, 1.0, rank_step_ms=[1.0, 1.0]) for step in range(21, 23)]
    records = read(tmp_path, [*first, {"step": 20, "val_loss": 3}, {"step": 24, "val_loss": 4}, *again])
    assert records.steps["step"].tolist() == list(range(1, 23))
    assert records.steps["loss"].tolist() == [9.0] * 20 + [1.0] * 2
    assert records.evaluations["step"].tolist() == [20]  # the one at 24 was of steps that are no more
    assert records.ranks["rank_step_ms"].shape == (22, 2)
    assert np.isnan(records.ranks["rank_step_ms"][:20, 1]).all()


def test_what_is_no_row_is_counted_and_passed_over(tmp_path: Path) -> None:
    broken = ['{"step": 2, "lo', "\n", "[1]\n", '{"loss": 3}\n', '{"step": -1}\n', "[" * 5000 + "\n"]
    rows = [row(1), *broken[1:], row(2, None), row(3, "x", step_ms=10**400), broken[0]]  # type: ignore[arg-type]
    records = read(tmp_path, rows, ["nonsense\n", {"event": 3}, {"event": "start"}, '{"event": "en'])
    assert records.steps["step"].tolist() == [1, 2, 3]
    assert records.num_unreadable == 5 + 2  # a last line without its end is being written
    assert math.isnan(records.steps["loss"][1])
    assert math.isnan(records.steps["step_ms"][2])
    assert [event["event"] for event in records.events] == ["start"]


def test_columns_that_come_and_go_are_missing_where_they_are_not(tmp_path: Path) -> None:
    records = read(tmp_path, [row(1), row(2, mfu=0.5, rank_data_ms=[1, 2]), row(3), row(4, rank_data_ms=[3])])
    assert np.array_equal(records.steps["mfu"], [np.nan, 0.5, np.nan, np.nan], equal_nan=True)
    expected = [[np.nan, np.nan], [1, 2], [np.nan, np.nan], [3, np.nan]]
    assert np.array_equal(records.ranks["rank_data_ms"], expected, equal_nan=True)
    assert np.isnan(records.steps["lr"]).all()
    assert records.ranks["rank_optim_ms"].shape == (4, 2)


def test_rows_every_few_steps_stand_for_those_between(tmp_path: Path) -> None:
    records = read(tmp_path, [row(10), row(20), row(25)])
    assert records.training_s().tolist() == pytest.approx([0.1, 0.2, 0.25])
    work = [row(step, rank_compute_ms=[100.0, 200.0], world_size=2) for step in (10, 20, 25)]
    assert Summary(read(tmp_path, work)).ranks_text().endswith("training would take 2.5s less.")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_records_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "run", [row(1)])
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(UserError, match=rf"cannot read .*run/{name}: Is a directory"):
        read_run(path)


@given(
    arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6) | st.just(math.nan)),
    st.integers(1, 60),
)
def test_buckets_lose_no_row_and_no_extreme(values: "np.ndarray[Any, Any]", most: int) -> None:
    edges = buckets(len(values), most)
    curve = in_buckets(values, edges)
    assert len(curve.mean) == min(most, len(values))
    assert edges[0] == 0
    assert edges[-1] == len(values)
    assert np.ptp(np.diff(edges)) <= 1
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        known = [value for value in values[start:stop] if not math.isnan(value)]
        if not known:
            assert math.isnan(curve.mean[i])
            continue
        assert (curve.low[i], curve.high[i]) == (min(known), max(known))
        assert curve.mean[i] == pytest.approx(math.fsum(known) / len(known), abs=1e-6)


def test_slowness_is_against_the_lower_median_of_the_ranks_there_are() -> None:
    work = np.array([[10.0, 30.0, math.nan], [10.0, 20.0, 40.0], [5.0, math.nan, math.nan]])
    assert lower_median(work).tolist() == [10, 20, 5]
    assert np.array_equal(slowness(work), [[0, 2, np.nan], [0, 0, 1], [0, np.nan, np.nan]], equal_nan=True)


def test_what_stragglers_cost_is_added_up_over_attempts(tmp_path: Path) -> None:
    slow = {"event": "straggler", "rank": 1, "host": "b", "phase": "data", "ms": 9, "median_ms": 3, "since_step": 2}
    events = [
        {"event": "start", "world_size": 2, "hosts": ["a", "b"]},
        slow | {"step": 8},
        {"event": "straggler over", "step": 12, "rank": 1, "cost_s": 2.5},
        {"event": "failed", "step": 14},  # this attempt had no end that says what it cost
        {"event": "resume", "step": 10, "reached": 14, "world_size": 2},
        slow | {"step": 16, "since_step": 11},
        {"event": "end", "step": 18, "reason": "signal", "straggler_cost_s": 4.0},
        {"event": "resume", "step": 18, "reached": 18, "world_size": 2},
        slow | {"step": 25, "since_step": 20},
    ]
    summary = Summary(read(tmp_path, [row(step) for step in range(1, 31)], events))
    assert summary.straggler_cost_s == 6.5
    assert [(slow.since_step, slow.until_step) for slow in summary.slow] == [(2, 12), (11, 18), (20, 30)]
    assert summary.slow[0].text == (
        "rank 1 (host b) was slow in steps 2 to 12: data took it 9 ms, the median rank 3 ms; it cost 2.5s"
    )
    assert summary.restarts == (2, 4)
    assert summary.status == ("open", "stale: no end is recorded, and its process is gone or silent")


def test_report_and_watch_name_the_same_ranks(tmp_path: Path) -> None:
    """Two ranks, equal or not, with 10% of noise in each phase; events are those that training records. Finds a second
    test of slow ranks in one of both."""
    for seed, slower, named in [(0, 1.0, ""), (1, 1.0, ""), (0, 1.1, "Rank 1 (host b)"), (0, 1.3, "Rank 1 (host b)")]:
        draw, stragglers, rows = random.Random(seed), Stragglers(2), []
        events: list[dict[str, Any]] = [{"event": "start", "world_size": 2, "hosts": ["a", "b"]}]
        for step in range(1, 401):
            usual = {"data": 2.0, "forward": 60.0, "backward": 120.0, "optimizer": 9.0, "other": 0.0}
            noise = {phase: [draw.lognormvariate(0, 0.1) for _ in range(2)] for phase in usual}
            parts = {phase: [ms * noise[phase][0], ms * noise[phase][1] * slower] for phase, ms in usual.items()}
            for item in stragglers.observe(step, [8, 8], parts):
                assert isinstance(item, Slow)
                events.append({"event": "straggler", "step": step, "host": "b", **dataclasses.asdict(item)})
            rows.append(by_rank_row(step, parts))
        run = read_run(folder(tmp_path / f"{seed} {slower}", rows, events))
        report, watch = Summary(run).ranks_text(), Run(run.path)
        assert watch.update()
        assert len(watch.view.ranks) == 2
        assert report.startswith(f"{named} was slow in steps " if named else "No rank is named slow. ")
        shown = {fact.label: fact.value for fact in watch.view.facts}
        rates = [fact.value for fact in Summary(run).facts() if fact.label == "Throughput"]
        assert rates == [shown["Throughput"]]
        said = watch.view.ranks_said
        assert report.startswith(said) if named else said.startswith("No rank is named slow. ")


def by_rank_row(step: int, parts: dict[str, list[float]]) -> dict[str, Any]:
    """A row of two ranks whose slower one the other waits for."""
    work = [sum(ms) for ms in zip(*parts.values(), strict=True)]
    parts = {"optim" if phase == "optimizer" else phase: by_rank for phase, by_rank in parts.items()}
    parts["exposed_comm"] = [max(work) - ms + 20 for ms in work]
    own = {f"rank_{phase}_ms": by_rank for phase, by_rank in parts.items() if phase != "other"}
    own |= {"rank_sequences": [8, 8], "rank_step_ms": work, "rank_compute_ms": work}
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(StepRow)), 0)
    own["tokens_per_s"] = 1e6 / (max(work) + 20)
    return zeros | own | {"tokens": 1000 * step, "step": step, "step_ms": max(work) + 20, "world_size": 2}


def test_ranks_that_share_memory_send_nothing(tmp_path: Path) -> None:
    """Finds a sentence about a link, and a plot of links, for ranks that have none."""
    parts = {phase: [5.0, 5.0] for phase in ("data", "forward", "backward", "optimizer", "other")}
    rows = [by_rank_row(step, parts) | {"comm_bytes": 689_562, "comm_ms": 4.9} for step in range(1, 9)]
    for shares_memory in (True, False):
        start = {"event": "start", "world_size": 2, "hosts": ["a", "a"], "shares_memory": shares_memory}
        run = read_run(folder(tmp_path / str(shares_memory), rows, [start]))
        assert ("shared memory, 673.4 KiB" in Summary(run).traffic_text()) == shares_memory
        assert ("A rank sends 673.4 KiB" in Summary(run).traffic_text()) != shares_memory
        assert (b"run0-links" in make_page([run.path], {})) != shares_memory
