"""The worlds that `paceline bench scaling` compares, and the resources of each rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.base import units
from paceline.base.cores import physical_cores
from paceline.base.errors import UserError
from paceline.config import Config
from paceline.world.cores import usable_cores
from paceline.world.device import choose_device, count_gpus

Kind = Literal["strong", "weak", "variants"]
_USUAL_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class World:
    ranks: int
    batch: int  # sequences in a step of all ranks
    hosts: int = 1
    rate: str = ""  # of the lab's links
    is_apart: bool = False  # separate worlds of one rank
    device: Literal["cpu", "cuda"] = "cpu"
    variant: str = ""  # of the config; empty: the config itself

    @property
    def label(self) -> str:
        if self.variant:
            return self.variant
        if self.hosts > 1:
            return f"{self.hosts} hosts, {'no exchange' if self.is_apart else self.rate}"
        noun = "GPU" if self.device == "cuda" else "rank"
        return units.plural(self.ranks, noun) + (" apart" if self.is_apart else "")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All worlds to measure, and the resources of each rank."""

    config: Config
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]  # numbers of ranks on this machine; 1 first
    cores: tuple[int, ...]  # a hardware thread of each core; none: not pinned (GPUs, macOS)
    threads: int
    device: Literal["cpu", "cuda"]
    has_gpu: bool = False  # as well as the CPU ranks
    hosts: int = 0  # in the lab; 0: no lab row
    host_ranks: int = 1
    rates: tuple[str, ...] = ()
    variants: Mapping[str, Config] = field(default_factory=dict)  # by label; measured on hosts of the lab
    cpu: tuple[str, ...] = ()  # of each host of the lab its share of a core; none: no limit
    steps: int = 12
    rounds: int = 3

    @property
    def batch(self) -> int:
        return sequences_of(self.config)

    @property
    def num_places(self) -> int:
        """Number of ranks with a core each."""
        return max(1, len(self.cores) // self.threads) if self.cores else self.counts[-1]

    @property
    def alone(self) -> World:
        return World(ranks=1, batch=self.batch, device=self.device)

    def apart(self, ranks: int) -> World:
        """Separate ranks, each as if alone; equal for both kinds."""
        return World(ranks=ranks, batch=self.batch * ranks, is_apart=True, device=self.device)

    @property
    def hosts_apart(self) -> World:
        """The hosts of the lab, which exchange nothing: with shares of a core each with the whole batch."""
        batch = self.batch if self.cpu else max(1, self.batch // self.hosts)
        return World(ranks=self.hosts, batch=batch * self.hosts, hosts=self.hosts, rate=self.rates[0], is_apart=True)

    def config_of(self, world: World) -> Config:
        """Returns the config of a world's runs, but for the batch."""
        config = self.variants.get(world.variant, self.config)
        return config.replace("parallel", shares="equal") if world.is_apart else config

    def table(self, kind: Kind) -> list[World]:
        if kind == "variants":
            of_each = {"ranks": self.hosts, "hosts": self.hosts, "rate": self.rates[0]}
            return [
                World(batch=sequences_of(config), variant=label, **of_each)  # type: ignore[arg-type]
                for label, config in self.variants.items()
            ]
        each = self.batch if kind == "weak" else 0
        many = self.hosts * self.host_ranks
        worlds = [World(ranks=n, batch=n * each or self.batch, device=self.device) for n in self.counts]
        if self.hosts:
            batch = many * each or self.batch
            worlds += [World(ranks=many, batch=batch, hosts=self.hosts, rate=rate) for rate in self.rates]
        if self.has_gpu:
            worlds.append(World(ranks=1, batch=self.batch, device="cuda"))
        return worlds

    def worlds(self) -> list[World]:
        """Returns all worlds to measure, each once: a single rank is the same in both kinds."""
        every = [world for kind in self.kinds for world in self.table(kind)]
        if self.variants:
            return [self.hosts_apart, *every]
        return list(dict.fromkeys([*every, *(self.apart(world.ranks) for world in every if world.ranks > 1)]))


def setup_here(
    config: Config, kinds: tuple[Kind, ...], *, max_ranks: int, hosts: int, rates: tuple[str, ...], **more: Any
) -> Setup:
    """Returns the worlds to measure on this machine; max_ranks 0: one a core, at most 4, or one a GPU. Raises UserError
    if the devices or the batch are too small."""
    num_gpus, batch = count_gpus(), sequences_of(config)
    wanted, cores = config.parallel.device, usable_cores()
    is_cuda = wanted == "cuda" or (wanted == "auto" and num_gpus > 1)
    most = max_ranks or (max(1, num_gpus) if is_cuda else min(cores, _USUAL_RANKS))
    if is_cuda:
        choose_device("cuda", most - 1, most, most)
    setup = Setup(
        config=config,
        kinds=kinds,
        # 1, 2, 3, 4, powers of two, and the largest
        counts=tuple(n for n in range(1, most + 1) if n <= _USUAL_RANKS or n & (n - 1) == 0 or n == most),
        cores=() if is_cuda else physical_cores()[:cores],
        threads=config.parallel.threads or max(1, cores // most),
        device="cuda" if is_cuda else "cpu",
        has_gpu=not is_cuda and wanted == "auto" and num_gpus > 0,
        hosts=0 if is_cuda else hosts,
        host_ranks=max(1, most // hosts) if hosts else 1,
        rates=rates,
        **more,
    )
    most = max(most, setup.hosts * setup.host_ranks)
    if "strong" in kinds and batch < most:
        raise UserError(
            f"a step has {batch} sequences (--train.global-batch-size), too few for {most} ranks; give at least "
            "one to each, or measure --kind weak alone"
        )
    return setup


def setup_of_variants(config: Config, variants: Mapping[str, Config], **more: Any) -> Setup:
    """Returns variants of a run to measure on hosts of a lab; without any, all kinds of shares of the batch."""
    shares = dict.fromkeys(("equal", "auto", config.parallel.shares))
    kinds_of_shares = {f"all, shares {value}": config.replace("parallel", shares=value) for value in shares}
    return Setup(
        config=config,
        kinds=("variants",),
        variants=variants or kinds_of_shares,
        counts=(1,),
        cores=(),
        threads=config.parallel.threads,
        device="cpu",
        **more,
    )


def sequences_of(config: Config) -> int:
    """Returns the sequences of a step. Raises UserError if the config leaves them to the run."""
    batch = config.batch_in_sequences().train.global_batch_size
    if not batch:
        raise UserError(
            "bench scaling compares worlds by the same batch, and the config names none; give "
            "--train.global-batch-size, the sequences of a step"
        )
    return batch
