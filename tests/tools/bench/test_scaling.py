"""`bench scaling`: which worlds it measures, what it makes of their figures, and that the figures are those of runs."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from program import Program, run

from paceline.base.cores import physical_cores
from paceline.base.errors import UserError
from paceline.base.process import environment_of_one, environment_of_rank
from paceline.config import Config, load_preset
from paceline.tools.bench import runs, scaling_show
from paceline.tools.bench.scaling import Measurements, Sample, _Bench
from paceline.tools.bench.scaling_rows import Row, tabulate
from paceline.tools.bench.worlds import Setup, World, sequences_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli"))
from in_process import here


def setup_of(**changes: object) -> Setup:
    config = load_preset("tiny", Config())  # 12 sequences of 64 tokens
    values = {"kinds": ("strong", "weak"), "counts": (1, 2), "cores": (0, 1), "threads": 1, "device": "cpu"}
    return Setup(config=config, **{**values, "hosts": 2, "rates": ("1gbit",), **changes})


def test_each_world_is_measured_once_and_the_ideal_serves_both_kinds() -> None:
    labels = [(world.label, world.batch) for world in setup_of().worlds()]
    assert labels == [
        ("1 rank", 12),
        ("2 ranks", 12),
        ("2 hosts, 1gbit", 12),
        ("2 ranks", 24),
        ("2 hosts, 1gbit", 24),
        ("2 ranks apart", 24),  # each as if it were alone, for both kinds
    ]


def test_a_batch_that_the_run_would_choose_is_refused() -> None:
    with pytest.raises(UserError, match="the config names none"):
        sequences_of(Config())


def test_a_measured_run_saves_and_traces_nothing_and_tells_no_tracker() -> None:
    """Mutation: a bench that takes the address to which the real run is to send its checkpoints."""
    config = Config().replace("train", profile=3).replace("track", to="wandb").replace("parallel", port=29500)
    measured = runs.only_steps(config.replace("checkpoint", every_s=1.0, to="file:///x/run"), 12)
    assert (measured.train.profile, measured.track.to, measured.parallel.port) == (0, "", 0)
    assert (measured.checkpoint.every, measured.checkpoint.every_s, measured.checkpoint.to) == (0, 0, "")


def test_hosts_without_ranks_of_their_number_here_are_held_against_ranks_apart_all_the_same() -> None:
    worlds = setup_of(counts=(1, 2), hosts=3, kinds=("strong",)).worlds()
    assert [world.ranks for world in worlds if world.is_apart] == [2, 3]


def test_a_gpu_beside_the_cores_has_a_row_and_no_ideal() -> None:
    setup = setup_of(has_gpu=True, hosts=0, kinds=("strong",))
    one, gpu = (World(ranks=1, batch=12, device=device) for device in ("cpu", "cuda"))
    found = Measurements(samples={one: [(Sample(tokens_per_s=100.0),)], gpu: [(Sample(tokens_per_s=5000.0),)]})
    rows = {row.label: row for row in tabulate(setup, found)["strong"]}
    assert rows["1 GPU"].tokens_per_s == 5000
    assert rows["1 GPU"].efficiency is None
    assert rows["1 rank"].efficiency == 1


def test_what_cpus_are_measured_with_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(commands: Sequence[tuple[Sequence[str], object]], *_: object) -> None:
        asked.extend(" ".join(command) for command, _ in commands)
        raise runs.Failed

    monkeypatch.setattr(runs, "run_at_once", note)
    bench = _Bench(setup_of(), tmp_path, Measurements())
    assert bench._bandwidth(World(ranks=2, batch=12)) is None
    assert ["--parallel.device cpu" in command for command in asked] == [True, True]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert bench._gpu(1) == {}


# ---- from figures to rows ----


def measured() -> tuple[Setup, Measurements]:
    """Two rounds in which the machine slows down by half: alone 100 and 50, together 150 and 75, apart 180 and 90."""
    setup = setup_of(kinds=("strong",), counts=(1, 2, 4))
    by_label = {world.label: world for world in setup.worlds()}
    rates = {"1 rank": 100, "2 ranks": 150, "2 ranks apart": 180, "4 ranks": 120, "4 ranks apart": 160}

    def sample(label: str, slow: int) -> Sample:
        return Sample(
            tokens_per_s=rates[label] / slow,
            step_ms=100.0,
            comm_ms=50.0,
            exposed_ms=30.0,
            spread_ms=10.0,
            comm_bytes=5e6,
        )

    found = Measurements(samples={by_label[label]: [(sample(label, 1),), (sample(label, 2),)] for label in rates})
    found.problems[by_label["2 hosts, 1gbit"]] = "no lab here"
    found.links[1, ""] = 1e9
    return setup, found


def test_efficiency_is_machine_times_synchronisation_and_a_slower_machine_changes_neither() -> None:
    rows = {row.label: row for row in tabulate(*measured())["strong"]}
    two = rows["2 ranks"]
    assert two.efficiency == pytest.approx(150 / 200)
    assert two.machine == pytest.approx(180 / 200)
    assert two.synchronisation == pytest.approx(150 / 180)
    assert two.ideal_tokens_per_s == 150  # of the median round
    assert two.computed_comm_ms == pytest.approx(5.0)
    assert two.exposed_frac == pytest.approx(0.3)


def test_more_ranks_than_cores_are_marked_and_their_ideal_is_that_of_the_cores() -> None:
    setup, found = measured()
    tables = tabulate(setup, found)
    four = next(row for row in tables["strong"] if row.label == "4 ranks")
    assert four.shares_cores
    assert four.efficiency == pytest.approx(120 / 200)
    assert "| 4 ranks * | " in scaling_show.markdown(setup, found)
    marked = "* more ranks than cores: the ideal is that of 2"
    assert marked in scaling_show.remarks(setup, tables)


def test_a_world_that_could_not_be_measured_says_why() -> None:
    setup, found = measured()
    assert "| 2 hosts, 1gbit | not measured |" in scaling_show.markdown(setup, found)
    remarks = scaling_show.remarks(setup, tabulate(setup, found))
    assert "2 hosts, 1gbit could not be measured: no lab here" in remarks
    assert [row["problem"] for row in json.loads(scaling_show.as_json(setup, found))["rows"]] == [
        *["", "", ""],
        "no lab here",
    ]


# ---- where it bends ----


def row(label: str = "2 ranks", **changes: object) -> Row:
    values = {
        **{"kind": "strong", "label": label, "ranks": 2, "hosts": 1, "rate": "", "batch": 16, "shares_cores": False},
        **{"tokens_per_s": 1.0, "efficiency": 0.97, "machine": 0.98, "step_ms": 100.0, "comm_ms": 50.0},
        **{"exposed_ms": 2.0, "spread_ms": 1.0, "comm_bytes": 40e6, "link_bytes_per_s": 1e9},
    }
    return Row(**{**values, **changes})


ONE = row("1 rank", ranks=1, efficiency=1.0, machine=None)
BENDS = {
    "rounds that differ": (
        row(efficiency=0.37, rounds_tokens_per_s=(0.5, 1.9)),
        "strong scaling bends at 2 ranks (37% of the ideal): rounds differ by 140%, more than what is lost: the cause "
        "cannot be told; measure again on a quiet machine (`paceline doctor` shows the load)",
    ),
    "a world faster than separate runs": (
        row(efficiency=0.37, machine=0.29),
        "strong scaling bends at 2 ranks (37% of the ideal): one world seems 128% as fast as separate runs, which "
        "cannot be: the cause cannot be told; measure again on a quiet machine (`paceline doctor` shows the load)",
    ),
    "nothing": (row(), "strong scaling does not bend up to 2 ranks: 97% of the ideal"),
    "the network": (
        row("2 hosts, 1gbit", hosts=2, efficiency=0.5, exposed_ms=40.0, spread_ms=2.0),
        "strong scaling bends at 2 hosts, 1gbit (50% of the ideal): a step waits 38% of its time for the network: a "
        "rank's 38.1 MiB take 50 ms (40 by the link's bandwidth), of which compute hides 10",
    ),
    "a slow rank": (
        row(efficiency=0.6, exposed_ms=40.0, spread_ms=35.0),
        "strong scaling bends at 2 ranks (60% of the ideal): a step waits 35% of its time for the rank that is last",
    ),
    "the machine": (
        row(efficiency=0.7, machine=0.75, exposed_ms=5.0),
        "strong scaling bends at 2 ranks (70% of the ideal): it is the machine that the ranks share, not their "
        "synchronisation: 2 separate runs at once reach 75%",
    ),
    "what does not divide": (
        row(efficiency=0.6, machine=0.95, exposed_ms=5.0),
        "strong scaling bends at 2 ranks (60% of the ideal): 30% of a step go to what ranks neither divide nor wait "
        "for: the update, a step's fixed costs, and carrying gradients on cores that compute",
    ),
    "too few cores": (
        row("4 ranks", ranks=4, efficiency=0.6, shares_cores=True),
        "strong scaling bends at 4 ranks (60% of the ideal): 4 ranks share the cores of fewer, so that each more is "
        "one more to wait for",
    ),
}


@pytest.mark.parametrize("cause", BENDS)
def test_the_last_line_says_where_it_bends_and_why(cause: str) -> None:
    bent, sentence = BENDS[cause]
    assert scaling_show.where_it_bends([ONE, bent]) == sentence


def test_what_was_not_measured_bends_nothing() -> None:
    gone = dataclasses.replace(row(), efficiency=None, problem="no lab here")
    assert scaling_show.where_it_bends([ONE, gone]) == "strong scaling: no world of several ranks was measured"


# ---- real processes ----


def test_each_rank_runs_on_cores_of_its_own_and_the_bench_goes_back_to_all(tmp_path: Path) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("processes are not pinned here")
    cores = physical_cores()
    before = os.sched_getaffinity(0)
    assert set(cores) <= before
    code = "import os, sys; open(sys.argv[1], 'w').write(str(sorted(os.sched_getaffinity(0))))"
    files = [tmp_path / f"cores-{place}" for place in range(len(cores) + 1)]
    commands = [([sys.executable, "-c", code, str(file)], dict(os.environ)) for file in files]
    runs.run_at_once(commands, tmp_path, [(core,) for core in (*cores, cores[0])])
    assert [file.read_text() for file in files] == [f"[{core}]" for core in (*cores, cores[0])]
    assert os.sched_getaffinity(0) == before


def test_a_world_in_which_one_rank_fails_ends_and_says_whose_failure_it_was(tmp_path: Path) -> None:
    consequence = "import sys, time; time.sleep(0.5); sys.exit('error: rank 0 lost the other ranks during a barrier')"
    for_ever, cause = "import time; time.sleep(600)", "import sys; sys.exit('error: no such corpus')"
    programs = [consequence, for_ever, cause]
    commands = [([sys.executable, "-c", program], dict(os.environ)) for program in programs]
    with pytest.raises(runs.Failed, match=r"^no such corpus$"):
        runs.run_at_once(commands, tmp_path)


def test_a_process_apart_inherits_nothing_of_a_world() -> None:
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "GROUP_RANK": "0"}
    launcher = {"TORCHELASTIC_RUN_ID": "job", "PACELINE_LAUNCHER": "1", "PACELINE_STATUS_FOLDER": "/tmp/x"}
    kept = {"HOME": "/root", "PACELINE_CACHE": "/cache", "OMP_NUM_THREADS": "1"}
    pod = {"PET_MASTER_ADDR": "x", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    assert environment_of_one({**world, **launcher, **pod, **kept}) == kept
    assert environment_of_rank({**world, **launcher, **kept}, MASTER_PORT="2") == {
        **{**world, "MASTER_PORT": "2"},
        "TORCHELASTIC_RUN_ID": "job",
        **kept,
    }


@pytest.mark.long
def test_one_command_makes_the_table_from_real_runs(tmp_path: Path) -> None:
    """Where no program is found on PATH there is no lab, which is what its row is to say."""
    flags = ("--preset", "tiny", "--max-ranks", "2", "--kind", "strong", "--steps", "5", "--rounds", "1")
    files = ("--json", "t.json", "--markdown", "t.md")
    ended = run("bench", "scaling", *flags, *files, env={"PATH": str(tmp_path)}, cwd=tmp_path).require(0)
    found = json.loads((tmp_path / "t.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == ["1 rank", "2 ranks", "2 hosts, 1gbit"]
    one, two, hosts = rows.values()
    assert one["efficiency"] == 1
    assert two["efficiency"] == pytest.approx(
        two["tokens_per_s"] / (min(2, len(found["cores"]) or 2) * one["tokens_per_s"])
    )
    assert two["synchronisation"] == pytest.approx(two["efficiency"] / two["machine"])
    # 12 sequences of 64 tokens are a step, in both worlds.
    assert all(row["tokens_per_s"] * row["step_ms"] == pytest.approx(12 * 64 * 1e3) for row in (one, two))
    # Two ranks send each of the model's float32 gradients once, and a few numbers more.
    assert two["comm_bytes"] == pytest.approx(4 * 171_840, rel=0.02)
    assert 0 < two["exposed_ms"] < two["step_ms"]
    assert two["computed_comm_ms"] == pytest.approx(1e3 * two["comm_bytes"] / two["link_bytes_per_s"])
    assert "apt install iproute2" in hosts["problem"]
    assert "2 hosts, 1gbit could not be measured: " in ended.out
    assert found["sentences"][0] in " ".join(ended.out.split())  # the terminal breaks lines where it will
    assert f"| 2 ranks | {two['tokens_per_s']:,.0f} |" in (tmp_path / "t.md").read_text()
    assert not list(tmp_path.glob("runs"))


REFUSALS = {
    "one host": (("--hosts", "1"), {}, "--hosts is 1; a lab has 2 or more, and 0 leaves it out"),
    "hosts": (("--hosts", "27"), {}, "--hosts is 27; it lies between 0 and 26"),
    "steps": (("--steps", "3"), {}, "--steps is 3; it lies between 5 and 1024"),
    "rate": (("--rate", "1gbit,fast"), {}, "'fast' is not a rate"),
    "folder": (("--json", "nowhere/x.json"), {}, "--json is nowhere/x.json; name a file in a folder that exists"),
    "rank": ((), {"RANK": "0"}, "start it once, from a plain shell"),
    "flag": (("--ronuds", "3"), {}, "did you mean '--rounds'?"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_before_anything_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, env, message = REFUSALS[case]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ended = here("bench", "scaling", *flags, cwd=tmp_path).require(2)
    assert message in ended.err.replace("\n", " ")


def test_a_file_that_may_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds it after the minutes that the bench takes. A real folder does not, as root may write to all."""
    asked: list[Path] = []
    monkeypatch.setattr("paceline.cli.flags.os.access", lambda path, _: bool(asked.append(path)))
    ended = here("bench", "scaling", "--json", "x.json", cwd=tmp_path).require(2)
    assert "--json is x.json; name a file in a folder that exists, and that may be written" in ended.err
    assert asked == [tmp_path]


def test_devices_that_are_not_there_or_cannot_scale_are_refused(tmp_path: Path) -> None:
    mps = here("bench", "scaling", "--parallel.device", "mps", cwd=tmp_path).require(2)
    assert "serves one process, so there is nothing to scale" in mps.err
    cuda = here("bench", "scaling", "--parallel.device", "cuda", "--max-ranks", "99", cwd=tmp_path).require(2)
    assert "GPU" in cuda.err


def test_a_batch_that_leaves_ranks_without_work_is_refused(tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--train.global-batch-size", "2", "--train.device-batch-size", "1")
    ended = here("bench", "scaling", *flags, "--max-ranks", "3", cwd=tmp_path).require(2)
    assert "a step has 2 sequences (--train.global-batch-size), too few for 3 ranks" in ended.err


@pytest.mark.long
def test_who_asks_it_to_stop_finds_nothing_left(tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--hosts", "0", "--max-ranks", "2", "--kind", "weak")
    with Program("bench", "scaling", *flags, env={"TMPDIR": str(tmp_path)}, cwd=tmp_path) as program:
        runs = "paceline-scaling-*/*/run"
        program.wait_for(lambda: any(len(list(run.glob("ranks/*.log"))) == 2 for run in tmp_path.glob(runs)))
        program.process.terminate()
        ended = program.wait().require(130)
        program.wait_until_gone()
    assert "Traceback" not in ended.err
    assert not list(tmp_path.glob("paceline-scaling-*"))
