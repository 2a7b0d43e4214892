"""The `zero` strategy: every rank has all weights, and updates only its part (ZeRO stage 1, arXiv 1910.02054).

Optimizer state, twice the weights for AdamW, is divided by the number of ranks (layout.py says how). `ddp`'s all-reduce
is a reduce-scatter and an all-gather; here the update comes between the two, so no more bytes are sent:

  launch   a bucket's reduce-scatter overlaps with backward: each rank gets the sums of its own gradients
  update   the optimizer changes this rank's slices: any elements with AdamW, complete matrices with Muon
  publish  all-gathers start, in the order in which the next forward needs the weights
  wait     each half of a block waits for its own weights, most of which arrived during the blocks before

What is sent may have fewer bits than the weights (owned.py). A step that is skipped leaves everything as it was.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.base.ownership import Slice
from paceline.optim.optimizer import ParamSlice
from paceline.sync.buckets import Bucket, BucketedSync
from paceline.sync.hooks import ModuleHook
from paceline.sync.layout import backward_order, divided
from paceline.sync.owned import EXCESS, REPLICA, OwnedBucket
from paceline.sync.strategy import Fetch
from paceline.sync.wire import CODINGS
from paceline.world.group import Group, Transfer

_MAX_BYTES_IN_FLIGHT = 40 << 20  # of buckets, and at least 4 of them: a received part takes memory until it is added


class ShardedSync(BucketedSync):
    """Communication a step: (n-1)/n times the gradients' bytes on the last micro-batch, the same for the weights after
    the update: together as much as `ddp`, or three quarters of it with weights in bfloat16. With a codec 1 byte an
    element of gradients, or 1/2, and 1/2 for weights; 1.5 to 2% more for the blocks' scales."""

    shards_state = True
    buckets: Sequence[OwnedBucket]

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        bucket_bytes: int,
        unsplit_costs: Mapping[str, float],
        stages: Sequence[nn.Module] = (),
        read_as: Mapping[str, torch.dtype] | None = None,
        rounded_gradients: Collection[str] = (),
        wire: str = "exact",
        is_padded: bool = False,
    ):
        """unsplit_costs: the parameters that one rank must update completely, and the cost of that, in any unit.

        stages: modules whose forward runs before any of their parameters is read, such as a model's blocks; each waits
        for its own weights. The model's forward waits for all other weights.

        read_as: the parameters that every reader casts to this dtype before any other use of them.
        rounded_gradients: those of them whose gradient from one backward pass has values of that dtype. wire: see
        codec.of_wire. is_padded: all ranks' parts of a bucket have one length, for NCCL.
        """
        read_as, self._rounded = read_as or {}, frozenset(rounded_gradients)
        layouts = divided(
            backward_order(model),
            lambda name: (read_as.get(name), name in self._rounded),
            unsplit_costs,
            group.size,
            bucket_bytes,
            is_padded=is_padded,
            is_coded=CODINGS[wire].weight_bits < 32,
        )
        buckets = [OwnedBucket(layout, group, read_as.get(layout.members[0][0]), wire) for layout in layouts]
        super().__init__(model, group, bucket_bytes, buckets)
        self._max_in_flight = max(4, _MAX_BYTES_IN_FLIGHT // bucket_bytes)
        self.holds_rounded = any(bucket.is_rounded for bucket in self.buckets)
        self._slices = [part for bucket in self.buckets for part in bucket.slices(bucket.names[0] in unsplit_costs)]
        self._handles = self._hook(stages)

    def slices(self) -> list[ParamSlice]:
        return self._slices

    def full_gradients(self) -> list[torch.Tensor]:
        for transfer in [self._group.start_all_gather(bucket.flat, bucket.borders) for bucket in self.buckets]:
            transfer.wait()
        return super().full_gradients()

    def publish(self) -> None:
        for bucket in reversed(self.buckets):  # in the order of forward
            bucket.start_gather()

    def take_codec_ms(self) -> float:
        spent = sum(bucket.codec_ms for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.codec_ms = 0.0
        return spent

    def wait_for_params(self) -> None:
        _wait_for(self.buckets)
        super().wait_for_params()

    def full_weights(self) -> dict[str, torch.Tensor]:
        weights = self.on_all_ranks()
        masters = [bucket.start_full() for bucket in self.buckets if bucket.is_rounded]
        for full, transfer in masters:
            transfer.wait()
            weights |= full
        return weights

    def private_state(self) -> tuple[dict[Slice, torch.Tensor], dict[str, Any]]:
        self.wait_for_params()
        coded = [bucket for bucket in self.buckets if bucket.change_codec]
        tensors = {item: tensor for bucket in coded for item, tensor in bucket.private_state().items()}
        return tensors, {"/loss_factor": coded[0].excess_factor} if coded else {}

    def restore(self, stored: Collection[str], numbers: Mapping[str, Any], fetch: Fetch) -> None:
        """As in Strategy. In another world each rank takes what several ranks' messages had too much, or nothing: the
        sum over ranks stays."""
        for bucket in reversed(self.buckets):
            bucket.start_refresh()
        _wait_for(self.buckets)
        coded = [bucket for bucket in self.buckets if bucket.change_codec]
        if names := [name for name in stored if self._is_for_this_rank(name)] if coded else []:
            tensors = fetch(names)
            for bucket in coded:
                bucket.restore(tensors, numbers.get("/loss_factor", 1.0))

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.holds_rounded:
            full = self.full_weights()
            for name, parameter in self._model.named_parameters():
                parameter.data.copy_(full[name])

    def _is_for_this_rank(self, stored: str) -> bool:
        name, _, key = stored.rpartition("/")
        is_excess = key.startswith(EXCESS)  # of gradients, unlike local's
        is_here = is_excess and int(key.removeprefix(EXCESS)) % self._group.size == self._group.rank
        return name in self._trained and (key == REPLICA or is_here)

    def _launch(self, bucket: Bucket) -> Transfer:
        assert isinstance(bucket, OwnedBucket)
        if bucket.codec is None and self.is_one_pass and bucket.names[0] in self._rounded:
            return bucket.start_exact_reduce()
        return bucket.start_reduce(self.loss_factor)

    def _hook(self, stages: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Makes each stage's forward wait for its buckets, and the model's for those of no stage."""
        stages_of: dict[nn.Parameter, list[nn.Module]] = {}  # several if they share a parameter
        for stage in stages:
            for parameter in stage.parameters():
                stages_of.setdefault(parameter, []).append(stage)
        needed: dict[nn.Module, list[OwnedBucket]] = {self._model: []}
        for bucket in self.buckets:
            waiting = [stage for parameter in bucket.parameters for stage in stages_of.get(parameter, [self._model])]
            for module in dict.fromkeys(waiting):
                needed.setdefault(module, []).append(bucket)
        handles = []
        for module, buckets in needed.items():
            hook: Callable[..., None] = ModuleHook(partial(_wait_for, buckets))
            if getattr(module, "_compiled_call_impl", None) is not None:  # nn.Module.compile: keep the wait out of it
                hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            handles.append(module.register_forward_pre_hook(hook))
        return handles


def _wait_for(buckets: Sequence[OwnedBucket], *_: object) -> None:
    for bucket in reversed(buckets):
        bucket.wait()
