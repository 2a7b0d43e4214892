"""Who draws the same random numbers as another: found out once, at the first step, and said.

Torch seeds worker w of a DataLoader with base_seed + w, and draws base_seed from the global generator, which a script
seeds alike on all ranks so that they build one model. `share` therefore gives its DataLoader a generator of its own,
seeded by rank too. What is left is what a script does itself: a worker_init_fn that seeds by worker or by a constant;
a data set that makes a generator when it is made, of which each worker has a copy; or, without workers, one that draws
from what all ranks seeded alike. Every sample is still there once, only cropped, flipped and masked like the one beside
it, and no loss curve tells.

So each worker writes digests of its generators' states into shared memory when it has begun, and the ranks compare.
"""

import functools
import hashlib
import inspect
import json
import random
import signal
import sys
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from paceline.world.group import Group

_GLOBAL = ("torch", "numpy", "random")
_REMEDIES = {  # global generator -> how a worker seeds it, how a process does
    "torch": ("torch.manual_seed(seed)", "torch.manual_seed(seed + world.rank)"),
    "numpy": ("np.random.seed(seed % 2**32)", "np.random.seed(seed + world.rank)"),
    "random": ("random.seed(seed)", "random.seed(seed + world.rank)"),
}
_STOPS = ("SIGINT", "SIGHUP", "SIGUSR1")
_PATIENCE_S = 20.0  # for the other workers once one has given a batch: under spawn each imports torch first
_DEPTH, _MOST_PARTS, _MOST_THINGS = 4, 50, 500  # how far a data set is looked through for generators
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generators:
    """The generators that reading a data set may draw from: the global ones, and those that it holds itself, found in
    its attributes and theirs (a transform's, those in a list of transforms)."""

    def __init__(self, data: Any) -> None:
        self.names = [*_GLOBAL, *_held(data)]

    def digests(self, data: Any) -> list[int]:
        """Returns a digest of the state of each, by `names`; 0 where it is not there any more. 0.2 ms."""
        held = _held(data)
        states = [
            torch.get_rng_state().numpy().tobytes(),
            _text(np.random.get_state(legacy=False)),
            repr(random.getstate()).encode(),
            *(_state(held[name]) if name in held else b"" for name in self.names[len(_GLOBAL) :]),
        ]
        return [_digest(state) if state else 0 for state in states]


def moved(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Returns the digests before of what has another state since; 0 for what has not, which is not compared."""
    return [was if was != now else 0 for was, now in zip(before, after, strict=True)]


def _digest(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1 | 1


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return repr(generator.getstate()).encode()
    if isinstance(generator, np.random.Generator):
        return _text(generator.bit_generator.state)
    return _text(generator.get_state(legacy=False))


def _text(state: Any) -> bytes:
    with np.printoptions(threshold=sys.maxsize):
        return repr(state).encode()


def _held(data: Any) -> dict[str, Any]:
    """The generators in an object, by such as `.transform.rng`; in the order of a search that is widest first."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    left = deque([("", data)])
    while left and len(seen) < _MOST_THINGS:
        path, thing = left.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _KINDS):
            if thing is not torch.default_generator and not isinstance(thing, random.SystemRandom):
                found[path] = thing
        elif path.count(".") + path.count("[") < _DEPTH:
            left.extend((path + step, part) for step, part in _parts(thing))
    return found


def _parts(thing: Any) -> list[tuple[str, Any]]:
    """What to look at next; none of the script's code is run by looking."""
    if isinstance(thing, torch.Tensor | np.ndarray | type | types.ModuleType) or inspect.isroutine(thing):
        return []
    if type(thing) in (list, tuple):
        return [(f"[{i}]", part) for i, part in enumerate(thing[:_MOST_PARTS])]
    if type(thing) is dict:
        return [(f"[{name!r}]", part) for name, part in islice(thing.items(), _MOST_PARTS) if isinstance(name, str)]
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return [(f".{name}", part) for name, part in attributes.items()]


class Telling:
    """What a DataLoader's workers tell of their generators: `init` is their worker_init_fn and `collate` their
    collate_fn, which call the script's own.

    It travels into workers by fork, forkserver and spawn where the script's functions do: what they write to are
    tensors in shared memory.
    """

    def __init__(
        self, data: Any, init: Callable[[int], Any] | None, collate: Callable[[Any], Any], num_workers: int
    ) -> None:
        self.generators = Generators(data)
        self.script_init, self._script_collate = init, collate
        num = len(self.generators.names)
        self._digests = torch.zeros(num_workers, num, dtype=torch.int64)
        self._has_told = torch.zeros(num_workers, dtype=torch.bool)
        self._drawn = torch.zeros(num, dtype=torch.bool)  # by some worker since it began
        for tensor in (self._digests, self._has_told, self._drawn):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._is_watching = True

    def init(self, worker: int) -> None:
        """Called in a worker when torch has seeded it.

        A worker takes no notice of what asks its rank for a stop, which a terminal sends to all processes: the rank
        goes on to the end of its step, and needs it. SIGTERM is torch's way of ending a worker, and stays.
        """
        for name in _STOPS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if self.script_init is not None:
            self.script_init(worker)
        self._digests[worker] = torch.tensor(self._now())
        self._has_told[worker] = True

    def collate(self, samples: Any) -> Any:
        """Called in a worker with the samples of a micro-batch; the first time tells what reading them drew from."""
        if self._is_watching:
            self._is_watching = False
            worker = get_worker_info()
            if worker is not None:
                self._drawn |= self._digests[worker.id] != torch.tensor(self._now())
        return self._script_collate(samples)

    def _now(self) -> list[int]:
        worker = get_worker_info()
        return self.generators.digests(None if worker is None else worker.dataset)

    def rows(self) -> list[list[int]]:
        """Returns the digests by worker when all have told, 0 for one that has not after 20 s; of a generator in the
        data set also 0 where nobody drew from it. Called when a worker has given a micro-batch."""
        deadline = time.monotonic() + _PATIENCE_S
        while not bool(self._has_told.all()) and time.monotonic() < deadline:
            time.sleep(0.002)
        counts = self._drawn.clone()
        counts[: len(_GLOBAL)] = True  # a mistake in worker_init_fn is one before it does harm
        rows: list[list[int]] = (self._digests * counts).tolist()
        return rows


@dataclass(frozen=True)
class Told:
    """What a rank tells of its generators."""

    names: list[str]
    in_workers: bool
    rows: list[list[int]]  # a digest for each name, 0: not to be compared; a row for each worker, or the process's


def warn_of_alike(group: Group, told: Told, data: Any, init: Any) -> None:
    """Warns on rank 0 where two workers or two ranks have a generator in the same state. Collective.

    data: what is read; init: the script's worker_init_fn, or None. The warning names the one that is to be changed,
    with file and line.
    """
    answers = [json.loads(text) for text in group.share_text(json.dumps([told.in_workers, told.rows]))]
    if group.rank != 0:
        return
    alike: dict[str, list[str]] = {}
    for column, name in enumerate(told.names):
        places: dict[int, list[str]] = {}
        for rank, (in_workers, rows) in enumerate(answers):
            for worker, row in enumerate(rows):
                place = f"worker {worker} of rank {rank}" if in_workers else f"rank {rank}"
                places.setdefault(row[column] if column < len(row) else 0, []).append(place)
        groups = [who for digest, who in places.items() if digest and len(who) > 1]
        if groups:
            alike[name] = max(groups, key=len)
    in_workers = any(in_workers for in_workers, _ in answers)
    _warn_of_global({name: who for name, who in alike.items() if name in _GLOBAL}, data, init, in_workers)
    _warn_of_held({name: who for name, who in alike.items() if name not in _GLOBAL}, data)


def _warn_of_global(alike: dict[str, list[str]], data: Any, init: Any, in_workers: bool) -> None:
    if not alike:
        return
    names = " and ".join(alike)
    remedies = "; ".join(_REMEDIES[name][0 if in_workers else 1] for name in alike)
    if in_workers:
        does = f"leaves the generator of {names} in the same state in {_them(alike)}"
        remedy = f"seed from torch.utils.data.get_worker_info().seed, which differs by worker and rank ({remedies})"
    else:
        does = f"draws from the generator of {names}, which is in the same state on {_them(alike)}"
        remedy = f"seed it by rank once the model is built ({remedies})"
    _warn(data if init is None else init, does, remedy)


def _warn_of_held(alike: dict[str, list[str]], data: Any) -> None:
    if alike:
        does = f"draws from {' and '.join(alike)}, a generator of its own in the same state in {_them(alike)}"
        remedy = "make it where it is first used, from torch.initial_seed(), or for each sample from its number"
        _warn(data, does, remedy)


def _them(alike: Mapping[str, list[str]]) -> str:
    who = max(alike.values(), key=len)
    return " and ".join(who) if len(who) < 4 else f"{', '.join(who[:3])} and {len(who) - 3} more"


def _warn(culprit: Any, does: str, remedy: str) -> None:
    file, line = _where(culprit)
    message = f"{_name(culprit)} ({file}:{line}) {does}, so they draw the same numbers and augment alike; {remedy}"
    warnings.warn_explicit(message, UserWarning, file, line)


def _name(culprit: Any) -> str:
    """A function's name, or that of an object's class, with the module's."""
    if isinstance(culprit, functools.partial):
        return _name(culprit.func)
    if inspect.isroutine(culprit):
        return f"{culprit.__module__}.{culprit.__qualname__}"
    return f"{type(culprit).__module__}.{type(culprit).__qualname__}"


def _where(culprit: Any) -> tuple[str, int]:
    """The file and the line of a function, or of an object's class; what has no source is `<unknown>`, line 1."""
    while isinstance(culprit, functools.partial):
        culprit = culprit.func
    code = getattr(inspect.unwrap(culprit), "__code__", None) if callable(culprit) else None
    if code is not None:
        return code.co_filename, code.co_firstlineno
    kind = culprit if isinstance(culprit, type) else type(culprit)
    try:
        return inspect.getsourcefile(kind) or "<unknown>", inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return "<unknown>", 1
