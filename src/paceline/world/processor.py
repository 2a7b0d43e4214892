"""What this machine's processor does with numbers, measured: how it rounds, how fast it multiplies in bfloat16, and its
peak. Measurements are kept in the cache folder (measured.py)."""

import contextlib
import functools
import hashlib
import itertools
import socket
import statistics
import time
from typing import cast

import torch

from paceline.base.cores import cpu_flags, is_amd_with_avx512
from paceline.base.units import dtype_name
from paceline.world.measured import Measured
from paceline.world.peaks import Peak, gpu_peak

# Time to measure a CPU's peak: at the first start on a machine, and at later ones.
_BUDGET_S, _KNOWN_BUDGET_S = 0.3, 0.03
_LEAST_COMPUTED = 0.9  # part of the time of two products that their thread had a core, if nothing disturbed it


def rounding() -> str:
    """Returns a digest of operations that optimizers use. It differs between vector units with and without fused
    multiply-add, and between code paths of MKL and oneDNN, which choose them by vendor and model. The number of threads
    does not change it, nor does load. Kept in the cache folder."""
    fact = Measured("rounding")
    digest: str | None = fact.read()
    if digest is None:
        digest = _computed_rounding()
        fact.keep(digest)
    return digest


def _computed_rounding() -> str:
    whole = torch.arange(1, 32769)
    a, b = (whole * 7919 % 10007).float() / 9973, (whole * 104729 % 7919).float() / 7907 - 0.5
    results = [a.sqrt(), a.exp(), a.lerp(b, 0.1), a.add(b, alpha=0.3), a.addcdiv(b, a + 1, value=0.3), b.norm()]
    x, y = a.view(64, 512), b.view(512, 64)
    flat = torch.cat([each.flatten() for each in (*results, x @ y, (x.bfloat16() @ y.bfloat16()).float())])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:6]


def _has_bfloat16_units() -> bool:
    """Whether oneDNN has bfloat16 kernels for this processor and environment. torch renames the private operator; where
    it has neither name, the processor's flags decide."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    for namespace in ("mkldnn", "onednn"):
        with contextlib.suppress(AttributeError):
            return bool(getattr(getattr(torch.ops, namespace), f"_is_{namespace}_bf16_supported")())
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_flags())


@functools.cache
def bfloat16_speedup() -> tuple[float, str]:
    """Returns (how much faster the CPU multiplies matrices in bfloat16 than in float32, when that was measured).
    AVX512_BF16 is slower than float32 on some processors. Kept in the cache folder if nothing disturbed it."""
    if not _has_bfloat16_units():  # the environment may restrict oneDNN's instructions
        return 0.0, "measured"  # emulated, in up to 100 times the time
    fact = Measured("bfloat16-speedup")
    kept: float | None = fact.read()
    if kept is not None:
        return kept, "measured at an earlier start"
    speedup, is_undisturbed = _measured_bfloat16_speedup()
    first: float | None = fact.read()  # another rank of this host may have been quicker: all take its value
    if first is not None:
        return first, "measured"
    if is_undisturbed:
        fact.keep(speedup)
    return speedup, "measured"


def _measured_bfloat16_speedup() -> tuple[float, bool]:
    """Returns (speedup, whether this thread had a core for itself in most of the products). Takes 20 ms."""
    matrices = [torch.ones(384, 384, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where a core is busy
    ratios, undisturbed = [], []
    for _ in range(15):
        seconds, computed_s = [], -time.thread_time()
        for matrix in matrices:
            start = time.perf_counter()
            _mm(matrix, matrix)
            seconds.append(time.perf_counter() - start)
        computed_s += time.thread_time()
        ratios.append(seconds[0] / seconds[1])
        undisturbed.append(computed_s >= _LEAST_COMPUTED * sum(seconds))
    torch.set_num_threads(threads)
    # The two of a pair share what else runs on their core; the best of each may not, and ranks start at once.
    return statistics.median(ratios), statistics.mean(undisturbed) > 0.5


def peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Returns the device's peak in this dtype: from a data sheet for known GPUs, measured on CPUs. Load makes it too
    low, so this machine's best is kept in the cache folder: the MFU of different runs is then comparable."""
    short = dtype_name(dtype)
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), short)
    if device.type == "cpu":
        return Peak(_best_so_far(dtype), f"the best matmul seen on this machine, {short}")
    return Peak(None, f"no peak known for {device.type}")


def _best_so_far(dtype: torch.dtype) -> float:
    """Measures the FLOP/s, briefly if some are kept; returns the larger and keeps it."""
    # Machines with one processor differ in cooling and in what a container may use.
    fact = Measured("peak", host=socket.gethostname(), dtype=dtype_name(dtype), threads=torch.get_num_threads())
    best: float = fact.read() or 0.0
    measured = _measured_matmul(dtype, _KNOWN_BUDGET_S if best else _BUDGET_S)
    if measured > best:
        fact.keep(measured)
    return max(best, measured)


def _measured_matmul(dtype: torch.dtype, budget_s: float = _BUDGET_S) -> float:
    """Returns the FLOP/s of the best of many square matmuls: small ones suit load, large ones many threads."""
    best, deadline = 0.0, time.perf_counter() + budget_s
    sides = itertools.cycle((512, 768, 1024, 2048))
    while time.perf_counter() < deadline:
        side = next(sides)
        flops = 2.0 * side**3
        if side > 512 and flops / best > budget_s / 8:  # too large for these threads
            continue
        a, b = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
        _mm(a, b)
        for _ in range(4):
            time.sleep(0.001)
            start = time.perf_counter()
            _mm(a, b)
            best = max(best, flops / (time.perf_counter() - start))
    return best


def sustained_flops(dtype: torch.dtype) -> float:
    """Returns the CPU's FLOP/s in matmuls over two periods of a cgroup's quota, which grants it anew each 0.1 s: a
    single product shows no quota. The best of three times, for load."""
    side, best = 1024, 0.0
    a = torch.ones(side, side, dtype=dtype)
    _mm(a, a)
    for _ in range(3):
        start, num_products = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - start) < 0.2:
            _mm(a, a)
            num_products += 1
        best = max(best, num_products * 2.0 * side**3 / elapsed_s)
    return best


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a @ b of CPU tensors, by the kernel that models take (model/cpu.py)."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if a.dtype == torch.float32 and is_amd_with_avx512() and has_onednn:
        for namespace in ("mkldnn", "onednn"):  # torch renames the private operator
            with contextlib.suppress(AttributeError):
                linear = getattr(torch.ops, namespace)._linear_pointwise
                return cast(torch.Tensor, linear(a, b.t(), None, "none", [], ""))
    return torch.mm(a, b)
