"""The `local` strategy: local steps (DiLoCo, arXiv 2311.08105), for links too slow for gradients. It is ANOTHER
ALGORITHM than the other strategies: its curve depends on the number of ranks.

Each rank updates its own weights, by the mean gradient of its own tokens. All ranks hold equal `anchor` weights, from
which each rank's own have moved away. The weights are cut into `sync_every` fragments of equal size. After each step,
one fragment is exchanged, in turn (Streaming DiLoCo, arXiv 2501.18512), so the link is used evenly:

  send    the fragment's change, own - anchor, times this rank's fraction of the tokens since its last exchange. The
          all-reduce overlaps with the whole next step.
  merge   after that step's update: anchor += mean change, own = anchor + (own - own when sent). So what a rank learned
          during the exchange stays. If rounds are long, Nesterov's momentum moves the anchor further: with it the loss
          was lower at sync_every 32, and higher at 8 (docs/LOG.md, 2026-11-22).

With a codec (codec.py) each rank sends its coded change to each other rank, and all add up what the messages decode to,
in the order of ranks. What a message had too much is subtracted from the fragment's next change (error feedback).

The anchor is what all ranks share: it is evaluated, compared, saved as the weights, and sampled from. Its arithmetic is
additions and products of single numbers, which all processors round alike.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.base import ownership
from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.sync.buckets import BucketedSync
from paceline.sync.codec import Codec, of_wire
from paceline.sync.strategy import Fetch
from paceline.sync.wire import CODINGS
from paceline.world.group import Group, LocalGroup, Transfer
from paceline.world.hierarchy import by_distance

_LONG_ROUND = 17  # steps
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.6  # MuLoCo, arXiv 2505.23725
_BLOCK = 256  # elements with one scale of a codec
_EXCESS = "wire.excess"  # in a checkpoint: what this rank's messages had too much


class LocalSync(BucketedSync):
    """Communication a step: 2 (n-1)/n times 1/sync_every of the weights' bytes, or with a codec n-1 times 1/sync_every
    of the bytes that it needs for them; and 8 (n-1) bytes for the norm. Gradients are those of a world of one."""

    shards_state = diverges = True

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int, sync_every: int, wire: str = "exact"):
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(model, LocalGroup(next(model.parameters()).device), bucket_bytes)
        for bucket in self.buckets:
            bucket.owns_memory = True
        self._world, self._shows_anchor = group, False
        self._own = {name: parameter.detach() for name, parameter in self._trained.items()}
        self._anchor = {name: tensor.clone() for name, tensor in self._own.items()}
        self._codec, _ = of_wire(wire, _BLOCK)
        has_momentum = sync_every >= _LONG_ROUND
        has_excess = CODINGS[wire].keeps_excess
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._own.items() if has_momentum}
        self._excess = {name: torch.zeros_like(tensor) for name, tensor in self._own.items() if has_excess}
        self._fragments = self._cut(sync_every)
        self._num_steps = 0

    # ---- a step ----

    def total(self, amount: torch.Tensor) -> torch.Tensor:
        """Returns the mean over ranks: the norm is the root mean square of theirs, so all clip and skip alike."""
        return self._world.total(amount) / self._world.size

    def full_gradients(self) -> list[torch.Tensor]:
        raise UserError(
            "with strategy local gradients are not summed over ranks: leave step.reduce() out", reach="world"
        )

    def end_step(self, own_weight: float = 0.0, weight: float = 0.0) -> None:
        """Also merges the fragment that was sent after the step before, and sends the next one."""
        super().end_step()
        for fragment in self._fragments:
            if fragment.transfer is not None:
                fragment.merge()
            fragment.own_weight += own_weight
            fragment.weight += weight
        if weight:  # else it was no step
            self._num_steps += 1
            self._send_next()

    def merge(self) -> bool:
        """Makes every rank's weights and the anchor the ranks' average, without momentum. Collective."""
        self.wait_for_params()
        if not any(fragment.weight or fragment.transfer for fragment in self._fragments):
            return False  # no step since the last one, which what messages had too much must not move
        for fragment in self._fragments:
            if fragment.transfer is None:
                fragment.send(self._world)
        for fragment in self._fragments:
            fragment.merge(is_last=True)
            torch._foreach_copy_(fragment.own, fragment.anchor)
        return True

    def release(self) -> None:
        for fragment in self._fragments:
            fragment.finish()

    def _cut(self, sync_every: int) -> "list[_Fragment]":
        """Returns fragments of equal size, as many as a round has steps."""
        whole = [Slice(name, 0, tensor.numel()) for name, tensor in self._own.items()]
        none = [Slice(whole[0].name, 0, 0)]  # in some fragments, if there are fewer weights than steps of a round
        fragments = []
        for items in ownership.cut(whole, sync_every):
            held = (self._own, self._anchor, self._momentum, self._excess)
            fragments.append(_Fragment(self._codec, *(_parts(tensors, items or none) for tensors in held)))
        return fragments

    def _send_next(self) -> None:
        self._fragments[self._num_steps % len(self._fragments)].send(self._world)

    def take_codec_ms(self) -> float:
        spent = sum(fragment.codec_ms for fragment in self._fragments)
        for fragment in self._fragments:
            fragment.codec_ms = 0.0
        return spent

    # ---- the weights that all ranks share ----

    def weights(self) -> dict[Slice, torch.Tensor]:
        return {Slice(name, 0, tensor.numel()): tensor.view(-1) for name, tensor in self._anchor.items()}

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        return super().on_all_ranks() | self._anchor

    def wait_for_params(self) -> None:
        if not self._shows_anchor:
            super().wait_for_params()

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        self.wait_for_params()
        self._shows_anchor = True
        self._show(self._anchor)
        try:
            yield
        finally:
            self._show(self._own)
            self._shows_anchor = False

    def _show(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._trained.items():
            parameter.data = weights[name]
        torch.clear_autocast_cache()  # a script's context may have copies of the weights that were there

    # ---- checkpoints ----

    def private_state(self) -> tuple[dict[Slice, torch.Tensor], dict[str, Any]]:
        """As in Strategy. The numbers: of steps, then this rank's and all ranks' weight since the last exchange, by
        fragment."""
        rank = self._world.rank
        tensors = {
            Slice(f"{name}/{kind}@{rank}", 0, tensor.numel()): tensor.reshape(-1)
            for kind, named in self._held().items()
            for name, tensor in named.items()
        }
        weights = [weight for each in self._fragments for weight in (each.own_weight, each.weight)]
        return tensors, {f"/progress@{rank}": [float(self._num_steps), *weights]}

    def restore(self, stored: Collection[str], numbers: Mapping[str, Any], fetch: Fetch) -> None:
        """As in Strategy. In a world of another size each rank begins with the mean of all ranks' weights; from another
        strategy's checkpoint with the anchor. If a fragment was under way at the save, sends it again."""
        self._begin_at_anchor()
        ranks = [key.removeprefix("/progress@") for key in numbers if key.startswith("/progress@")]
        if not ranks:
            return
        is_same = len(ranks) == self._world.size
        sources = [str(self._world.rank)] if is_same else ranks
        targets = {}
        for kind, named in self._held().items():
            for name, tensor in named.items():
                keys = tuple(f"{name}/{kind}@{source}" for source in sources)
                if keys[0] in stored:  # no momentum, if rounds were short
                    targets[keys] = tensor
        flats = fetch([key for keys in targets for key in keys])
        for keys, tensor in targets.items():
            first, *others = (flats[key] for key in keys)
            total = torch.stack([first, *others]).sum(0) if others else first
            num_shares = self._world.size if keys[0].rpartition("/")[2].startswith(_EXCESS) and others else len(keys)
            tensor.copy_((total / num_shares).view_as(tensor))
        self._num_steps, *weights = numbers[f"/progress@{sources[0]}"]
        self._num_steps = int(self._num_steps)
        has_weights = is_same and len(weights) == 2 * len(self._fragments)
        if has_weights:  # else of another sync_every: equal shares at first
            for fragment, weight_here, weight in zip(self._fragments, weights[::2], weights[1::2], strict=True):
                fragment.own_weight, fragment.weight = weight_here, weight
        newest = self._fragments[self._num_steps % len(self._fragments)]
        if newest.weight or not has_weights:  # else a step of weight 0 has merged it already
            self._send_next()

    def _held(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns, in place, by kind and name: this rank's own weights, the anchor's momentum, and what this rank's
        messages had too much, if any."""
        return {"own": self._own, "outer": self._momentum, _EXCESS: self._excess}

    def _begin_at_anchor(self) -> None:
        """The own weights become the anchor's, the rest zero; exchanges under way have no effect."""
        self.release()
        torch._foreach_copy_(list(self._own.values()), list(self._anchor.values()))
        for tensor in (*self._momentum.values(), *self._excess.values()):
            tensor.zero_()


class _Fragment:
    """Some elements of the weights, as flat parts: this rank's own, the anchor's, and, if there are any, those of the
    anchor's momentum and of what this rank's messages had too much."""

    def __init__(
        self,
        codec: Codec | None,
        own: list[torch.Tensor],
        anchor: list[torch.Tensor],
        momentum: list[torch.Tensor],
        excess: list[torch.Tensor],
    ):
        self._codec, self.codec_ms = codec, 0.0
        self.own, self.anchor, self.momentum, self.excess = own, anchor, momentum, excess
        self.own_weight = self.weight = 0.0  # of the steps since the last exchange: this rank's, all ranks'
        self.transfer: Transfer | None = None
        self._sizes = [part.numel() for part in own]

    def send(self, group: Group) -> None:
        """Begins the exchange. Collective."""
        self._sent = torch.cat(self.own)
        fraction = self.own_weight / self.weight if self.weight else 1.0 / group.size
        self._change = (self._sent - torch.cat(self.anchor)).mul_(fraction)
        if self._codec is None:
            self.transfer = group.start_all_reduce(self._change)
        else:
            self.transfer = self._start_coded(group, self._codec)

    def _start_coded(self, group: Group, codec: Codec) -> Transfer:
        """Begins to replace `_change` by the sum of what all ranks' messages decode to."""
        began, change = time.thread_time(), self._change
        message = torch.empty(codec.num_bytes(len(change)), dtype=torch.uint8, device=change.device)
        if self.excess:
            self._next_excess = torch.empty_like(change)
            codec.encode(change, message, torch.cat(self.excess), self._next_excess)
        else:
            codec.encode(change, message)
        arrived = {source: torch.empty_like(message) for source in by_distance(group.rank, -1, group.size)}
        self._count(began)

        def add_up() -> None:
            began = time.thread_time()
            change.zero_()
            for _, received in sorted({group.rank: message, **arrived}.items()):
                codec.add_decoded(received, change)
            self._count(began)

        sends = dict.fromkeys(by_distance(group.rank, 1, group.size), message)
        return group.start_messages(sends, arrived, add_up)

    def _count(self, began: float) -> None:
        self.codec_ms += (time.thread_time() - began) * 1e3

    def finish(self) -> None:
        """Waits for the exchange, if one is under way; the next one weighs later steps only."""
        if self.transfer is not None:
            self.transfer.wait()
            if self.excess:
                torch._foreach_copy_(self.excess, torch.split(self._next_excess, self._sizes))
        self.transfer, self.own_weight, self.weight = None, 0.0, 0.0

    def merge(self, is_last: bool = False) -> None:
        """Waits for the exchange, and moves the anchor and this rank's weights. is_last: without momentum."""
        self.finish()
        if self.momentum and not is_last:
            momentum = torch.cat(self.momentum).mul_(_OUTER_MOMENTUM).add_(self._change)
            torch._foreach_copy_(self.momentum, torch.split(momentum, self._sizes))
            self._change.add_(momentum.mul_(_OUTER_MOMENTUM)).mul_(_OUTER_LR)
        torch._foreach_add_(self.anchor, torch.split(self._change, self._sizes))
        torch._foreach_add_(self.own, torch.split(torch.cat(self.anchor) - self._sent, self._sizes))


def _parts(tensors: Mapping[str, torch.Tensor], items: Sequence[Slice]) -> list[torch.Tensor]:
    return [tensors[item.name].view(-1)[item.start : item.stop] for item in items if tensors]
