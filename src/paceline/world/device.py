"""The device of a rank: which one, its threads, number format, peak speed and clock."""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import socket
import statistics
import sys
import time
from typing import Protocol, cast

import psutil
import torch

from paceline.base.cores import cpu_flags, cpu_name, is_amd_with_avx512
from paceline.base.errors import UserError
from paceline.base.units import dtype_name
from paceline.world.cores import free_memory, usable_cores
from paceline.world.facts import RankFacts
from paceline.world.measured import Measured
from paceline.world.peaks import Peak, gpu_peak

# Time to measure a CPU's peak: at the first start on a machine, and at later ones.
_BUDGET_S, _KNOWN_BUDGET_S = 0.3, 0.03
_LEAST_SPEEDUP = 1.5  # of a product in bfloat16, for it to be chosen
_LEAST_COMPUTED = 0.9  # part of the time of two products that their thread had a core, if nothing disturbed it


def count_gpus() -> int:
    """Returns the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(
    wanted: str, local_rank: int, local_world_size: int, world_size: int, *, sees_all_gpus: bool = True
) -> torch.device:
    """Returns this rank's device; a GPU by its local rank. sees_all_gpus False: a scheduler may show each rank its own
    GPU only, which is then number 0 on all of them. Raises UserError if the wanted device is missing, or if several
    ranks want MPS, which Gloo does not support."""
    num_gpus = count_gpus()
    if num_gpus == 1 and not sees_all_gpus:
        local_rank, local_world_size = 0, 1
    if wanted == "auto":
        if num_gpus >= local_world_size:
            wanted = "cuda"
        elif world_size == 1 and torch.backends.mps.is_available():
            wanted = "mps"
        else:
            wanted = "cpu"
    if wanted == "cuda":
        if num_gpus <= local_rank:
            raise UserError(
                f"parallel.device is cuda, and local rank {local_rank} has no GPU: torch {torch.__version__} sees "
                f"{num_gpus} here; start at most {num_gpus} ranks on this host, or use --parallel.device cpu"
                if num_gpus
                else f"parallel.device is cuda, and torch {torch.__version__} sees no GPU on this machine; "
                "use --parallel.device cpu, or install a CUDA build of torch",
                reach="rank" if num_gpus else "host",
            )
        return torch.device("cuda", local_rank)
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("parallel.device is mps, and this machine has no Apple GPU; use --parallel.device cpu")
        if world_size > 1:
            raise UserError("parallel.device mps serves one process only (Gloo has no MPS tensors); use cpu")
    return torch.device(wanted)


def use_deterministic_kernels() -> None:
    """Makes torch choose kernels that repeat bit for bit from now on, and refuse operations that have none. Call it
    before the first matrix product: cuBLAS then takes a fixed workspace."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # we read none
    torch.use_deterministic_algorithms(True)


def choose_threads(wanted: int, local_world_size: int) -> tuple[int, str]:
    """Returns (threads of this rank, why). local_world_size: the ranks that share this rank's cores, of all launchers.
    OMP_NUM_THREADS=1 counts as not set if torchrun has set it, as it does for several ranks."""
    if wanted:
        return wanted, "--parallel.threads"
    user = os.environ.get("OMP_NUM_THREADS", "")
    from_torchrun = user == "1" and "PACELINE_LAUNCHER" not in os.environ and not _is_set_by_user("OMP_NUM_THREADS")
    if user.isdecimal() and int(user) > 0 and not from_torchrun:
        return int(user), "OMP_NUM_THREADS"
    cores = usable_cores()
    return max(1, cores // local_world_size), f"{cores} cores / {local_world_size} local ranks"


def _is_set_by_user(name: str) -> bool:
    """Whether the environment in which torchrun was started has this variable; True if this is no rank of torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    with contextlib.suppress(psutil.Error, OSError):
        for parent in psutil.Process().parents():  # the first one that is no rank, or a wrapper of one
            started_with = parent.environ()
            if "TORCHELASTIC_RUN_ID" not in started_with:
                return name in started_with
    return False


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns (number format of matrix products, why). Weights and optimizer state are always float32."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted], "--train.dtype"
    if device.type == "cuda":
        # torch also says yes for GPUs that emulate bfloat16; Ampere (8.0) is the first with hardware units.
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"compute capability {major}.{minor} has bfloat16"
        return torch.float16, f"compute capability {major}.{minor} has no bfloat16 units; float16 with a loss scaler"
    if device.type == "cpu":
        speedup, measured = bfloat16_speedup()
        if speedup > _LEAST_SPEEDUP:
            return torch.bfloat16, f"{measured}, it is faster than float32 on this CPU"
        return torch.float32, f"{measured}, bfloat16 is no faster on this CPU"
    if torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0):
        return torch.bfloat16, "macOS 14 or later has bfloat16 on Apple GPUs"
    return torch.float16, "macOS before 14 has no bfloat16 on Apple GPUs; float16 with a loss scaler"


def product_dtype(name: str) -> torch.dtype:
    """The dtype of what matrix products give; theirs, unless that is float8."""
    found: torch.dtype = getattr(torch, name.replace("float8", "bfloat16"))
    return found


def why_no_float8(device: torch.device) -> str:
    """Returns why this device has no float8 products; empty if it has."""
    if device.type != "cuda":
        return f"{device.type} has no float8 units"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no float8 units; 8.9 has"


def own_facts(device: torch.device, backend: str, threads: tuple[int, str], local_world_size: int) -> RankFacts:
    """Returns this rank's facts. threads: their number, and why."""
    is_cuda = device.type == "cuda"
    dtype, dtype_reason = choose_dtype("auto", device)
    return RankFacts(
        host=socket.gethostname(),
        device=device.type,
        backend=backend,
        processor=torch.cuda.get_device_name(device) if is_cuda else cpu_name(),
        instructions=f"CUDA {torch.version.cuda}" if is_cuda else torch.backends.cpu.get_cpu_capability(),
        rounding=_rounding() if device.type == "cpu" else "",
        threads=threads[0],
        threads_reason=threads[1],
        free_bytes=float(torch.cuda.mem_get_info(device)[0]) if is_cuda else free_memory() / local_world_size,
        dtype=dtype_name(dtype),
        dtype_reason=dtype_reason,
        num_gpus=count_gpus(),
        why_no_float8=why_no_float8(device),
    )


def _rounding() -> str:
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


def peak_flops(device: torch.device, dtype: torch.dtype, *, is_kept: bool = False) -> Peak:
    """Returns the device's peak in this dtype: from a data sheet for known GPUs, measured on CPUs. Load makes it too
    low, so `is_kept` keeps this machine's best in the cache folder: the MFU of different runs is then comparable."""
    short = dtype_name(dtype)
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), short)
    if device.type == "cpu":
        if not is_kept:
            return Peak(_measured_matmul(dtype), f"matmul measured here, {short}")
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


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a @ b of CPU tensors, by the kernel that models take (model/cpu.py)."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if a.dtype == torch.float32 and is_amd_with_avx512() and has_onednn:
        for namespace in ("mkldnn", "onednn"):  # torch renames the private operator
            with contextlib.suppress(AttributeError):
                linear = getattr(torch.ops, namespace)._linear_pointwise
                return cast(torch.Tensor, linear(a, b.t(), None, "none", [], ""))
    return torch.mm(a, b)


class Stamp(Protocol):
    """A moment on a device's clock, made by DeviceClock.stamp()."""


class DeviceClock:
    """Measures work on a device: the monotonic clock on CPU, events in the current stream on CUDA, which synchronise
    only when they are read."""

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def has_passed(self, stamp: Stamp) -> bool:
        """Whether the device has reached the stamp. Waits for nothing; any thread may ask."""
        return isinstance(stamp, float) or bool(stamp.query())  # type: ignore[attr-defined]

    def ms(self, start: Stamp, end: Stamp) -> float:
        """Returns the milliseconds from start to end. On CUDA call `finish` first: both must have happened."""
        if isinstance(start, float) and isinstance(end, float):
            return (end - start) * 1e3
        end.synchronize()  # type: ignore[attr-defined]  # a thread may just have recorded it
        return float(start.elapsed_time(end))  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Waits for all work queued in the current stream; collectives may still be under way."""
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()


def keep_freed_memory() -> None:
    """Asks glibc to keep large freed buffers: else each CPU step would fault them in again (docs/LOG.md)."""
    if sys.platform != "linux":
        return
    m_mmap_threshold, m_trim_threshold = -3, -1  # malloc.h
    with contextlib.suppress(AttributeError, OSError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        # Older ones refuse more than 32 MiB. The second call alone would fix the first threshold at 128 KiB.
        if mallopt(m_mmap_threshold, 1 << 30) or mallopt(m_mmap_threshold, 32 << 20):
            mallopt(m_trim_threshold, (1 << 31) - 1)
