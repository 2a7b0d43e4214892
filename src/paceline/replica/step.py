"""One update, top to bottom: micro-batches -> losses -> gradients -> sums over ranks -> update.

    step = replica.step(batch)                   # or: for step in replica.steps(loader)
    for x, y in step:                            # this rank's micro-batches; none perhaps
        step.backward(criterion(model(x), y))    # all-reduce overlaps with the last one's backward pass
    result = step.finish(max_norm=1.0)           # every rank calls it

Gradients are sums, never means of means. Each micro-batch's mean loss is multiplied by its weight (samples or tokens),
and the sum over all ranks is divided by the total weight. Backward divides by the total if it is given, else by an
estimate: the last step's total, scaled by the batch's rows if known. After backward the ranks learn the true total, and
clipping multiplies by estimate / total. The factor is exactly 1 if weights are rows or batches are alike.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.base.sums import exact_sum
from paceline.optim.clip import clip_
from paceline.replica import agreement, generators, mistakes
from paceline.replica.batch import Batch, Pass, num_rows
from paceline.replica.model import ReplicatedModel
from paceline.replica.result import NO_WEIGHT, Exchanged, Rows, StepClock, StepResult, Trouble, exchange, find_trouble
from paceline.replica.stopping import why_to_stop
from paceline.sync.replicas import flip_a_bit
from paceline.world.calls import mistake


class Step:
    """One update. Every rank makes it; a rank without a micro-batch only calls `finish`."""

    def __init__(self, replica: ReplicatedModel, batch: Batch, total: float | None = None):
        """Use Replica.step or Replica.steps. total: weight of the global batch, if known."""
        if batch.observe is not None and replica.sync.shards_weights:
            raise mistake(
                'shares="auto" needs each rank\'s own time, and with strategy fsdp ranks wait for each '
                "other inside every pass: give numbers, or take strategy zero"
            )
        self.number = replica.num_steps + 1
        """The number of this update, from 1."""
        self.result: StepResult | None = None
        """What `finish` returned; None before it."""
        self.lr = 0.0
        """The first param group's learning rate, as it was in `finish`."""
        self.rows: range | None = None
        """Rows of the global batch in the current micro-batch; None: not known."""
        self._replica, self._batch = replica, batch
        self._digests = agreement.digests_before(replica)
        self._clock = StepClock(replica.clock, replica.world.group, replica.sync.take_codec_ms)
        self._is_total_given, self._total = total is not None, total or 0.0
        self._divisor = replica.total_before * (batch.num_rows or 1) if total is None else total  # of losses
        # float16 has no room for gradients of losses that a first estimate of 1 divides.
        self._needs_first_weights = replica.scaler.is_dynamic and total is None and not replica.num_steps
        replica.sync.is_one_pass = batch.passes == 1
        replica.sync.loss_factor = replica.scaler.scale / self._divisor
        self._weight = 0.0  # of this rank's micro-batches so far
        self._num_losses = 0  # that had step.backward, of this rank's own micro-batches
        self._weight_before: float | None = None  # of the micro-batch's earlier loss
        self._max_norm = 0.0
        self._loss_sum: torch.Tensor | None = None  # sum of losses times weights
        self._unweighted: set[int] = set()  # numbers of rows of micro-batches without a weight
        self._draws: list[torch.Tensor] = []  # for the whole batch, in the order of draws; reused by all micro-batches
        self._num_draws = 0  # of the current micro-batch
        is_first = replica.num_steps == 0 and total is None and batch.rows is None
        self._digest = mistakes.digest_of(batch.micro_batches[0]) if is_first and batch.micro_batches else 0
        # The current pass. A script may call backward for its only micro-batch without iterating over the step.
        rows = batch.rows[0] if batch.rows else None
        known_rows = num_rows(batch.micro_batches[0]) if batch.micro_batches else None
        only = Pass(None, rows, known_rows, is_real=True, is_last=True)
        self._current: Pass | None = only if len(batch) <= 1 else None
        self._has_loss = self._is_iterating = False  # it had a backward pass; the script is in the loop
        self._stage = "backward"  # then "launched", "reduced", "over"; "failed" until a pass has ended
        self._unused: Sequence[str] = ()
        self._rows = Rows([], [], [], [])  # by rank, after the all-gather

    def __len__(self) -> int:
        return len(self._batch)

    @property
    def is_begun(self) -> bool:
        """Whether the step has had a backward pass, or a part of one."""
        return self._loss_sum is not None or self._stage == "failed"

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's micro-batches, on its device, under autocast if the replica has a `dtype`; with fsdp then
        dummies of weight 0, so that all ranks make equally many passes."""
        replica = self._replica
        replica.at("data")
        for one in self._batch.passes_of(replica.sync, replica.world):
            self._current, self.rows, self._has_loss, self._num_draws = one, one.rows, False, 0
            self._clock.end("data")
            replica.at("forward")
            self._is_iterating = True
            try:
                with replica.autocast():
                    yield one.micro_batch
            finally:  # also if the script breaks the loop
                self._is_iterating = False
            if self._current is not None:
                raise mistake(
                    "a micro-batch had no step.backward(loss)"
                    + (" that was its last: leave more=True out of that" if self._has_loss else "")
                )
        if self._loss_sum is None:
            self._clock.end("data")

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, *, more: bool = False, is_sum: bool = False
    ) -> None:
        """Makes a backward pass from the micro-batch's mean loss, a scalar.

        weight: number of items in the mean, such as unmasked tokens; None: the micro-batch's rows if known, else 1.
        0: the micro-batch contributes nothing, whatever its loss is. more: another backward of this micro-batch
        follows; the step's loss is the sum of both losses, which have one weight. is_sum: the loss is a sum over
        `weight` items, not their mean.

        Communicates in the last micro-batch's last pass only. Raises UserError for mistakes that would train wrongly.
        """
        replica, current = self._replica, self._require_micro_batch()
        mistakes.check_loss(loss, len(self), replica.num_steps == 0, replica.world)
        weight = self._weight_of(current, weight, is_sum)
        self._check_losses(weight, more)
        self._estimate_total(weight * max(1, len(self)) if current.is_real else 0.0)
        factor = 1.0 if is_sum and weight else weight
        is_last, calls = current.is_last and not more, replica.world.calls
        if is_last:
            mistakes.check_order(replica, calls)
            calls.reducing = replica
        self._clock.end("forward")
        fault = replica.at("backward")
        self._stage = "failed"
        scaled = loss * (factor * replica.scaler.scale / self._divisor)
        others = calls.num_replicas > 1 and not replica.sync.shards_weights
        with replica.autocast(enabled=False):  # a pass without weight still says which parameters the step used
            replica.gradients.backward(
                scaled, is_last=is_last, may_pass_others=others, has_weight=weight > 0, fault=fault
            )
        self._stage = "launched" if is_last else "backward"
        self._clock.end("backward")
        term = loss.detach().to(torch.promote_types(loss.dtype, torch.float32) if is_sum else replica.exact_dtype)
        term = term * factor if factor else torch.zeros_like(term)
        self._loss_sum = term if self._loss_sum is None else self._loss_sum + term
        self._has_loss = True
        self._num_losses += current.is_real
        if not more:
            self._weight += weight
            self._current = None

    def finish(self, max_norm: float = 0.0, *, numbers: Sequence[float] = ()) -> StepResult:
        """Sums gradients over ranks, clips them, updates the model and clears the gradients. Collective: called once a
        step, also by a rank without a micro-batch.

        max_norm: gradients are shrunk to this global norm; 0: the norm is only measured. numbers: a few of this rank,
        as many on each; `result.numbers` has all ranks', without another collective. If a gradient is not finite,
        or all weights are 0, no rank updates. Raises UserError on all ranks if micro-batches of different sizes would
        have equal weight, or if learning rates or other numbers of the step differ between ranks.
        """
        replica, sync = self._replica, self._replica.sync
        replica.world.calls.record("Step.finish", replica)
        self._require_complete("finish")
        self._max_norm, numbers = mistakes.checked_norm(max_norm), list(map(float, numbers))
        self.lr = float(replica.updates.param_groups()[0].get("lr", 0.0))

        # ---- sum over ranks, clip ----
        if self._stage == "reduced":  # the script may have changed them
            dropped = [name for name, parameter in replica.gradients.trained.items() if parameter.grad is None]
            self._unused = [*self._unused, *dropped]  # set to None by the script: unchanged, as in one process
            gradients, scale = sync.changed_gradients(), 1.0
            if numbers and not self._is_total_given:
                self._rows = self._rows._replace(numbers=replica.world.group.share(numbers))
        else:
            gradients, scale = self._sum_gradients(numbers), self._scale()
        norm = clip_(gradients, self._max_norm, scale, sync.total)
        self._clock.end("reduce")

        # ---- update this rank's part ----
        is_empty = not self._is_total_given and not self._total
        is_queued = replica.world.group.is_queued and replica.updates.can_skip and not is_empty
        if is_queued:  # the GPU skips the update itself: the host waits once a step, here
            self._update(norm.isfinite())
            self._publish()
            self._clock.end("optim")
            norm = self._read(norm)
        if self._is_total_given:  # before weights are sent: on the same link, numbers behind them would wait for all
            replica.at("exchange")
            self._exchange([], numbers)
            mistakes.check_total(self._rows.exchanged)
        trouble = None
        if is_empty or not math.isfinite(norm):
            trouble = NO_WEIGHT if is_empty else find_trouble(sync, replica.world.group)
            if is_queued:
                replica.updates.skipped()
            replica.wait_copied()
        elif not is_queued:
            self._update()
        if is_empty:
            self._say_empty()
        else:
            replica.scaler.observe(trouble is not None)
        self._clock.end("optim")

        # ---- publish the weights ----
        if trouble is None and not is_queued:
            self._publish()
        weights = (self._weight, self._total) if trouble is None else (0.0, 0.0)
        sync.end_step(*weights)  # a step that all ranks skip is no step of a round
        return self._close(float(norm), trouble)

    def reduce(self) -> None:
        """Sums the gradients over ranks, for scripts that read or change them; else `finish` does it. Collective.

        Afterwards `.grad` is the gradient of the mean loss over the global batch, on all ranks; a script may change it
        before `finish`. With zero this costs an all-gather of the gradients; with fsdp `.grad` is a DTensor, one shard
        on each rank.
        """
        self._replica.world.calls.record("Step.reduce", self._replica)
        self._require_complete("reduce")
        self._sum_gradients(())
        self._replica.gradients.expose(self._scale())
        self._stage = "reduced"

    def draw(self, function: Callable[..., torch.Tensor], *size: int, **options: Any) -> torch.Tensor:
        """Returns this micro-batch's rows of a random tensor for the whole global batch, on this rank's device: row r
        of the global batch gets the same numbers at any number of ranks.

        step.draw(torch.randn, 100) has shape (rows of this micro-batch, 100). `function(rows, *size, **options)` is
        called once a step on each rank for all rows, and must draw from the CPU's global generator, which ranks seed
        alike. Raises UserError if the source does not say which rows these are.
        """
        if self.rows is None or self._batch.num_rows is None:
            raise mistake(
                "step.draw is used in `for ... in step` over what paceline.share or replica.steps deals "
                "out: only then a micro-batch knows its rows"
            )
        if self._num_draws == len(self._draws):
            self._draws.append(function(self._batch.num_rows, *size, **options))
        self._num_draws += 1
        return self._draws[self._num_draws - 1][self.rows.start : self.rows.stop].to(self._replica.world.device)

    # ---- inside ----

    def _sum_gradients(self, numbers: Sequence[float]) -> list[torch.Tensor]:
        """Returns this rank's flat gradients, summed over ranks, along with the total weight if unknown. Collective."""
        replica = self._replica
        self._estimate_total(0.0)  # a rank without a micro-batch
        replica.gradients.reveal()
        replica.updates.check_groups()
        replica.at("reduce")
        gradients, used = replica.gradients.reduce()
        replica.world.calls.reducing = None
        if not self._is_total_given:
            self._exchange(used, numbers)
            self._total = exact_sum([row.weight for row in self._rows.exchanged])
            self._unused = replica.gradients.unused(self._rows.used)
            num_trained, is_first = len(replica.gradients.trained), replica.num_steps == 0
            mistakes.check_step(self._rows.exchanged, self._unused, num_trained, is_first, replica.world)
        return gradients

    def _estimate_total(self, weight: float) -> None:
        """Takes the first step's divisor in float16 from all ranks' first micro-batches, before a gradient is sent:
        collective. weight: what this rank's micro-batches weigh if all are like its first."""
        if not self._needs_first_weights:
            return
        self._needs_first_weights = False
        replica = self._replica
        self._divisor = exact_sum(row[0] for row in replica.world.group.share([weight])) or self._divisor
        replica.sync.loss_factor = replica.scaler.scale / self._divisor

    def _exchange(self, used: Sequence[float], numbers: Sequence[float]) -> None:
        """Makes the step's one small all-gather."""
        replica = self._replica
        loss_sum = 0.0 if self._loss_sum is None else float(self._loss_sum)  # may wait for the device: before the times
        self._before_update = self._clock.times()
        exchanged = Exchanged(
            loss_sum=loss_sum,
            weight=self._weight,
            vote=replica.vote,
            least_rows=min(self._unweighted, default=-1),
            most_rows=max(self._unweighted, default=-1),
            digest=float(self._digest),
            drawn_from=float(generators.digest(replica.world.device)) if self._draws else 0.0,
            total=self._total,
            num_losses=self._num_losses,
            settings=float(agreement.digest_of_numbers(replica, self._max_norm)),
            weights=float(agreement.overall(self._digests)),
        )
        times = self._before_update.with_update(replica.update_ms)
        self._rows = exchange(replica.world.group, exchanged, times, used, numbers)
        agreement.require_equal_numbers(self._rows.exchanged, replica, self._max_norm)
        agreement.require_equal_weights(self._rows.exchanged, replica, self._digests)

    def _update(self, is_finite: torch.Tensor | None = None) -> None:
        """Updates this rank's part. Parameters that no rank used stay unchanged, as in one process; with local all of a
        rank that had nothing to learn from: decay and momentum alone would move them."""
        replica = self._replica
        is_idle = replica.sync.diverges and not self._weight
        replica.at("update")
        replica.wait_copied()
        unused = list(replica.gradients.trained) if is_idle else self._unused
        replica.updates.make(unused, is_finite)

    def _publish(self) -> None:
        """Begins to send the updated weights."""
        sync = self._replica.sync
        fault = self._replica.at("publish")
        sync.publish()
        if fault == "flip":
            flip_a_bit(next(iter((sync.on_all_ranks() or sync.weights()).values())))

    def _read(self, norm: torch.Tensor) -> torch.Tensor:
        """Copies the norm and the sum of losses to the host, in one wait for all that the GPU has to do."""
        loss_sum = norm if self._loss_sum is None else self._loss_sum.to(norm.dtype)
        on_host = torch.stack([norm, loss_sum]).to("cpu", non_blocking=True)
        self._replica.clock.finish()
        if self._loss_sum is not None:
            self._loss_sum = on_host[1]
        return on_host[0]

    def _scale(self) -> float:
        """Returns the divisor of the summed gradients: loss scale, and true total / estimate. Called once a step."""
        if not self._total:  # the gradients are 0
            return 1.0
        weight_here = self._weight if self._replica.sync.diverges else 0.0
        return self._replica.scaler.scale * (weight_here or self._total) / self._divisor

    def _close(self, norm: float, trouble: Trouble | None) -> StepResult:
        """Ends the update, on all ranks alike. Collective where buffers or generators may differ."""
        replica, rows, total = self._replica, self._rows.exchanged, self._total
        self._stage = "over"
        if total and not self._is_total_given:
            replica.total_before = total / (self._batch.num_rows or 1)
        if replica.waits_at_once:
            replica.sync.wait_for_params()
        replica.batch_fraction = self._weight / total if total else 1 / replica.world.world_size
        replica.average_statistics()
        if len({row.drawn_from for row in rows}) > 1:  # a rank without a micro-batch has not drawn
            source = next(rank for rank, row in enumerate(rows) if row.drawn_from)
            generators.agree(replica.world.group, replica.world.device, source)
        if not replica.num_steps and (problem := replica.updates.not_kept()):
            mistakes.warn(f"{problem}, so a checkpoint will be refused; take another optimizer", replica.world)
        replica.num_steps += 1
        replica.mark_left()
        replica.open_step, replica.has_dropped = None, False
        replica.stop_reason = why_to_stop([row.vote for row in rows])
        if self._batch.observe is not None:
            self._batch.observe(self._rows.times)
        times = self._clock.times()
        replica.update_ms = times.optim_ms - self._before_update.optim_ms
        self.result = StepResult(
            loss=exact_sum([row.loss_sum for row in rows]) / total if total else math.nan,
            grad_norm=norm,
            weight=total,
            weights=[row.weight for row in rows],
            skipped=trouble,
            stop_reason=replica.stop_reason,
            numbers=self._rows.numbers,
            times=times,
            by_rank=self._rows.times,
        )
        return self.result

    def _say_empty(self) -> None:
        """Warns of the first step without an update because nothing had weight, as when a batch has no label."""
        if not self._replica.has_said_empty:
            mistakes.warn(
                f"all weights of step {self.number} were 0 (a batch without labels?), so it made no update and its "
                "loss is not a number; said once",
                self._replica.world,
            )
        self._replica.has_said_empty = True

    # ---- checks ----

    def _require_complete(self, verb: str) -> None:
        if self._stage == "over" or (verb == "reduce" and self._stage == "reduced"):
            raise mistake(f"step.{verb}() was called twice for one step")
        if self._replica.open_step is not self:
            raise mistake(
                f"step.{verb}() of step {self.number}: another step was begun since, and this one was dropped"
            )
        if self._is_iterating:
            raise mistake(
                f"step.{verb}() is inside the loop over the step's micro-batches, where a rank that has "
                "fewer of them would call it less often: call it after that loop, once a step"
            )
        if self._stage in ("backward", "failed") and (self.is_begun or len(self)):
            raise mistake(
                f"step.{verb}() came before the last micro-batch had its step.backward(loss): go through "
                "all of `for ... in step` first"
            )

    def _require_micro_batch(self) -> Pass:
        if self._stage == "failed":
            raise mistake("a backward pass of this step failed and left a part of its gradients: begin another loop")
        if self._stage != "backward":
            raise mistake(
                f"step.backward was called again after the last one of step {self.number}: pass more=True to "
                "all losses of a micro-batch but the last, or add them up; call step.finish() once after the loop"
            )
        if self._current is None:
            done = "already had its step.backward: pass more=True to all losses but the last, or add them up"
            none = "was not drawn: go through them by `for ... in step`"
            raise mistake(f"this micro-batch {done if self._is_iterating else none}")
        return self._current

    def _check_losses(self, weight: float, more: bool) -> None:
        """Raises UserError if this loss of a micro-batch cannot follow the one before."""
        before, self._weight_before = self._weight_before, weight if more else None
        if before not in (None, weight):
            raise mistake(
                f"a micro-batch has losses of weights {before} and {weight}, and a step divides by one: give both "
                "the same, or make one backward of a / num_a + b / num_b"
            )
        if more and self._replica.has_rounded_gradients:
            raise mistake(
                "more=True makes several backward passes of a micro-batch, and rounded_gradients= holds for one: add "
                "the losses up for one backward, or leave rounded_gradients out"
            )

    def _weight_of(self, current: Pass, weight: float | None, is_sum: bool) -> float:
        if not current.is_real:
            return 0.0
        if weight is None and is_sum and current.rows is None:
            raise mistake("is_sum=True without weight= leaves open how many items the sum has: give their number")
        if weight is None and current.rows is None and current.num_rows is not None:
            self._unweighted.add(current.num_rows)
        if weight is None:
            weight = 1.0 if current.rows is None else len(current.rows)
        if not (math.isfinite(weight) and weight >= 0):
            raise mistake(f"the weight of a micro-batch is {weight}; it is a number of samples or tokens")
        return float(weight)
