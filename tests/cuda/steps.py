"""Whole training steps of a preset at full size on a modelled GPU (gpu.py)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gpu import CUDA, Gpu, rehearsed
from rank_facts import FACTS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.config import Config, load_preset
from paceline.model.gpt import GPT
from paceline.optim.optimizer import make_optimizers
from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.replica.updates import LossScaler
from paceline.sync import fsdp
from paceline.world.group import DistributedGroup, Group, LocalGroup
from paceline.world.hierarchy import Hosts
from paceline.world.runtime import World

SEQ_LEN = 1024


class _Alike(Group):
    """Small messages pass over Gloo, which is not modelled: all ranks have this one's."""

    def share(self, values: list[float]) -> list[list[float]]:
        return [values] * self.size

    def share_integers(self, values: list[int]) -> list[list[int]]:
        return [values] * self.size

    def share_text(self, text: str) -> list[str]:
        return [text] * self.size


class _World(_Alike, DistributedGroup): ...


class _Alone(_Alike, LocalGroup): ...


@dataclass
class Rehearsal:
    """One rank on a GPU."""

    gpu: Gpu
    replica: Replica
    group: Group
    micro_batch: int

    def step(self, micro_batches: int) -> None:
        """One update as train/loop.py makes it."""
        tokens = [torch.zeros(self.micro_batch, SEQ_LEN, dtype=torch.int64, device=CUDA) for _ in range(micro_batches)]
        step = self.replica.step(Batch(tokens), total=float(self.micro_batch * SEQ_LEN * self.group.size))
        for tokens_BT in step:
            step.backward(self.replica.model(tokens_BT, tokens_BT), weight=tokens_BT.numel(), is_sum=True)
        with patch("paceline.replica.mistakes.check_total"):  # the other ranks have this rank's numbers, so another sum
            step.finish(max_norm=1.0)


@contextmanager
def rehearsal(
    preset: str, strategy: Any, size: int, *, rank: int = 0, layers: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Rehearsal]:
    """Yields a rank of a world of this size; inside all tensors are fake. layers: 0: as many as the preset has. A model
    for fsdp in a process without a launcher (size 1) is made on the host, as by the trainer."""
    config = load_preset(preset, Config()).replace("model", n_positions=SEQ_LEN)
    config = config.replace("model", n_layer=layers or config.model.n_layer)
    gpu = Gpu()
    hosts = Hosts.of(["a"] * (size // 2) + ["b"] * (size - size // 2))
    is_sharded = strategy in ("fsdp", "hsdp")
    with _torchs_own_mesh(size, hosts) if is_sharded else nullcontext(), rehearsed(gpu, rank, size):
        group: Group = _World(CUDA, 300.0, [""] * size) if size > 1 else _Alone(CUDA)
        if isinstance(group, DistributedGroup):
            group.hosts = hosts
        is_alone = is_sharded and size == 1
        with torch.device("cpu") if is_alone else CUDA:
            model = GPT(config.model)
        if dtype == torch.float8_e4m3fn:
            model.use_float8()
            dtype = torch.bfloat16
        model.compute_dtype = dtype
        named = list(model.named_parameters())
        optimizers = make_optimizers(config.optim, named, lr=1e-3, weight_decay=0.1, compute_dtype=dtype)
        world = _world(group, rank, size)
        with patch.object(nn.Module, "to", _fake_to) if is_alone else nullcontext():
            replica = Replica(model, optimizers, world, strategy=strategy, blocks=list(model.layers))
        replica.waits_at_once = False
        replica.scaler = LossScaler.for_dtype(dtype)
        replica.compare_every = 0  # as train/meet.py does
        yield Rehearsal(gpu, replica, group, micro_batch=2)  # two chunks of the loss


def _fake_to(module: nn.Module, device: torch.device) -> nn.Module:
    """As `nn.Module.to`, which puts others in the place of fake parameters; real ones stay the same objects."""
    for tensor in (*module.parameters(), *module.buffers()):
        cast(FakeTensor, tensor).fake_device = device
    return module


class _Grid(dict[str, DeviceMesh]):
    """The mesh of hsdp, taken apart before tensors are fake."""

    def __init__(self, hosts: Hosts) -> None:
        grid = DeviceMesh("cuda", torch.tensor(hosts.ranks), mesh_dim_names=("host", "place"))
        super().__init__(place=grid["place"])
        self.get_group, self.get_local_rank = grid.get_group, grid.get_local_rank


@contextmanager
def _torchs_own_mesh(size: int, hosts: Hosts) -> Iterator[None]:
    """fully_shard asks a process group who it is; torch has one that sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    mesh = init_device_mesh("cuda", (size,))
    grid = _Grid(hosts)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "init_device_mesh", lambda *_: mesh)
            patch.setattr(fsdp, "DeviceMesh", lambda *_, **__: grid)
            yield
    finally:
        dist.destroy_process_group()


def _world(group: Group, rank: int, size: int) -> World:
    facts = replace(FACTS, device="cuda", backend="nccl", free_bytes=8e10, dtype="bfloat16")
    return World(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        device=CUDA,
        backend="nccl",
        threads=1,
        group=group,
        peers=(),
        facts=(facts,) * size,
        generation="",
        store=None,
        warnings=(),
    )
