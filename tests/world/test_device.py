"""Threads, number format and device: who decides, and what is said about it."""

import time

import pytest
import torch

from paceline.base.errors import UserError
from paceline.world.cores import usable_cores
from paceline.world.device import (
    DeviceClock,
    choose_device,
    choose_dtype,
    choose_threads,
    cpu_bfloat16_unit,
    peak_flops,
)

CPU = torch.device("cpu")


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


def test_torchruns_own_single_thread_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    threads, reason = choose_threads(0, 1)
    assert threads == usable_cores()
    assert "cores / 1 local ranks" in reason
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # torchrun never says 2: this is the user's
    assert choose_threads(0, 1) == (2, "OMP_NUM_THREADS")


def test_under_our_own_launcher_a_single_thread_is_the_users_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PACELINE_LAUNCHER", "1")
    assert choose_threads(0, 1) == (1, "OMP_NUM_THREADS")


@pytest.mark.parametrize("value", ["", "0", "many", "-2"])
def test_an_omp_num_threads_that_means_nothing_is_passed_over(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert choose_threads(0, 1)[0] == usable_cores()


def test_every_rank_has_at_least_one_thread() -> None:
    assert choose_threads(0, 10_000)[0] == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_given_dtype_is_the_dtype(name: str) -> None:
    assert choose_dtype(name, CPU) == (getattr(torch, name), "--train.dtype")


def test_the_chosen_dtype_says_why() -> None:
    dtype, reason = choose_dtype("auto", CPU)
    unit = cpu_bfloat16_unit()
    assert dtype == (torch.bfloat16 if unit else torch.float32)
    assert (unit or "no bfloat16") in reason
    assert choose_dtype("auto", torch.device("mps"))[0] == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"sees no GPU.*--parallel\.device cpu"):
        choose_device("cuda", 0, 1, 1)
    assert choose_device("auto", 0, 2, 2) == CPU


def test_a_peak_measured_on_a_cpu_says_so_and_is_plausible() -> None:
    peak = peak_flops(CPU, torch.float32)
    assert "measured" in peak.source
    assert peak.flops_per_s is not None
    assert 1e8 < peak.flops_per_s < 1e15


def test_the_clock_of_a_cpu_counts_milliseconds() -> None:
    clock = DeviceClock(CPU)
    start = clock.stamp()
    time.sleep(0.02)
    assert 20 <= clock.ms(start, clock.stamp()) < 500
