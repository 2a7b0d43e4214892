"""A model and its optimizers, replicated: equal on all ranks after every step. __init__.py shows a complete script.

step.py does one step, loop.py all steps; gradients.py collects gradients, sync/ sums them over ranks, and updates.py
updates this rank's part.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from paceline.base.units import listed
from paceline.optim.clip import has_float64
from paceline.replica import generators, mistakes
from paceline.replica.batch import as_batch
from paceline.replica.contents import not_kept
from paceline.replica.gradients import Gradients
from paceline.replica.loop import BegunFrom, steps
from paceline.replica.passes import call, evaluate
from paceline.replica.result import Exchanged, StepResult
from paceline.replica.share import Share, share
from paceline.replica.statistics import RunningStatistics
from paceline.replica.step import Step
from paceline.replica.stopping import StopRequest, why_to_stop
from paceline.replica.trouble import poison_a_gradient
from paceline.replica.updates import LossScaler, Updates
from paceline.sync.buckets import release
from paceline.sync.make import check_strategy, make_strategy
from paceline.sync.replicas import broadcast_parameters
from paceline.world.calls import Calls, mistake
from paceline.world.config import ParallelConfig
from paceline.world.device import DeviceClock
from paceline.world.facts import unequal_kinds
from paceline.world.runtime import World

_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# By world, the replicas that are alive.
_REPLICAS: "weakref.WeakKeyDictionary[Calls, weakref.WeakSet[Replica]]" = weakref.WeakKeyDictionary()


class Replica:
    """This rank's copy of a model and its optimizers. Every rank calls every method, in the same order."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        world: World,
        *,
        strategy: Literal["auto", "ddp", "zero", "fsdp", "hsdp", "local", "naive"] = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        blocks: Sequence[nn.Module] = (),
        bucket_mb: float = 0.0,
        wire: Literal["exact", "bf16", "int8", "int4"] = "exact",
        read_as: Mapping[str, torch.dtype] | None = None,
        sync_every: int = 0,
        rounded_gradients: Collection[str] = (),
    ):
        """Copies rank 0's weights and buffers to all ranks. Collective.

        model: any module, compiled or not, on `world.device`. optimizer: one or several, of torch.optim or with the
        same `param_groups`, `state` and `step()`. strategy: `zero` shards the optimizer state, `fsdp` also weights and
        gradients, `hsdp` these over the ranks of each host; `auto` is `zero` if processors round differently, else
        `ddp`. dtype: autocast of the loop over micro-batches; `float16` scales the loss. blocks: modules that run one
        after the other, such as a transformer's layers. With `zero` their weights are gathered during the forward pass
        (call `wait_for_params` before you read weights between steps), with `fsdp` one block at a time. bucket_mb: MiB
        of gradients in one transfer; 0: 2 with `zero` on CPUs, else 10.
        wire: `bf16` makes `zero` send gradients rounded to bfloat16; they are added in their own dtype. `int8`
        and `int4` send integers of so many bits, and the change of weights in 4 bits (sync/coded.py).
        read_as: parameters that the forward pass casts to a dtype, such as torch.bfloat16, before any other use of
        them. `zero` and `fsdp` send these rounded to it: half the bytes, the same results. Between steps `zero`'s model
        then holds rounded values; `state_dict` and checkpoints have the exact ones. rounded_gradients: those of them
        whose gradient from one backward pass has that dtype's values: sent in it if no rank makes two passes.
        sync_every: with strategy `local`, another algorithm, the steps between two exchanges of a weight.

        Raises UserError for mistakes that would stay silent (mistakes.py), and warns of probable ones.
        """
        world.calls.record("Replica")
        if dtype not in _DTYPES:
            raise mistake(f"dtype is {dtype!r}; it is one of {', '.join(_DTYPES)}")
        if strategy == "auto":
            strategy = "zero" if unequal_kinds(world.facts) or wire != "exact" else "ddp"
        config = ParallelConfig(strategy=strategy, bucket_mb=bucket_mb, wire=wire, sync_every=sync_every)
        config.check_wire()
        config.check_rounds()
        check_strategy(strategy, world.facts, wire)
        self.model, self.world, self.strategy = model, world, strategy
        self.optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self.clock = DeviceClock(world.device)
        self.exact_dtype = torch.float64 if has_float64(world.device) else torch.float32
        self._autocast = _DTYPES[dtype]
        self.scaler = LossScaler.for_dtype(self._autocast or torch.float32)

        self._all = _REPLICAS.setdefault(world.calls, weakref.WeakSet())
        self._replace_earlier()
        mistakes.check_model(model, self.optimizers, strategy, world)
        self.updates = Updates(model, self.optimizers)
        mistakes.check_sharding(model, strategy, self.optimizers)
        if not mistakes.is_on_the_host(model, strategy, world):  # else blocks move to the device one by one
            mistakes.check_same_start(model, world)
            broadcast_parameters(model, world.group)
        self.statistics = RunningStatistics(mistakes.warn_of_batch_norm(model, world), world.group)
        mistakes.warn_of_prefix(model, world)
        # NCCL adds in the dtype in which it sends, and several ranks of a host add before they send to another host.
        hosts = len({facts.host for facts in world.facts})
        is_direct = all(facts.device == "cpu" for facts in world.facts) and hosts in (1, world.world_size)
        rounded = rounded_gradients if is_direct else ()
        whole = self.updates.updated_whole()
        self.gradients = Gradients(
            model, lambda: make_strategy(config, model, world.group, whole, blocks, read_as, rounded)
        )
        self.sync = self.gradients.sync
        self.updates.adopt(self.sync.slices())

        self.num_steps = 0
        """Updates made, including those before a restore."""
        self.stop: StopRequest | None = None  # sets this rank's stop flag; made by `steps(stop_on_signals=True)`
        self.stop_reason: str | None = None
        """Why to stop, the same on all ranks; None: no stop flag is set."""
        self.at: Callable[[str], str | None] = lambda phase: None
        """Called as each phase of a step begins; returns the fault that a test injects there."""
        self.copies: list[Callable[[], object]] = []
        """By Checkpoints object that saves this replica: waits until weights and state may change."""
        self.total_before = 1.0  # weight of the last step, or of a row of it (see Step); the same on all ranks, saved
        self.update_ms = 0.0  # of the last step
        self.open_step: Step | None = None
        self.begun_from: BegunFrom | None = None
        self.shares: list[Share] = []  # of the loaders given to `steps`, in the order of first use
        self.positions: list[dict[str, Any]] = []  # restored, for loaders that `steps` has not seen yet
        self._batch_share = 1.0 / world.world_size  # this rank's share of the last step's batch
        self._waits_at_once = not blocks  # a script may call a part of the model, which would wait for nothing
        self._by_source: dict[tuple[int, bool, str], tuple[Any, Share]] = {}  # holds the source, so its id stays unique
        self._all.add(self)

    # ---- training ----

    def steps(
        self,
        source: Any,
        *,
        max_steps: int | None = None,
        epochs: int | None = None,
        stop_on_signals: bool = False,
        **sharing: Any,
    ) -> Iterator[Step]:
        """Yields a Step for each global batch; each rank reads its own part.

        source: what `paceline.share` returned, or a source that it takes (a DataLoader, a data set with batch_size=...,
        a function), with its other arguments as `sharing`; checkpoints of this replica keep the position. max_steps:
        total updates, over as many passes as needed; epochs: total passes; both include those before a restore. Without
        them: one pass. After a restore, or a loop that max_steps ended, it continues within the pass.

        stop_on_signals: SIGTERM, SIGINT (Ctrl-C; a second one ends at once), SIGUSR1 and SIGHUP on any rank end the
        loop after the current step, on all ranks; `stop_reason` says why. Then save, and leave with
        `sys.exit(paceline.EXIT_RESUMABLE)`, which asks for a restart.
        """
        batches = self._shared(source, sharing)
        if stop_on_signals and self.stop is None:
            self.stop = StopRequest().__enter__()
        try:
            yield from steps(self, batches, max_steps, epochs)
        finally:
            if stop_on_signals and self.stop is not None and self.stop_reason is None:
                self.stop.__exit__(None, None, None)  # after a stop, signals must not end the save that follows
                self.stop = None

    def agree_to_stop(self) -> str | None:
        """Returns why to stop, or None; the same on all ranks. Collective. Call it during long work between steps, such
        as an evaluation; after each step `stop_reason` has it."""
        vote = self.stop.vote if self.stop is not None else 0.0
        self.stop_reason = why_to_stop([row[0] for row in self.world.group.share([vote])])
        return self.stop_reason

    def step(self, batch: Any, total: float | None = None) -> Step:
        """Returns the next update over a batch: from `paceline.share`, a `paceline.Batch`, or this rank's one
        micro-batch. For loops of your own; `steps` does it for you.

        total: weight of the global batch over all ranks, if known. Without it the ranks all-gather their weights before
        the update; with it after the update, so a parameter that no rank used gets a zero gradient (weight decay and
        momentum still change it) instead of none.
        """
        if self.open_step is not None and self.open_step.is_begun:
            raise mistake(
                "the step before had no step.finish(), and its gradients would be lost: call it once in "
                "each step. After an exception make optimizer and Replica anew"
            )
        self.open_step = Step(self, as_batch(batch), total)
        return self.open_step

    def train(self, batch: Any, loss_of: Callable[..., Any], *, max_norm: float = 0.0) -> StepResult:
        """Makes one update over `batch` (see `step`): forward and backward passes, sums over ranks, clipping, update.

        loss_of: called with each micro-batch, tuples and lists unpacked: `lambda x, y: criterion(model(x), y)`. Returns
        the mean loss, or (mean loss, weight), see Step.backward.
        """
        step = batch if isinstance(batch, Step) else self.step(batch)
        for micro_batch in step:
            step.backward(*call(loss_of, micro_batch))
        return step.finish(max_norm)

    def evaluate(self, source: Any, loss_of: Callable[..., Any], **sharing: Any) -> Any:
        """Returns the mean of `loss_of` over one pass of the source, shared by the ranks; the same on all. Collective.

        source: as for `steps`; a data set is read in order, a function that draws is read for one step. loss_of: as for
        `train`; if it returns a dict of means, so does this. Ranks have the shares of training, if those were given to
        `steps`. Runs in eval() without gradients and restores the random generators.
        """
        if hasattr(source, "__getitem__"):  # a data set
            sharing.setdefault("shuffle", False)
        if self.shares:
            sharing.setdefault("shares", self.shares[0].shares)
        with torch.no_grad(), self.aside(), self.precision(), self.sync.shared_weights():
            batches = self._shared(source, sharing, keep=False)
            return evaluate(self.model, batches, loss_of, self.sync, self.world)

    def merge(self) -> None:
        """Makes the weights of all ranks their average: call it after the last step with strategy `local`. Does nothing
        with others. Collective."""
        self.world.calls.record("Replica.merge")
        self.wait_copied()
        self.sync.merge()

    # ---- the model ----

    def aside(self) -> AbstractContextManager[None]:
        """Restores the random generators at the end: for an evaluation or a sample during training."""
        return generators.aside(self.world.device)

    def precision(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns the autocast context of the loop over micro-batches, in the replica's `dtype`."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self._autocast, enabled=enabled)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all weights and buffers by their plain names, unsharded; tied ones by each name. Collective with fsdp
        and `read_as`; otherwise rank 0 may call it alone."""
        if self.sync.shards_weights or self.sync.holds_rounded:
            self.world.calls.record("Replica.state_dict")
        self.wait_for_params()
        found = {**self.sync.full_weights(), **self.buffers()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found.setdefault(name, found[names[parameter]])
        return {mistakes.plain(name): tensor for name, tensor in found.items()}

    def wait_for_params(self) -> None:
        """Waits until the model has the weights of the last update: with `zero` and `blocks` they may still be
        arriving. Forward passes and paceline's own functions wait by themselves."""
        self.sync.wait_for_params()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the persistent buffers by name."""
        passing = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in passing}

    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the groups of all optimizers, in their order."""
        return self.updates.param_groups()

    def average_statistics(self) -> None:
        """Averages the running statistics of batch norms over ranks; also before a save, since another replica's step
        may have used this model. Collective if there are any."""
        self.statistics.average(self._batch_share)

    # ---- for Step ----

    def backward(self, scaled_loss: torch.Tensor, is_last: bool) -> None:
        """Makes one backward pass, outside autocast; communicates if it is this rank's last in the step."""
        self.gradients.reveal()
        if self.at("backward") == "nan":
            poison_a_gradient(self.model)
        with self.precision(enabled=False):
            is_alone = len(self._all) == 1 or self.sync.shards_weights
            self.gradients.backward(scaled_loss, is_last=is_last, for_this_model=not is_alone)
        self.world.calls.reducing = self if is_last else None

    def update(self, unused: Sequence[str], is_finite: torch.Tensor | None = None) -> None:
        """Updates this rank's part; parameters that no rank used stay unchanged, as in one process. is_finite: see
        Updates.make."""
        if unused and not self.num_steps:
            mistakes.warn(
                f"nothing used {listed(unused)} in the first step: they get no gradient and are not updated",
                self.world,
            )
        self.wait_copied()
        self.updates.make(unused, self.sync.parts(), is_finite)

    def wait_copied(self) -> None:
        """Waits until saves under way have copied weights and state, which may change then."""
        for wait_copied in self.copies:
            wait_copied()

    def end_step(self, batch_share: float, rows: Sequence[Exchanged]) -> None:
        """Ends an update on all ranks. batch_share: this rank's share of the batch; rows: by rank."""
        if self._waits_at_once:
            self.wait_for_params()
        self._batch_share = batch_share
        self.average_statistics()
        if len({row.drawn_from for row in rows}) > 1:  # a rank without a micro-batch has not drawn
            generators.agree(self.world.group, self.world.device)
        if not self.num_steps and (problem := not_kept(self)):
            mistakes.warn(f"{problem}, so a checkpoint will be refused; take another optimizer", self.world)
        self.num_steps += 1
        self.sync.end_step()
        self.open_step = self.begun_from = None
        self.stop_reason = why_to_stop([row.vote for row in rows])

    # ---- inside ----

    def _replace_earlier(self) -> None:
        """Releases an earlier replica of this model or these optimizers, as when a notebook cell runs again."""
        parameters = set(self.model.parameters())
        for other in list(self._all):
            has_mine = any(each is own for each in self.optimizers for own in other.optimizers)
            if has_mine or not parameters.isdisjoint(other.model.parameters()):
                other.release()
        release(self.model.parameters())

    def release(self) -> None:
        """Removes all hooks from model and optimizers; this replica cannot train any more."""
        self.wait_for_params()
        self.sync.release()
        release(self.model.parameters())
        if not self.updates.release():
            mistakes.warn("this optimizer's state was divided by a replica before, and begins anew", self.world)
        self._all.discard(self)

    def _shared(self, source: Any, sharing: dict[str, Any], keep: bool = True) -> Share:
        """Returns this rank's part of the source, made once for training and once for evaluation. Collective then.
        keep: checkpoints store its position."""
        if isinstance(source, Share):
            return source
        key = id(source), keep, str(sharing.get("shares"))
        known = self._by_source.get(key)
        if known is None:
            known = self._by_source[key] = (source, share(source, self.world, **sharing))
            if keep:
                self.shares.append(known[1])
                if self.positions:
                    known[1].load_state_dict(self.positions.pop(0))
        return known[1]
