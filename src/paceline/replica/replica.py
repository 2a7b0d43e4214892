"""A model and its optimizers, replicated: equal on all ranks after every step. __init__.py shows a complete script.

step.py does one step; here are the loops over steps, evaluation, and what a script reads of the model. gradients.py
collects gradients, sync/ sums them over ranks, and updates.py updates this rank's part.
"""

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from paceline.base.seeds import key
from paceline.base.sums import exact_sum
from paceline.base.units import listed
from paceline.replica import agreement, generators, mistakes
from paceline.replica.batch import Batch, is_samples
from paceline.replica.model import ReplicatedModel, drop_abandoned_step
from paceline.replica.positions import Sources
from paceline.replica.result import StepResult
from paceline.replica.share import Share
from paceline.replica.step import Step
from paceline.replica.stopping import StopRequest, why_to_stop
from paceline.world.calls import mistake
from paceline.world.config import ParallelConfig, StrategyName, WireName
from paceline.world.facts import unequal_kinds
from paceline.world.runtime import World

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOSS = ""  # the name of a single number that an evaluation's function returns


class BegunFrom(NamedTuple):
    """Data position and random generators before the current step was drawn. A checkpoint that is saved before
    `step.finish()` resumes there and repeats the step."""

    batches: Share
    position: dict[str, Any]
    states: generators.States | None  # None: no Checkpoints save this replica


class Replica(ReplicatedModel):
    """This rank's copy of a model and its optimizers. Every rank calls every method, in the same order."""

    num_steps: int
    """Updates made, including those before a restore."""
    stop_reason: str | None
    """Why to stop, the same on all ranks; None: no stop flag is set."""
    open_step: Step | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        world: World,
        *,
        strategy: Literal["auto", StrategyName] = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        blocks: Sequence[nn.Module] = (),
        bucket_mb: float = 0.0,
        wire: WireName = "exact",
        read_as: Mapping[str, torch.dtype] | None = None,
        sync_every: int = 0,
        rounded_gradients: Collection[str] = (),
    ):
        """Copies rank 0's weights and buffers to all ranks. Collective.

        model: any module, compiled or not, on `world.device`. optimizer: one or several, of torch.optim or with the
        same `param_groups`, `state` and `step()`. strategy: `zero` shards the optimizer state, `fsdp` also weights and
        gradients, `hsdp` these over the ranks of each host; `auto` is `zero` if processors round differently or `wire`
        is given, else `ddp`. dtype: autocast of the loop over micro-batches; `float16` scales the loss. blocks: modules
        that run one after the other, such as a transformer's layers. `fsdp` gathers the weights of one at a time; for
        `zero` see `waits_at_once`. bucket_mb: MiB of gradients in one transfer; 0: 2 with `zero` on CPUs, else 10.
        wire: `bf16` makes `zero` send gradients rounded to bfloat16; they are added in their own dtype. `int8`
        and `int4` send integers of so many bits, and the change of weights in 4 bits (sync/owned.py). `local` sends
        its changes of weights so, also in 2 bits (`int2`).
        read_as: parameters that the forward pass casts to a dtype, such as torch.bfloat16, before any other use of
        them. `zero` and `fsdp` send these rounded to it: half the bytes, the same results. Between steps `zero`'s model
        then holds rounded values; `state_dict` and checkpoints have the exact ones. rounded_gradients: those of them
        whose gradient from one backward pass has that dtype's values: sent in it if no rank makes two passes.
        sync_every: with strategy `local`, another algorithm, the steps between two exchanges of a weight.

        Raises UserError for mistakes that would stay silent (mistakes.py), and warns of probable ones.
        """
        drop_abandoned_step(world)
        world.calls.record("Replica")
        if dtype not in _DTYPES:
            raise mistake(f"dtype is {dtype!r}; it is one of {', '.join(_DTYPES)}")
        if strategy == "auto":
            strategy = "zero" if unequal_kinds(world.facts) or wire != "exact" else "ddp"
        config = ParallelConfig(strategy=strategy, bucket_mb=bucket_mb, wire=wire, sync_every=sync_every)
        config.check()
        mistakes.check_blocks(model, blocks)
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        super().__init__(model, optimizers, world, config, _DTYPES[dtype], blocks, read_as, rounded_gradients)
        world.calls.at_leaving = partial(agreement.require_equal_at_leaving, world)
        self.sources = Sources(world)
        self._begun_from: BegunFrom | None = None
        self._is_stopped = False  # a loop ended because of `stop_reason`
        earlier, self.earlier = self.earlier, None
        self.continues = 0 if earlier is None else earlier.number
        """The number of the replica whose steps this one counts on; 0: none."""
        if isinstance(earlier, Replica):
            self.sources = earlier.sources

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
        `sys.exit(paceline.EXIT_RESUMABLE)`, which asks for a restart. Later loops make no step, until the script sets
        `stop_reason` to None; at an interactive prompt the next loop continues.
        """
        for name, most in (("max_steps", max_steps), ("epochs", epochs)):
            if most is not None and not most >= 0:
                raise mistake(f"{name} is {most}; it is a total, at least 0: leave it out for no limit")
        self._drop_open_step()
        batches = self.sources.of_steps(source, sharing)
        if batches.is_endless and epochs is not None:
            raise mistake("a function that draws has no end of a pass, so epochs= has no effect: give max_steps=")
        if self._is_stopped and (self.stop_reason is None or hasattr(sys, "ps1")):
            self._forget_stop()  # the script, or the person at the prompt, continues
        if self._is_over(batches, max_steps, epochs) and (self.stop_reason or self.continues):
            why = f"a stop was asked for ({self.stop_reason})" if self.stop_reason else "its steps are made"
            how = "set replica.stop_reason = None" if self.stop_reason else "give a larger max_steps= or epochs="
            mistakes.warn(f"this loop makes no step: {why}. To train on, {how} first", self.world)
        with self._stopping(stop_on_signals):
            while not self._is_over(batches, max_steps, epochs):
                begun_at, is_from_the_top = self.num_steps, batches.step == 0
                yield from self._one_pass(batches, max_steps)
                if max_steps is None and epochs is None:
                    return
                if self.num_steps == begun_at and is_from_the_top:
                    raise mistake("a whole pass over the data gave no step")

    def step(self, batch: Any, total: float | None = None) -> Step:
        """Returns the next update over a batch: from `paceline.share`, a `paceline.Batch`, or this rank's one
        micro-batch. For loops of your own; `steps` does it for you.

        total: weight of the global batch over all ranks, if known; `finish` raises UserError for weights of another
        sum. Without it the ranks all-gather their weights before the update; with it afterwards, so a parameter that
        no rank used gets a zero gradient (weight decay and momentum still change it) instead of none.
        """
        self.require_current()
        self._drop_open_step(may_repeat=False)
        if total is not None and not 0 < total < math.inf:
            raise mistake(f"total is {total}; it is the weight of the global batch: a number of samples or tokens")
        self._begun_from = None
        batch = batch if isinstance(batch, Batch) else Batch([batch])
        self.sources.begin_step(batch.dealt_by)
        self.open_step = Step(self, batch, total)
        return self.open_step

    def train(self, batch: Any, loss_of: Callable[..., Any], *, max_norm: float = 0.0) -> StepResult:
        """Makes one update over `batch` (see `step`): forward and backward passes, sums over ranks, clipping, update.

        loss_of: called with each micro-batch, tuples and lists unpacked: `lambda x, y: criterion(model(x), y)`. Returns
        the mean loss, or (mean loss, weight), see Step.backward.
        """
        step = batch if isinstance(batch, Step) else self.step(batch)
        for micro_batch in step:
            step.backward(*_call(loss_of, micro_batch))
        return step.finish(max_norm)

    def evaluate(self, source: Any, loss_of: Callable[..., Any], **sharing: Any) -> Any:
        """Returns the mean of `loss_of` over one pass of the source, shared by the ranks; the same on all. Collective.

        source: as for `steps`; a data set is read in order; of a function that draws, one step. Each evaluation reads
        the first pass, of what `paceline.share` returned the next one, and draws the same numbers from the CPU's
        generators. loss_of: as for `train`; if it returns a dict of means, so does this. Ranks have the shares of
        training, if `steps` was given some. Runs in eval() without gradients and restores the random generators.
        """
        if hasattr(source, "__getitem__") and not isinstance(source, IterableDataset):  # which torch gives one, too
            sharing.setdefault("shuffle", False)
        sums: dict[str, list[float]] = {}  # by name: of means times weights, and of weights
        with (
            torch.no_grad(),
            self.aside(),
            generators.seeded(key("evaluation")),
            self.autocast(),
            self.sync.shared_weights(),
            _in_eval_mode(self.model),
            self.sources.of_evaluation(source, sharing) as batches,
        ):
            # A function that draws has no end: its evaluation is one step.
            for batch in islice(batches, 1 if batches.is_endless else None):
                for one in batch.passes_of(self.sync, self.world):
                    returned, weight = _call(loss_of, one.micro_batch)
                    if not one.is_real:
                        continue
                    weight = float(one.num_rows or 1) if weight is None else weight
                    for name, value in (returned if isinstance(returned, Mapping) else {_LOSS: returned}).items():
                        number = _number(name, value)
                        sum_and_weight = sums.setdefault(name, [0.0, 0.0])
                        sum_and_weight[0] += number * weight if weight else 0.0  # 0: perhaps NaN
                        sum_and_weight[1] += weight
        rows = self.world.group.share_json(sums)
        names = dict.fromkeys(name for row in rows for name in row)  # a rank without a micro-batch knows none
        if not names:
            raise mistake("an evaluation got no sample: its source is empty", reach="world")
        means = {}
        for name in names:
            total, weights = map(exact_sum, zip(*(row[name] for row in rows if name in row), strict=True))
            means[name] = total / (weights or math.nan)
        return means.get(_LOSS, means)

    def agree_to_stop(self) -> str | None:
        """Returns why to stop, or None; the same on all ranks. Collective. Call it during long work between steps, such
        as an evaluation; after each step `stop_reason` has it."""
        self.world.calls.record("Replica.agree_to_stop")
        self.stop_reason = why_to_stop([row[0] for row in self.world.group.share([self.vote])])
        return self.stop_reason

    def merge(self) -> bool:
        """Makes the weights of all ranks their average: call it after the last step with strategy `local`. Does nothing
        with others. A new Replica of the model does it, too. Returns whether that may have changed them. Collective."""
        self.world.calls.record("Replica.merge")
        self.wait_copied()
        return self.sync.merge()

    # ---- the model ----

    def aside(self) -> AbstractContextManager[None]:
        """Restores the random generators at the end: for an evaluation or a sample during training."""
        return generators.aside(self.world.device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all weights and buffers by their plain names, unsharded; tied ones by each name. Collective with fsdp
        and `read_as`; otherwise rank 0 may call it alone."""
        self.require_current()
        if self.sync.shards_weights or self.sync.holds_rounded:
            self.world.calls.record("Replica.state_dict")
        self.wait_for_params()
        weights = {**self.sync.full_weights(), **self.buffers()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            weights.setdefault(name, weights[names[parameter]])
        return {mistakes.plain(name): tensor for name, tensor in weights.items()}

    def wait_for_params(self) -> None:
        """Waits until the model has the weights of the last update: without `waits_at_once` they may still be
        arriving. Forward passes and paceline's own functions wait by themselves."""
        self.sync.wait_for_params()

    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the groups of all optimizers, in their order."""
        return self.updates.param_groups()

    # ---- inside ----

    @property
    def begun_from(self) -> BegunFrom | None:
        """Where the open step of a loop began; None between steps."""
        return None if self.open_step is None else self._begun_from

    def _one_pass(self, batches: Share, max_steps: int | None) -> Iterator[Step]:
        drawn = batches.resumed()
        while True:
            states = generators.states(self.world.device) if self.copies else None
            begun_from = BegunFrom(batches, batches.state_dict(), states)
            if (batch := next(drawn, None)) is None:
                return
            step = self.step(batch)
            self._begun_from = begun_from
            try:
                yield step
            except GeneratorExit:  # the script left its loop by `break`
                batches.leave()
                raise
            if self.open_step is not None:
                raise mistake("a step of replica.steps had no step.finish(): call it once in each step")
            if self._is_over(batches, max_steps, None):
                return

    def _is_over(self, batches: Share, max_steps: int | None, epochs: int | None) -> bool:
        has_steps = max_steps is not None and self.num_steps >= max_steps
        return self.stop_reason is not None or has_steps or (epochs is not None and batches.epoch >= epochs)

    @contextmanager
    def _stopping(self, on_signals: bool) -> Iterator[None]:
        """While open, signals set the stop flag, if asked for. After a stop they still do: they must not end the save
        that follows."""
        if on_signals and self.stop is None:
            self.stop = StopRequest().__enter__()
        is_at_end = False
        try:
            yield
            is_at_end = True
        except GeneratorExit:  # the script left its loop by `break`
            is_at_end = True
            raise
        finally:
            # A flag that was set after the last step's exchange ends the next loop.
            has_flag = self.stop_reason is not None or (is_at_end and self.vote != 0)
            self._is_stopped = self._is_stopped or self.stop_reason is not None
            if on_signals and not has_flag:
                self._forget_stop()

    def _forget_stop(self) -> None:
        if self.stop is not None:
            self.stop.__exit__(None, None, None)
        self.stop, self.stop_reason, self._is_stopped = None, None, False


def _number(name: str, value: Any) -> float:
    """Returns what an evaluation's function gave. Raises UserError for what is not one number."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise mistake(
            f"the function of an evaluation gave {name or 'a tensor'}, of shape {list(value.shape)}: "
            "return one number, such as its mean"
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise mistake(
            f"the function of an evaluation gave {name or 'its loss'} as a {type(value).__name__}: return one "
            "number, such as its mean"
        ) from None


def _call(function: Callable[..., Any], micro_batch: Any) -> tuple[Any, float | None]:
    """Calls a script's function with the items of a tuple or list as arguments, but for a list of samples that are
    tuples. Returns (value, weight); weight is None if the function returns none."""
    is_unpacked = isinstance(micro_batch, list | tuple) and not hasattr(micro_batch, "_fields")
    arguments = micro_batch if is_unpacked and not is_samples(micro_batch) else [micro_batch]
    try:
        returned = function(*arguments)
    except TypeError:
        _require_fits(function, arguments)
        raise
    if not isinstance(returned, tuple):
        return returned, None
    value, *others = returned
    weight = others[0] if len(others) == 1 else None
    is_number = isinstance(weight, int | float | np.number) or (
        isinstance(weight, torch.Tensor) and weight.numel() == 1
    )
    if not is_number:
        raise mistake(
            "the function of a micro-batch returned a tuple that is not (mean loss, weight): return the loss alone, or "
            f"the loss and the number of items in its mean, not {len(returned)} values such as (loss, logits)"
        )
    return value, float(cast(float, weight))


def _require_fits(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Raises UserError if the function does not take these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        kinds = listed([type(argument).__name__ for argument in arguments])
        raise mistake(
            f"the function of a micro-batch was called with ({kinds}): {error}. The items of a tuple or a list are its "
            "arguments, and a list of samples that are tuples is one argument. Several micro-batches of a step go into "
            "paceline.Batch([...])"
        ) from error


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
