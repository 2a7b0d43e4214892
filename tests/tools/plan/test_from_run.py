"""Machines as an earlier run measured them: what is read back, what is refused, and how sure a plan for them is."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program import rows
from ranks import run_ranks
from whole_runs import events, tiny

from paceline.base.errors import UserError
from paceline.config import Config, to_toml
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device
from paceline.tools.plan.from_run import device_of_rank, read_run, shaped
from paceline.tools.plan.plan import Plan, plan
from paceline.tools.plan.show import _facts
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli"))
from in_process import here

ARCH = tiny().model.arch
FLOPS = {"products": 2e-11, "attention": 2e-11}
DEVICE = Device(
    name="a processor",
    kind="cpu",
    dtype="float32",
    peak_flops_per_s=1e11,
    memory_bytes=8e9,
    forward={ARCH: FLOPS},
    backward={ARCH: {kind: 2 * rate for kind, rate in FLOPS.items()}},
    update={"adamw": {"elements": 1e-9}},
    copy_bytes_per_s=2e9,
    inner_latency_s=0.0,
    inner_bytes_per_s=1e13,
    step_s=1e-3,
)
CONFIG = tiny(
    model__vocab_size=512,
    model__n_positions=64,
    train__dtype="float32",
    train__global_batch_size=24,
    train__device_batch_size=4,
    parallel__strategy="ddp",
)
TWO = Cluster(hosts=2, link_gbit=0.05, latency_us=50.0, speeds=(1.0, 0.5))


def recorded(folder: Path, planned: Plan, num_steps: int = 40, noise: float = 0.0, **changed: Any) -> Path:
    """Writes the records of a run whose steps took what is planned; noise: deviation of each pass."""
    rng, cluster, ms = np.random.default_rng(1), planned.cluster, {name: 1e3 * s for name, s in planned.parts.items()}
    device = {"device": "cpu", "processor": planned.device.name, "threads": 1, "free_bytes": 8e9}
    ranks = range(cluster.num_ranks)
    hosts = [f"host-{rank // cluster.ranks_per_host}" for rank in ranks]
    start = {"event": "start", "hosts": hosts, "devices": [device for _ in ranks]} | changed
    step_ms = sum(ms[part] for part in ("forward", "backward", "exposed communication", "optimizer", "fixed"))
    found = []
    for step in range(1, num_steps + 1):
        slow = [(1 + noise * rng.normal()) / cluster.speed(rank) for rank in ranks]
        row = {"step": step, "loss": 1.0, "step_ms": step_ms * (3 if step == 1 else 1), "comm_ms": step_ms / 2}
        row |= {"data_ms": ms["fixed"], "other_ms": 0.0, "tokens_per_s": planned.tokens_per_s, "mfu": planned.mfu}
        row |= {f"rank_{part}_ms": [ms[part] * each for each in slow] for part in ("forward", "backward")}
        row |= {"rank_optim_ms": [ms["optimizer"]] * len(ranks)}
        found.append(row | {"rank_sequences": planned.settings.plan.num_sequences()})
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(planned.settings.config))
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def test_a_run_gives_back_the_machines_that_it_ran_on(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", plan(CONFIG, TWO, DEVICE))
    found = read_run(path)
    assert found.cluster.speeds == pytest.approx((1.0, 0.5))
    assert found.cluster.link_gbit * found.device.outer_frac == pytest.approx(0.05, rel=0.02)
    assert found.device.forward[ARCH] == pytest.approx(DEVICE.forward[ARCH])
    assert found.device.update["adamw"]["elements"] == pytest.approx(2e-9, rel=1e-3)  # of the slower host's update
    assert found.device.memory_bytes == 8e9
    assert found.device.peak_flops_per_s == pytest.approx(1e11)
    for changes in ({"strategy": "zero"}, {"strategy": "ddp", "shares": "auto"}):
        other = CONFIG.replace("parallel", **changes)
        known, again = plan(other, TWO, DEVICE), plan(other, found.cluster, found.device)
        assert again.step_s == pytest.approx(known.step_s, rel=0.03)


def test_with_hsdp_the_ranks_of_a_host_divide_the_update(tmp_path: Path) -> None:
    four = replace(TWO, ranks_per_host=2, speeds=())
    planned = plan(CONFIG.replace("parallel", strategy="hsdp"), four, DEVICE)
    found = read_run(recorded(tmp_path / "run", planned))
    assert found.device.update["adamw"]["elements"] == pytest.approx(1e-9)


def test_what_passes_hid_is_a_link_of_at_least_so_much(tmp_path: Path) -> None:
    fast = replace(TWO, link_gbit=100.0, speeds=())
    path = recorded(tmp_path / "run", plan(CONFIG, fast, replace(DEVICE, step_s=0.0)))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"step_ms": 0.9 * row["step_ms"]} for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run(path)
    assert any(how.startswith("at least") for _, _, how in found.device.traced)


def test_jitter_is_that_of_the_passes_without_what_ranks_have_in_common(tmp_path: Path) -> None:
    four = replace(TWO, hosts=4, speeds=())
    found = read_run(recorded(tmp_path / "run", plan(CONFIG, four, DEVICE), num_steps=400, noise=0.05))
    assert found.device.jitter_frac == pytest.approx(0.05, rel=0.15)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_steps": 9}, "has 8 recorded steps after the first one of its last attempt; a plan needs 10"),
        ({"devices": None}, "does not tell its devices"),
        ({"hosts": ["a", "b", "b"]}, "unequal numbers of ranks on its hosts (a, b, b)"),
        ({"hosts": ["a", "b", "a"]}, "unequal numbers of ranks"),
    ],
)
def test_a_run_that_shows_too_little_is_refused(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", plan(CONFIG, TWO, DEVICE), **changed)
    with pytest.raises(UserError) as refused:
        read_run(path)
    assert says in str(refused.value)


def test_damaged_rows_and_idle_ranks_are_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", plan(CONFIG, TWO, DEVICE))
    text = (path / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for name, value, says in (
        ("rank_forward_ms", [1], "damaged rows"),
        ("rank_forward_ms", [0, 0], "damaged rows"),
        ("step_ms", -5.0, "damaged rows"),
        ("tokens_per_s", 1e300, "damaged rows"),
        ("rank_sequences", [24, 0], "computed nothing"),
    ):
        last = lines[-1] | ({} if value == [1] else {name: value})  # or lists of different lengths
        changed = [*(row | {name: value} for row in lines[:-1]), last]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        read_run.cache_clear()
        with pytest.raises(UserError, match=says):
            read_run(path)


def test_of_more_ranks_than_a_row_lists_the_rows_by_rank_count(tmp_path: Path) -> None:
    """Finds: such a run has "damaged rows", however long it trained."""
    many = replace(TWO, hosts=9, speeds=())
    path = recorded(tmp_path / "run", plan(CONFIG.replace("train", global_batch_size=72), many, DEVICE))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lists = [{name: row.pop(name) for name in list(row) if name.startswith("rank_")} for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for every in (3, 5):
        by_rank = [{"step": row["step"], **by} for row, by in zip(rows, lists, strict=True) if row["step"] % every == 0]
        (path / "ranks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in by_rank))
        read_run.cache_clear()
        if every == 3:
            assert read_run(path).device.forward[ARCH] == pytest.approx(DEVICE.forward[ARCH])
        else:
            with pytest.raises(UserError, match=r"has 8 recorded steps .*with a smaller --log\.ranks-every"):
                read_run(path)


def test_without_a_known_peak_a_plan_says_nothing_of_mfu(tmp_path: Path) -> None:
    """Finds "MFU 0.0%", and numpy's warning about rows that have none."""
    path = recorded(tmp_path / "run", plan(CONFIG, TWO, DEVICE))
    rows = [json.loads(line) | {"mfu": None} for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run(path)
    planned = plan(CONFIG, found.cluster, found.device)
    assert planned.mfu is None
    assert "MFU" not in str(_facts(planned))
    auto = CONFIG.replace("model", size="auto").replace("train", time_budget=9.0, steps=0)
    assert plan(shaped(found.cluster, auto), found.cluster, found.device).tokens_per_s > 0


def test_the_run_of_a_script_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[run]\nlr = 0.1\n")
    assert "run is the run of a script" in here("plan", "--cluster", "run", cwd=tmp_path).require(2).err


def test_the_command_plans_other_worlds_on_the_machines_of_a_run(tmp_path: Path) -> None:
    recorded(tmp_path / "run", plan(CONFIG, TWO, DEVICE))
    own = json.loads(here("plan", "--cluster", "run", "--json", cwd=tmp_path).require().out)["plans"][0]
    took = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step_ms"]
    steady = own["step_ms"] - sum(own["part_ms"][part] for part in ("checks", "saves", "evaluations"))
    assert steady == pytest.approx(took, rel=1e-3)
    told = here("plan", "--cluster", "run", "--explain", cwd=tmp_path).require().out
    for word in ("forward of a step in the run", "link in the run", "speeds of the hosts", "jitter", "measured by run"):
        assert word in told
    refused = here("plan", "--cluster", "run", "--optim.name", "muon", cwd=tmp_path)
    assert refused.status == 2
    assert "run trained with optim.name adamw" in " ".join(refused.err.split())
    (tmp_path / "other.toml").write_text('device = "run"\nhosts = 2\nlink_gbit = 10\n')
    faster = here("plan", "--config", "run/config.toml", "--cluster", "other.toml", "--json", cwd=tmp_path).require()
    assert json.loads(faster.out)["plans"][0]["step_ms"] < own["step_ms"]
    alone = recorded(tmp_path / "alone", plan(CONFIG, Cluster(), DEVICE))
    assert read_run(alone).cluster.link_gbit == 0
    refused = here("plan", "--cluster", "alone", "--ranks", "2", cwd=tmp_path)
    assert "no link between them: give --link-gbit" in " ".join(refused.err.split())
    linked = here(
        "plan", "--cluster", "alone", "--ranks", "2", "--link-gbit", "0.1,1", "--json", cwd=tmp_path
    ).require()
    found = {row["label"]: row["step_ms"] for row in json.loads(linked.out)["plans"]}
    assert found["0.1 Gbit/s"] > found["1 Gbit/s"]
    for flags, says in (
        (("--link-gbit", "fast"), "is 'fast'; give rates"),
        (("--link-gbit", "1"), "there is one host"),
    ):
        refused = here("plan", "--cluster", "alone", *flags, cwd=tmp_path)
        assert refused.status == 2
        assert says in " ".join(refused.err.split())


# ---- several links ----


def test_links_and_ranks_make_a_row_each(tmp_path: Path) -> None:
    """One row for a single host, whatever the links are. Finds a plan of one host for each link."""
    (tmp_path / "c.toml").write_text('device = "H100"\nhosts = 2\nranks_per_host = 8\nlink_gbit = 400\n')
    common = ("plan", "--preset", "gpt2-124m", "--cluster", "c.toml", "--ranks", "1,16", "--link-gbit", "100,400")
    linked = here(*common, "--json", cwd=tmp_path).require()
    assert [row["ranks"] for row in json.loads(linked.out)["plans"]] == [16, 16, 1]
    shown = " ".join(here(*common, cwd=tmp_path).require().out.split())
    assert "efficiency: of the tokens/s of all devices, if each trains alone" in shown
    assert "times may be off by 30%" in shown


# ---- a run on two hosts ----


def train_as_host(_: ParallelConfig, env: Environment, folder: Path, config: Config) -> int:
    """Trains as one rank of a host of its own."""
    import socket

    socket.gethostname = lambda: f"host-{env.rank}"
    return train(Request(config, folder), env)


@pytest.mark.long
def test_a_run_on_two_hosts_is_a_cluster(tmp_path: Path) -> None:
    config = tiny(train__steps=12, parallel__strategy="zero", train__eval_every=-1)
    assert run_ranks(train_as_host, 2, tmp_path / "run", config, opened=False) == [0, 0]
    (start,) = events(tmp_path / "run", "start")
    assert [each["device"] for each in start["devices"]] == ["cpu", "cpu"]
    found = read_run(tmp_path / "run")
    assert found.cluster.hosts == 2
    took = np.median([row["step_ms"] for row in rows(tmp_path / "run" / "metrics.jsonl")[1:] if "loss" in row])
    steady = plan(config, found.cluster, device_of_rank(found.cluster, config))
    assert took / 10 < 1e3 * steady.step_s < 10 * took  # ten steps on a busy machine: the same unit
