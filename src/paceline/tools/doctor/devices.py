"""Checks the devices: multiplies matrices on each, verifies and times the result, and reads the GPUs' driver."""

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator

import torch

from paceline.base import units
from paceline.tools.doctor.finding import Verdict, failure, ok, warning
from paceline.tools.doctor.host import Place
from paceline.world.device import choose_device, choose_threads, own_facts, product_dtype
from paceline.world.facts import RankFacts
from paceline.world.peaks import gpu_peak
from paceline.world.processor import sustained_flops

_SIDE, _TIMED = 4096, 20  # the side of a GPU's timed matrices, and how many products of them
_LEAST_OF_PEAK = 0.35
_DRIVER_S = 8.0
_FIELDS = (
    "index,name,driver_version,memory.used,memory.total,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active"
)
# Bits of clocks_throttle_reasons.active (nvml.h) that are no choice of the user's: heat and the power supply.
_THROTTLED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


def products(place: Place) -> Iterator[Verdict]:
    """Computes on the device of each rank of this host, and notes the facts of ranks."""
    parallel, place.notes["ranks"], place.notes["flops"] = place.config.parallel, [], {}
    threads = choose_threads(parallel.threads, place.num_ranks)
    for local_rank in range(place.num_ranks):
        device = choose_device(parallel.device, local_rank, place.num_ranks, place.world_size)
        backend = "nccl" if device.type == "cuda" and parallel.backend != "gloo" else "gloo"
        facts = own_facts(device, backend, threads, place.num_ranks)
        place.notes["ranks"].append(dataclasses.asdict(facts))
        if device.type != "cpu" or local_rank == 0:  # a host's ranks have one CPU
            yield from _product(place, device, facts)


def _product(place: Place, device: torch.device, facts: RankFacts) -> Iterator[Verdict]:
    dtype, processor = product_dtype(facts.dtype), facts.processor
    if not is_right(device, dtype):
        yield failure(f"{device} ({processor}) multiplies wrongly", "use another device; this one is damaged")
        return
    if device.type == "cuda":
        speed, peak = _gpu_flops(device, dtype), gpu_peak(processor, facts.dtype).flops_per_s or 0.0
    else:
        speed, peak = sustained_flops(dtype) if device.type == "cpu" else 0.0, 0.0
    seen = f"{device} ({processor}): {f'{units.count(speed)}FLOP/s in ' if speed else ''}{facts.dtype}"
    place.notes["flops"][str(device)] = speed
    if 0.0 < speed < _LEAST_OF_PEAK * peak:
        yield warning(f"{seen}, of {units.count(peak)} by data sheet", "nvidia-smi -q -d PERFORMANCE shows why")
    else:
        yield ok(seen)


def is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of small integers, which every number format holds, is exact."""
    numbers = torch.arange(256 * 256).view(256, 256)
    a, b = numbers * 7919 % 5 - 2, numbers * 104729 % 3 - 1
    product = a.to(device, dtype) @ b.to(device, dtype)
    # To 256 a bfloat16 holds each integer; beyond, the right answer is the rounded one.
    return torch.equal(product.cpu(), (a @ b).to(dtype))


def _gpu_flops(device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.mm(a, a)
    start.record(torch.cuda.current_stream(device))
    for _ in range(_TIMED):
        torch.mm(a, a)
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(_TIMED * 2.0 * _SIDE**3 / (start.elapsed_time(end) / 1e3))


def driver(place: Place) -> Iterator[Verdict]:
    """Reads nvidia-smi, before this program uses a GPU itself; silent without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return
    gpus = _ask("--query-gpu=" + _FIELDS)
    for gpu in gpus:
        place.notes["versions"]["driver"] = gpu[2]
        yield _gpu(gpu)
    for pid, *name, used in _ask("--query-compute-apps=pid,process_name,used_memory"):  # a name may have commas
        yield warning(f"process {pid} ({', '.join(name)}) uses {used} MiB of a GPU", f"kill {pid}")
    if gpus and not torch.cuda.is_available():
        yield warning(
            f"the driver shows {len(gpus)} GPUs, and torch {torch.__version__} none",
            "unset CUDA_VISIBLE_DEVICES, or install a CUDA build: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu130",
        )


def _ask(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=False)
    if said.returncode != 0:
        raise RuntimeError((said.stdout + said.stderr).strip() or f"nvidia-smi ended with {said.returncode}")
    return [[word.strip() for word in line.split(",")] for line in said.stdout.splitlines() if line.strip()]


def _gpu(fields: list[str]) -> Verdict:
    index, name, version, used, total, busy, celsius, ecc, reasons = fields
    seen = f"GPU {index} ({name}, driver {version}): {used} of {total} MiB used, {busy}% busy, {celsius} °C"
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    slowed = [text for bit, text in _THROTTLED.items() if bits & bit]
    if ecc.isdigit() and int(ecc):
        return failure(f"{seen}, {ecc} uncorrected memory errors", f"nvidia-smi --gpu-reset -i {index}, or replace it")
    if slowed:
        return warning(f"{seen}, slowed by {', '.join(slowed)}", f"nvidia-smi -q -d PERFORMANCE -i {index}")
    if used.isdigit() and total.isdigit() and int(used) > 0.1 * int(total):
        return warning(f"{seen}: little is left", f"nvidia-smi -i {index} shows who uses it")
    return ok(seen)
