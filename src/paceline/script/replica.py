"""A model and its optimizer, replicated: equal on all ranks after every step.

    for batch in batches:                                 # a step: this rank's micro-batches, none perhaps
        for x, y in replica.micro_batches(batch):
            replica.backward(criterion(model(x), y))      # communicates behind the last one's backward
        result = replica.step(max_norm=1.0)               # what the whole batch's mean loss asks for

Gradients are sums, never means of means: each micro-batch's mean loss is multiplied by what it is a mean of, and the
sum over all micro-batches of all ranks divided by what they hold together. Ranks learn that number in the one small
exchange of a step, after backward; until then the step before's stands for it, so where batches are alike the division
costs nothing, and where they are not it is made good while gradients are clipped.
"""

import math
import signal
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from paceline.base.errors import UserError
from paceline.optim.clip import clip_
from paceline.optim.optimizer import Piece
from paceline.script import mistakes
from paceline.script.keeping import Keeper
from paceline.script.share import num_rows
from paceline.sync.buckets import hooked, release
from paceline.sync.replicas import broadcast_parameters
from paceline.sync.strategy import make_strategy
from paceline.train.guard import StopRequest
from paceline.train.trouble import Trouble, whose_trouble
from paceline.world.calls import place
from paceline.world.config import ParallelConfig
from paceline.world.group import Group
from paceline.world.runtime import World

MicroBatch = TypeVar("MicroBatch")

# Each element is updated by its own gradient and state alone, so a run of a parameter's elements is updated as the
# whole would be. For any other optimizer a parameter stays in one piece.
_ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
_FLAGS = 48  # in a float64, exactly


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step, the same on all ranks."""

    loss: float  # mean over the whole global batch
    grad_norm: float  # of that loss's gradient, before clipping
    weight: float  # samples, or what backward was told, in the global batch
    skipped: Trouble | None  # a gradient was not finite, so no rank made an update


class _Passes:
    """This rank's backward passes of a step so far, and what is known of the next one."""

    def __init__(self, device: torch.device):
        self.num, self.weight = 0, 0.0
        exact = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have
        self.loss_sum = torch.zeros((), dtype=exact, device=device)  # of mean losses times their weights
        self.unweighted: set[int] = set()  # rows of micro-batches that count 1 each
        self.drawn_rows: int | None = None  # of the micro-batch that `micro_batches` gave
        self.seen_rows: int | None = None  # of the model's last forward
        self.is_last = True
        self.launched = False  # the last one was made: gradients are on their way
        self.first_digest = 0  # of this rank's first micro-batch, in the first step; 0: not known
        self.is_drawing = False  # inside the loop over `micro_batches`
        self.marks: list[int | None] | None = None  # versions of the gradients after the last backward
        self.arrived: set[torch.Tensor] = set()  # parameters whose gradient came in the last backward


class Replica:
    """This rank's copy of what learns, and its part in keeping all copies equal.

    Every rank calls every method, in the same order; `backward` and `micro_batches` excepted, which a rank without a
    micro-batch does not come to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        world: World,
        *,
        strategy: Literal["ddp", "zero", "fsdp", "naive"] = "ddp",
        blocks: Sequence[nn.Module] = (),
        bucket_mb: float = 10.0,
    ):
        """Gives all ranks rank 0's weights and buffers. Collective.

        model: any module, compiled or not. optimizer: one, or several, of torch.optim, over the model's parameters;
        state that they have must be the same on all ranks. strategy: who updates what; `zero` divides the optimizer's
        state by the ranks, `fsdp` weights and gradients, too (see the guide). blocks: modules that run one after the
        other and whose own forward runs before their parameters are read, such as a transformer's: with `zero` their
        weights arrive behind the forward before them, with `fsdp` only one is whole at a time.

        Raises UserError for what would go wrong silently (mistakes.py); warns of what need not.
        """
        world.calls.note("Replica")
        self.model, self.world = model, world
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        mistakes.check_wrapper(model)
        mistakes.check_device(model, world)
        mistakes.check_kind(self.optimizers)
        mistakes.check_sharding(model, strategy, [] if self._is_elementwise() else self.optimizers)
        mistakes.check_optimizers(model, self.optimizers, world)
        mistakes.check_same_start(model, world)
        broadcast_parameters(model, world.group)
        self._statistics = _Statistics(mistakes.tell_of_batch_norm(model, world), world.group)
        mistakes.tell_of_prefix(model, world)
        self._is_inside = False  # replica.backward, or the optimizers' step
        given = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        release(model.parameters())  # an earlier replica's
        for parameter in given.values():  # first: before the strategy's own, which take the gradient
            parameter.grad = None  # of a trial pass, which would stand in for those of every step
            hooked(parameter, self._require_inside)
        whole = {name: float(parameter.numel()) for name, parameter in given.items() if not self._is_elementwise()}
        config = ParallelConfig(strategy=strategy, bucket_mb=bucket_mb)
        self.sync = make_strategy(config, model, world.group, whole, blocks)
        self._settles = not blocks  # a script may call a part of the model by itself, which waits for nothing
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.pieces = self.sync.pieces()
        self._gradients = [piece.parameter.grad for piece in self.pieces]  # zero's: views that stay
        self._adopt({parameter: name for name, parameter in given.items()})
        self._num_held = [len(group["params"]) for group in self._groups()]
        model.register_forward_pre_hook(_SeeRows(self), with_kwargs=True)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._require_own_step)
        self._keeper = Keeper(self)
        self._stop: StopRequest | None = None
        self._stop_reason: str | None = None
        self.num_steps = 0  # made by this replica, those before a restore included
        self.total_before = 1.0  # of the weights in the step before; alike on all ranks, and kept with a checkpoint
        self._passes = _Passes(world.device)

    # ---- a step ----

    def micro_batches(self, batch: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields a step's micro-batches of this rank; `backward` then knows which is the last, and how many rows each
        holds."""
        if self.sync.lockstep:
            batch = list(batch)
            self._require_equal_passes(len(batch))
        iterator = iter(batch)
        following = next(iterator, None)
        while following is not None:
            current, following = following, next(iterator, None)
            passes = self._passes
            passes.is_last, passes.drawn_rows, passes.is_drawing = following is None, num_rows(current), True
            if not self.num_steps and not passes.num:
                passes.first_digest = mistakes.digest_of(current)
            try:
                yield current
            finally:  # also where the script leaves its loop early
                passes.is_drawing = False
            if passes.is_last and passes.num and not passes.launched:
                raise UserError(f"{place()}: the last micro-batch of a step had no replica.backward(loss)")
        self._passes.drawn_rows, self._passes.is_last = None, True

    def backward(self, loss: torch.Tensor, weight: float | None = None, last: bool | None = None) -> None:
        """Makes the backward pass of one micro-batch from its mean loss, a scalar; of several losses give the sum.

        weight: what the loss is a mean of, in any unit that is the same on all ranks, such as tokens that count; rows
        of the micro-batch where `micro_batches` gave it, else 1. last: whether no other micro-batch of this step
        follows on this rank; known where `micro_batches` gave it, else taken to be so.

        Communicates behind the backward of the last one only. Raises UserError for a second one after the last.
        """
        passes = self._passes
        if passes.launched:
            raise UserError(
                f"{place()}: replica.backward was called again after the last micro-batch of step "
                f"{self.num_steps + 1}: draw micro-batches with `for x, y in replica.micro_batches(batch)`, or say "
                "last=False; of several losses give the sum; and call replica.step() after them"
            )
        if loss.dim():
            raise UserError(f"{place()}: the loss is of shape {list(loss.shape)}; backward needs the mean, a scalar")
        if not loss.requires_grad:
            raise UserError(
                f"{place()}: the loss depends on no weight that is trained: it was computed under torch.no_grad(), "
                "detached, or all its weights are frozen"
            )
        if weight is None:
            weight = 1.0 if passes.drawn_rows is None else float(passes.drawn_rows)
            if passes.drawn_rows is None and passes.seen_rows is not None:
                passes.unweighted.add(passes.seen_rows)
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(f"{place()}: the weight of a micro-batch is {weight}; it is a number of samples or tokens")
        self._require_untouched()
        passes.launched = passes.is_last if last is None else last
        passes.arrived.clear()
        self._is_inside = True
        try:
            with self.sync.accumulate(last=passes.launched):
                (loss * (weight / self.total_before)).backward()  # type: ignore[no-untyped-call]
        finally:
            self._is_inside = False
        self.world.calls.travelling = self if passes.launched else None
        passes.num += 1
        passes.weight += weight
        passes.loss_sum += loss.detach().to(passes.loss_sum.dtype) * weight
        passes.marks = self._marks()

    def step(self, max_norm: float = 0.0) -> StepResult:
        """Makes the update that the mean loss over the whole global batch asks for, and lets go of the gradients.

        max_norm: gradients are shrunk to this global norm; 0: measured only. Collective: the gradients' sums, and one
        exchange of a few numbers; called also by a rank that had no micro-batch. Where a gradient is not finite no rank
        updates. Raises UserError on all ranks where micro-batches of different sizes would count alike.
        """
        self.world.calls.note("Replica.step", self)
        if self._passes.is_drawing:
            raise UserError(
                f"{place()}: replica.step() is inside the loop over replica.micro_batches(batch), where a rank that "
                "has fewer of them would call it less often: call it after that loop, once for each batch"
            )
        self._require_untouched()
        if self._passes.num and not self._passes.launched:
            raise UserError(
                f"{place()}: replica.step() came before the last micro-batch of the step: call it after the loop over "
                "replica.micro_batches(batch), or say last=True to the last backward"
            )
        self._require_groups()
        used = [parameter.grad is not None for parameter in self._trained.values()]
        gradients = self.sync.reduce()
        self.world.calls.travelling = None
        total, loss_sum, unused = self._exchange(used)
        norm = clip_(gradients, max_norm, total / self.total_before, self.sync.total)
        trouble = None
        if math.isfinite(norm):
            self._keeper.before_update()
            self._update(unused)
        else:
            trouble = whose_trouble(self.sync, self.world.group)
        self.sync.publish()
        if self._settles:
            self.sync.settle()
        self._statistics.average(self._passes.weight / total)
        if not self.num_steps:
            self._keeper.after_first_update()
        self.total_before = total
        self.num_steps += 1
        self._passes = _Passes(self.world.device)
        self.world.group.take_traffic()  # nobody reads it here, and it would grow with every step
        self._keeper.tell()
        return StepResult(loss=loss_sum / total, grad_norm=norm, weight=total, skipped=trouble)

    def stop_requested(self) -> str | None:
        """Returns why to stop, once a rank was asked to, the same on all ranks; None until then.

        From the first call on SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP ask, and end nothing; a second Ctrl-C ends.
        What was asked is known after the next step. Save then, and leave with status 75: "start me again".
        """
        if self._stop is None:
            self._stop = StopRequest()
            self._stop.__enter__()
        return self._stop_reason

    # ---- what is kept ----

    def save(self, folder: str | Path, **state: Any) -> None:
        """Begins a checkpoint of weights, buffers, optimizers and `state` in `folder`/checkpoints, named by the steps
        made; it is written while training goes on, complete or absent. Collective: every rank calls it.

        state: JSON values, or objects with state_dict() and load_state_dict(), such as a learning rate schedule or
        what `share` returned. Waits where the save before is still being written. Raises UserError for what cannot be
        kept, RunError where replicas differ. Where a save fails that is said, and training goes on; the last one's
        failure is the script's.
        """
        self.world.calls.note("Replica.save")
        self._keeper.save(Path(folder), state)

    def restore(self, folder: str | Path, **state: Any) -> dict[str, Any] | None:
        """Takes up the newest whole checkpoint in `folder`, of any number of ranks and any strategy; returns the JSON
        values given to `save`, None where nothing was ever saved there. Collective.

        state: the objects of `save`, whose load_state_dict gets what their state_dict gave. Every byte is verified
        before use. Raises UserError where the checkpoint does not fit, RunError where none is whole.
        """
        self.world.calls.note("Replica.restore")
        found = self._keeper.restore(Path(folder), state)
        self._statistics.remember()
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all weights and buffers by their plain names, whole, to save or hand on; tied ones by each of theirs.
        Collective with fsdp alone: with the others rank 0 may call it by itself."""
        if self.sync.shards_weights:
            self.world.calls.note("Replica.state_dict")
        self.sync.settle()
        found = {**self.sync.full_weights(), **self.buffers()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found.setdefault(name, found[names[parameter]])
        return {mistakes.plain(name): tensor for name, tensor in found.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that belong to the model's state, by name."""
        passing = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in passing}

    # ---- inside ----

    def _is_elementwise(self) -> bool:
        return all(type(optimizer).__name__ in _ELEMENTWISE for optimizer in self.optimizers)

    def _adopt(self, names: dict[nn.Parameter, str]) -> None:
        """Lets the optimizers update this rank's pieces instead of the whole parameters that they were given. State
        that they have already, as Adagrad has from the beginning, is divided in the same way."""
        pieces = {piece.name: piece for piece in self.pieces}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                held = []
                for parameter in group["params"]:
                    state = optimizer.state.pop(parameter, None)
                    piece = pieces.get(names.get(parameter, ""))
                    if piece is not None:
                        held.append(piece.parameter)
                    if piece is not None and state:
                        optimizer.state[piece.parameter] = {key: _part(v, key, piece) for key, v in state.items()}
                group["params"] = held

    def _exchange(self, used: list[bool]) -> tuple[float, float, list[str]]:
        """Returns (the weights of all micro-batches, the weighted sum of their losses, the parameters that no rank made
        a gradient for)."""
        flags = [
            sum(1 << bit for bit, is_used in enumerate(used[start : start + _FLAGS]) if is_used)
            for start in range(0, len(used), _FLAGS)
        ]
        reason = self._stop.reason if self._stop is not None else None
        least, most = (
            (min(self._passes.unweighted), max(self._passes.unweighted)) if self._passes.unweighted else (-1, -1)
        )
        mine = [
            self._passes.weight,
            float(self._passes.loss_sum),
            float(signal.Signals[reason]) if reason is not None else 0.0,
            least,
            most,
            float(self._passes.first_digest),
            *map(float, flags),
        ]
        rows = self.world.group.share(mine)
        sizes = {int(size) for row in rows for size in row[3:5] if size >= 0}
        if len(sizes) > 1:
            raise UserError(
                f"{place()}: micro-batches of {min(sizes)} and of {max(sizes)} rows would count alike in this step, so "
                "the rows of the smaller ones more: say replica.backward(loss, weight=len(x)), or draw them with "
                "`for x, y in replica.micro_batches(batch)`",
                reach="world",
            )
        mistakes.tell_of_same_rows([int(row[5]) for row in rows], self.world)
        votes = {rank: signal.Signals(int(row[2])).name for rank, row in enumerate(rows) if row[2]}
        self._stop_reason = ", ".join(f"{name} on rank {rank}" for rank, name in votes.items()) or None
        total = math.fsum(row[0] for row in rows)
        if not total:
            raise UserError(f"{place()}: no rank had a micro-batch in this step", reach="world")
        anywhere = [0] * len(flags)
        for row in rows:
            anywhere = [known | int(flag) for known, flag in zip(anywhere, row[6:], strict=True)]
        if self._trained and not any(anywhere):
            raise UserError(
                f"{place()}: no gradient of this step reached a parameter of the model that the replica was made with: "
                "its parameters were replaced since (assign=True, a new module), or the loss is another model's",
                reach="world",
            )
        names = enumerate(self._trained)
        unused = [name for index, name in names if not anywhere[index // _FLAGS] >> index % _FLAGS & 1]
        return total, math.fsum(row[1] for row in rows), unused

    def _update(self, unused: list[str]) -> None:
        """Each rank updates its pieces; what no rank used stays as it is, as in a script of one process."""
        if unused and not self.num_steps:
            mistakes.warn(
                f"nothing used {mistakes.listed(unused)} in the first step: they get no gradient and are not updated",
                self.world,
            )
        idle = frozenset(unused)
        for piece, view in zip(self.pieces, self._gradients, strict=True):
            if view is not None:  # a script's own optimizer.zero_grad() let go of it
                piece.parameter.grad = view
            if piece.name in idle:
                piece.parameter.grad = None
        self._is_inside = True
        try:
            for optimizer in self.optimizers:
                if any(group["params"] for group in optimizer.param_groups):
                    optimizer.step()
        finally:
            self._is_inside = False

    def _require_equal_passes(self, num_passes: int) -> None:
        numbers = [row[0] for row in self.world.group.share_integers([num_passes])]
        if len(set(numbers)) > 1:
            raise UserError(
                f"{place()}: ranks have {numbers} micro-batches in this step, and with strategy fsdp each must have as "
                "many: choose a global batch and micro-batch that divide, or strategy zero",
                reach="world",
            )

    def _marks(self) -> list[int | None]:
        """What any change of a gradient from outside changes. 40 us for 150 parameters."""
        found = [parameter.grad for parameter in self._trained.values()]
        # fsdp's are views of a part, which has the version.
        return [
            None if gradient is None else getattr(gradient, "_local_tensor", gradient)._version for gradient in found
        ]

    def _require_untouched(self) -> None:
        """Between two backward passes, and before the step: nobody has zeroed, clipped or scaled what is summed."""
        if self._passes.marks is not None and self._passes.marks != self._marks():
            raise UserError(
                f"{place()}: gradients were changed after replica.backward of this step, while they are being summed: "
                "take zero_grad() and clip_grad_norm_() away; replica.step(max_norm=...) clips, and lets go of them"
            )
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen:
            raise UserError(
                f"{place()}: {mistakes.listed(unfrozen)} was frozen when the replica was made, so no rank's gradient "
                "of it would reach another: say requires_grad_(True) before, or make optimizer and Replica anew"
            )

    def _require_groups(self) -> None:
        """Nobody gave an optimizer a parameter since, whose gradient would not be summed: ranks would part silently."""
        if [len(group["params"]) for group in self._groups()] != self._num_held:
            raise UserError(
                f"{place()}: an optimizer was given parameters after the replica was made, so no rank's gradient of "
                "them would reach another: make optimizer and Replica anew after the model was changed"
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _require_inside(self, parameter: torch.Tensor) -> None:
        if parameter in self._passes.arrived:
            name = next(name for name, known in self._trained.items() if known is parameter)
            raise UserError(
                f"{place()}: the gradient of {name} came twice in one backward, the second time after its sum was on "
                "the way: say use_reentrant=False to torch.utils.checkpoint"
            )
        self._passes.arrived.add(parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(
                f"{place()}: a gradient is sparse, and ranks sum dense ones: say sparse=False to the embedding"
            )
        if not self._is_inside:
            raise UserError(
                f"{place()}: a gradient came without replica.backward: say replica.backward(loss) for loss.backward(), "
                "and requires_grad_(False) for a model that another loss only passes through"
            )

    def _require_own_step(self, *_: object) -> None:
        if not self._is_inside:
            raise UserError(f"{place()}: replica.step() makes the optimizer's step, too; take optimizer.step() away")


class _SeeRows:
    """Notes how many rows the model's forward was given. A copy of the model (an average of its weights, a teacher, a
    file) has one that does nothing: by itself it would take the replica with it, and all that the world holds."""

    def __init__(self, replica: Replica | None = None):
        self._replica = None if replica is None else weakref.ref(replica)

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        replica = self._replica() if self._replica is not None else None
        if replica is not None and torch.is_grad_enabled():
            replica._passes.seen_rows = num_rows((*arguments, *named.values()))

    def __reduce__(self) -> tuple[Any, ...]:  # copy and pickle
        return _SeeRows, ()


class _Statistics:
    """The running statistics of batch norms, the same on all ranks after each step: those before it and the mean over
    ranks of how they changed, each counted by the share of the batch that it has seen."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: Group):
        self._means = [tensor for tensor in tensors if tensor.is_floating_point()]
        self._counts = [tensor for tensor in tensors if not tensor.is_floating_point()]
        self._group = group
        self.remember()

    def remember(self) -> None:
        """The statistics are equal on all ranks now."""
        self._before: torch.Tensor | None = None
        if self._means and self._group.size > 1:
            self._before = self._flat()

    def average(self, share: float) -> None:
        """Collective where there are any. Changes, not values: what a norm in eval() has stays as it is, to the bit."""
        if self._before is None:
            return
        change = (self._flat() - self._before) * share if share else torch.zeros_like(self._before)
        self._group.all_reduce(change)
        begin = 0
        for tensor in self._means:
            stop = begin + tensor.numel()
            tensor.copy_((self._before[begin:stop] + change[begin:stop]).view_as(tensor))
            begin = stop
        self.remember()
        for tensor in self._counts:  # of batches seen: a rank without a micro-batch has seen fewer
            self._group.all_reduce(tensor, "max")

    def _flat(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).double() for tensor in self._means])


def _part(value: Any, key: str, piece: Piece) -> Any:
    """An optimizer's state of a whole parameter, for a piece of it."""
    if isinstance(value, torch.Tensor) and value.shape == piece.shape and key != "step":
        return value.reshape(-1)[piece.start : piece.stop].reshape(piece.parameter.shape).clone()
    return value
