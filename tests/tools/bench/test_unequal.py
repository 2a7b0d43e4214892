"""`bench scaling --cpu`: what it makes of its figures, and that the figures are those of runs in a lab."""

import json
import os
from pathlib import Path

import pytest
from program import run

from paceline.config import Config, load_preset
from paceline.tools.bench import unequal
from paceline.tools.bench.unequal import Sample, Setup, World

pytestmark = pytest.mark.alone


def setup_of(shares: str) -> Setup:
    config = load_preset("tiny", Config()).replace("parallel", shares=shares)
    return Setup(config=config, hosts=("a", "b"), cpu=("1.0", "0.35"), rate="1gbit", steps=12, rounds=2)


def test_hosts_are_measured_alone_and_together_with_each_kind_of_shares_once() -> None:
    assert [(world.cpu, world.num_hosts) for world in setup_of("equal").alone] == [("1.0", 1), ("0.35", 1)]
    assert {(world.cpu, world.num_hosts) for world in setup_of("9,3").together} == {("1.0,0.35", 2)}
    assert [world.shares for world in setup_of("auto").together] == ["equal", "auto"]
    assert [world.shares for world in setup_of("9,3").together] == ["equal", "auto", "9,3"]


def sample(tokens_per_s: float, sequences: tuple[int, ...] = (12,)) -> Sample:
    return Sample(tokens_per_s=tokens_per_s, step_ms=5.0, sequences=sequences, idle_frac=(0.02,) * len(sequences))


def test_the_sum_is_that_of_the_same_round() -> None:
    """The machine is half as fast in the second of two rounds."""
    world = World(label="all, shares auto", cpu="1.0,0.35", shares="auto")
    row = unequal._row(world, [sample(130, (9, 3)), sample(65, (8, 4))], [140, 70])
    assert row.sum_frac == pytest.approx(130 / 140)
    assert row.rounds_tokens_per_s == (130, 65)
    assert "| all, shares auto | 98 | 92.9% | 8, 4 | 2, 2 | 5.0 |" in unequal.markdown(setup_of("equal"), [row])


REFUSALS = {
    "one host": (("--cpu", "1.0"), "--cpu is 1.0; give the share of a core of each of at least two hosts"),
    "no share": (("--cpu", "1.0,unlimited"), "--cpu is 1.0,unlimited; give the share of a core"),
    "another table's": (("--cpu", "1.0,0.35", "--max-ranks", "3"), "--max-ranks has no effect with --cpu"),
    "rates": (("--cpu", "1.0,0.35", "--rate", "1gbit,100mbit"), "with --cpu give one rate, that of all links"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_before_anything_runs(case: str, tmp_path: Path) -> None:
    flags, message = REFUSALS[case]
    ended = run("bench", "scaling", *flags, cwd=tmp_path).require(2)
    assert message in ended.err.replace("\n", " ")


@pytest.fixture
def _a_machine_that_makes_labs() -> None:
    ended = run("lab", "--hosts", "2", "--cpu", "0.5", "--", "exec", "true")
    if ended.status == 2:
        pytest.skip(ended.err.strip())


@pytest.mark.usefixtures("_a_machine_that_makes_labs")
def test_more_than_the_cores_is_refused(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ended = run("bench", "scaling", "--preset", "tiny", "--cpu", f"1.0,{cores}", cwd=tmp_path).require(2)
    assert "together the hosts would be slower than each alone" in ended.err.replace("\n", " ")


@pytest.mark.long
@pytest.mark.usefixtures("_a_machine_that_makes_labs")
def test_one_command_makes_the_table_from_runs_in_a_lab(tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--cpu", "0.8,0.4", "--steps", "10", "--rounds", "1", "--parallel.shares", "9,3")
    ended = run("bench", "scaling", *flags, "--json", "t.json", "--markdown", "t.md", cwd=tmp_path).require(0)
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    a, b, equal, auto, fixed = rows
    for row in rows:
        assert sum(row["sequences"]) == 12
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(12 * 64 * 1e3)
        assert row["sum_frac"] == pytest.approx(row["tokens_per_s"] / (a["tokens_per_s"] + b["tokens_per_s"]))
    assert [row["sequences"] for row in (a, b, equal, fixed)] == [[12], [12], [6, 6], [9, 3]]
    assert [row["label"] for row in (b, auto, fixed)] == [
        "host b alone, 0.4 of a core",
        "all, shares auto",
        "all, shares 9,3",
    ]
    assert "all, shares auto" in ended.out
    assert "all, shares auto" in (tmp_path / "t.md").read_text()
