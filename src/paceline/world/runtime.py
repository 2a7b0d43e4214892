"""Opens and closes a world: from the environment to a rank with a device, threads and a group, and back."""

import math
import os
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.base.sums import exact_sum
from paceline.base.units import dtype_name, listed
from paceline.world.calls import Calls, mistake
from paceline.world.config import ParallelConfig
from paceline.world.device import choose_device, choose_threads, keep_freed_memory, own_facts
from paceline.world.env import Environment, check_interface, check_size, detect, wait_for_master
from paceline.world.facts import RankFacts, warn_of_idle_gpus
from paceline.world.group import Group, ReduceOp
from paceline.world.peer import Peer, ranks_by_gpu, this_process, warn_of_shared_gpus
from paceline.world.process_group import adopt_group, join_open_group, open_group, store_of_open_group
from paceline.world.torch_version import check_private_names
from paceline.world.torchrun import check_nodes, compare_clocks, warn_of_lost_hosts

Number = TypeVar("Number", float, torch.Tensor)
_ALIKE = "one dtype and shape"
_ALIKE_ROWS = "one dtype, and one shape but for the first dimension"


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's rank, device and group, and its peers."""

    rank: int
    """This process's number, from 0."""
    world_size: int
    """Processes in the world."""
    local_rank: int
    """This process's number on its host."""
    local_world_size: int
    """Processes of the world on this host."""
    device: torch.device
    """Where this rank computes."""
    backend: str
    """`gloo`, `nccl`, or `none` for one process without a launcher."""
    threads: int
    """CPU threads of this rank."""
    group: Group
    """The collectives and messages between ranks."""
    peers: tuple[Peer, ...]
    """All processes of the world, by rank."""
    facts: tuple[RankFacts, ...]
    """What each rank computes with, by rank."""
    generation: str
    """A random name of this attempt; empty for one process without a launcher."""
    store: Store | None
    """Keys that only the ranks of this attempt see; None for one process without a launcher."""
    warnings: tuple[str, ...]
    """Problems of the hosts that do not stop a run."""
    calls: Calls = field(default_factory=Calls)
    """A script's collective verbs, which the watchdog compares."""
    exits: list[Callable[..., None]] = field(default_factory=list)
    """Called when the world is left, with the error, if any."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def backend_text(self) -> str:
        """The backend, as text."""
        return "no process group" if self.backend == "none" else f"backend {self.backend}"

    def say(self, *values: object, **options: Any) -> None:
        """Prints on rank 0, at once; does nothing on other ranks. Takes print's arguments: `print = world.say`."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def is_first(self, but: Collection[int] = ()) -> bool:
        """Whether this is the first rank that is alive, as far as its host knows, and not among `but`: the one to print
        what all ranks see."""
        here = self.peers[self.rank].machine
        living = (peer.rank for peer in self.peers if peer.machine != here or peer.is_alive)
        return self.rank == next((rank for rank in living if rank not in but), self.rank)

    def leave(self) -> None:
        """Leaves the world: waits for the last save, then for all ranks. Collective. A process group that the script
        opened stays. The end of a `with` block or of the script does the same."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for call in list(self.exits):
            call(error)

    def sum(self, value: Number) -> Number:
        """Returns the sum over ranks: of a number as a float64, of a tensor (same shape on all ranks) as a new tensor.
        Collective, like the verbs below. Raises UserError between a step's last backward and its finish."""
        self.calls.record("World.sum")
        return self._reduced(value, "sum")

    def max(self, value: Number) -> Number:
        """Returns the maximum over ranks: of a number as a float64, of a tensor element by element."""
        self.calls.record("World.max")
        return self._reduced(value, "max")

    def mean(self, value: Number, weight: float = 1.0) -> Number:
        """Returns the mean over ranks of a number or a tensor, weighted by the number of samples or tokens behind each
        rank's value. A rank of weight 0 does not count, but gives a number or a tensor as the others do; nan if all
        weights are 0."""
        self.calls.record("World.mean")
        weight = float(weight)
        if isinstance(value, torch.Tensor):
            kind = torch.result_type(value, 1.0)  # float32 for integers, with weight 0, too
            wide = torch.promote_types(kind, torch.float32)  # times a number of tokens float16 overflows
            weighted = value.detach().to(wide) * weight if weight else torch.zeros_like(value, dtype=wide)
            total = exact_sum(map(_float, self._of_alike(_bits(weight), _kind(wide, value.shape), _ALIKE)))
            return (self._all_reduced(weighted, "sum") / (total or math.nan)).to(kind)
        number = float(value) if weight else 0.0
        weights = self._numbers(weight, _ALIKE)
        rows = self.group.share([number])
        total = exact_sum(weights)
        return exact_sum(row[0] * each for row, each in zip(rows, weights, strict=True)) / total if total else math.nan

    def gather(self, value: Number) -> "list[Number]":
        """Returns the numbers or tensors of all ranks, by rank, on every rank. Tensors have the same dtype and shape,
        except for the first dimension; they stay on their device. Raises UserError on all ranks if they differ."""
        self.calls.record("World.gather")
        if not isinstance(value, torch.Tensor):
            return self._numbers(value, _ALIKE_ROWS)
        rows = value.detach().reshape(value.shape or (1,))
        shape = rows.shape[1:]
        lengths = self._of_alike(len(rows), _kind(rows.dtype, shape), _ALIKE_ROWS)
        borders = [sum(lengths[:rank]) * shape.numel() for rank in range(self.world_size + 1)]
        flat = torch.zeros(borders[-1], dtype=value.dtype, device=self.device)
        flat[borders[self.rank] : borders[self.rank + 1]] = rows.reshape(-1).to(self.device)
        self.group.start_all_gather(flat, borders).wait()
        parts = torch.split(flat.view(sum(lengths), *shape).to(value.device), lengths)
        return [part if value.dim() else part.reshape(()) for part in parts]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.calls.record("World.barrier")
        self.group.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the body on rank 0 first, then on all others: for a download or a cache that one makes and all read."""
        self.calls.record("World.main_first")
        if not self.is_main:
            self.group.barrier()
        yield
        if self.is_main:
            self.group.barrier()

    def _of_alike(self, integer: int, kind: str, needs: str) -> list[int]:
        """Returns every rank's integer. Raises UserError on all ranks if the kinds of their values differ: Gloo would
        abort a rank. 16 (n-1) bytes."""
        integers, kinds = zip(*self.group.share_integers([integer, crc32(kind.encode())]), strict=True)
        if len(set(kinds)) > 1:
            raise mistake(
                f"{self.calls.last()[-1][1]} needs {needs}, and got by rank: "
                f"{listed(self.group.share_text(kind), 16)}. Make them alike; torch.tensor([]) is float32",
                reach="world",
            )
        return list(integers)

    def _numbers(self, number: float, needs: str) -> list[float]:
        """Returns every rank's number, exactly. Raises UserError on all ranks if one has a tensor."""
        return [_float(bits) for bits in self._of_alike(_bits(number), "a number", needs)]

    def _reduced(self, value: Number, op: ReduceOp) -> Number:
        if not isinstance(value, torch.Tensor):
            numbers = self._numbers(value, _ALIKE)
            return exact_sum(numbers) if op == "sum" else max(numbers, key=lambda number: (math.isnan(number), number))
        self._of_alike(0, _kind(value.dtype, value.shape), _ALIKE)
        reduced = self._all_reduced(value, op)
        if op == "max" and value.is_floating_point():  # the backends keep or lose a NaN by the rank that has it
            reduced[self._all_reduced(value.isnan(), op).bool()] = math.nan
        return reduced

    def _all_reduced(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        sent_as = {torch.bool: torch.int64 if op == "sum" else torch.uint8, torch.int16: torch.int32}  # as Gloo can
        reduced = value.detach().to(self.device, sent_as.get(value.dtype, value.dtype), copy=True).contiguous()
        self.group.all_reduce(reduced, op)
        return reduced.to(value.device)


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", float(number)))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


@contextmanager
def open_world(config: ParallelConfig, env: Environment | None = None) -> Iterator[World]:
    """Yields this rank's World, and closes it on every way out.

    env: None: a process group of torch.distributed that is already open, and stays open; without one the environment's.

    Raises UserError for what the user must change (a torch without what we use; a missing interface, device or port; a
    wrong world size; two processes as one rank; clocks apart), RunError if the ranks do not find each other. After an
    error it calls no collective: the peers may be gone, and notice this rank's exit.
    """
    check_private_names()
    adopted = None
    if env is None and dist.is_initialized():
        env, adopted = join_open_group(store_of_open_group(), dist.get_rank(), dist.get_world_size(), config.timeout_s)
    env = env or detect()
    check_size(env.world_size, config.expect_ranks)
    if adopted is None:
        check_nodes(env)
        check_interface(config.interface)
        wait_for_master(env, config.timeout_s)
    sees_all_gpus = "TORCHELASTIC_RUN_ID" in os.environ  # its ranks have one environment; Slurm's tasks may not
    device = choose_device(
        config.device, env.local_rank, env.local_world_size, env.world_size, sees_all_gpus=sees_all_gpus
    )
    keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group_open = open_group(config, env, device) if adopted is None else adopt_group(config, device, adopted)
    with group_open as (group, joined, backend):
        peers = joined.peers if joined else (this_process(env),)
        sharing = max(env.local_world_size, sum(peer.cores == peers[env.rank].cores for peer in peers))
        threads = choose_threads(config.threads, sharing)
        torch.set_num_threads(threads[0])
        on_this_gpu = ranks_by_gpu(peers).get(peers[env.rank].gpu, [env.rank])
        facts_here = own_facts(device, backend, threads, sharing, len(on_this_gpu))
        facts_here = replace(facts_here, shares_memory=group.shares_memory)
        facts = tuple(RankFacts(**each) for each in group.share_json(asdict(facts_here)))
        warnings = (*compare_clocks(group, joined.peers), *warn_of_lost_hosts(env)) if joined else ()
        idle = warn_of_idle_gpus(facts) if config.device == "auto" else ()
        yield World(
            rank=env.rank,
            world_size=env.world_size,
            local_rank=env.local_rank,
            local_world_size=env.local_world_size,
            device=device,
            backend=backend,
            threads=threads[0],
            group=group,
            peers=peers,
            facts=facts,
            generation=joined.generation if joined else "",
            store=joined.store if joined else None,
            warnings=(*warnings, *idle, *warn_of_shared_gpus(peers)),
        )
