"""`bench scaling --compare` and `--cpu`: what they make of their figures, and that these are those of runs in a lab."""

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from program import run

from paceline.config import Config, load_preset
from paceline.tools.bench import runs, scaling_show
from paceline.tools.bench.scaling import Measurements, Sample, _Bench
from paceline.tools.bench.scaling_rows import tabulate
from paceline.tools.bench.worlds import Setup, setup_of_variants

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli"))
from in_process import here

pytestmark = pytest.mark.alone


def setup_of(cpu: tuple[str, ...] = ("1.0", "0.35"), shares: str = "equal") -> Setup:
    config = load_preset("tiny", Config()).replace("parallel", shares=shares)
    return setup_of_variants(config, {}, hosts=2, cpu=cpu, rates=("1gbit",), steps=12, rounds=2)


def apart(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """The steps and the sequences of a step with which each host of a lab trains alone."""
    monkeypatch.setattr(runs, "run_at_once", lambda *_, **__: None)
    with pytest.raises(runs.Failed, match="it left 0 steps"):
        _Bench(setup, tmp_path, Measurements())._train_apart(setup.hosts_apart)
    found = {path.parent.name: tomllib.loads(path.read_text())["train"] for path in tmp_path.glob("*/*/config.toml")}
    return {host: (found[host]["steps"], found[host]["global_batch_size"]) for host in sorted(found)}


def test_unequal_hosts_are_measured_alone_and_together_with_each_kind_of_shares_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(shares="9,3")
    assert setup.worlds()[0].is_apart
    assert setup.config_of(setup.worlds()[0]).parallel.shares == "equal"
    assert apart(setup, tmp_path, monkeypatch) == {"a": (34, 12), "b": (12, 12)}, "so that both end at the same time"
    assert list(setup_of(shares="auto").variants) == ["all, shares equal", "all, shares auto"]
    assert [setup.config_of(world).parallel.shares for world in setup.worlds()[1:]] == ["equal", "auto", "9,3"]


def test_the_ideal_of_equal_hosts_is_each_with_its_part_of_the_batch_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apart(setup_of(cpu=()), tmp_path, monkeypatch) == {"a": (12, 6), "b": (12, 6)}


def sample(tokens_per_s: float, sequences: tuple[int, ...] = (12,)) -> Sample:
    idle = (0.02,) * len(sequences)
    return Sample(
        tokens_per_s=tokens_per_s, step_ms=5.0, exposed_ms=2.0, comm_bytes=1.5e6, sequences=sequences, idle_frac=idle
    )


def test_the_ideal_is_that_of_the_same_round() -> None:
    """The machine is half as fast in the second of two rounds."""
    setup = setup_of(shares="auto")
    ideal, _, auto = setup.worlds()
    found = Measurements(samples={ideal: [(sample(100), sample(40)), (sample(50), sample(20))]})
    found.samples[auto] = [(sample(130, (9, 3)),), (sample(65, (8, 4)),)]
    *alone, _, row = tabulate(setup, found)["variants"]
    assert [(each.label, each.tokens_per_s) for each in alone] == [
        ("host a alone, 1.0 of a core", 75),
        ("host b alone, 0.35 of a core", 30),
    ]
    assert row.efficiency == pytest.approx(130 / 140)
    assert row.rounds_tokens_per_s == (130, 65)
    shown = "| all, shares auto | 98 | 92.9% | 5.0 | 1.5 | 0.0 | 2.0 (40%) | 0.0 | 8, 4 | 2, 2 |"
    assert shown in scaling_show.markdown(setup, found)


REFUSALS = {
    "one host": (("--cpu", "1.0"), "--cpu is 1.0; give the share of a core of each of at least two hosts"),
    "no share": (("--cpu", "1.0,unlimited"), "--cpu is 1.0,unlimited; give the share of a core"),
    "another table's": (("--cpu", "1.0,0.35", "--max-ranks", "3"), "--max-ranks has no effect with --cpu"),
    "a table's": (("--compare", "train.seed=1", "--kind", "weak"), "--kind has no effect with --compare"),
    "no hosts": (("--compare", "train.seed=1", "--hosts", "0"), "--hosts is 0, and --compare measures hosts of a lab"),
    "a variant": (("--compare", "train.sed=1"), "no option --train.sed (did you mean '--train.seed'?)"),
    "rates": (("--cpu", "1.0,0.35", "--rate", "1gbit,100mbit"), "with --cpu give one rate, that of all links"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_before_anything_runs(case: str, tmp_path: Path) -> None:
    flags, message = REFUSALS[case]
    ended = here("bench", "scaling", *flags, cwd=tmp_path).require(2)
    assert message in ended.err.replace("\n", " ")


@pytest.fixture(scope="module")
def _a_machine_that_makes_labs() -> None:
    ended = run("lab", "--hosts", "2", "--cpu", "0.5", "--", "exec", "true")
    if ended.status == 2:
        pytest.skip(ended.err.strip())


@pytest.mark.usefixtures("_a_machine_that_makes_labs")
def test_more_than_the_cores_is_refused(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ended = here("bench", "scaling", "--preset", "tiny", "--cpu", f"1.0,{cores}", cwd=tmp_path).require(2)
    assert "together the hosts would be slower than each alone" in ended.err.replace("\n", " ")


@pytest.mark.long
@pytest.mark.usefixtures("_a_machine_that_makes_labs")
def test_one_command_makes_the_table_from_runs_in_a_lab(tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--cpu", "0.8,0.4", "--steps", "5", "--rounds", "1", "--parallel.shares", "9,3")
    ended = run("bench", "scaling", *flags, "--json", "t.json", "--markdown", "t.md", cwd=tmp_path).require(0)
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    a, b, equal, auto, fixed = rows
    for row in rows:
        assert sum(row["sequences"]) == 12
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(12 * 64 * 1e3)
        assert row["efficiency"] == pytest.approx(row["tokens_per_s"] / (a["tokens_per_s"] + b["tokens_per_s"]))
    assert [row["sequences"] for row in (a, b, equal, fixed)] == [[12], [12], [6, 6], [9, 3]]
    assert [row["label"] for row in (b, auto, fixed)] == [
        "host b alone, 0.4 of a core",
        "all, shares auto",
        "all, shares 9,3",
    ]
    assert "all, shares auto" in ended.out
    assert "all, shares auto" in (tmp_path / "t.md").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("_a_machine_that_makes_labs")
def test_variants_are_held_against_hosts_that_exchange_nothing(tmp_path: Path) -> None:
    variants = ("parallel.strategy=ddp", "parallel.strategy=zero train.layered-micro-batches=3")
    flags = ("--preset", "tiny", "--rate", "1gbit", "--steps", "5", "--rounds", "1", "--json", "t.json")
    run("bench", "scaling", *flags, "--compare", *variants, cwd=tmp_path).require(0)
    apart, *rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert (apart["label"], apart["sequences"], apart["comm_bytes"]) == ("2 hosts, no exchange", [6, 6], 0)
    assert apart["efficiency"] == 1
    assert [row["label"] for row in rows] == [*variants]
    for row in rows:
        assert row["sequences"] == [6, 6]
        assert row["efficiency"] == pytest.approx(row["tokens_per_s"] / apart["tokens_per_s"])
        # Two ranks send each of the model's float32 gradients (ddp), or half of them and of the weights (zero), once.
        assert row["comm_bytes"] == pytest.approx(4 * 171_840, rel=0.05)
