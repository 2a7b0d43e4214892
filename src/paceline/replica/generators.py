"""The global random generators of a process: torch's, the device's, numpy's and Python's, as text and back. Also those
that a script's objects, such as samplers, keep to themselves."""

import base64
import json
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

from paceline.base.seeds import key
from paceline.world.group import Group

States = tuple[Any, ...]
CPU = torch.device("cpu")
_NUMPY = [np.random.MT19937(0)]  # free to replace numpy's global generator inside `seeded`: one for each level


def states(device: torch.device) -> States:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device, np.random.get_state(), random.getstate()


def put_back(kept: States, device: torch.device) -> None:
    torch.set_rng_state(kept[0])
    if kept[1] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(kept[1], device)
    np.random.set_state(kept[2])
    random.setstate(kept[3])


def digest(device: torch.device) -> int:
    """Returns a hash of torch's states, at least 1."""
    on_cpu, on_device, *_ = states(device)
    return zlib.crc32(on_cpu.numpy().data, 0 if on_device is None else zlib.crc32(on_device.numpy().data)) or 1


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Restores the global generators at the end, so that draws inside have no effect outside."""
    before = states(device)
    try:
        yield
    finally:
        put_back(before, device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws inside, on the CPU, depend on the seed alone; afterwards the global generators are as before, except the
    second half of a pair that numpy's randn may have cached. Half as slow as `aside`."""
    outside = torch.get_rng_state(), np.random.mtrand.get_bit_generator(), random.getstate()
    inside = _NUMPY.pop() if _NUMPY else np.random.MT19937(0)
    np.random.mtrand.set_bit_generator(inside)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(outside[0])
        np.random.mtrand.set_bit_generator(outside[1])
        random.setstate(outside[2])
        _NUMPY.append(inside)


def drawn_from(source_states: States, items: Iterator[Any]) -> Iterator[Any]:
    """Yields the items of an iterator that draws from global generators, which are in `source_states` when it starts.
    Between items the script's own generators are in place."""
    while True:
        with aside(CPU):
            put_back(source_states, CPU)
            head = list(islice(items, 1))
            source_states = states(CPU)
        if not head:
            return
        yield head[0]


def advanced(here: States, begun: States, end: States) -> States:
    """Returns `here`, with `end` for each generator that is in the state `begun`."""
    was, is_now = (json.loads(to_text(each)) for each in (begun, here))
    same = [was[name] == is_now[name] for name in ("torch", "cuda", "numpy", "random")]
    return tuple(after if is_same else now for now, after, is_same in zip(here, end, same, strict=True))


def agree(group: Group, device: torch.device, source: int = 0) -> None:
    """Copies the global generators of the rank `source` to all ranks. Collective."""
    here = to_text(states(device))
    rows = group.share_integers([key(here)])
    if any(row != rows[0] for row in rows):
        put_back(from_text(group.broadcast_json(here, source)), device)


def to_text(kept: States) -> str:
    cpu, on_device, (name, keys, position, has_gauss, gauss), (version, words, next_gauss) = kept
    return json.dumps(
        {
            "torch": _text(bytes(cpu.numpy())),
            "cuda": None if on_device is None else _text(bytes(on_device.numpy())),
            "numpy": [name, _text(keys.tobytes()), int(position), int(has_gauss), float(gauss)],
            "random": [version, _text(np.array(words, dtype=np.uint32).tobytes()), next_gauss],
        }
    )


def from_text(text: str) -> States:
    kept = json.loads(text)
    name, keys, position, has_gauss, gauss = kept["numpy"]
    version, words, next_gauss = kept["random"]
    numpy_state = (name, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, gauss)
    python_state = (version, tuple(np.frombuffer(base64.b64decode(words), dtype=np.uint32).tolist()), next_gauss)
    on_device = None if kept["cuda"] is None else state_of(kept["cuda"])
    return state_of(kept["torch"]), on_device, numpy_state, python_state


def text_of(generator: torch.Generator) -> str:
    return _text(bytes(generator.get_state().numpy()))


def state_of(text: str) -> torch.Tensor:
    """Returns the state that `text_of` wrote, for `set_state`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class ScriptState:
    """The random generators that some objects of a script have as attributes, and the numbers there that have changed
    since this was made, such as a count of epochs."""

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._numbers = self._all_numbers()
        self.at_first = self.now()

    def now(self) -> dict[str, Any]:
        """Returns the states, as JSON, by the object's place and the attribute's name."""
        numbers = {name: value for name, value in self._all_numbers().items() if self._numbers.get(name) != value}
        drawing = {name: _state_of(value) for name, value in self._attributes() if isinstance(value, _GENERATORS)}
        return {**numbers, **json.loads(json.dumps(drawing, default=np.ndarray.tolist))}

    def changed(self) -> list[str]:
        """Returns the names of attributes that are not as they were when this was made."""
        now = self.now()
        return sorted({name.partition(".")[2] for name in now if now[name] != self.at_first.get(name)})

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restores what `now` returned. Numbers that had not changed then get their first value."""
        for name, value in {**self._numbers, **state}.items():
            place, _, attribute = name.partition(".")
            thing = self._objects[int(place)]
            current = vars(thing).get(attribute)
            if isinstance(current, _GENERATORS):
                _set_state(current, value)
            elif current != value:
                setattr(thing, attribute, value)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for place, thing in enumerate(self._objects):
            yield from ((f"{place}.{name}", value) for name, value in getattr(thing, "__dict__", {}).items())

    def _all_numbers(self) -> dict[str, int | float]:
        numbers = {name: value for name, value in self._attributes() if type(value) in (int, float)}
        return {name: value for name, value in numbers.items() if value == value}  # NaN would always have changed


_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return text_of(generator)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state_of(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    else:
        generator.set_state(state)
