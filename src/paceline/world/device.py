"""The device a rank computes on: which one, how many threads, which number format, how fast, and its clock."""

import math
import os
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.base.errors import UserError
from paceline.world.cores import usable_cores

# Dense peak in TFLOP/s by name fragment (first match): bfloat16/float16 with float32 accumulation, and TF32 for
# float32. From the vendors' data sheets, without sparsity; SXM parts where a name does not tell.
_GPU_PEAKS = (
    ("B200", 2250.0, 1100.0),
    ("GH200", 989.0, 494.0),
    ("H200", 989.0, 494.0),
    ("H100 PCIe", 756.0, 378.0),
    ("H100", 989.0, 494.0),
    ("A100", 312.0, 156.0),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 62.5),
    ("A40", 149.7, 74.8),
    ("A6000", 154.8, 77.4),
    ("L40S", 362.0, 183.0),
    ("L4", 121.0, 60.0),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 4080", 97.5, 48.7),
    ("RTX 4070", 58.3, 29.1),
    ("RTX 3090", 71.0, 35.6),
    ("RTX 3080", 59.5, 29.8),
)


def choose_device(wanted: str, local_rank: int, local_world_size: int, world_size: int) -> torch.device:
    """Returns the device of this rank; a GPU by its local rank.

    Raises UserError where the wanted device is not there, or MPS is to serve more than one rank (Gloo cannot
    communicate MPS tensors).
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
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


def choose_threads(wanted: int, local_world_size: int) -> tuple[int, str]:
    """Returns (threads for this rank, why).

    torchrun sets OMP_NUM_THREADS=1 for everybody who did not: under it a 1 is taken for torchrun's, not the user's.
    """
    if wanted:
        return wanted, "--parallel.threads"
    user = os.environ.get("OMP_NUM_THREADS", "")
    from_torchrun = user == "1" and "TORCHELASTIC_RUN_ID" in os.environ and "PACELINE_LAUNCHER" not in os.environ
    if user.isdigit() and int(user) > 0 and not from_torchrun:
        return int(user), "OMP_NUM_THREADS"
    cores = usable_cores()
    return max(1, cores // local_world_size), f"{cores} cores / {local_world_size} local ranks"


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns (number format of the matrix work, why). Weights and optimizer state are float32 in any case."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted], "--train.dtype"
    if device.type == "cuda":
        # torch also answers yes for cards that emulate bfloat16; Ampere (8.0) is the first with the units.
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"compute capability {major}.{minor} has bfloat16"
        return torch.float16, f"compute capability {major}.{minor} has no bfloat16 units; float16 with a loss scaler"
    if device.type == "cpu":
        unit = cpu_bfloat16_unit()
        return (torch.bfloat16, f"this CPU has {unit}") if unit else (torch.float32, "this CPU has no bfloat16 units")
    return torch.float32, "mps"


def cpu_bfloat16_unit() -> str:
    """Returns the name of this CPU's bfloat16 matrix instructions, or an empty string: emulated bfloat16 is slower."""
    probes = (("AMX", "_is_amx_tile_supported"), ("AVX512_BF16", "_is_avx512_bf16_supported"))
    for name, probe in probes:
        if getattr(torch.cpu, probe, lambda: False)():
            return name
    return ""


@dataclass(frozen=True)
class Peak:
    """What this rank's MFU is relative to: FLOP/s, and where the figure comes from. None: unknown."""

    flops_per_s: float | None
    source: str


def peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Returns the peak of this device in this dtype: a data sheet's for GPUs we know, measured on CPUs."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for fragment, half, single in _GPU_PEAKS:
            if fragment.lower() in name.lower():
                tera = single if dtype == torch.float32 else half
                return Peak(tera * 1e12, f"{name}, {tera:g} TFLOP/s dense by data sheet")
        return Peak(None, f"{name} is not in the table of peaks")
    if device.type == "cpu":
        return Peak(_measured_matmul(dtype), f"matmul measured here, {str(dtype).removeprefix('torch.')}")
    return Peak(None, f"no peak known for {device.type}")


def _measured_matmul(dtype: torch.dtype, side: int = 768, budget_s: float = 0.15) -> float:
    """FLOP/s of the best of several square matmuls with this rank's threads."""
    a = torch.ones(side, side, dtype=dtype)
    b = torch.ones(side, side, dtype=dtype)
    best, deadline = math.inf, time.perf_counter() + budget_s
    torch.mm(a, b)
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best if best < math.inf else 2 * side**3 / budget_s


class Stamp(Protocol):
    """A moment on a device's clock; made by DeviceClock.stamp(), compared by DeviceClock.ms()."""


class DeviceClock:
    """Moments of work on a device. On CPU the monotonic clock; on CUDA events in the current stream, which cost no
    synchronisation until they are read."""

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ms(self, start: Stamp, end: Stamp) -> float:
        """Milliseconds from start to end. On CUDA both must have happened: call `finish` first."""
        if isinstance(start, float) and isinstance(end, float):
            return (end - start) * 1e3
        return float(start.elapsed_time(end))  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Returns when everything asked of the current stream so far is done; collectives may still be under way."""
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()
