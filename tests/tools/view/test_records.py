"""Records as they are found: of resumed runs, cut short, older, or not what they should be."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.base.errors import UserError
from paceline.tools.view.findings import restarts, slow_stretches, straggler_cost_s
from paceline.tools.view.measures import newest_rows
from paceline.tools.view.read import MOST_COLUMNS, RankHistory, Run, buckets, in_buckets, last_of
from paceline.tools.view.report import make_page
from paceline.tools.view.view import RunView, view_of


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


def read(path: Path, *args: Any) -> Run:
    run = Run(folder(path / "run", *args))
    run.read()
    return run


def viewed(path: Path, *args: Any) -> RunView:
    return view_of(read(path, *args))


def test_a_step_that_was_made_again_stands_there_once(tmp_path: Path) -> None:
    first = [row(step, 9.0, rank_compute_ms=[9.0, 9.0]) for step in range(1, 25)]
    again = [row(step, 1.0, rank_compute_ms=[1.0, 1.0, 2.0]) for step in range(21, 23)]
    records = read(tmp_path, [*first, {"step": 20, "val_loss": 3}, {"step": 24, "val_loss": 4}, *again])
    assert records.steps["step"].tolist() == list(range(1, 23))
    assert records.steps["loss"].tolist() == [9.0] * 20 + [1.0] * 2
    assert records.evaluations["step"].tolist() == [20]  # the one at 24 was of steps that are no more
    assert records.ranks.steps == list(range(1, 23))
    assert [len(by_rank) for by_rank in records.ranks.slowness()[0]] == [2] * 20 + [3] * 2
    assert [row["step"] for row in records.recent] == list(range(1, 23))
    assert records.steps["seconds"][-1] == pytest.approx(0.22)


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
    records = read(tmp_path, [row(1), row(2, mfu=0.5), row(3)])
    assert np.array_equal(records.steps["mfu"], [np.nan, 0.5, np.nan], equal_nan=True)
    assert np.isnan(records.steps["lr"]).all()


def test_rows_every_few_steps_stand_for_those_between(tmp_path: Path) -> None:
    work = [
        row(step, rank_compute_ms=[100.0, 200.0], world_size=2, tokens_per_s=9.0) for step in (10, 20, 25)
    ]  # fmt: skip
    assert read(tmp_path, work).steps["seconds"].tolist() == pytest.approx([0.1, 0.2, 0.25])
    assert viewed(tmp_path, work).findings["ranks"].endswith("training would take 2.5s less.")


def test_a_slow_rate_has_its_digits(tmp_path: Path) -> None:
    view = viewed(tmp_path, [row(step, tokens_per_s=rate) for step, rate in ((1, 9.0), (2, 1.4), (3, 1.4), (4, 0.4))])
    assert ("Throughput", "1.07", "tokens a second") in view.facts
    assert view.findings["rate"].startswith(
        "Half of the steps made 1.4 tokens a second or more, nine of ten between 0.5"
    )
    assert view.findings["rate"].endswith("step 4 with 0.4.")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        make_page([tmp_path])


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_records_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "run", [row(1)])
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(UserError, match=rf"cannot read .*run/{name}: Is a directory"):
        make_page([path])


@given(
    arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6) | st.just(math.nan)),
    st.integers(1, 60),
)
def test_buckets_lose_no_row_and_no_extreme(values: "np.ndarray[Any, Any]", most: int) -> None:
    begins = buckets(len(values), most)
    mean, lowest, highest = in_buckets(values, begins)
    assert most / 2 - 1 <= len(mean) <= most or len(mean) == len(values)
    edges = [*begins, len(values)]
    assert edges[0] == 0
    assert np.ptp(np.diff(edges[:-1])) == 0 if len(edges) > 2 else True
    assert last_of(values, begins)[-1] == pytest.approx(values[-1], nan_ok=True)
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        known = [value for value in values[start:stop] if not math.isnan(value)]
        if not known:
            assert math.isnan(mean[i])
            continue
        assert (lowest[i], highest[i]) == (min(known), max(known))
        assert mean[i] == pytest.approx(math.fsum(known) / len(known), abs=1e-6)


def test_slowness_is_against_the_lower_median_of_the_ranks_there_are(tmp_path: Path) -> None:
    work = [[10.0, 30.0, None], [10.0, 20.0, 40.0], [5.0, None, 5.0]]
    means, _ = read(tmp_path, [row(step, rank_compute_ms=ms) for step, ms in enumerate(work, 1)]).ranks.slowness()
    expected = [[0, 2, np.nan], [0, 0, 1], [0, np.nan, 0]]
    assert np.array_equal(np.array(means), expected, equal_nan=True)


def test_lists_of_a_large_world_come_from_ranks_jsonl(tmp_path: Path) -> None:
    run = Run(folder(tmp_path / "run", [row(step, world_size=9, tokens_per_s=1.0) for step in range(1, 5)]))
    lists = [{"step": step, "rank_compute_ms": [1.0] * 8 + [3.0]} for step in (2, 4)]
    run.folder.ranks.write_text("".join(json.dumps(line) + "\n" for line in lists))
    run.read()
    assert run.ranks.steps == [2, 4]
    assert run.ranks.slowness()[1][0] == [0.0] * 8 + [2.0]
    assert [len(row["rank_compute_ms"]) for row in newest_rows(run)] == [9, 9]


def test_the_history_of_ranks_is_in_order_though_it_is_in_two_files(tmp_path: Path) -> None:
    """Of nine ranks, then of two, then of nine. Mutations: rows of the nine are taken for the newest; they are dropped
    where metrics.jsonl is read later; they stay when the file begins anew."""
    rows = [row(step, world_size=9) for step in (1, 2, 3)]
    rows += [row(step, world_size=2, rank_compute_ms=[1.0, 2.0]) for step in (4, 5)]
    run = Run(folder(tmp_path / "run", rows))

    def of_nine(step: int) -> str:
        return json.dumps({"step": step, "rank_compute_ms": [1.0] * 8 + [3.0]}) + "\n"

    run.folder.ranks.write_text(of_nine(1) + "nonsense\n" + of_nine(3))
    run.read()
    assert run.ranks.steps == [1, 3, 4, 5]
    assert run.num_unreadable == 1
    for path, line in ((run.folder.ranks, of_nine(6)), (run.folder.metrics, json.dumps(row(6, world_size=9)) + "\n")):
        with path.open("a") as file:
            file.write(line)
        run.read()
    assert run.ranks.steps == [1, 3, 4, 5, 6]
    run.folder.ranks.write_text(of_nine(2) + of_nine(7))
    run.read()
    assert run.ranks.steps == [2, 4, 5, 7]


def test_the_history_of_ranks_is_bounded_and_keeps_its_ends_and_extremes() -> None:
    history = RankHistory()
    for step in range(1, 5001):
        history.add(step, [0.0, 5.0 if step == 777 else 0.1], [8.0, 4.0])
    means, most = history.slowness()
    assert MOST_COLUMNS // 2 <= len(means) <= MOST_COLUMNS
    assert history.steps[-1] == 5000
    assert max(slowest for _, slowest in most) == 5.0
    assert all(sequences == [8.0, 4.0] for sequences in history.sequences())
    history.cut(1000)
    assert 900 < history.steps[-1] < 1000


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
    assert straggler_cost_s(events) == 6.5
    slow = slow_stretches(events, 30, is_running=False)
    assert [(each.since_step, each.until_step) for each in slow] == [(2, 12), (11, 18), (20, 30)]
    assert slow[0].text == (
        "rank 1 (host b) was slow in steps 2 to 12: data took it 9 ms, the median rank 3 ms; it cost 2.5s"
    )
    assert restarts(events) == (2, 4)
    view = viewed(tmp_path, [row(step) for step in range(1, 31)], events)
    assert (view.level, view.said) == ("open", "stale: no end is recorded, and its process is gone or silent")
