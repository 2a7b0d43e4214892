"""`bench link`: its arithmetic against numbers worked out by hand, its figures against links whose rate is known."""

import dataclasses
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from program import run
from ranks import run_ranks

from paceline.cli.main import main
from paceline.config import Config, load_preset
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.sync.buckets import BucketedSync
from paceline.tools.bench.link import (
    _time_collective,
    bucket_elements,
    interface_in_use,
    measure,
    pairs_to_measure,
)
from paceline.tools.plan.calibrate import COLLECTIVES, bus_factor, fit, sizes
from paceline.tools.plan.stopwatch import Stopwatch
from paceline.world.group import LocalGroup
from paceline.world.peer import Peer
from paceline.world.runtime import World

pytestmark = pytest.mark.alone

PAYLOAD = 1448 / 1514  # of a full Ethernet frame, TCP with time stamps
KIB = 1024
SMALL = ("--model.n-layer", "2", "--model.n-embd", "128", "--data.seq-len", "64", "--train.device-batch-size", "2")


# ---- arithmetic ----


@pytest.mark.parametrize(
    ("num_ranks", "factors"),
    [(2, (1, 0.5, 0.5, 1)), (4, (1.5, 0.75, 0.75, 1)), (8, (1.75, 0.875, 0.875, 1))],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(num_ranks: int, factors: tuple[float, ...]) -> None:
    assert tuple(bus_factor(name, num_ranks) for name in COLLECTIVES) == factors


@pytest.mark.parametrize(("alpha_s", "beta"), [(2e-4, 119e6), (5e-5, 2.4e9), (0.02, 1e6)])
def test_a_fit_finds_latency_and_bandwidth_also_among_sizes_that_follow_another_rule(
    alpha_s: float, beta: float
) -> None:
    measured = [alpha_s + size / beta for size in sizes(64 << 20)]
    found = fit(sizes(64 << 20), measured)
    assert found.alpha_s == pytest.approx(alpha_s)
    assert found.beta_bytes_per_s == pytest.approx(beta)
    assert found.residual_frac < 1e-9
    measured[2], measured[5] = measured[2] / 2, measured[5] * 3  # a token bucket; a moment without a processor
    bent = fit(sizes(64 << 20), measured)
    assert bent.alpha_s == pytest.approx(alpha_s)
    assert bent.beta_bytes_per_s == pytest.approx(beta)


def test_a_fit_is_never_a_negative_time_and_needs_two_sizes() -> None:
    falling = fit([1024, 4096, 16384], [3e-4, 2e-4, 1e-4])
    assert falling.alpha_s >= 0
    assert falling.beta_bytes_per_s > 0
    with pytest.raises(ValueError, match="two sizes"):
        fit([1024], [1e-4])


def test_sizes_are_powers_of_four_from_a_kibibyte() -> None:
    assert sizes(256 << 20) == [KIB * 4**i for i in range(10)]
    assert sizes(5000) == [1024, 4096]


def test_a_size_that_is_left_out_takes_no_memory() -> None:
    """Finds a buffer of the largest size before the first one is measured: the system ends such a rank."""
    watch = Stopwatch(LocalGroup(torch.device("cpu")), torch.device("cpu"))
    measured = _time_collective(watch, "all-reduce", 1 << 50, budget_s=0.0)
    assert [time.num_bytes for time in measured.times] == [KIB, 4 * KIB]
    assert measured.left_out_bytes[-1] == 1 << 50


@pytest.mark.parametrize("bucket_bytes", [1 << 18, 1 << 20, 10 << 20])
def test_buckets_are_those_that_training_makes_of_the_model(bucket_bytes: int) -> None:
    model = ModelConfig(arch="gpt2", n_layer=3, n_embd=128, vocab_size=512, n_positions=64, bias=True)
    real = BucketedSync(build(model, 0, "cpu"), LocalGroup(torch.device("cpu")), bucket_bytes)
    assert bucket_elements(model, bucket_bytes) == [bucket.flat.numel() for bucket in real.buckets]


def peers(*hosts: str) -> list[Peer]:
    return [Peer(rank=i, host=host, pid=1, local_rank=0, boot_id="", born_ticks=0) for i, host in enumerate(hosts)]


def test_every_pair_of_hosts_is_measured_by_one_rank_of_each() -> None:
    assert pairs_to_measure(peers("a", "a", "b", "b", "c")) == [(0, 2), (0, 4), (2, 4)]
    assert pairs_to_measure(peers("a", "a", "a")) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs_to_measure(peers(*["a"] * 64))) == 6


def test_the_interface_is_the_one_that_was_named_or_has_the_address_of_the_host(monkeypatch) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    assert interface_in_use("gloo").startswith(f"{loopback} 127.0.0.1, MTU ")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert interface_in_use("gloo").partition(" ")[0] in {name for _, name in socket.if_nameindex()}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"={loopback}")
    assert interface_in_use("nccl").startswith(f"{loopback} 127.0.0.1, MTU ")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"^{loopback}")  # any but this one
    assert interface_in_use("nccl") == ""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert interface_in_use("nccl") == ""


# ---- a world ----


def on_ranks(world: World) -> dict[str, Any]:
    config = load_preset("demo", Config())
    config = config.replace("model", n_layer=2, n_embd=128).replace("data", seq_len=64)
    config = config.replace("train", device_batch_size=2).replace("parallel", bucket_mb=1.0)
    heard: list[str] = []
    found = dataclasses.asdict(measure(world, config, max_bytes=64 * KIB, budget_s=20.0, say=heard.append))
    assert {"all-reduce", "reduce-scatter", "all-gather", "broadcast"} <= {text.partition(",")[0] for text in heard}
    return found


@pytest.mark.long
def test_three_ranks_come_to_the_same_report_and_its_parts_add_up() -> None:
    reports = run_ranks(on_ranks, 3)
    assert reports[0] == reports[1] == reports[2]
    found = json.loads(json.dumps(reports[0]))
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in found["pairs"]:
        assert pair["latency_s"] > 1e-6
        assert pair["bytes_per_s"] > 0
    for collective in found["collectives"]:
        assert [row["num_bytes"] for row in collective["times"]] == [KIB, 4 * KIB, 16 * KIB, 64 * KIB]
        factor = bus_factor(collective["name"], 3)
        for row in collective["times"]:
            assert row["iterations"] >= 3
            assert row["bus_bytes_per_s"] == pytest.approx(factor * row["num_bytes"] / row["seconds"])
    model, fitted = found["model"], found["collectives"][0]["fit"]
    assert len(model["bucket_bytes"]) > 2
    assert sum(model["bucket_bytes"]) == model["gradient_bytes"] == 4 * model["parameters"]
    assert model["wire_bytes"] == pytest.approx(model["gradient_bytes"] * 4 / 3)
    slowest = min(pair["bytes_per_s"] for pair in found["pairs"])
    assert model["computed_s"] == pytest.approx(model["wire_bytes"] / slowest)
    by_fit = len(model["bucket_bytes"]) * fitted["alpha_s"] + model["gradient_bytes"] / fitted["beta_bytes_per_s"]
    assert model["fitted_s"] == pytest.approx(by_fit)
    assert model["predicted_s"] == (model["alone_s"] or model["fitted_s"]) > 0  # no time was left on a busy machine
    job = found["job"]
    assert sum(sum(stage["elements"]) for stage in job["stages"]) == model["parameters"]
    assert job["num_hosts"] == job["num_ranks"] == 3
    assert job["bytes_per_s"] == slowest
    assert job["update_s"] > 0
    assert all(0 < path["efficiency_frac"] < 1 for path in found["paths"])
    assert found["paths"][0]["wire_bytes"] == pytest.approx(model["wire_bytes"])


@pytest.mark.long
def test_ranks_that_train_in_shared_memory_get_no_prediction_of_sending(tmp_path: Path) -> None:
    """Finds a comm_ms of Gloo that is announced for ranks that send nothing."""
    options = ("--nproc", "2", "--time-budget", "5", "--max-bytes", "65536", "--compute-ms", "640")
    ended = run("bench", "link", *options, *SMALL, cwd=tmp_path).require(0)
    assert "no prediction of a training step: `train` lets these ranks add gradients in shared memory" in ended.out
    assert "comm_ms of a training step" not in ended.out


@pytest.mark.long
def test_the_command_prints_tables_and_writes_a_file(tmp_path: Path) -> None:
    ended = run(
        *("bench", "link", "--nproc", "2", "--time-budget", "5", "--max-bytes", "65536", "--json", "found.json"),
        *("--compute-ms", "640", "--parallel.no-shared-memory", *SMALL),
        cwd=tmp_path,
    ).require(0)
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)  # no Infinity, no NaN
    assert found["world_size"] == 2
    assert [host["ranks"] for host in found["hosts"]] == [[0, 1]]
    assert " 127.0.0.1, MTU " in found["hosts"][0]["interface"]
    for words in (
        "the slowest pair: ranks 0 and 1",
        *COLLECTIVES,
        "alpha us",
        "All-reduce of",
        "measured alone",
        "97%",
    ):
        assert words in ended.out
    [shown] = re.findall(r"comm_ms of a training step, strategy ddp: ([\d.]+) ms", ended.out)
    assert float(shown) == pytest.approx(found["model"]["predicted_s"] * 1e3, rel=0.01, abs=0.01)
    assert "A step predicted: 640.0 ms of forward and backward" in ended.out


def test_what_cannot_be_is_refused_at_once_with_what_to_do(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)

    def refusal(*arguments: str) -> str:
        assert main(["bench", *arguments]) == 2
        said = capfd.readouterr()
        assert not said.out
        return str(said.err)

    for arguments, says in (
        ((), "--nproc 2"),
        (("--nproc", "two"), "a number of ranks"),
        (("--nproc", "2", "--max-bytes", "1024"), "--max-bytes is 1024"),
        (("--nproc", "2", "--time-budget", "1"), "at least 5 seconds"),
        (("--nproc", "2", "--compute-ms", "-1"), "--compute-ms is -1"),
        (("--nproc", "2", "--json", "no/where.json"), "name a file in a folder that exists"),
        (("--nproc", "2", "--tiem-budget", "9"), "did you mean '--time-budget'?"),
        (("--nproc", "2", "--model.n-head", "3"), "not a multiple of model.n-head"),
    ):
        assert says in refusal("link", *arguments)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    assert "measures between ranks, and here is one" in refusal("link")
    assert "inside a world" in refusal("link", "--nproc", "2")
    assert "there are: link, scaling" in refusal("linq")


# ---- two hosts, whose link is known ----


@pytest.mark.long
def test_at_100_mbit_the_figures_are_those_of_the_link(tmp_path: Path) -> None:
    """Nothing is faster than the link; messages and the larger collectives are as fast, both ways at once, too."""
    if os.geteuid() != 0:
        pytest.skip("a lab takes root")
    flags = ("--time-budget", "25", "--max-bytes", str(4 << 20), "--json", "found.json", *SMALL)
    ended = run("lab", "--hosts", "2", "--rate", "100mbit", "--", "bench", "link", *flags, cwd=tmp_path)
    if ended.status == 2:
        pytest.skip(f"no lab on this machine: {ended.err.strip()}")
    ended.require(0)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [host["name"] for host in found["hosts"]] == ["a", "b"]
    assert ["MTU 1500" in host["interface"] for host in found["hosts"]] == [True, True]
    link = 100e6 / 8 * PAYLOAD
    (pair,) = found["pairs"]
    assert pair["bytes_per_s"] == pytest.approx(link, rel=0.05)
    times = {(c["name"], row["num_bytes"]): row for c in found["collectives"] for row in c["times"]}
    for name in COLLECTIVES:
        largest = max(size for other, size in times if other == name)
        assert largest >= KIB << 10
        assert times[name, largest]["bus_bytes_per_s"] < 1.05 * link
    # Before receives were begun first, the two ways of an exchange waited for each other: half the bandwidth.
    exchanges = [
        times[name, 1 << 20]["bus_bytes_per_s"] for name in ("reduce-scatter", "all-gather") if (name, 1 << 20) in times
    ]
    assert max(exchanges) > 0.65 * link
    model = found["model"]
    assert model["computed_s"] == pytest.approx(model["gradient_bytes"] / link, rel=0.05)
    assert model["predicted_s"] > 0.95 * model["computed_s"]
