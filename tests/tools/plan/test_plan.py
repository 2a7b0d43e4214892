"""Plans against hand-computed cases, laws, real memory, and what the command says."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from whole_runs import status_of, tiny

from paceline.base.errors import UserError
from paceline.config import Config, load_preset
from paceline.record.console import Console
from paceline.tools.plan import calibrate, devices
from paceline.tools.plan.cluster import Cluster, read
from paceline.tools.plan.failures import Failures
from paceline.tools.plan.from_run import device_of_rank
from paceline.tools.plan.paths import path_of, paths
from paceline.tools.plan.plan import plan, rank_facts
from paceline.tools.plan.schedule import Job, Load, Stage, predict
from paceline.tools.plan.show import show
from paceline.tools.plan.work import memory_bytes
from paceline.train.resolve import resolve
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli"))
from in_process import here

H100 = devices.gpu("H100", compiled=True)
ONE = Job((Stage(1.0, 1.0, (1_000_000,)),), 1, 0.5, 2, 2, 0.1, 4e6)  # 1M elements, 4 MB/s each way


def step_s(job: Job, **parallel: object) -> float:
    config = ParallelConfig(**{"strategy": "ddp", **parallel})  # type: ignore[arg-type]
    return predict(job, path_of(config, job, is_layered=False)).step_s


# ---- the simulated step, by hand ----


def test_a_step_of_one_bucket_is_that_of_the_pencil() -> None:
    # 2 s of compute, then an all-reduce of 8 MB, of which half passes the link (1 s), two latencies, the update.
    assert step_s(ONE) == pytest.approx(2 + 1 + 0.2 + 0.5)
    # A reduce-scatter of 4 MB (0.5 s), latencies of it, its end and the norm; half an update; then a gather of 2 bytes
    # an element (0.25 s), which the next forward waits for.
    assert step_s(ONE, strategy="zero") == pytest.approx(2 + 0.5 + 0.3 + 0.25 + 0.1 + 0.25)
    # A gather of 2 MB (0.25 s); the second overlaps with forward; a scatter of 4 MB, a last latency, half an update.
    assert step_s(ONE, strategy="fsdp") == pytest.approx(0.35 + 1 + 1 + 0.6 + 0.1 + 0.25)
    # A host of one rank has all weights, and adds gradients as ddp does, after its only backward pass.
    assert step_s(ONE, strategy="hsdp") == pytest.approx(2 + 1 + 0.2 + 0.5)
    assert step_s(replace(ONE, num_ranks=1, num_hosts=1)) == 2.5


def test_a_measured_exchange_is_added_where_ranks_do_not_wait_for_the_link() -> None:
    measured = replace(ONE, exchange_s=0.3)
    assert step_s(replace(measured, is_across=False)) == pytest.approx(2 + 0.5 + 0.3)
    assert step_s(measured) == step_s(ONE)  # the link is slow: ranks wait for all bytes
    fast = replace(measured, bytes_per_s=4e9, latency_s=0)
    assert step_s(replace(fast, inner_bytes_per_s=4e9), strategy="fsdp") == pytest.approx(2 + 0.25 + 0.3, abs=0.01)


def test_a_shaped_link_sends_at_once_what_it_saved_up_before_each_of_fsdps_messages() -> None:
    measured = replace(ONE, exchange_s=0.3)  # one stage: two gathers and a scatter, 1 s on the link
    usual = step_s(measured, strategy="fsdp")
    assert step_s(replace(measured, burst_s=0.1), strategy="fsdp") == pytest.approx(usual - 3 * 0.1)
    assert step_s(replace(measured, burst_s=9.0), strategy="fsdp") == pytest.approx(usual - 1)


def test_a_shaped_link_sends_at_once_what_it_saved_up_in_a_step_of_any_strategy() -> None:
    # Of an all-reduce of 1 s, of which 0.1 s or all is saved up in forward and backward.
    assert step_s(replace(ONE, burst_s=0.1)) == pytest.approx(step_s(ONE) - 0.1)
    assert step_s(replace(ONE, burst_s=9.0)) == pytest.approx(2 + 0.2 + 0.5)
    # Half an update is the pause before the weights, which take 0.25 s: enough to save up 0.1 s again.
    assert step_s(replace(ONE, burst_s=0.1), strategy="zero") == pytest.approx(step_s(ONE, strategy="zero") - 0.2)
    # Before the first gather and before the scatter; the second gather overlaps with forward.
    assert step_s(replace(ONE, burst_s=0.1), strategy="fsdp") == pytest.approx(step_s(ONE, strategy="fsdp") - 0.2)
    inside = replace(ONE, num_ranks=4, inner_bytes_per_s=4e6)  # the links of hsdp's gathers are not shaped
    assert step_s(replace(inside, burst_s=0.1), strategy="hsdp") == step_s(inside, strategy="hsdp")


def test_all_wait_for_the_slowest_load() -> None:
    slower = replace(ONE, slower=(Load(3, 1.5), Load(1, 1.0)))
    assert step_s(slower) == pytest.approx(3 * 1.5 * 2 + 1 + 0.2 + 0.5)
    assert predict(slower, paths(slower)[0]).exposed_s == pytest.approx(9 + 1.2 - 2)
    assert step_s(replace(ONE, slower=(Load(0),))) == step_s(ONE)


def test_the_ranks_of_a_host_overlap_with_the_link_between_hosts() -> None:
    fast = replace(ONE, num_ranks=16, inner_bytes_per_s=1e12)
    assert step_s(fast) == pytest.approx(step_s(ONE))
    assert step_s(replace(fast, inner_bytes_per_s=1e6)) == pytest.approx(2 + 7 / 8 * 8 + 0.2 + 0.5)


JOBS = st.builds(
    lambda blocks, forward, elements, count, hosts, rate, latency: Job(
        (Stage(0, forward, (elements,), True), *[Stage(forward, 2 * forward, (elements, elements))] * blocks),
        count, forward, hosts, hosts, latency, rate,
    ),
    st.integers(1, 5), st.floats(1e-3, 1), st.integers(1000, 4_000_000), st.integers(1, 3), st.integers(1, 5),
    st.floats(1e6, 1e10), st.floats(0, 1e-2),
)  # fmt: skip


@given(JOBS, st.floats(1.0, 10.0), st.booleans())
def test_a_faster_link_is_never_slower_and_parts_are_parts(job: Job, factor: float, is_fsdp: bool) -> None:
    found = [path_of(ParallelConfig(strategy="fsdp"), job, is_layered=False)] if is_fsdp else paths(job)
    for path in found:
        now, better = predict(job, path), predict(replace(job, bytes_per_s=factor * job.bytes_per_s), path)
        assert better.step_s <= now.step_s * (1 + 1e-9)
        assert 0 <= now.exposed_s < now.step_s
        if job.num_ranks == 1:
            assert now.wire_bytes == 0
            assert now.exposed_s == pytest.approx(0, abs=1e-9)


# ---- failures, fits ----


def test_a_gpu_saves_over_pcie() -> None:
    """Finds a snapshot at the speed of the GPU's own memory, for which 16 H100 were to save every two minutes."""
    config = load_preset("gpt2-124m", Config()).replace("parallel", strategy="ddp")
    cluster = Cluster(hosts=2, ranks_per_host=8, link_gbit=400, latency_us=10)
    found = plan(config, cluster, H100, vocab_size=50_304)
    save_s = 12 * 124e6 / 25e9
    young_s = math.sqrt(2 * save_s * H100.mtbf_hours * 3600 / 16)
    assert found.best_interval_s == pytest.approx(young_s, rel=0.1)
    assert found.best_interval_s > 600


@pytest.mark.parametrize(("between_s", "save_s"), [(1e4, 1.0), (1e4, 100.0), (3600.0, 600.0), (1e6, 5.0)])
def test_the_best_interval_is_where_goodput_is_greatest(between_s: float, save_s: float) -> None:
    job = Failures(between_s=between_s, save_s=save_s, restart_s=120)
    tried = [job.goodput_frac(interval) for interval in np.geomspace(1, 10 * between_s, 4000)]
    assert job.goodput_frac(job.best_interval_s) == pytest.approx(max(tried), rel=2e-3)
    assert job.goodput_frac(100 * between_s) < max(tried)


def test_goodput_is_that_of_simulated_failures() -> None:
    job, rng = Failures(between_s=2000, save_s=20, restart_s=100), np.random.default_rng(0)
    work, elapsed = 0.0, 0.0
    for life_s in rng.exponential(job.between_s, 4000):  # a restart, then intervals until the next failure
        work += 300 * max(0.0, (life_s - job.restart_s) // 320)
        elapsed += life_s
    assert work / elapsed == pytest.approx(job.goodput_frac(300), rel=0.03)


def calibrated(world: World, config: Config) -> devices.Device:
    """Calibrates with one round after the first, of which none counts as interrupted."""
    calibrate._MESSAGES, calibrate._LEAST_ROUNDS, calibrate._MOST_OF_QUICK = (1 << 14, 1 << 20), 1, math.inf
    return calibrate.measure(world, config, Console(world.rank), seconds=0.0)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_two_ranks_calibrate_a_device_that_plans_a_deeper_model(strategy: str) -> None:
    config = tiny(parallel__strategy=strategy)
    first, second = run_ranks(calibrated, 2, config.replace("parallel", shares="4,4,4"))
    assert replace(first, memory_bytes=0, peak_flops_per_s=0, copy_bytes_per_s=0) == replace(
        second, memory_bytes=0, peak_flops_per_s=0, copy_bytes_per_s=0
    )
    assert first.inner_bytes_per_s > 1e6
    shallow, deep = (
        plan(config.replace("model", n_layer=depth), Cluster(ranks_per_host=2), first, vocab_size=512)
        for depth in (1, 9)
    )
    for each in (shallow, deep):  # which of them is faster, a second of timing on a busy machine does not tell
        assert 0 < each.step_s < 60
        assert min(each.parts[part] for part in ("forward", "backward", "optimizer")) >= 0


def test_the_slowest_of_many_ranks_is_the_maximum_of_as_many_normal_times() -> None:
    config = load_preset("gpt2-124m", Config())
    cluster = Cluster(device="H100", hosts=128, ranks_per_host=8, link_gbit=3200, jitter_frac=0.02)
    calm, unsteady = (plan(config, replace(cluster, jitter_frac=frac), H100) for frac in (0.0, 0.02))
    drawn = np.random.default_rng(2).normal(size=(2000, 1024)).max(1).mean()
    waited = unsteady.parts["exposed communication"] - calm.parts["exposed communication"]
    assert waited == pytest.approx(0.02 * drawn * (calm.step.forward_s + calm.step.backward_s), rel=0.02)


# ---- whole plans ----


def test_sixteen_thousand_ranks_are_planned_at_once_and_goodput_falls() -> None:
    config = load_preset("gpt2-124m", Config()).replace("train", global_batch_size=1 << 15)
    cluster = Cluster(device="H100", hosts=2048, ranks_per_host=8, link_gbit=3200)
    began = time.process_time()
    found = [plan(config, cluster.of_ranks(count), H100) for count in (1, 8, 64, 1024, 16384)]
    assert time.process_time() - began < 20  # 0.2 s; a loop over ranks in the simulation would take minutes
    assert [each.cluster.hosts for each in found] == [1, 1, 8, 128, 2048]
    assert [each.goodput_frac for each in found] == sorted((each.goodput_frac for each in found), reverse=True)
    assert found[0].parts["exposed communication"] == 0
    assert found[0].efficiency_frac > found[3].efficiency_frac


def test_shares_by_speed_bring_what_the_speeds_sum_to() -> None:
    config = load_preset("gpt2-124m", Config()).replace("parallel", shares="auto")
    cluster = Cluster(device="H100", hosts=2, link_gbit=3200, speeds=(1.0, 0.25), jitter_frac=0)
    auto, equal = (plan(config.replace("parallel", shares=shares), cluster, H100) for shares in ("auto", "equal"))
    assert auto.efficiency_frac == pytest.approx(1, abs=0.05)
    assert equal.efficiency_frac == pytest.approx(2 * 0.25 / 1.25, rel=0.05)


def peak_bytes(_: ParallelConfig, env: Environment, folder: Path, config: Config) -> float:
    """Returns by how much training raises the most that this process had in memory."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    before = status("VmRSS")
    assert status_of(folder, config) == 0
    return status("VmHWM") - before


@pytest.mark.long
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_memory_is_that_of_a_real_run(arch: str, tmp_path: Path) -> None:
    config = tiny(model__arch=arch, model__n_layer=4, model__n_embd=512, model__n_head=8, data__seq_len=256,
                  train__steps=2, train__global_batch_size=4, train__device_batch_size=4, train__eval_every=-1,
                  parallel__strategy="ddp")  # fmt: skip
    (measured,) = run_ranks(peak_bytes, 1, tmp_path / "run", config, opened=False)
    device = replace(H100, kind="cpu", dtype="float32" if config.train.dtype == "auto" else config.train.dtype)
    facts = rank_facts(config, Cluster(), device)
    expected = memory_bytes(resolve(config, 512, facts), facts[0], 1, 1)
    assert measured == pytest.approx(sum(expected.values()), rel=0.15)


# ---- what people see ----


def test_the_command_prints_a_plan_a_table_and_json(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('device = "A100-40GB"\nhosts = 2\nranks-per-host = 8\nlink_gbit = 1600\n')
    common = ("plan", "--preset", "gpt2-124m", "--cluster", "two.toml", "--price", "2")
    one = here(*common, "--explain", cwd=tmp_path).require()
    for word in ("tokens/s", "MFU", "gradients", "save every", "times may be off by", "expected maximum", " at 2 "):
        assert word in one.out
    several = here(*common, "--ranks", "1,8,16", "--json", cwd=tmp_path).require()
    rows = json.loads(several.out)["plans"]
    assert [row["ranks"] for row in rows] == [16, 8, 1]  # the fastest first
    for row in rows:
        assert row["step_ms"] == pytest.approx(sum(row["part_ms"].values()))
        assert row["price"] == pytest.approx(2 * row["device_hours"])
    table = here(
        *common, "--vary", "parallel.strategy=zero", "parallel.strategy=ddp model.n-layer=500", cwd=tmp_path
    ).require()
    assert "does not fit" in table.out
    assert table.out.index("strategy=zero") < table.out.index("does not fit")


def test_a_variant_that_a_start_would_refuse_is_named_and_the_others_are_planned(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('device = "A100-40GB"\nhosts = 2\nranks-per-host = 8\nlink_gbit = 1600\n')
    common = ("plan", "--preset", "gpt2-124m", "--cluster", "two.toml", "--vary")
    refused = "parallel.strategy=zero parallel.wire=int8"
    one = here(*common, "parallel.strategy=ddp", refused, "--json", cwd=tmp_path).require()
    found = json.loads(one.out)
    assert [row["label"] for row in found["plans"]] == ["parallel.strategy=ddp"]
    assert [row["label"] for row in found["refused"]] == [f"{refused} on 16 ranks"]
    assert "NCCL adds gradients as they are" in found["refused"][0]["why"]
    table = here(*common, "parallel.strategy=ddp", refused, cwd=tmp_path).require()
    assert f"left out: {refused} on 16 ranks: parallel.wire is int8" in " ".join(table.out.split())
    here(*common, f"{refused} parallel.backend=gloo", cwd=tmp_path).require()
    alone = here(*common, refused, cwd=tmp_path)
    assert alone.status == 2
    assert "NCCL adds gradients as they are" in alone.err


def test_what_the_doctor_measured_is_a_cluster(tmp_path: Path) -> None:
    links = {"link_gbit": 0.9, "latency_us": 60.0}
    (tmp_path / "job.json").write_text(json.dumps({"ok": True, "cluster": {"hosts": 2, "ranks_per_host": 1, **links}}))
    assert read(tmp_path / "job.json") == Cluster(hosts=2, link_gbit=0.9, latency_us=60.0)
    for text, says in (("3", "is not what `paceline doctor --json` prints"), ("{}", "has an empty cluster")):
        (tmp_path / "other.json").write_text(f'{{"cluster": {text}}}')
        with pytest.raises(UserError, match=says):
            read(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device = 'H100'\nhost = 2", "has no field 'host' (did you mean 'hosts'?)"),
        ("device = 'H1000'", "no device is named 'H1000'"),
        ("hosts = 'two'", "hosts is 'two'; it must be of type int"),
        ("hosts = 2", "no link between them: give --link-gbit"),
        ("hosts = 2\nlink_gbit = 1\nspeeds = [1]", "give one above 0 for each of the 2 hosts"),
        ("hosts = -1", "hosts is -1; it must be at least 1"),
        ("price = inf", "price is inf"),
        ("jitter_frac = nan", "jitter_frac is nan"),
        ("hosts =", "is not TOML"),
        ("hosts = " + "9" * 6000, "is not TOML"),
        ("hosts = " + "[" * 3000 + "]" * 3000, "is not TOML"),
    ],
    ids=range(11),
)
def test_a_wrong_cluster_is_refused_by_name(text: str, says: str, tmp_path: Path) -> None:
    """Finds: a number of thousands of digits, and thousands of brackets, were a ValueError and a RecursionError."""
    (tmp_path / "c.toml").write_text(text)
    ended = here("plan", "--preset", "tiny", "--cluster", "c.toml", cwd=tmp_path)
    assert ended.status == 2
    assert says in " ".join(ended.err.split())


@pytest.mark.parametrize("text", ['{"cluster": {"hosts": ' + "9" * 6000 + "}}", "[" * 100_000, "{", "{}"], ids=range(4))
def test_json_that_the_doctor_did_not_print_is_refused(text: str, tmp_path: Path) -> None:
    """Finds: the same two in a file of JSON."""
    (tmp_path / "c.json").write_text(text)
    ended = here("plan", "--preset", "tiny", "--cluster", "c.json", cwd=tmp_path)
    assert ended.status == 2
    assert "is not what `paceline doctor --json` prints" in " ".join(ended.err.split())


def test_a_machine_without_a_calibration_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    ended = here("plan", "--preset", "tiny", "--json", cwd=tmp_path)  # for programs, which know nothing of the wait
    assert ended.status == 2
    assert "the same command with --calibrate" in ended.err
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    slow = replace(H100, kind="cpu", name="here", source="measured here, 2 ranks")
    config = load_preset("tiny", Config())
    devices.store(config, 2, slow)
    assert devices.calibration(config, 4).forward["gpt2"]["products"] == 2 * slow.forward["gpt2"]["products"]
    with pytest.raises(UserError, match="nothing was measured for this config on this machine yet with 1 rank at once"):
        devices.calibration(config, 1)
    path = devices.store(config, 1, slow)
    assert "here" in here("plan", "--preset", "tiny", cwd=tmp_path).require().out
    assert "here" in here("plan", "--preset", "tiny", "--model.n-layer", "9", cwd=tmp_path).require().out
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UserError, match="nothing was measured"):
        devices.calibration(config, 1)


def test_a_calibration_is_found_by_the_threads_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a key of the flag's text: a rank has the same threads by the flag and by the environment."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = load_preset("tiny", Config())
    devices.store(config, 2, H100)
    for threads, is_known in ((3, True), (2, False)):
        assert bool(devices.stored(config.replace("parallel", threads=threads))) == is_known
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not devices.stored(config)


A_TOKEN_S = 1.3e-7  # of a block's forward or backward, for each of its width


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `plan` has measured of a machine of two cores, on which nothing is known yet."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    monkeypatch.setattr("paceline.cli.plan.usable_cores", lambda: 2)
    monkeypatch.setattr("paceline.tools.doctor.host.say_load", lambda _: None)
    said: list[str] = []

    def measure(config: Config, num_ranks: int) -> int:
        hosts = "" if config.parallel.shared_memory else " of a host"
        said.append(f"{num_ranks}{hosts}: {config.model.n_embd} wide")
        passes = {config.model.arch: {"block tokens": A_TOKEN_S * config.model.n_embd}}
        device = replace(H100, kind="cpu", name="here", source="measured here", forward=passes, backward=passes)
        devices.store(config, num_ranks, device)
        return 0

    monkeypatch.setattr("paceline.cli.plan._calibrate", measure)
    return said


def test_a_machine_that_is_not_known_yet_is_measured_first(tmp_path: Path, measured: list[str]) -> None:
    """Finds a first plan that only tells to calibrate, a second one that measures again, and the plan of two ranks by
    what one alone has shown. Mutation: any number of ranks serves for all."""
    first = here("plan", "--preset", "tiny", "--explain", cwd=tmp_path).require().out
    assert first.startswith("nothing was measured for this config on this machine yet: measuring 1 rank")
    assert "here" in first
    here("plan", "--preset", "tiny", cwd=tmp_path).require()
    assert measured == ["1: 64 wide"]
    here("plan", "--preset", "tiny", "--ranks", "1,2,4", cwd=tmp_path).require()
    assert measured == ["1: 64 wide", "2: 64 wide"]
    variants = ("--vary", "parallel.threads=1", "parallel.threads=2")
    here("plan", "--preset", "tiny", "--calibrate", *variants, cwd=tmp_path).require()
    assert measured[2:] == ["1: 64 wide"] * 2 + ["2: 64 wide"] * 2


def test_what_an_exchange_depends_on_is_measured_by_itself(tmp_path: Path, measured: list[str]) -> None:
    """Finds variants whose measured exchange is that of another number of local steps, or of larger transfers."""
    local = [f"parallel.strategy=local parallel.sync-every={steps}" for steps in (1, 64)]
    transfers = [f"parallel.strategy=ddp parallel.bucket-mb={size}" for size in (1, 10)]
    words = ("plan", "--preset", "tiny", "--ranks", "2", "--vary", *local, *transfers)
    here(*words, cwd=tmp_path).require()
    assert measured == ["2: 64 wide"] * 4
    here(*words, "train.global-batch-size=8", "model.n-layer=9", cwd=tmp_path).require()
    assert len(measured) == 5  # of the strategy auto, whatever the batch and the depth


def test_for_several_hosts_ranks_are_measured_that_share_no_memory(tmp_path: Path, measured: list[str]) -> None:
    """Finds a plan of one host and of two that asks for --calibrate again after each one."""
    (tmp_path / "c.toml").write_text("hosts = 2\nranks_per_host = 2\nlink_gbit = 1\n")
    common = ("plan", "--preset", "tiny", "--cluster", "c.toml", "--ranks", "2,4")
    assert "with --calibrate first" in here(*common, cwd=tmp_path).require(2).err
    here(*common, "--calibrate", cwd=tmp_path).require()
    assert measured == ["2: 64 wide", "2 of a host: 64 wide"]
    assert "left out" not in here(*common, cwd=tmp_path).require().out
    (tmp_path / "c.toml").write_text("device = 'H100'\nhosts = 2\nranks_per_host = 2\nlink_gbit = 1\n")
    assert "--cluster is of H100" in here(*common, "--calibrate", cwd=tmp_path).require(2).err


def test_a_shape_that_a_run_would_choose_is_measured_itself(tmp_path: Path, measured: list[str]) -> None:
    """Mutation: times of blocks as wide as the given ones. These reach 1e11 FLOP/s, for which 150 s give 2 layers."""
    here("plan", "--preset", "fast", cwd=tmp_path).require()
    assert measured == ["1: 256 wide", "1: 128 wide"]
    (row,) = json.loads(here("plan", "--preset", "fast", "--json", cwd=tmp_path).require().out)["plans"]
    tokens = row["tokens_per_s"] * row["step_ms"] / 1e3
    assert row["part_ms"]["forward"] == pytest.approx(1e3 * 2 * 128 * A_TOKEN_S * tokens)
    here("plan", "--preset", "fast", "--ranks", "2", "--calibrate", cwd=tmp_path).require()
    assert measured[2:] == ["2: 256 wide", "2: 128 wide"]


TWO_HOSTS = Cluster(device="H100", hosts=2, ranks_per_host=8, link_gbit=3200)


def test_the_lines_below_a_table_are_those_of_all_its_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """Finds the batch, and how sure it is, of the first row alone; and a label that lost a part of a path."""
    config = load_preset("gpt2-124m", Config()).replace("train", global_batch_size=480)
    other = config.replace("train", global_batch_size=960)
    label = "data.path=/x/a.txt"
    plans = [plan(config, TWO_HOSTS, H100), plan(other, TWO_HOSTS, replace(H100, error_frac=0.5), label=label)]
    show(plans, Console(0))
    said = " ".join(capfd.readouterr().out.split())
    assert "; worlds make steps of 480 or 960 sequences" in said
    assert "may be off by 50%" in said
    assert "path=/x/a.txt " in said
    show(plans[:1] * 2, Console(0))
    assert "; all worlds make steps of 480 sequences" in " ".join(capfd.readouterr().out.split())


def test_a_run_that_saves_at_its_end_only_loses_what_it_did_since_its_start() -> None:
    config = load_preset("gpt2-124m", Config())
    config = config.replace("checkpoint", every=0, every_s=0.0)
    short, long = (plan(config.replace("train", steps=steps), TWO_HOSTS, H100) for steps in (1000, 10**9))
    assert short.goodput_frac > 0.99
    assert long.goodput_frac < 0.1


def test_shares_of_other_ranks_are_refused_as_by_a_run() -> None:
    config = load_preset("gpt2-124m", Config()).replace("parallel", shares="240,240")
    with pytest.raises(UserError, match="is for 2 ranks, and 16 train"):
        plan(config, TWO_HOSTS, H100)


def test_a_gpu_of_the_table_is_as_fast_as_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "H100").mkdir()  # no run
    config = load_preset("gpt2-124m", Config())
    exact = device_of_rank(TWO_HOSTS, config.replace("train", dtype="float32"))
    assert exact.peak_flops_per_s == 67e12
    assert exact.forward["gpt2"]["products"] > 10 * H100.forward["gpt2"]["products"]
    assert device_of_rank(TWO_HOSTS, config) == H100
    with pytest.raises(UserError, match="computes on H100: plan does not know its speed with float8"):
        plan(config.replace("train", dtype="float8"), TWO_HOSTS, H100)


def test_the_ranks_of_a_planned_host_see_its_gpus() -> None:
    """By which hsdp knows how many ranks divide the state."""
    assert rank_facts(Config(), TWO_HOSTS, H100)[0].num_gpus == 8


def test_a_plan_for_other_machines_imports_no_torch(tmp_path: Path) -> None:
    """Its import takes a second, half of the time that a plan may take."""
    (tmp_path / "cluster.toml").write_text('device = "H100"\nhosts = 2\nranks_per_host = 8\nlink_gbit = 400\n')
    words = ["plan", "--preset", "gpt2-124m", "--cluster", "cluster.toml", "--ranks", "1,16", "--explain"]
    code = f"import sys; from paceline.cli.main import main; sys.exit(main({words}) or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
