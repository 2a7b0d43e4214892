"""The `local` strategy: local steps (DiLoCo, arXiv 2311.08105), for links too slow for gradients. It is ANOTHER
ALGORITHM than the other strategies: its curve depends on the number of ranks.

Each rank updates its own weights, by the mean gradient of its own tokens. All ranks hold equal `anchor` weights, from
which each rank's own have moved away. The weights are cut into `sync_every` fragments of equal size. After each step,
one fragment is exchanged, in turn (Streaming DiLoCo, arXiv 2501.18512), so the link is used evenly:

  send    the fragment's change, own - anchor, times this rank's share of the tokens since its last exchange. The
          all-reduce overlaps with the whole next step.
  merge   after that step's update: anchor += mean change, own = anchor + (own - own when sent). So what a rank learned
          during the exchange stays. If rounds are long, Nesterov's momentum moves the anchor further: with it the loss
          was lower at sync_every 32, and higher at 8 (docs/LOG.md, 2026-11-22).

The anchor is what all ranks share: it is evaluated, compared, saved as the weights, and sampled from. Its arithmetic is
additions and products of single numbers, which all processors round alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.base import ownership
from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.sync.ddp import BucketedSync
from paceline.world.group import Group, LocalGroup, Transfer

_LONG_ROUND = 17  # steps
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.6  # MuLoCo, arXiv 2505.23725


class LocalSync(BucketedSync):
    """Communication a step: 2 (n-1)/n times 1/sync_every of the weights' bytes, and 8 (n-1) bytes for the norm.
    Gradients are those of a world of one."""

    shards_state = True
    held: Mapping[str, Mapping[str, torch.Tensor]]

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int, sync_every: int):
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(model, LocalGroup(next(model.parameters()).device), bucket_bytes)
        for bucket in self.buckets:
            bucket.owns_memory = True
        self._world, self._shows_anchor = group, False
        own = {name: parameter.detach() for name, parameter in self._trained.items()}
        momentum = {name: torch.zeros_like(tensor) for name, tensor in own.items()} if sync_every >= _LONG_ROUND else {}
        self._anchor = {name: tensor.clone() for name, tensor in own.items()}
        self.held = {"own": own, "outer": momentum}
        """In place: its own weights, and the anchor's momentum, if any."""
        whole = [Slice(name, 0, tensor.numel()) for name, tensor in own.items()]
        none = [Slice(whole[0].name, 0, 0)]  # in some fragments, if there are fewer weights than steps of a round
        self._fragments = [
            _Fragment(*([_part(named, item) for item in items if named] for named in (own, self._anchor, momentum)))
            for items in (part or none for part in ownership.cut(whole, sync_every))
        ]
        self._num_steps = 0
        self._own_weight = self._weight = 0.0  # of this step

    # ---- a step ----

    def weigh(self, own: float, total: float) -> float:
        self._own_weight, self._weight = own, total
        return own or total

    def total(self, amount: torch.Tensor) -> torch.Tensor:
        """Returns the mean over ranks: the norm is the root mean square of theirs, so all clip and skip alike."""
        return self._world.total(amount) / self._world.size

    def full_gradients(self) -> list[torch.Tensor]:
        raise UserError(
            "with strategy local gradients are not summed over ranks: leave step.reduce() out", reach="world"
        )

    def publish(self) -> None:
        """Also merges the fragment that was sent after the step before."""
        super().publish()
        for fragment in self._fragments:
            if fragment.transfer is not None:
                fragment.merge()
            fragment.own_weight += self._own_weight
            fragment.weight += self._weight
        self._own_weight = self._weight = 0.0  # a step that an exception ends is not weighed

    def end_step(self) -> None:
        self._num_steps += 1
        self._send_next()

    def merge(self) -> None:
        """Makes every rank's weights and the anchor the ranks' average, without momentum. Collective."""
        self.wait_for_params()
        for fragment in self._fragments:
            if fragment.transfer is None:
                fragment.send(self._world)
        for fragment in self._fragments:
            fragment.merge(is_last=True)
            torch._foreach_copy_(fragment.own, fragment.anchor)

    def release(self) -> None:
        for fragment in self._fragments:
            fragment.finish()

    def _send_next(self) -> None:
        self._fragments[self._num_steps % len(self._fragments)].send(self._world)

    # ---- the weights that all ranks share ----

    def weights(self) -> dict[Slice, torch.Tensor]:
        return {Slice(name, 0, tensor.numel()): tensor.view(-1) for name, tensor in self.full_weights().items()}

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        return super().on_all_ranks() | self._anchor

    def wait_for_params(self) -> None:
        if not self._shows_anchor:
            super().wait_for_params()

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        self.wait_for_params()
        self._shows_anchor = True
        for name, parameter in self._trained.items():
            parameter.data = self._anchor[name]
        try:
            yield
        finally:
            for name, parameter in self._trained.items():
                parameter.data = self.held["own"][name]
            self._shows_anchor = False

    # ---- checkpoints ----

    def progress(self) -> list[float]:
        """The number of steps, then this rank's and all ranks' weight since the last exchange, by fragment."""
        return [float(self._num_steps), *(w for each in self._fragments for w in (each.own_weight, each.weight))]

    def begin_at_anchor(self) -> None:
        """The own weights become the anchor's, and the momentum zero; exchanges under way have no effect."""
        self.release()
        own, momentum = self.held["own"], list(self.held["outer"].values())
        torch._foreach_copy_(list(own.values()), [self._anchor[name] for name in own])
        if momentum:
            torch._foreach_zero_(momentum)

    def resume(self, progress: Sequence[float]) -> None:
        """Continues from restored weights: sends the fragment that was under way again. Collective. progress: of this
        rank; if it is of another sync_every, or the number of steps alone, ranks have equal shares at first."""
        self._num_steps = int(progress[0])
        if len(progress) == 1 + 2 * len(self._fragments):
            for fragment, own, weight in zip(self._fragments, progress[1::2], progress[2::2], strict=True):
                fragment.own_weight, fragment.weight = own, weight
        self._send_next()


class _Fragment:
    """Some elements of the weights, as flat parts: this rank's own, the anchor's, and its momentum's, if any."""

    def __init__(self, own: list[torch.Tensor], anchor: list[torch.Tensor], momentum: list[torch.Tensor]):
        self.own, self.anchor, self.momentum = own, anchor, momentum
        self.own_weight = self.weight = 0.0  # of the steps since the last exchange: this rank's, all ranks'
        self.transfer: Transfer | None = None

    def send(self, group: Group) -> None:
        """Begins the exchange. Collective."""
        self._sent = torch.cat(self.own)
        share = self.own_weight / self.weight if self.weight else 1.0 / group.size
        self._change = (self._sent - torch.cat(self.anchor)).mul_(share)
        self.transfer = group.start_all_reduce(self._change)

    def finish(self) -> None:
        """Waits for the exchange, if one is under way; the next one weighs later steps only."""
        if self.transfer is not None:
            self.transfer.wait()
        self.transfer, self.own_weight, self.weight = None, 0.0, 0.0

    def merge(self, is_last: bool = False) -> None:
        """Waits for the exchange, and moves the anchor and this rank's weights. is_last: without momentum."""
        self.finish()
        sizes = [part.numel() for part in self.own]
        if self.momentum and not is_last:
            momentum = torch.cat(self.momentum).mul_(_OUTER_MOMENTUM).add_(self._change)
            torch._foreach_copy_(self.momentum, torch.split(momentum, sizes))
            self._change.add_(momentum.mul_(_OUTER_MOMENTUM)).mul_(_OUTER_LR)
        torch._foreach_add_(self.anchor, torch.split(self._change, sizes))
        torch._foreach_add_(self.own, torch.split(torch.cat(self.anchor) - self._sent, sizes))


def _part(tensors: Mapping[str, torch.Tensor], item: Slice) -> torch.Tensor:
    return tensors[item.name].view(-1)[item.start : item.stop]
