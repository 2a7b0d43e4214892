"""Report, live page and terminal say the same of a run: its state, its speed, its losses, and who is slow."""

import dataclasses
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.record.rows import StepRow
from paceline.record.stragglers import Slow, Stragglers
from paceline.tools.view.findings import not_over, slow_stretches, slow_text
from paceline.tools.view.follow import Views
from paceline.tools.view.report import make_page

RECORDED = sorted(path for path in (Path(__file__).parents[2] / "golden/runs").iterdir() if path.is_dir())
START: dict[str, Any] = {"event": "start", "world_size": 2, "hosts": ["a", "b"]}
SLOW = {"event": "straggler", "step": 8, "rank": 1, "host": "b", "phase": "forward", "ms": 9.0, "median_ms": 3.0}
OVER = {"event": "straggler over", "step": 12, "rank": 1, "cost_s": 2.5}
END = {"event": "end", "step": 20, "reason": "horizon reached"}
OTHERS = {
    "slow to its end": [START, SLOW, END],
    "slow once": [START, SLOW, OVER, END],
    "cut short": [START, SLOW],
    "failed": [START, SLOW, {"event": "failed", "step": 20, "error": "rank 1 was lost"}],
}
USUAL_MS = {"data": 2.0, "forward": 60.0, "backward": 120.0, "optimizer": 9.0, "other": 0.0}


def in_report(path: Path) -> dict[str, Any]:
    """What a report has of the run in this folder."""
    found = re.search(rb'<script type="application/json" id="data">(.*?)</script>', make_page([path]), re.DOTALL)
    assert found
    view: dict[str, Any] = json.loads(found[1])["runs"]["0"]
    return view


def live(path: Path) -> dict[str, Any]:
    """What the live page is sent of it."""
    ((_, view),) = Views(path).update()
    sent: dict[str, Any] = json.loads(json.dumps(view.as_json()))
    return sent


def agree(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report, page = in_report(path), live(path)
    assert report.keys() == page.keys()
    changing = {"updated_s", "said"} if report["said"].startswith("running") else set[str]()
    assert {name for name in report if report[name] != page[name]} <= changing
    assert main(["watch", str(path), "--once"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{path.name} ● {page['said']}" in said
    for label, value, _ in page["facts"]:
        assert f"{label} {value}" in said
    assert page["findings"].get("ranks", "") in said
    return page


def write(path: Path, rows: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.toml").touch()
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return path


def test_report_page_and_terminal_say_the_same_of_recorded_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Finds a second reader, or a second sentence, of what a run folder holds; and `Restarts 0` beside the loss."""
    assert len(RECORDED) >= 8
    for path in RECORDED:
        view = agree(path, capsys)
        labels = {label for label, _, _ in view["facts"]}
        assert {"Loss", "Throughput", "Step", "Ranks", "Tokens", "Training time"} <= labels
        assert labels.isdisjoint({"Restarts", "Stragglers cost", "Time left"})
        assert view["findings"]["ranks"].startswith("No rank is named slow. ")
        assert view["notices"] == []
        assert [len(view["ranks"]), len(view["heat"]["labels"])] == [2, 2]
        assert view["curves"]["steps"]["step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", OTHERS)
def test_they_say_the_same_however_a_run_ended(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Finds a state in one of them that has other words, and a slow rank that one of them does not name."""
    recorded = RECORDED[0].parent / "ddp"
    first = json.loads((recorded / "metrics.jsonl").read_text().splitlines()[0])
    rows = [first | {"step": step, "tokens": 144 * step} for step in range(1, 21)]
    view = agree(write(tmp_path, rows, OTHERS[name]), capsys)
    assert [rank["is_slow"] for rank in view["ranks"]].count(True) == (
        name in ("slow to its end", "cut short", "failed")
    )
    assert view["findings"]["ranks"].startswith("Rank 1 (host b) was slow in steps 8 to " if "slow" in name else "")


def test_a_slow_rank_of_many_is_named_before_ranks_jsonl_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finds a sentence that waits for times by rank: they come every 100 steps, and anew after a resume."""
    row = {"loss": 2.0, "step_ms": 9.0, "tokens_per_s": 5.0, "world_size": 16}
    rows = [row | {"step": step, "tokens": step} for step in range(1, 21)]
    view = agree(write(tmp_path, rows, [START, SLOW]), capsys)
    assert view["findings"]["ranks"].startswith("Rank 1 (host b) was slow in steps 8 to 20: forward took it 9 ms")
    assert view["ranks"] == []


def test_a_rank_that_caught_up_is_not_slow_now() -> None:
    """Finds a stretch that is over, or of an earlier attempt, shown as the present."""
    resume = {"event": "resume", "step": 10, "reached": 14}
    for events, num_now in (([START, SLOW], 1), ([START, SLOW, OVER], 0), ([START, SLOW, resume], 0)):
        stretches = slow_stretches(events, 14, is_running=True)
        assert len(stretches) == 1
        assert len(not_over(stretches, len(events) - events.count(SLOW) - events.count(OVER))) == num_now
    running, ended = (slow_text(slow_stretches([START, SLOW], 14, is_running)) for is_running in (True, False))
    assert running == "Rank 1 (host b) has been slow since step 8: forward took it 9 ms, the median rank 3 ms."
    assert ended == "Rank 1 (host b) was slow in steps 8 to 14: forward took it 9 ms, the median rank 3 ms."
    assert slow_stretches([START, {"event": "straggler", "rank": 1}], math.nan, is_running=True) == []


def simulated(path: Path, num_ranks: int, noise: float, seed: int, slower: float = 1.0) -> Path:
    """A run of ranks of which the last is slower, with noise in each phase; events are those that training records."""
    draw, stragglers, rows = random.Random(seed), Stragglers(num_ranks), []
    events: list[dict[str, Any]] = [{"event": "start", "world_size": num_ranks, "hosts": ["h"] * num_ranks}]
    for step in range(1, 301):
        factors = [1.0] * (num_ranks - 1) + [slower]
        parts = {
            phase: [ms * factor * draw.lognormvariate(0, noise) for factor in factors] for phase, ms in USUAL_MS.items()
        }
        for item in stragglers.observe(step, [8] * num_ranks, parts):
            assert isinstance(item, Slow)
            events.append({"event": "straggler", "step": step, "host": "h", **dataclasses.asdict(item)})
        rows.append(by_rank_row(step, parts))
    return write(path, rows, events)


def by_rank_row(step: int, parts: dict[str, list[float]]) -> dict[str, Any]:
    """A row of ranks that wait for the slowest."""
    work = [sum(ms) for ms in zip(*parts.values(), strict=True)]
    own = {"optim" if phase == "optimizer" else phase: by_rank for phase, by_rank in parts.items() if phase != "other"}
    own["exposed_comm"] = [max(work) - ms + 20 for ms in work]
    lists = {f"rank_{phase}_ms": by_rank for phase, by_rank in own.items()}
    lists |= {"rank_sequences": [8] * len(work), "rank_step_ms": work, "rank_compute_ms": work}
    numbers = {f"{phase}_ms": by_rank[0] for phase, by_rank in own.items()}
    numbers |= {"tokens_per_s": 1e6 / (max(work) + 20), "tokens": 1000 * step, "step_ms": max(work) + 20}
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(StepRow)), 0)
    return zeros | lists | numbers | {"step": step, "world_size": len(work)}


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equal_ranks_are_not_named_for_their_noise(tmp_path: Path, num_ranks: int) -> None:
    """34 runs of each number of ranks, with 3, 6 and 10% of noise. Finds a second test of slow ranks, such as one that
    named a rank in each run of two equal ones with 10%."""
    for seed in range(34):
        view = live(simulated(tmp_path / f"{seed}", num_ranks, (0.03, 0.06, 0.1)[seed % 3], seed))
        assert view["findings"]["ranks"].startswith("No rank is named slow. In the last 100 rows rank")
        assert not any(rank["is_slow"] for rank in view["ranks"])


@pytest.mark.parametrize("slower", [1.1, 1.3])
def test_a_slower_rank_is_named(tmp_path: Path, slower: float) -> None:
    view = live(simulated(tmp_path / "run", 2, 0.1, 0, slower))
    assert view["findings"]["ranks"].startswith("Rank 1 (host h) was slow in steps ")
    assert [rank["rank"] for rank in view["ranks"] if rank["is_slow"]] == [1]


def test_ranks_that_share_memory_send_nothing(tmp_path: Path) -> None:
    """Finds a sentence about a link, and rates of links, for ranks that have none."""
    parts = {phase: [5.0, 5.0] for phase in ("data", "forward", "backward", "optimizer", "other")}
    rows = [by_rank_row(step, parts) | {"comm_bytes": 689_562, "comm_ms": 4.9} for step in range(1, 9)]
    for shares_memory in (True, False):
        start = {"event": "start", "world_size": 2, "hosts": ["a", "a"], "shares_memory": shares_memory}
        view = live(write(tmp_path / str(shares_memory), rows, [start]))
        assert ("shared memory, 673.4 KiB" in view["findings"]["traffic"]) == shares_memory
        assert ("A rank sends 673.4 KiB" in view["findings"]["traffic"]) != shares_memory
        assert ("1 Gbit/s" in str(view["tables"]["traffic"])) != shares_memory
