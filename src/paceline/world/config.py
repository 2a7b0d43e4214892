"""Settings of ranks, device, network and threads."""

from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import UserError, require_at_least, require_choices

StrategyName = Literal["ddp", "zero", "fsdp", "hsdp", "local", "naive"]
WireName = Literal["exact", "bf16", "int8", "int4", "int2"]
SHARDS_WEIGHTS = ("fsdp", "hsdp")
UPDATES_ALONE = ("auto", "zero", "fsdp", "local")
"""Of a weight one rank makes the update, or each rank its own. With others several make the same one, so their
processors have to round alike."""
_LONGEST_S = 1e9  # of a timeout: torch counts nanoseconds in 64 bits, some of twice as many


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks, device, network."""

    strategy: Literal["auto", StrategyName] = "auto"
    """ddp: every rank updates everything. zero: each rank updates its share and holds that optimizer state. fsdp:
    weights and gradients are sharded, too. hsdp: as fsdp over the ranks of each host, and replicated between hosts:
    less traffic between them than fsdp. naive: ddp without overlap, for reading and comparing. local: each rank
    updates weights of its own, and the ranks exchange them (sync-every): for slow links; ANOTHER ALGORITHM, whose
    loss depends on the number of ranks. auto: the first of ddp, zero, fsdp that fits in memory; not ddp with
    Muon, whose update is expensive, and where processors round differently; never hsdp or local."""
    wire: WireName = "exact"
    """What zero and local send. exact: gradients and weights lose no bit that anything reads; weights that the model
    reads in bfloat16 only are sent in it. bf16: gradients, too, are sent in bfloat16, and added in float32: fewer
    bytes, but each rank's sum is rounded. int8: gradients as 8-bit integers with a scale for each block, and the change
    of weights as 4-bit ones: a quarter and an eighth of float32's bytes. int4: gradients, too, in 4 bits; what a
    message leaves out is in the next one. local sends the changes of its weights so, in 2 bits with int2. Other values
    than exact make auto choose zero, and need gloo."""
    sync_every: int = 0
    """local: steps between two exchanges of a weight, 8 for example. In each step 1/sync-every of the weights is sent,
    during the next step. Larger: fewer bytes, and a higher loss. 0 with other strategies."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda where there is a GPU for each local rank, else mps for one process, else cpu."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda, gloo elsewhere."""
    shared_memory: bool = True
    """CPU ranks of one host reduce gradients in memory that they share. False: over sockets, as between hosts."""
    interface: str = ""
    """Network interface for Gloo and NCCL (a name from `ip link`); empty: they choose; loopback under --nproc."""
    timeout_s: float = 300.0
    """Seconds ranks wait for each other, joining included, until the first step is done; then the run fails."""
    step_timeout_s: float = 120.0
    """The same from the second step on; never less than ten times the slowest rank's first step."""
    expect_ranks: int = 0
    """Refuse a world of any other size, as when a host is missing; 0: accept any size."""
    threads: int = 0
    """CPU threads of a rank; 0: OMP_NUM_THREADS if the user set it, else the cores divided by the ranks on them, of all
    launchers of this machine."""
    port: int = 0
    """Port of the rendezvous under --nproc and launch; 0: a free one."""
    bucket_mb: float = 0.0
    """MiB of gradients in one transfer. Smaller: they start earlier in backward, and with zero the next step's forward
    waits for less. Larger: fewer round trips. 0: 2 with zero on CPUs that do not share memory, else 10."""
    shares: str = "equal"
    """How many sequences of a step each rank computes. equal: the same number, in micro-batches that do not depend on
    the world size. auto: by the ranks' measured speeds, changed while training if that makes steps at least 2% shorter;
    not with fsdp. 24,8: these, by rank; their sum is train.global-batch-size. The loss is the same but for rounding:
    equal and 24,8 repeat bit for bit, auto does not, because it depends on the clock."""
    check_every: int = 100
    """Compare digests of parameters and optimizer state between ranks every N steps; 0: never."""

    def check(self) -> None:
        """Raises UserError for an impossible value, named as the user types it."""
        require_choices(self, "parallel.")
        if not 0 <= self.port < 65536:
            raise UserError(f"parallel.port is {self.port}; a port lies between 1 and 65535 (0: choose a free one)")
        for name in ("timeout_s", "step_timeout_s"):
            if not 1 <= (seconds := getattr(self, name)) <= _LONGEST_S:
                name = name.replace("_", "-")
                raise UserError(f"parallel.{name} is {seconds}; it must be between 1 and {_LONGEST_S:g} seconds")
        require_at_least(self, "parallel.", bucket_mb=1e-5 if self.bucket_mb else 0)
        require_at_least(self, "parallel.", expect_ranks=0, threads=0, check_every=0, sync_every=0)
        self.fixed_shares()
        self.check_wire()
        self.check_rounds()
        if self.backend == "nccl" and self.device in ("cpu", "mps"):
            raise UserError(
                f"parallel.backend nccl works on GPUs only, and parallel.device is {self.device}; "
                "use --parallel.backend gloo"
            )

    def bucket_bytes(self, device: str, *, shares_memory: bool = False) -> int:
        """Returns the bytes of gradients in one transfer. device: the type of the ranks' devices, such as cpu."""
        is_sent_by_gloo = device == "cpu" and not shares_memory
        return int((self.bucket_mb or (2.0 if self.strategy == "zero" and is_sent_by_gloo else 10.0)) * 2**20)

    def check_wire(self) -> None:
        """Raises UserError if the strategy cannot send what `wire` says."""
        if self.wire == "int2" and self.strategy != "local":
            raise UserError(
                f"parallel.wire int2 is for local steps, and parallel.strategy is {self.strategy}; use --parallel.wire "
                "int4, or --parallel.strategy local --parallel.sync-every 32"
            )
        if self.wire != "exact" and self.strategy not in ("auto", "zero", "local"):
            raise UserError(
                f"parallel.wire {self.wire} works with strategies zero and local, and parallel.strategy is "
                f"{self.strategy}; use --parallel.strategy zero, or --parallel.wire exact"
            )

    def check_rounds(self) -> None:
        """Raises UserError for strategy local without sync_every, or sync_every with another strategy."""
        if (self.strategy == "local") != (self.sync_every > 0):
            raise UserError(
                f"parallel.strategy is {self.strategy} and parallel.sync-every {self.sync_every}; local steps need "
                "both: --parallel.strategy local --parallel.sync-every 8. Other strategies have no rounds: leave "
                "sync-every out, or 0"
            )

    def fixed_shares(self) -> tuple[int, ...]:
        """Returns the sequences of a step by rank; empty for equal and auto. Raises UserError for anything else."""
        if self.shares in ("equal", "auto"):
            return ()
        parts = [part.strip() for part in self.shares.split(",")]
        if not all(part.isdecimal() for part in parts) or not any(map(int, parts)):
            raise UserError(
                f"parallel.shares is {self.shares!r}; it is equal, auto, or the sequences of each rank, such as 24,8"
            )
        return tuple(map(int, parts))

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raises UserError if the fixed shares are those of another number of ranks."""
        shares = self.fixed_shares()
        if shares and len(shares) != num_ranks:
            raise UserError(
                f"parallel.shares {self.shares} is for {len(shares)} ranks, and {num_ranks} train; give one number for "
                "each rank, or --parallel.shares auto"
            )
