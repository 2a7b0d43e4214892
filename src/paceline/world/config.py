"""What the user decides about the world: device, backend, network, threads."""

import math
from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks, device, network."""

    strategy: Literal["auto", "ddp", "zero", "fsdp", "naive"] = "auto"
    """Who updates what. ddp: every rank everything. zero: each rank its share, so the optimizer's state is divided by
    the ranks. fsdp: weights and gradients are divided, too. naive: ddp without overlap, to read and compare with.
    auto: the first of ddp, zero, fsdp that fits in memory; zero with Muon, whose update is shared out."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda where there is a GPU for each local rank, else mps for one process, else cpu."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda, gloo elsewhere."""
    interface: str = ""
    """Network interface for Gloo and NCCL (a name from `ip link`); empty: theirs to choose, loopback under --nproc."""
    timeout_s: float = 300.0
    """Seconds ranks wait for each other, joining included, until the first step is done; then the run fails."""
    step_timeout_s: float = 120.0
    """The same from the second step on; never less than ten times the first step of the slowest rank."""
    expect_ranks: int = 0
    """Refuse a world of any other size, as where a host did not come; 0: any size will do."""
    threads: int = 0
    """CPU threads a rank; 0: OMP_NUM_THREADS where the user set it, else the cores there are over the local ranks."""
    port: int = 0
    """Port of the rendezvous under --nproc; 0: a free one."""
    bucket_mb: float = 10.0
    """MiB of gradients that travel in one all-reduce: smaller ones start sooner behind backward, larger ones cost
    fewer round trips."""
    check_every: int = 100
    """Compare a digest of all parameters between ranks every so many steps, and that of the optimizer's state across
    the border of two steps; 0: never."""
    repair: bool = False
    """Where a replica differs and most others agree: copy theirs and go on, instead of stopping."""

    def check(self) -> None:
        """Raises UserError for what cannot be, named as the user types it."""
        if not 0 <= self.port < 65536:
            raise UserError(f"parallel.port is {self.port}; a port lies between 1 and 65535 (0: choose a free one)")
        for name, value, least in (
            ("timeout-s", self.timeout_s, 1),
            ("step-timeout-s", self.step_timeout_s, 1),
            ("expect-ranks", self.expect_ranks, 0),
            ("threads", self.threads, 0),
            ("bucket-mb", self.bucket_mb, 0.001),
            ("check-every", self.check_every, 0),
        ):
            if not (math.isfinite(value) and value >= least):
                raise UserError(f"parallel.{name} is {value}; it must be at least {least}")
        if self.backend == "nccl" and self.device in ("cpu", "mps"):
            raise UserError(
                f"parallel.backend nccl works on GPUs only, and parallel.device is {self.device}; "
                "use --parallel.backend gloo"
            )
