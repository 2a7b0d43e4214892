"""Threads, number format and device: who decides, and what is said about it."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ranks import run_ranks

from paceline.base.errors import UserError
from paceline.cli import start
from paceline.world import device as device_module
from paceline.world import env as env_module
from paceline.world import processor
from paceline.world.config import ParallelConfig
from paceline.world.cores import usable_cores
from paceline.world.device import choose_device, choose_dtype, choose_threads, may_share_gpu, own_facts
from paceline.world.device_clock import DeviceClock
from paceline.world.env import Environment
from paceline.world.facts import warn_of_idle_gpus
from paceline.world.measured import Measured
from paceline.world.peaks import Peak, gpu_peak
from paceline.world.peer import ranks_by_gpu, this_process, warn_of_shared_gpus
from paceline.world.processor import peak_flops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BUDGET_S", "_KNOWN_BUDGET_S"):
        monkeypatch.setattr(processor, name, 0.03)  # of the peak; 0.3 s otherwise


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "PACELINE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


def test_the_flag_decides_the_threads_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(3, 2) == (3, "--parallel.threads")


@pytest.mark.parametrize("value", ["1", "2", "7"])
def test_the_users_omp_num_threads_is_obeyed(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert choose_threads(0, 2) == (int(value), "OMP_NUM_THREADS")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun sets 1 or nothing
    assert value == "1" or choose_threads(0, 2) == (int(value), "OMP_NUM_THREADS")


AS_TORCHRUN = """
import os, subprocess, sys
rank = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TORCHELASTIC_RUN_ID": "x"}
code = "from paceline.world.device import choose_threads; print(*choose_threads(0, 1))"
subprocess.run([sys.executable, "-c", code], env=rank, check=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "says"), [({}, "cores / 1 local ranks"), ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS")]
)
def test_a_single_thread_is_the_users_wish_unless_torchrun_set_it(own: dict[str, str], says: str) -> None:
    """The launcher's own first environment tells. By the number alone a user's 1 was passed over."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | own
    done = subprocess.run([sys.executable, "-c", AS_TORCHRUN], env=env, capture_output=True, text=True, check=True)
    assert says in done.stdout


def test_under_our_own_launcher_a_single_thread_is_the_users_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PACELINE_LAUNCHER", "1")
    assert choose_threads(0, 1) == (1, "OMP_NUM_THREADS")


@pytest.mark.parametrize("value", ["", "0", "many", "-2", "²"])
def test_an_omp_num_threads_that_means_nothing_is_passed_over(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert choose_threads(0, 1)[0] == usable_cores()


def test_two_hardware_threads_of_one_core_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm gives them to a task."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: "0-1" if {"cpu0", "cpu1"} & {*path.parts} else "2-3")
    monkeypatch.setattr("paceline.world.cores.cgroup_quota", lambda: math.inf)  # it reads files, too
    assert usable_cores() == 2


@pytest.mark.parametrize("namespace", ["mkldnn", "onednn", "gone"])
def test_torchs_private_operators_may_be_renamed_or_gone(monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    """torch moves them from `mkldnn` to `onednn`; each start on a CPU asked for the old name."""
    linear = torch.ops.mkldnn._linear_pointwise
    own = {f"_is_{namespace}_bf16_supported": lambda: False, "_linear_pointwise": linear}
    for name in ("mkldnn", "onednn"):
        monkeypatch.setattr(torch.ops, name, SimpleNamespace(**own if name == namespace else {}), raising=False)
    monkeypatch.setattr(processor, "is_amd_with_avx512", lambda: True)
    processor.bfloat16_speedup.cache_clear()
    try:
        assert choose_dtype("auto", CPU)[0] in (torch.float32, torch.bfloat16)
        assert namespace == "gone" or not processor._has_bfloat16_units()
    finally:
        processor.bfloat16_speedup.cache_clear()
    a, b = torch.rand(8, 8), torch.rand(8, 8)
    assert torch.allclose(processor._mm(a, b), a @ b, atol=1e-5)


class OldGlibc:
    """Refuses a threshold above 32 MiB, as glibc before 2.35 does; then nothing may fix the others."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, which: int, value: int) -> int:
        self.calls.append((which, value))
        return int(which != -3 or value <= 32 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_an_old_glibc_gets_the_largest_threshold_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    glibc = OldGlibc()
    monkeypatch.setattr(device_module.ctypes, "CDLL", lambda _: glibc)
    device_module.keep_freed_memory()
    assert glibc.calls == [(-3, 1 << 30), (-3, 32 << 20), (-1, (1 << 31) - 1)]


def test_every_rank_has_at_least_one_thread() -> None:
    assert choose_threads(0, 10_000)[0] == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_given_dtype_is_the_dtype(name: str) -> None:
    assert choose_dtype(name, CPU) == (getattr(torch, name), "--train.dtype")


def chosen_dtype(config: ParallelConfig, env: Environment) -> tuple[torch.dtype, str]:
    return choose_dtype("auto", CPU)


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_bfloat16_is_not_chosen_where_the_environment_leaves_no_units_for_it(
    instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, whose oneDNN has not read the variable yet."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
    expected = torch.float32, "measured, bfloat16 is no faster on this CPU"
    assert run_ranks(chosen_dtype, 1, opened=False) == [expected]


def test_amx_means_bfloat16_and_an_old_macos_float16() -> None:
    if torch.cpu._is_amx_tile_supported() and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        assert choose_dtype("auto", CPU)[0] == torch.bfloat16
    assert choose_dtype("auto", torch.device("mps"))[0] == torch.float16  # no macOS 14 here


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"sees no GPU.*--parallel\.device cpu"):
        choose_device("cuda", 0, 1, 1)
    assert choose_device("auto", 0, 2, 2) == CPU


def test_a_peak_measured_on_a_cpu_says_so_and_is_plausible() -> None:
    peak = peak_flops(CPU, torch.float32)
    assert "matmul" in peak.source
    assert peak.flops_per_s is not None
    assert 1e8 < peak.flops_per_s < 1e15


GPUS = (
    ("NVIDIA B200", 2250, 75),
    ("NVIDIA GB200", 2500, 80),
    ("NVIDIA GH200 480GB", 989, 67),
    ("NVIDIA H200", 989, 67),
    ("NVIDIA H200 NVL", 835, 60),
    ("NVIDIA H100 80GB HBM3", 989, 67),
    ("NVIDIA H100 PCIe", 756, 51),
    ("NVIDIA H100 NVL", 835, 60),
    ("NVIDIA A100-SXM4-80GB", 312, 19.5),
    ("NVIDIA A100 80GB PCIe", 312, 19.5),
    ("A100-PCIE-40GB", 312, 19.5),
    ("NVIDIA A40", 149.7, 37.4),
    ("NVIDIA A10", 125, 31.2),
    ("NVIDIA A10G", 70, 35),
    ("NVIDIA RTX A6000", 154.8, 38.7),
    ("NVIDIA RTX A4000", 76.7, 19.2),
    ("NVIDIA RTX 6000 Ada Generation", 364.2, 91.1),
    ("NVIDIA L40S", 362, 91.6),
    ("NVIDIA L40", 181, 90.5),
    ("NVIDIA L4", 121, 30.3),
    ("Tesla V100-SXM2-16GB", 125, 15.7),
    ("Tesla V100-PCIE-32GB", 112, 14),
    ("Tesla T4", 65, 8.1),
    ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
)
UNKNOWN_GPUS = (
    *("NVIDIA RTX A1000 Laptop GPU", "NVIDIA RTX A1000", "NVIDIA RTX A2000 12GB", "NVIDIA A16", "NVIDIA T400 4GB"),
    *("NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4090 Laptop GPU"),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "Quadro RTX 6000", "AMD Instinct MI300X"),
)


@pytest.mark.parametrize(("name", "half", "single"), GPUS, ids=lambda value: str(value))
def test_a_gpus_peak_is_that_of_its_data_sheet(name: str, half: float, single: float) -> None:
    for dtype in ("bfloat16", "float16"):
        assert gpu_peak(name, dtype).flops_per_s == pytest.approx(half * 1e12)
    peak = gpu_peak(name, "float32")
    assert peak.flops_per_s == pytest.approx(single * 1e12)
    assert name in peak.source
    assert "without TF32" in peak.source
    assert not torch.backends.cuda.matmul.allow_tf32, "else the peak would be another"


@pytest.mark.parametrize("name", UNKNOWN_GPUS)
def test_a_part_of_a_name_is_no_peak(name: str) -> None:
    peak = gpu_peak(name, "bfloat16")
    assert peak == Peak(None, f"{name} is not in the table of peaks")


BURN = "print(flush=True)\nwhile True: pass"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a test's measurements are kept."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "measured"


def find_peak(config: ParallelConfig, env: Environment) -> float | None:
    torch.set_num_threads(1)
    return peak_flops(CPU, torch.float32).flops_per_s


def reported() -> float:
    """The peak that a process of its own reports."""
    (found,) = run_ranks(find_peak, 1, opened=False)
    return float(found)


@pytest.mark.long
def test_a_slow_start_after_a_fast_one_reports_the_fast_ones_peak(kept: Path) -> None:
    fast = reported()
    (file,) = kept.iterdir()
    with ExitStack() as stack:
        for _ in range(usable_cores()):
            burning = stack.enter_context(subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE))
            stack.callback(burning.kill)
            assert burning.stdout is not None
            burning.stdout.readline()
        under_load = reported()
    assert under_load >= fast
    content = json.loads(file.read_text())
    assert content["value"] == under_load
    assert (content["threads"], content["dtype"], content["torch"]) == (1, "float32", torch.__version__)
    assert list(kept.iterdir()) == [file], "nothing else is left there"


def test_a_kept_peak_is_of_this_dtype_and_these_threads(kept: Path) -> None:
    """Finds a key without dtype or threads, and a larger value that does not replace a smaller one."""
    assert torch.get_num_threads() == 1, "the tests' own setting"
    host = socket.gethostname()
    Measured("peak", host=host, dtype="float32", threads=1).keep(1e15)
    Measured("peak", host=host, dtype="bfloat16", threads=1).keep(1.0)
    Measured("peak", host=host, dtype="float32", threads=2).keep(1e16)
    assert peak_flops(CPU, torch.float32) == Peak(1e15, "the best matmul seen on this machine, float32")
    measured = peak_flops(CPU, torch.bfloat16).flops_per_s
    assert Measured("peak", host=host, dtype="bfloat16", threads=1).read() == measured
    assert measured is not None
    assert measured > 1.0


def test_a_processor_that_is_throttled_after_a_burst_is_timed_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds the best of some short products, as a quota of half a core grants them at full speed."""
    elapsed_s = [0.0]

    def multiply(a: torch.Tensor, _: torch.Tensor) -> None:
        is_granted = elapsed_s[0] % 0.1 < 0.05
        elapsed_s[0] += 0.001 if is_granted else 0.001 + 0.1 - elapsed_s[0] % 0.1

    monkeypatch.setattr(processor, "_mm", multiply)
    monkeypatch.setattr(processor, "time", SimpleNamespace(perf_counter=lambda: elapsed_s[0]))
    full_speed = 2 * 1024**3 / 0.001
    assert processor.sustained_flops(torch.float32) == pytest.approx(full_speed / 2, rel=0.1)


def test_the_clock_of_a_cpu_counts_milliseconds() -> None:
    clock = DeviceClock(CPU)
    before = time.perf_counter()
    start = clock.stamp()
    time.sleep(0.02)
    took_ms = clock.ms(start, clock.stamp())
    assert 20 <= took_ms <= 1e3 * (time.perf_counter() - before)


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "local_ranks", "sees_all", "device"),
    [
        (8, 3, 8, True, "cuda:3"),
        (1, 0, 1, True, "cuda:0"),
        (1, 3, 8, False, "cuda:0"),  # srun --gpus-per-task 1
        (1, 3, 8, True, "cpu"),  # eight ranks of one launcher, one GPU
        (4, 3, 8, False, "cpu"),
        (0, 0, 1, False, "cpu"),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_its_task_is_shown(
    num_gpus: int, local_rank: int, local_ranks: int, sees_all: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "count_gpus", lambda: num_gpus)
    found = choose_device("auto", local_rank, local_ranks, max(2, local_ranks), sees_all_gpus=sees_all)
    assert found == torch.device(device)


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "local_ranks", "device"),
    [(1, 3, 4, "cuda:0"), (2, 3, 4, "cuda:1"), (8, 3, 4, "cuda:3"), (0, 3, 4, "cpu")],
)
def test_ranks_share_gpus_in_turn_if_a_test_says_so(
    num_gpus: int, local_rank: int, local_ranks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: four ranks on one GPU are sent to the CPU, or refused."""
    monkeypatch.setattr(device_module, "count_gpus", lambda: num_gpus)
    monkeypatch.setenv("PACELINE_SHARE_GPU", "1")
    for wanted in ("auto", "cuda") if num_gpus else ("auto",):
        assert choose_device(wanted, local_rank, local_ranks, local_ranks) == torch.device(device)
    monkeypatch.setenv("PACELINE_SHARE_GPU", "0")
    assert choose_device("auto", local_rank, local_ranks, local_ranks).type == ("cuda" if num_gpus == 8 else "cpu")


def test_ranks_that_share_a_gpu_divide_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: each of four ranks takes the whole memory of one GPU for its own, and chooses a micro-batch for it."""
    monkeypatch.setattr(device_module, "count_gpus", lambda: 2)
    for name, answer in {
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100",
        "mem_get_info": (80e9, 90e9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    facts = [own_facts(torch.device("cuda"), "nccl", (1, ""), 8, ranks_of_gpu=ranks) for ranks in (1, 2)]
    assert [each.free_bytes for each in facts] == [80e9, 40e9]


def test_ranks_that_share_a_gpu_are_those_with_its_uuid() -> None:
    """Finds: eight tasks with a GPU each divide one's memory by eight, or no line says that two share one."""
    peer = this_process(Environment())
    peers = [replace(peer, rank=rank, gpu=gpu) for rank, gpu in enumerate(("a", "b", "a", "", ""))]
    assert ranks_by_gpu(peers) == {"a": [0, 2], "b": [1]}
    [warning] = warn_of_shared_gpus(peers)
    assert warning.startswith("ranks 0, 2 share a GPU")
    assert warn_of_shared_gpus(peers[1:2]) == ()


def test_whether_ranks_may_share_a_gpu_is_1_or_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SHARE_GPU", "true")
    with pytest.raises(UserError, match="PACELINE_SHARE_GPU is 'true'; it is 1"):
        may_share_gpu()


@pytest.mark.parametrize("on_one_host", [True, False])
def test_nccl_takes_each_rank_for_a_host_and_what_the_user_set_stays(
    on_one_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: all ranks have one host id, and ranks of several machines listen on loopback."""
    names = ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    device_module.let_nccl_share_gpu(3, on_one_host=on_one_host)
    loopback = env_module.interface_of("127.0.0.1") if on_one_host else None
    assert [os.environ.get(name) for name in names] == ["rank3", "1", loopback]
    for name in names:
        monkeypatch.setenv(name, "mine")
    device_module.let_nccl_share_gpu(3, on_one_host=on_one_host)
    assert [os.environ.get(name) for name in names] == ["mine"] * 3


@pytest.mark.parametrize(
    ("num_gpus", "device", "ranks"), [(8, "auto", 8), (1, "cuda", 1), (8, "cpu", 4), (0, "auto", 4)]
)
def test_nproc_auto_is_one_rank_for_each_gpu(
    num_gpus: int, device: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "count_gpus", lambda: num_gpus)
    monkeypatch.setenv("PACELINE_SHARE_GPU", "1")  # that ranks may share a GPU does not make them more
    monkeypatch.setattr(start, "usable_cores", lambda: 64)
    monkeypatch.setattr(start, "free_memory", lambda: 1 << 40)
    assert start.find_world("auto", ParallelConfig(device=device))[1] == ranks


def test_a_host_that_leaves_its_gpus_idle_is_named() -> None:
    mine = own_facts(CPU, "gloo", (1, ""), 1)
    on_gpu = replace(mine, device="cuda", num_gpus=8)
    assert warn_of_idle_gpus([mine, on_gpu]) == ()
    (warning,) = warn_of_idle_gpus([on_gpu, *[replace(mine, host="b", num_gpus=4)] * 5])
    assert warning.startswith("b computes on its CPU: it has 4 visible GPUs and more ranks")
