"""What each rank computes with, and what unequal ranks cannot do together. Ranks all-gather these facts once, when the
world opens; every automatic choice is a function of them, so all ranks choose alike. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.units import listed
from paceline.world.config import SHARDS_WEIGHTS, UPDATES_ALONE


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


def warn_of_idle_gpus(facts: Sequence[RankFacts]) -> tuple[str, ...]:
    """Returns a warning for each host that has GPUs and computes on its CPU."""
    idle = {each.host: each.num_gpus for each in facts if each.device == "cpu" and each.num_gpus}
    return tuple(
        f"{host} computes on its CPU: it has {units.plural(num_gpus, 'visible GPU')} and more ranks. Start "
        "one rank for each GPU (--nproc auto), or set --parallel.device cpu"
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


def check_strategy(strategy: str, facts: Sequence[RankFacts], wire: str = "exact") -> None:
    """Raises UserError on all ranks if processors with these facts cannot use the strategy, or the wire, together."""
    if wire != "exact" and facts[0].backend == "nccl":
        raise UserError(
            f"parallel.wire is {wire}, and NCCL adds gradients as they are: use --parallel.wire exact, or "
            "--parallel.backend gloo where the network is slow",
            reach="world",
        )
    kinds = unequal_kinds(facts)
    if strategy not in UPDATES_ALONE and kinds:
        raise UserError(
            f"with strategy {strategy} several ranks make the same update, and unequal processors round it "
            f"differently: {kinds}. Use --parallel.strategy zero (in a script: strategy='zero'), where each weight is "
            "updated on one rank and sent to the others",
            reach="world",
        )
    if strategy in SHARDS_WEIGHTS and sends_gpu_memory_by_gloo(facts):
        raise UserError(
            f"strategy {strategy} sends a GPU's memory, which backend gloo cannot: use --parallel.strategy zero, or "
            "nccl with GPUs on all ranks",
            reach="world",
        )


def sends_gpu_memory_by_gloo(facts: Sequence[RankFacts]) -> bool:
    """Whether a GPU's tensors pass through host memory, where torch's own collectives of `fsdp` do not find them."""
    return facts[0].backend == "gloo" and any(each.device == "cuda" for each in facts)
