"""Report and watch of a run say the same: its state, its speed, its losses, and who is slow."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.report.facts import Summary
from paceline.tools.report.read import read_run
from paceline.tools.view.findings import not_over, slow_stretches, slow_text
from paceline.tools.watch.run import Run

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
    "repaired": [START, {"event": "repaired", "step": 9}, END],
}


def both_of(path: Path) -> tuple[Summary, Run]:
    report, watch = Summary(read_run(path)), Run(path)
    assert watch.update()
    return report, watch


def agree(path: Path) -> None:
    report, watch = both_of(path)
    assert report.status == (watch.view.level, watch.view.said)
    facts = {fact.label: fact.value for fact in report.facts()}
    shown = {fact.label: fact.value for fact in watch.view.facts}
    both = {"Loss", "Validation loss", "Throughput", "MFU", "Training time"} & facts.keys() & shown.keys()
    assert {"Loss", "Throughput"} <= both
    assert {label: facts[label] for label in both} == {label: shown[label] for label in both}
    now = {each.rank for each in watch.view.ranks if each.is_slow}
    assert now <= {slow.rank for slow in report.slow}
    if now:
        assert watch.view.ranks_said in report.ranks_text()
    elif not report.slow:
        assert watch.view.ranks_said.startswith("No rank is named slow. ")
        assert report.ranks_text().startswith("No rank is named slow. ")


def test_report_and_watch_say_the_same_of_recorded_runs() -> None:
    """Finds a second reader, or a second sentence, of what a run folder holds."""
    assert len(RECORDED) >= 8
    for path in RECORDED:
        agree(path)


@pytest.mark.parametrize("name", OTHERS)
def test_report_and_watch_say_the_same_however_a_run_ended(tmp_path: Path, name: str) -> None:
    """Finds a state in one of both that has other words, and a slow rank that one of both does not name."""
    recorded = RECORDED[0].parent / "ddp"
    first = json.loads((recorded / "metrics.jsonl").read_text().splitlines()[0])
    rows = [first | {"step": step, "tokens": 144 * step} for step in range(1, 21)]
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in OTHERS[name]))
    agree(tmp_path)


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


def test_what_is_zero_is_not_shown() -> None:
    """Finds `Restarts 0` and `Stragglers cost 0.0s` as large as the loss."""
    for path in RECORDED:
        labels = {fact.label for fact in both_of(path)[0].facts()}
        assert labels.isdisjoint({"Restarts", "Stragglers cost"})
