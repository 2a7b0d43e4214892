"""The strategies `fsdp` and `hsdp` shard weights, gradients and optimizer state, for models too large for a device.

torch's `fully_shard` (FSDP2; Zhao et al., arXiv 2304.11277) gathers a block's weights before the block runs and frees
them afterwards. Here it sums gradients, and its shards become slices as in other strategies. It communicates in every
forward and backward, so all ranks must make equally many passes.

`hsdp` shards within a host and replicates between hosts: weights are gathered over the host's fast links only, and over
the network goes an all-reduce of each rank's sharded gradients. Ranks with the same place on their hosts hold the same
slices, and update them alike.

A weight that every reader rounds first, as a matrix product in bfloat16 does, is gathered rounded: half the bytes, and
no other bit in any product. Its gathered copy is float32, and the shards stay exact.

A matrix that an optimizer updates as a whole, as Muon does, has an owner. After backward each rank sends its rows of
the gradient there; the owner updates its float32 copy of the matrix, and sends each rank the new rows. So the update is
divided over the ranks and each state has one place, as with `zero`, and any optimizer can be used.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.base import ownership
from paceline.base.errors import UserError
from paceline.base.units import listed
from paceline.optim.optimizer import ParamSlice
from paceline.sync.buckets import converted
from paceline.sync.fully_shard import Gather, ReduceScatter, block_of, gathered, send_zeros_for_unused
from paceline.sync.hooks import hooked
from paceline.sync.strategy import Fetch, Strategy
from paceline.world.calls import mistake
from paceline.world.group import DistributedGroup, all_reduce_for_torch

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class FullySharded(Strategy):
    """Communication of a step with b micro-batches and s bytes of weights: b s (n-1)/n for the weights in forward, the
    same in backward (rounded weights: half of both), and s (n-1)/n for the gradients on the last one. With hsdp n is
    the ranks of a host, and an all-reduce of s/n bytes over h hosts follows: 2 s/n (h-1)/h. Matrices updated as a whole
    add 2 s (n-1)/n^2."""

    shards_weights = True
    shards_state = True
    _in_backward = False  # of any object: a replica's loss may pass through another one's model

    def __init__(
        self,
        model: nn.Module,
        group: DistributedGroup,
        stages: Sequence[nn.Module],
        unsplit_costs: Mapping[str, float],
        hosts: Sequence[Sequence[int]] = (),
        read_as: Mapping[str, torch.dtype] | None = None,
    ):
        """stages: modules that are gathered and freed one after the other, such as a model's blocks. unsplit_costs: the
        parameters that one rank must update completely, and the cost of that, in any unit. hosts: the ranks of each,
        of which each host holds all weights; none: all ranks hold them together. read_as: the parameters
        that every reader casts to this dtype, of 16 bits, before any other use of them."""
        if len({len(ranks) for ranks in hosts}) > 1:
            raise UserError(
                "parallel.strategy hsdp needs equally many ranks on each host, and they have "
                f"{[len(ranks) for ranks in hosts]}; start as many on each, or use --parallel.strategy fsdp",
                reach="world",
            )
        super().__init__(model, group)
        self._trained = {}  # this would keep the whole parameters, which fully_shard replaces
        self._between: dist.ProcessGroup | None = None
        if len(hosts) > 1:
            grid = DeviceMesh(group.device.type, torch.tensor(hosts), mesh_dim_names=("host", "place"))
            mesh, self._between = grid["place"], grid.get_group("host")
            group.beside += [mesh.get_group(), self._between]
            self._holders, here = list(zip(*hosts, strict=True)), grid.get_local_rank("host")
        else:
            mesh = init_device_mesh(group.device.type, (group.size,))
            self._holders, here = [], 0
        self._modules = list(dict.fromkeys((*stages, model)))
        before = dict(model.named_parameters())
        for parameter in before.values():
            parameter.data = parameter.data.contiguous()
        for module in self._modules:
            fully_shard(module, mesh=mesh)
        names = {parameter: name for name, parameter in model.named_parameters()}
        if torn := [name for name in names.values() if name not in before]:
            raise mistake(
                f"fsdp and hsdp shard each of the `blocks` by itself, and {listed(torn)} is a parameter that two of "
                "them share, or one and the rest of the model: leave these modules out of `blocks`"
            )
        self._gathered: list[FSDPParam] = []  # what torch holds of each parameter
        dtypes = {parameter: (read_as or {}).get(name) for parameter, name in names.items()}
        for module in self._modules:
            self._send_by(group, module, mesh.size(), dtypes)
        self._parameters = {
            name: cast(DTensor, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._shards = [_slice(name, parameter, mesh) for name, parameter in self._parameters.items()]
        ranks = hosts[here] if len(hosts) > 1 else range(group.size)
        self._whole = _Whole(group, ranks, self._shards, unsplit_costs)
        self._sharded: dict[torch.Tensor, DTensor] = {}  # by gathered parameter
        self._used: set[torch.Tensor] = set()  # gathered parameters for which this rank had a gradient in this step
        self._sums_of_others: dict[DTensor, torch.Tensor | None] = {}  # for which it had none
        self._is_begun = False  # the step had a backward pass

    def _send_by(
        self, group: DistributedGroup, module: nn.Module, num_parts: int, dtypes: Mapping[Any, torch.dtype | None]
    ) -> None:
        """Makes the group carry what torch sends of this module. dtypes: of each parameter, that in which it is sent,
        None for its own. Raises UserError for a module with parameters of several dtypes."""
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)  # gradients are sums, see strategy.py
        # A plain sum: Gloo lacks the default, a pre-scaled one.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_custom_reduce_scatter(ReduceScatter(group, self._own_sums))  # type: ignore[arg-type]  # what it calls is there
        block = block_of(module)
        if block is not None:
            held = {each.sharded_param.dtype for each in block.fsdp_params}
            if len(held) > 1:
                raise mistake(
                    f"parameters of {listed(sorted(map(str, held)))} are in one of the `blocks`, or in the rest of the "
                    "model, and fsdp gathers each of these in one dtype: convert them, or take strategy zero"
                )
            send_zeros_for_unused(block)
            self._gathered += block.fsdp_params
            order = [each.sharded_param for each in block.fsdp_params]
            sizes = [_edges(parameter.shape, num_parts)[1] for parameter in order]
            sent_as = [dtypes[parameter] for parameter in order]
            sharded.set_custom_all_gather(Gather(group, sizes, sent_as))  # type: ignore[arg-type]
        if self._between is not None:
            sharded.set_all_reduce_hook(partial(all_reduce_for_torch, group, process_group=self._between))

    def slices(self) -> list[ParamSlice]:
        split = [shard for shard in self._shards if shard.start < shard.stop and shard not in self._whole.shards]
        return split + self._whole.owned

    def leaves(self) -> Collection[torch.Tensor]:
        return self._sharded.keys()

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        for shard, parameter in zip(self._shards, self._parameters.values(), strict=True):
            if parameter.dtype != shard.parameter.dtype:
                raise converted(shard.name, parameter.dtype, shard.parameter.dtype)
        if not self._is_begun:
            self.end_step()  # drops what another replica's loss left here since the step before
            self._is_begun = True
        cast(FSDPModule, self._model).set_requires_gradient_sync(last)
        for each in self._gathered:
            whole = gathered(each)
            if whole is not None and whole not in self._sharded:
                self._sharded[whole] = cast(DTensor, each.sharded_param)
                hooked(whole, self._on_gradient)
        FullySharded._in_backward = True
        try:
            yield
        finally:
            FullySharded._in_backward = False
        for whole, sharded in self._sharded.items() if last else ():
            if whole not in self._used:  # `.grad` shows what this rank used, as with other strategies
                self._sums_of_others[sharded], sharded.grad = sharded.grad, None

    def reduce(self) -> list[torch.Tensor]:
        for shard, parameter in zip(self._shards, self._parameters.values(), strict=True):
            if parameter.grad is None:
                parameter.grad = self._sums_of_others.pop(parameter, None)
            gradient = parameter.grad
            local = torch.zeros_like(shard.parameter) if gradient is None else cast(DTensor, gradient).to_local()
            shard.parameter.grad = local.reshape(-1)
        self._whole.collect_gradients()
        return _gradients(self.slices())

    def full_gradients(self) -> list[torch.Tensor]:
        return _gradients(self._shards)

    def changed_gradients(self) -> list[torch.Tensor]:
        return self.reduce()

    def total(self, amount: torch.Tensor) -> torch.Tensor:
        return super().total(amount) / (len(self._holders[0]) if self._holders else 1)

    def publish(self) -> None:
        self._whole.spread_weights()
        self._free_gathered()

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._free_gathered()

    def end_step(self, own_weight: float = 0.0, weight: float = 0.0) -> None:
        for whole in self._sharded:  # in a step that was dropped it has the sum of passes that no last one followed
            whole.grad = None
        for parameter in (*self._parameters.values(), *(each.parameter for each in self._shards + self._whole.owned)):
            parameter.grad = None
        for kept in (self._own_sums, self._used, self._sums_of_others):
            kept.clear()
        self._is_begun = False

    def _on_gradient(self, whole: torch.Tensor) -> None:
        if self.check is not None and not self._in_backward:
            self.check(whole)
        self._used.add(whole)

    def restore(self, stored: Collection[str], numbers: Mapping[str, Any], fetch: Fetch) -> None:
        self._whole.spread_weights()
        self._free_gathered()

    def _free_gathered(self) -> None:
        """Makes the next pass gather all weights. A forward pass that no backward follows leaves those gathered that
        belong to no block: later passes would use these copies, whatever became of the shards."""
        for module in self._modules:
            cast(FSDPModule, module).reshard()

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        return {}

    def copies(self) -> tuple[dict[str, torch.Tensor], Sequence[Sequence[int]]]:
        return {shard.name: shard.parameter.detach() for shard in self._shards if self._holders}, self._holders

    def full_weights(self) -> Mapping[str, torch.Tensor]:
        return _Gathered(self._parameters)


class _Gathered(Mapping[str, torch.Tensor]):
    """Sharded parameters by name, each gathered when it is read: together they may not fit on a device."""

    def __init__(self, parameters: Mapping[str, DTensor]):
        self._parameters = parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return cast(DTensor, self._parameters[name].detach()).full_tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class _Whole:
    """The parameters that one rank updates completely: their owners, and what the owners exchange with all ranks."""

    def __init__(
        self, group: DistributedGroup, ranks: Sequence[int], shards: Sequence[ParamSlice], costs: Mapping[str, float]
    ) -> None:
        """ranks: those that hold the shards together."""
        self._group, self._ranks, self._places = group, ranks, range(len(ranks))
        self.shards = [shard for shard in shards if shard.name in costs]
        if len(held := {str(shard.parameter.dtype) for shard in self.shards}) > 1:
            raise mistake(
                f"parameters of {listed(sorted(held))} are updated as a whole, as by Muon, and fsdp exchanges their "
                "rows in one dtype: convert them, or take strategy zero"
            )
        owners = ownership.assign([costs[shard.name] for shard in self.shards], len(ranks))
        self._owned = [[n for n, owner in enumerate(owners) if owner == i] for i in self._places]  # shards, by place
        self._place = ranks.index(group.rank)
        owned = [self.shards[n] for n in self._owned[self._place]]
        self._edges = [_edges(shard.shape, len(ranks)) for shard in owned]  # of each rank's rows
        weights = self._collected([shard.parameter.detach() for shard in self.shards])
        self.owned = [
            ParamSlice(shard.name, shard.shape, 0, weight.numel(), nn.Parameter(weight.view(shard.shape)))
            for shard, weight in zip(owned, weights, strict=True)
        ]

    def collect_gradients(self) -> None:
        """Sets `.grad` of this rank's whole parameters from the shards' gradients of all ranks. Collective."""
        gradients = self._collected(_gradients(self.shards))
        for whole, gradient in zip(self.owned, gradients, strict=True):
            whole.parameter.grad = gradient.view(whole.shape)

    def spread_weights(self) -> None:
        """Gives all ranks the rows of the owners' weights. Collective."""
        flat = [whole.parameter.detach().view(-1) for whole in self.owned]
        rows = [
            [part[edges[i] : edges[i + 1]] for part, edges in zip(flat, self._edges, strict=True)] for i in self._places
        ]
        theirs = [[self.shards[n] for n in owned] for owned in self._owned]
        sizes = [[shard.stop - shard.start for shard in shards] for shards in theirs]
        for shards, arrived in zip(theirs, self._exchanged(rows, sizes), strict=True):
            for shard, weight in zip(shards, arrived, strict=True):
                shard.parameter.detach().copy_(weight)

    def _collected(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's whole tensors, flat, from every rank's part of each."""
        sends = [[parts[n] for n in owned] for owned in self._owned]
        sizes = [[edges[i + 1] - edges[i] for edges in self._edges] for i in self._places]
        return [torch.cat(rows) for rows in zip(*self._exchanged(sends, sizes), strict=True)]

    def _exchanged(
        self, sends: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[tuple[torch.Tensor, ...]]:
        """Sends flat tensors, and returns those that arrive, of these sizes; by place, this rank's own included."""
        if not self.shards:
            return [()] * len(sizes)
        none = self.shards[0].parameter.detach().new_empty(0)
        packed = [torch.cat([none, *tensors]) for tensors in sends]
        arriving = [none.new_empty(sum(each)) for each in sizes]
        arriving[self._place] = packed[self._place]
        with self._group.watched("an exchange of rows"):
            self._group.start_messages(self._of_others(packed), self._of_others(arriving)).wait()
        return [torch.split(flat, list(each)) for flat, each in zip(arriving, sizes, strict=True)]

    def _of_others(self, by_place: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {rank: flat for rank, flat in zip(self._ranks, by_place, strict=True) if rank != self._group.rank}


def _gradients(slices: Sequence[ParamSlice]) -> list[torch.Tensor]:
    return [each.parameter.grad for each in slices if each.parameter.grad is not None]


def _edges(shape: torch.Size, num_ranks: int) -> list[int]:
    """Returns where each rank's elements begin, and the end: torch assigns ceil(rows / ranks) consecutive rows each."""
    rows, width = shape[0], shape[1:].numel()
    return [min(rows, -(-rows // num_ranks) * rank) * width for rank in range(num_ranks + 1)]


def _slice(name: str, parameter: DTensor, mesh: DeviceMesh) -> ParamSlice:
    """Returns this rank's rows."""
    place = mesh.get_local_rank()
    start, stop = _edges(parameter.shape, mesh.size())[place : place + 2]
    local = cast(DTensor, parameter.detach()).to_local().view(-1)
    assert local.numel() == stop - start
    return ParamSlice(name, parameter.shape, start, stop, nn.Parameter(local))
