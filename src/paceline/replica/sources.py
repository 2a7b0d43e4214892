"""Samples for each rank: `Share`, the position in passes over a source; functions as sources. datasets.py has torch's
data sets.

Random numbers while reading: torch seeds a DataLoader's workers, each rank's differently. Without workers, a single
process draws from the script's global generators, as with a plain DataLoader. Several ranks draw different numbers, so
that their augmentations differ, and the script's generators stay equal on all ranks. Streams and lanes draw the same
numbers at any number of ranks.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, count, islice
from typing import Any

from paceline.base.seeds import key
from paceline.replica import generators
from paceline.replica.batch import Batch, Split, copied, tensors_in
from paceline.replica.mistakes import digest_of
from paceline.world.calls import mistake
from paceline.world.runtime import World

Drawn = dict[str, Any]  # random choices of one pass; JSON, the same on all ranks
Collate = Callable[[list[Any]], Any]


class Share:
    """This rank's micro-batches, step by step. Each `for` starts a new pass, as over a DataLoader; `replica.steps`
    resumes an unfinished one."""

    is_endless = False
    """Whether a pass never ends (a function that draws micro-batches)."""
    is_named = False
    """Whether paceline.Checkpoints has it by a name."""
    _compared = _advice = ""  # what ranks compare at each step, and the advice if they differ
    _remedy = ""  # the advice if a resume does not find the place

    def __init__(
        self, dataset: Any, world: World, split: Split, num_steps: int, deciding: Sequence[Any] = (), **facts: Any
    ) -> None:
        """Use paceline.share. num_steps: in a pass; -1: not known. deciding: objects of the script whose generators and
        counts decide the order. facts: identify a position's source; JSON, the same on all ranks."""
        self.dataset = dataset
        """The DataLoader's data set, the data set, or the function."""
        self.epoch = 0
        """Completed passes."""
        self.step = 0
        """Steps yielded in the current pass."""
        self._world, self._split, self._num_steps, self.facts = world, split, num_steps, facts
        self._pass = 0  # number of the current pass, counting unfinished ones
        self._drawn: Drawn | None = None  # for the current pass; None: not begun
        self._is_loaded = False  # position from a checkpoint; the next `for` resumes there
        self._is_left = False  # the current pass must not be resumed
        self._iterator = 0  # number of the newest iterator; older ones must not continue
        self._last: Any = None  # a drawn micro-batch, for `peek`
        self._script_state = generators.ScriptState(*deciding)
        self._seen: int | None = None  # digest of the newest step, if ranks compare their samples
        self._is_checking = False  # the next digest must be `_seen`: that of the last step before a restored position

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares of a batch, by rank; empty: equal."""
        return self._split.shares

    def __len__(self) -> int:
        """Steps in a pass. Raises TypeError if not known: for a function and some samplers."""
        if self._num_steps < 0:
            raise TypeError("how many steps a pass has is known at its end: the source does not say it")
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches of each step, which may be none. Starts a new pass, except that the first
        after `load_state_dict` resumes.

        Collective at the start of a pass; for samplers, streams and functions in each step, too: 16 bytes a rank.
        """
        if not self._is_loaded:
            self.leave()
        number = self._iterator + 1
        try:
            yield from self.resumed()
        except GeneratorExit:  # `break`
            if number == self._iterator:
                self.leave()
            raise

    def rewound(self) -> "Share":
        """Returns itself, before its first pass."""
        self._pass, self.epoch, self.step, self._drawn, self._is_left = 0, 0, 0, None, False
        self._script_state.put_back(self._script_state.at_first)
        return self

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Rewinds: each evaluation reads the same samples. At the end the script's generators and counts are as before,
        since training may use them, too."""
        before = self._script_state.now()
        try:
            self.rewound()
            yield
        finally:
            self._script_state.put_back(before)

    def leave(self) -> None:
        """Called after `break`: the next pass starts anew. A checkpoint still has the position of this one."""
        self._is_left = self._drawn is not None

    def resumed(self) -> Iterator[Batch]:
        """Yields the remaining batches of the current pass; of a new one if none is open."""
        if self._is_left:
            self._pass, self.step, self._drawn = self._pass + 1, 0, None
        self._is_loaded = self._is_left = False
        self._iterator += 1
        number = self._iterator
        self._world.calls.record("share")
        if self._drawn is None:
            drawn = self._begin(self._pass)
            self._drawn = {**drawn, "own": self._world.group.broadcast_json(self._script_state.now())}
        self._script_state.put_back(self._drawn.get("own", {}))
        for batch in self._steps(self._pass, self.step, self._drawn):
            self.step += 1
            batch.dealt_by = self
            yield batch
            if number != self._iterator:
                raise mistake(
                    "this pass is stale: another one was started, or a checkpoint was restored; start a new pass"
                )
            batch.drain()
        self._pass, self.epoch, self.step, self._drawn = self._pass + 1, self.epoch + 1, 0, None

    def flat(self) -> Iterator[Any]:
        """Yields this rank's micro-batches of one pass, not grouped by step: for reading without training."""
        for batch in self:
            yield from batch.draw()

    def peek(self) -> Any:
        """Returns a sample micro-batch, to look at shapes. Uses nothing up, except of a function with a state of its
        own, such as the next() of an iterator."""
        if self._last is not None:
            return self._last
        with generators.aside(generators.CPU):
            return self._example()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and a description of the source; JSON, the same on all ranks at the same step."""
        position = {"epoch": self.epoch, "pass": self._pass, "step": self.step, "drawn": self._drawn}
        between_passes = {"own": self._script_state.now()} if self._drawn is None else {}
        return {**position, **between_passes, "seen": self._seen, "shares": list(self.shares), "of": dict(self.facts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass begin at this state's position; world size and micro-batch size may differ. Raises
        UserError, naming the difference, for another source, batch size or seed."""
        try:
            epoch, number, step = int(state["epoch"]), int(state["pass"]), int(state["step"])
            drawn, of = state["drawn"], dict(state["of"])
        except (KeyError, TypeError, ValueError) as error:
            raise mistake(f"this is not the position of a share: {short(state)}") from error
        for name, here in self.facts.items():
            if of.get(name) != here:
                raise mistake(
                    f"the saved position is one with {name} {short(of.get(name))}, here it is "
                    f"{short(here)}, so the order would differ; give what was given then (to replica.steps: the same "
                    "sources in the same order), or start from the beginning"
                )
        self._split.restore(state.get("shares", ()))
        self.epoch, self._pass, self.step, self._drawn = epoch, number, step, drawn
        self._script_state.put_back(state.get("own", {}))
        self._seen = state.get("seen")
        self._is_checking = bool(step) and self._seen is not None
        self._is_loaded, self._is_left = True, False
        self._iterator += 1

    # ---- by kind of source ----

    def _begin(self, number: int) -> Drawn:
        """Returns the random choices of pass `number`. Collective."""
        return {}

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        """Yields this rank's part of each batch of pass `number` from step `first` on; equally many on all ranks."""
        raise NotImplementedError

    def _example(self) -> Any:
        """Returns a micro-batch to look at."""
        raise NotImplementedError

    def _share_integers(self, *numbers: int) -> list[list[int]]:
        self._world.calls.record("share")
        return self._world.group.share_integers(list(numbers))

    def _require_same(self, step: int, digest: int | None) -> None:
        """Raises UserError on all ranks if one drew something else, or its pass ended (None). Collective."""
        rows = self._share_integers(int(digest is not None), digest or 0)
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            (here, _), (there, _) = rows[0], rows[other]
            does = "ends" if not there else f"gives other {self._compared}" if here else "continues"
            raise mistake(
                f"{self.facts['source']} {does} on rank {other} at step {step} of the epoch, unlike rank 0: "
                f"{self._advice}",
                reach="world",
            )
        self._require_place(digest)

    def _require_place(self, digest: int | None) -> None:
        """Raises UserError on all ranks if the last step before a restored position is now another than it was."""
        if self._is_checking and digest != self._seen:
            raise mistake(
                f"{self.facts['source']} cannot continue in the pass where the checkpoint was saved: read again, step "
                f"{self.step - 1} of the pass has other samples, so its order depends on something that is not saved. "
                f"To make it repeatable {self._remedy}",
                reach="world",
            )
        self._is_checking, self._seen = False, digest


class FunctionShare(Share):
    """A function that draws one random micro-batch a call. Every rank calls it for all micro-batches of a step, so that
    all draw the same numbers, and keeps its own.

    As in a loop that fetches one micro-batch ahead (nanoGPT's), the first of a step is drawn before the script gets the
    step, the others during it. So draws of the script, as for an evaluation, come in between. After a restore the
    global generators are where they were. A function that begins anew all the same, such as the next() of an iterator,
    is called as often as before the save.
    """

    is_endless = True

    def __init__(self, function: Callable[[], Any], world: World, split: Split, num_micro_batches: int) -> None:
        facts: dict[str, Any] = {"source": "a function", "micro_batches": num_micro_batches}
        super().__init__(function, world, split, -1, **facts)
        self._count = num_micro_batches
        self._num_calls = 0  # by this process
        self._first: int | None = None  # digest of the run's first micro-batch; `_seen`: of the newest step's first

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._first = state.get("first")

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        self._equalise_generators()
        ahead = self._find_place(first) if self._is_checking else []
        for step in count(first):
            plan = self._split.plan(self._count, (number, step))
            rows_here = plan.micro_batches(self._world.rank)
            self._equalise_generators()  # dropout may have drawn more on some ranks
            self._last = ahead.pop() if ahead else self._call()
            self._seen = _digest(self._last)
            self._first = self._seen if self._first is None else self._first
            draw = partial(self._draw, self._last, rows_here)
            batch = Batch(draw, count=len(rows_here), passes=plan.passes, stand_in=self.peek)
            batch.observe = self._split.observer((number, step), plan)
            yield batch

    def _call(self) -> Any:
        self._num_calls += 1
        return self.dataset()

    def _equalise_generators(self) -> None:
        """Copies rank 0's global generators to all ranks. Collective."""
        self._world.calls.record("share")
        generators.agree(self._world.group, generators.CPU)

    def _draw(self, first: Any, rows_here: list[range]) -> Iterator[Any]:
        """Yields this rank's micro-batches of a step. All are drawn now, while the ranks' generators are equal; a
        single process draws each when needed, with dropout in between, as in a plain loop. Collective."""
        drawn = chain([first], (self._call() for _ in range(self._count - 1)))
        if self._world.world_size == 1:
            return drawn
        self._equalise_generators()
        numbers = {rows.start for rows in rows_here}
        # Copied at once: the function may fill one buffer again and again.
        return iter([copied(micro_batch) for number, micro_batch in enumerate(drawn) if number in numbers])

    def _find_place(self, first: int) -> list[Any]:
        """Returns the next micro-batch, if one was drawn to find out whether the function is where it was at step
        `first`. Raises UserError if it cannot be put there."""
        self._is_checking = False
        called_before, device = self._num_calls, self._world.device
        states = generators.states(device)
        micro_batch = self._call()
        calls = [_digest(micro_batch)]  # now: the next call may fill the same memory
        if not called_before and calls[0] != self._first:
            return [micro_batch]  # it does not begin anew: it draws at random, or the script has put it back
        generators.put_back(states, device)
        micro_batch = self._call()
        calls.append(_digest(micro_batch))
        if calls[0] == calls[1]:
            return [micro_batch]  # it depends on the global generators alone
        if not called_before:
            calls += [_digest(self._call()) for _ in range(2, first * self._count)]
        generators.put_back(states, device)
        if called_before or len(calls) > first * self._count or calls[(first - 1) * self._count] != self._seen:
            raise mistake(
                f"{kind(self.dataset)} cannot continue at step {first}, where the checkpoint was saved: it depends on "
                "more than the global random generators, and "
                + ("has been called since" if called_before else "calling it as often as then gives other samples")
                + ". Give share a function (lane, num_lanes) -> iterator of samples, which a resume reads again, or "
                "keep its state in paceline.Checkpoints and train by replica.step(paceline.Batch([...]))"
            )
        return []

    def _example(self) -> Any:
        return self._call()


def _digest(micro_batch: Any) -> int:
    """Returns a hash of the first rows of a micro-batch's tensors; of all of it, such as arrays, if it has none."""
    first_rows = [tensor[:1] if tensor.ndim else tensor for tensor in tensors_in(micro_batch)]
    return digest_of(first_rows) if first_rows else sample_digest(micro_batch)


class LaneShare(Share):
    """An iterator of samples (lane) for each row of the batch; this rank runs the lanes of its rows."""

    _remedy = (
        "have the function begin anew at each call, and draw from the global generators or by its parameters alone"
    )

    def __init__(
        self, function: Callable[..., Iterator[Any]], world: World, split: Split, collate: Collate, **facts: Any
    ) -> None:
        """facts: batch_size, drop_last and seed."""
        super().__init__(function, world, split, -1, (function,), source="lanes", **facts)
        self._collate = collate
        self._samples: list[Any] = []  # of the last micro-batch

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        size, rank = self.facts["batch_size"], self._world.rank
        begins_at = first - self._is_checking  # the step before shows whether the lanes give what they gave then
        lanes_of = [[self._open(lane, number, begins_at) for lane in rows] for rows in self._split(size)]
        for step in count(begins_at):
            with generators.seeded(0):  # on a rank without lanes, too, what numpy has cached is lost
                micro_batches = [[sample for lane in lanes for sample in islice(lane, 1)] for lanes in lanes_of]
            micro_batches = [samples for samples in micro_batches if samples]
            counts = self._share_integers(
                sum(map(len, micro_batches)),
                len(micro_batches),
                sample_digest(micro_batches[0][0]) if micro_batches else 0,
            )
            num_rows = sum(rows for rows, *_ in counts)
            self._require_place(next((digest for rows, _, digest in counts if rows), None))
            if step < first:
                continue
            if num_rows == 0 or (self.facts["drop_last"] and num_rows < size):
                return
            self._samples = micro_batches[0] if micro_batches else self._samples
            ends = list(accumulate(map(len, micro_batches), initial=sum(rows for rows, *_ in counts[:rank])))
            yield Batch(
                partial(map, self._collate, micro_batches),
                rows=list(map(range, ends, ends[1:])),
                num_rows=num_rows,
                passes=max(passes for _, passes, _ in counts),
                stand_in=self.peek,
            )

    def _example(self) -> Any:
        return self._collate(self._samples or list(islice(self._open(0, 0, 0), 1)))

    def _open(self, lane: int, epoch: int, first: int) -> Iterator[Any]:
        """Opens the lane at step `first`: earlier samples are drawn and skipped."""
        size, seed = self.facts["batch_size"], self.facts["seed"]
        known = inspect.signature(self.dataset).parameters
        wanted = {"epoch": epoch, "seed": seed}
        with generators.seeded(key(seed, "lanes", epoch, lane)):
            samples = self.dataset(lane, size, **{name: wanted[name] for name in wanted if name in known})
        if not isinstance(samples, Iterable):
            raise mistake(
                f"{kind(self.dataset)}({lane}, {size}) gave a {kind(samples)}; a function that is shared "
                "returns an iterator over the samples of its lane"
            )
        return islice(_seeded(iter(samples), seed, "lanes", epoch, lane), first, None)


def sample_digest(sample: Any) -> int:
    """Returns a hash of a sample's numbers, texts and tensors."""
    return key(json.dumps(sample, default=digest_of, skipkeys=True))


def _seeded(samples: Iterator[Any], *parts: int | str) -> Iterator[Any]:
    """Each sample is drawn with generators seeded by the parts and its number: the same at any number of ranks, and
    after a resume."""
    for number in count():
        with generators.seeded(key(*parts, number)):
            head = list(islice(samples, 1))
        if not head:
            return
        yield head[0]


def kind(thing: Any) -> str:
    """Returns the name of its class; of a function, its own name."""
    return str(thing.__qualname__ if inspect.isroutine(thing) else type(thing).__qualname__)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
