"""The device of a rank: which one, its threads and its number format."""

import contextlib
import ctypes
import os
import socket
import sys

import psutil
import torch

from paceline.base.cores import cpu_name
from paceline.base.errors import UserError
from paceline.base.net import LOOPBACK
from paceline.base.units import dtype_name
from paceline.world.cores import free_memory, usable_cores
from paceline.world.env import interface_of
from paceline.world.facts import RankFacts
from paceline.world.processor import bfloat16_speedup, rounding

SHARE_GPU = "PACELINE_SHARE_GPU"  # 1: ranks may share a GPU, for tests
_LEAST_SPEEDUP = 1.5  # of a product in bfloat16, for it to be chosen


def count_gpus() -> int:
    """Returns the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def may_share_gpu() -> bool:
    """Whether ranks may share a GPU: only if the user says so, since each is slower than alone. It shows on one GPU
    that several ranks compute the same, not how fast they are. Raises UserError for another value than 1 and 0."""
    value = os.environ.get(SHARE_GPU, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{SHARE_GPU} is '{value}'; it is 1, for tests in which ranks share a GPU, or 0")
    return value == "1"


def let_nccl_share_gpu(rank: int, *, on_one_host: bool) -> None:
    """Makes NCCL take this rank for a host of its own: it refuses two ranks of a host that have one GPU. Call it before
    NCCL starts. What the user has set stays. on_one_host: all ranks are, so loopback reaches them."""
    os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")  # sockets, as between hosts without InfiniBand
    if on_one_host and (loopback := interface_of(LOOPBACK)):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def choose_device(
    wanted: str, local_rank: int, local_world_size: int, world_size: int, *, sees_all_gpus: bool = True
) -> torch.device:
    """Returns this rank's device; a GPU by its local rank. sees_all_gpus False: a scheduler may show each rank its own
    GPU only, which is then number 0 on all of them. Raises UserError if the wanted device is missing, or if several
    ranks want MPS, which Gloo does not support."""
    num_gpus = count_gpus()
    if num_gpus == 1 and not sees_all_gpus:
        local_rank, local_world_size = 0, 1
    local_rank, local_world_size = _in_turn(local_rank, local_world_size, num_gpus)
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


def _in_turn(local_rank: int, local_world_size: int, num_gpus: int) -> tuple[int, int]:
    """Returns the number of the GPU that a rank wants, and how many its host's ranks need."""
    if num_gpus and may_share_gpu():
        return local_rank % num_gpus, min(local_world_size, num_gpus)
    return local_rank, local_world_size


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
    answer: torch.dtype = getattr(torch, name.replace("float8", "bfloat16"))
    return answer


def why_no_float8(device: torch.device) -> str:
    """Returns why this device has no float8 products; empty if it has."""
    if device.type != "cuda":
        return f"{device.type} has no float8 units"
    if not hasattr(torch, "_scaled_mm"):  # private, may go
        return f"torch {torch.__version__} has no _scaled_mm"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no float8 units; 8.9 has"


def own_facts(
    device: torch.device, backend: str, threads: tuple[int, str], local_world_size: int, ranks_of_gpu: int = 1
) -> RankFacts:
    """Returns this rank's facts. threads: their number, and why. local_world_size: the ranks of this host, of all
    launchers, which share its memory. ranks_of_gpu: those that share this rank's GPU."""
    is_cuda = device.type == "cuda"
    dtype, dtype_reason = choose_dtype("auto", device)
    return RankFacts(
        host=socket.gethostname(),
        device=device.type,
        backend=backend,
        processor=torch.cuda.get_device_name(device) if is_cuda else cpu_name(),
        instructions=f"CUDA {torch.version.cuda}" if is_cuda else torch.backends.cpu.get_cpu_capability(),
        rounding=rounding() if device.type == "cpu" else "",
        threads=threads[0],
        threads_reason=threads[1],
        free_bytes=torch.cuda.mem_get_info(device)[0] / ranks_of_gpu if is_cuda else free_memory() / local_world_size,
        dtype=dtype_name(dtype),
        dtype_reason=dtype_reason,
        num_gpus=count_gpus(),
        why_no_float8=why_no_float8(device),
    )


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
