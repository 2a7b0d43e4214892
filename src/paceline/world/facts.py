"""What each rank computes with. Ranks all-gather these facts once, when the world opens; every automatic choice is a
function of them, so all ranks choose alike."""

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from paceline.base import units
from paceline.base.cores import cpu_name
from paceline.base.units import listed
from paceline.world.cores import free_memory
from paceline.world.device import choose_dtype, count_gpus, why_no_float8
from paceline.world.group import Group


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The device of one rank, and its part of the host."""

    host: str
    device: str  # cpu, cuda, mps
    backend: str  # gloo, nccl, none; the same on all ranks
    processor: str  # the GPU's name, or the CPU's
    instructions: str  # the CPU's vector instructions that torch uses, or the version of CUDA
    rounding: str  # digest of some results on the CPU; empty on a GPU, where name and version decide
    threads: int
    threads_reason: str
    free_bytes: float  # memory for this rank: of its GPU, or its part of the host's
    dtype: str  # what "auto" means on this device
    dtype_reason: str
    num_gpus: int = 0  # that this rank sees
    why_no_float8: str = "a CPU has no float8 units"  # empty: the device has them
    shares_memory: bool = False  # with all other ranks; the same on all

    @property
    def kind(self) -> str:
        """Names the kind of processor. Ranks of one kind round alike, so all of them may make the same update."""
        if self.device == "cpu":
            return f"CPU with {self.instructions}, rounding {self.rounding}"
        return f"{self.processor}, {self.instructions}"


def gather_facts(group: Group, mine: RankFacts) -> tuple[RankFacts, ...]:
    """Returns every rank's facts, by rank. Collective."""
    return tuple(RankFacts(**facts) for facts in group.share_json(asdict(mine)))


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
        dtype=str(dtype).removeprefix("torch."),
        dtype_reason=dtype_reason,
        num_gpus=count_gpus(),
        why_no_float8=why_no_float8(device),
    )


def warn_of_idle_gpus(facts: Sequence[RankFacts]) -> tuple[str, ...]:
    """Returns a warning for each host that has GPUs and computes on its CPU."""
    idle = {each.host: each.num_gpus for each in facts if each.device == "cpu" and each.num_gpus}
    return tuple(
        f"{host} computes on its CPU: it has {units.plural(num_gpus, 'visible GPU')} and more ranks. Start "
        "one rank for each GPU (--nproc auto), or say --parallel.device cpu"
        for host, num_gpus in idle.items()
    )


def unequal_kinds(facts: Sequence[RankFacts]) -> str:
    """Returns which ranks have which kind of processor, as text; empty if all have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        ranks_of.setdefault(each.kind, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    return "; ".join(
        f"{kind} on rank {listed(ranks, 16)} ({', '.join(list(dict.fromkeys(facts[r].host for r in ranks))[:4])})"
        for kind, ranks in ranks_of.items()
    )


def _rounding() -> str:
    """Returns a digest of operations that optimizers use. It differs between vector units with and without fused
    multiply-add, and between code paths of MKL and oneDNN, which choose them by vendor and model. The number of threads
    does not change it."""
    whole = torch.arange(1, 32769)
    a, b = (whole * 7919 % 10007).float() / 9973, (whole * 104729 % 7919).float() / 7907 - 0.5
    results = [a.sqrt(), a.exp(), a.lerp(b, 0.1), a.add(b, alpha=0.3), a.addcdiv(b, a + 1, value=0.3), b.norm()]
    x, y = a.view(64, 512), b.view(512, 64)
    flat = torch.cat([each.flatten() for each in (*results, x @ y, (x.bfloat16() @ y.bfloat16()).float())])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:6]
