"""What a checkpoint stores of each object: JSON in its manifest, and tensors by name.

A replica's tensors are named `NAME:parameter` and `NAME:parameter/moment`, without the prefix if the replica has no
name (`paceline train`). Tensors of other objects are named `NAME.key`, kind "extra".

With strategy local, `parameter` is the anchor's. Each rank saves its own moments, `parameter/moment@RANK`, its own
weights, `parameter/own@RANK`, and the anchor's momentum, `parameter/outer@RANK`. A world of the same size restores
them. In another world, every rank begins with their average; with another strategy, with the anchor and the average
moments.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.base import seeds
from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.checkpoint.encode import decode, encode
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.shards import dtype_of
from paceline.optim.optimizer import ParamSlice
from paceline.replica import generators
from paceline.replica.agreement import HOW_COMPUTED
from paceline.replica.mistakes import plain
from paceline.replica.replica import BegunFrom, Replica
from paceline.replica.share import Share
from paceline.replica.updates import LossScaler, like, stored_as
from paceline.sync.replicas import digests, fill
from paceline.world.calls import mistake

Receive = Callable[[Kind, Mapping[Slice, torch.dtype]], dict[Slice, torch.Tensor]]  # reads from a checkpoint


# ---- a replica ----


class ReplicaContents:
    """A replica's weights, buffers, optimizer state and settings. `prefix` starts every name."""

    def __init__(self, replica: Replica, name: str, keeps_frozen: bool = True):
        """keeps_frozen: a save has the parameters that were frozen when the replica was made; False: their digest."""
        self.replica, self.prefix, self._keeps_frozen = replica, f"{name}:" if name else "", keeps_frozen
        self._digest_of_frozen = 0, 0  # the sum of their versions, and the digest

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shapes of the parameters and buffers that a save has."""
        left_out = {} if self._keeps_frozen else self._frozen()
        return {name: shape for name, shape in self._all_shapes().items() if name not in left_out}

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        named = {**dict(self.replica.model.named_parameters()), **self.replica.buffers()}
        return {self._kept_name(name): tuple(tensor.shape) for name, tensor in named.items()}

    def _frozen(self) -> dict[str, torch.Tensor]:
        """The parameters that were frozen when the replica was made."""
        trained = self.replica.gradients.trained
        named = self.replica.model.named_parameters()
        return {self._kept_name(name): p.detach() for name, p in named if name not in trained and p.numel()}

    def _of_frozen(self) -> int:
        """Returns a digest of the frozen parameters, computed again only if torch counts a change of them."""
        frozen = self._frozen()
        version = 1 + sum(tensor._version for tensor in frozen.values())
        if version != self._digest_of_frozen[0]:
            self._digest_of_frozen = version, seeds.key("frozen", repr(sorted(digests(frozen).items())))
        return self._digest_of_frozen[1]

    def weights(self) -> dict[Slice, torch.Tensor]:
        """The weights that this rank updates, not copied."""
        return self._kept(self.replica.sync.weights())

    def constants(self, has_frozen: bool | None = None) -> dict[Slice, torch.Tensor]:
        """What no optimizer updates: buffers, parameters that were frozen when the replica was made, and those without
        an element; equal on all ranks. has_frozen: the checkpoint has frozen ones; None: that to be saved."""
        parameters, trained = self.replica.model.named_parameters(), self.replica.gradients.trained
        named = {n: p for n, p in parameters if not (n in trained and p.numel())} | self.replica.buffers()
        kept = {self._kept_name(name): tensor for name, tensor in named.items()}
        has_frozen = self._keeps_frozen if has_frozen is None else has_frozen
        left_out = {} if has_frozen else self._frozen()
        return {Slice(name, 0, t.numel()): _flat(t) for name, t in kept.items() if name not in left_out}

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        """What must be equal on all ranks, by name: parameters, if each rank has them all, and buffers."""
        named = {**self.replica.sync.on_all_ranks(), **self.replica.buffers()}
        return {self._kept_name(name): tensor.detach() for name, tensor in named.items()}

    def state(self) -> tuple[dict[Slice, torch.Tensor], dict[str, tuple[int, ...]], dict[str, Any]]:
        """This rank's optimizer state: tensors, the shapes that differ from their parameter's, and numbers."""
        tensors: dict[Slice, torch.Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        numbers: dict[str, Any] = {}
        mark = f"@{self.replica.world.rank}" if self.replica.sync.diverges else ""  # each rank has its own
        for part, optimizer, _ in self.replica.updates.owned():
            for key, value in optimizer.state.get(part.parameter, {}).items():
                name = f"{self._kept_name(part.name)}/{key}{mark}"
                kind = stored_as(key, value, part)
                if kind == "moment":
                    tensors[Slice(name, part.start, part.stop)] = _flat(value)
                elif kind == "number":
                    numbers[name] = value.item() if isinstance(value, torch.Tensor) else value
                elif kind == "tensor":
                    tensors[Slice(name, 0, value.numel())] = _flat(value)
                    shapes[name] = tuple(value.shape)
        return tensors, shapes, numbers

    def facts(self) -> dict[str, Any]:
        """Returns the manifest's entry: optimizer settings, data position, loss scale."""
        replica = self.replica
        return {
            "num_steps": replica.num_steps,
            "strategy": replica.strategy,
            "optimizers": [type(optimizer).__name__ for optimizer in replica.optimizers],
            "groups": [[_settings(group) for group in optimizer.param_groups] for optimizer in replica.optimizers],
            "total_before": replica.total_before,
            **({} if self._keeps_frozen else {"frozen": self._of_frozen()}),
            "scaler": dataclasses.asdict(replica.scaler),
            **replica.sources.kept(lambda share: _position(share, replica.begun_from)),
        }

    def check(self, where: str, kept: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Raises UserError if the checkpoint has another model or other optimizers, before anything is changed. stored:
        name of a weight -> shape and dtype."""
        here = self._all_shapes()
        there = {name: tuple(spec["shape"]) for name, spec in stored.items() if name.startswith(self.prefix)}
        if "frozen" in kept:
            if self._keeps_frozen:
                raise UserError(f"{where} was saved with frozen=False: give it here, too", reach="world")
            if kept["frozen"] != self._of_frozen():
                raise UserError(
                    f"{where} was saved without the frozen weights (frozen=False), and they are other ones here: load "
                    "the model that was trained then before you make optimizer and Replica",
                    reach="world",
                )
            here = self.shapes()
        if different := [name for name in [*here, *there] if here.get(name) != there.get(name)]:
            name = different[0]
            said = [f"{list(shapes[name])}" if name in shapes else "not there" for shapes in (there, here)]
            raise UserError(
                f"{where} is of another model: {name.removeprefix(self.prefix)} is {said[0]} in it and {said[1]} here",
                reach="world",
            )
        optimizers = self.replica.optimizers
        names = [type(optimizer).__name__ for optimizer in optimizers]
        if kept["optimizers"] != names:
            raise UserError(f"{where} has the state of {kept['optimizers']}, and here are {names}", reach="world")
        for name, optimizer, groups in zip(names, optimizers, kept["groups"], strict=True):
            if len(groups) != (num_groups := len(optimizer.param_groups)):
                raise UserError(
                    f"{where} has {len(groups)} parameter groups of {name}, and here are {num_groups}", reach="world"
                )

    def take_weights(self, receive: Receive, kept: Mapping[str, Any]) -> None:
        """Fills weights and buffers from the checkpoint. kept: see `facts`. Collective."""
        replica = self.replica
        replica.wait_for_params()
        replica.wait_copied()
        weights, constants = self.weights(), self.constants(has_frozen="frozen" not in kept)
        # A tensor in another memory order (channels_last) is copied when flattened, so the tensor itself is set.
        whole = self.on_all_ranks()
        targets = {
            item: weights[item] if item in weights and replica.sync.shards_state else whole[item.name]
            for item in (*weights, *constants)
            if item.num_elements
        }
        flats = receive("weights", {item: target.dtype for item, target in targets.items()})
        for item, target in targets.items():
            fill(target, flats[item].view(target.shape))

    def take_state(self, receive: Receive, stored: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Fills the optimizer state from the checkpoint. Collective. stored: tensor name -> shape and dtype."""
        sources = self._sources(numbers)
        by_parameter = _by_parameter([*stored, *numbers], sources)
        for optimizer in self.replica.optimizers:
            optimizer.state.clear()
        wanted: dict[Slice, tuple[ParamSlice, Any, str, tuple[int, ...]]] = {}
        for part, optimizer, group in self.replica.updates.owned():
            for key, name in by_parameter.get(self._kept_name(part.name), []):
                if name in numbers:
                    number = _number(optimizer, group, part, numbers[name])
                    optimizer.state.setdefault(part.parameter, {})[key] = number
                elif (shape := tuple(stored[name]["shape"])) == tuple(part.shape):
                    wanted[Slice(name, part.start, part.stop)] = part, optimizer, key, tuple(part.parameter.shape)
                else:
                    wanted[Slice(name, 0, math.prod(shape))] = part, optimizer, key, shape
        flats = receive("optimizer", {item: dtype_of(stored[item.name]["dtype"]) for item in wanted})
        for item, (part, optimizer, key, shape) in wanted.items():
            tensor = like(part.parameter, flats.pop(item).to(part.parameter.device).view(shape))
            state = optimizer.state.setdefault(part.parameter, {})
            state[key] = tensor if len(sources) == 1 else state.get(key, 0) + tensor / len(sources)

    def _sources(self, numbers: Mapping[str, Any]) -> list[str]:
        """Returns the ends of the names of the state to restore: this rank's own, or all ranks', to be averaged."""
        start = f"{self.prefix}/progress@"
        marks = [f"@{name.removeprefix(start)}" for name in numbers if name.startswith(start)]
        world = self.replica.world
        is_same = self.replica.sync.diverges and len(marks) == world.world_size
        return [f"@{world.rank}"] if is_same else marks or [""]

    def private_state(self) -> tuple[dict[Slice, torch.Tensor], dict[str, Any]]:
        """What this rank's later steps depend on besides: tensors and numbers."""
        tensors, numbers = self.replica.sync.private_state()
        return self._kept(tensors), {self.prefix + key: number for key, number in numbers.items()}

    def take_private_state(
        self, receive: Receive, stored: Mapping[str, Any], numbers: Mapping[str, Any], kept: Mapping[str, Any]
    ) -> None:
        """After weights and state: restores it, and gives the weights to all ranks. Collective."""
        replica = self.replica
        plain_names = {self._kept_name(name): name for name in replica.gradients.trained}
        names: dict[str, str] = {}  # as the strategy knows them -> in the checkpoint
        for name in stored:
            owner, _, key = name.rpartition("/")
            if owner in plain_names:
                names[f"{plain_names[owner]}/{key}"] = name

        def fetch(keys: Collection[str]) -> dict[str, torch.Tensor]:
            items = {key: Slice(names[key], 0, math.prod(stored[names[key]]["shape"])) for key in keys}
            flats = receive("optimizer", {item: dtype_of(stored[item.name]["dtype"]) for item in items.values()})
            return {key: flats[item] for key, item in items.items()}

        told = {key.removeprefix(self.prefix): number for key, number in numbers.items() if key.startswith(self.prefix)}
        told.setdefault("/loss_factor", kept.get("loss_factor", 1.0))  # where earlier versions have it
        replica.sync.restore(names, told, fetch)
        replica.wait_for_params()
        replica.statistics.remember()

    def take_facts(self, kept: Mapping[str, Any]) -> None:
        """Restores optimizer settings, number of steps, data positions and loss scale."""
        replica = self.replica
        for optimizer, groups in zip(replica.optimizers, kept["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    if key in HOW_COMPUTED:  # the script's, which may run on another device
                        continue
                    group[key] = _restored(group.get(key), value)
        replica.num_steps, replica.total_before = kept["num_steps"], kept["total_before"]
        if replica.scaler.is_dynamic and kept["scaler"].get("is_dynamic"):  # else the dtype has changed
            replica.scaler = LossScaler(**kept["scaler"])
        replica.sources.restore(kept)

    def _kept(self, tensors: Mapping[Slice, torch.Tensor]) -> dict[Slice, torch.Tensor]:
        return {Slice(self._kept_name(item.name), item.start, item.stop): tensor for item, tensor in tensors.items()}

    def _kept_name(self, name: str) -> str:
        return self.prefix + plain(name)


def _by_parameter(names: Sequence[str], sources: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Returns parameter -> (key, name) of the optimizer state of these sources, see ReplicaContents._sources."""
    names_of: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        parameter, _, ending = name.rpartition("/")
        key, mark, rank = ending.partition("@")
        is_private = key.startswith("wire.") or (mark and key in ("own", "outer"))  # of a strategy
        if not is_private and mark + rank in sources:
            names_of.setdefault(parameter, []).append((key, name))
    return names_of


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that JSON can hold, numbers of torch and numpy as Python's."""
    settings = {key: _as_python(value) for key, value in group.items() if key != "params"}
    return {key: value for key, value in settings.items() if isinstance(value, int | float | str | list | None)}


def _as_python(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_python(item) for item in value]
    is_number = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if is_number else value


def _restored(here: Any, value: Any) -> Any:
    """Returns a setting as a checkpoint has it; a tensor that is here is filled."""
    if isinstance(here, torch.Tensor):
        return here.fill_(value)
    if isinstance(value, list):
        items_here = here if isinstance(here, list | tuple) and len(here) == len(value) else [None] * len(value)
        return tuple(map(_restored, items_here, value))
    return value


def _position(share: Share, begun: BegunFrom | None) -> dict[str, Any]:
    """The data position at the beginning of the current step, or now."""
    return begun.position if begun is not None and begun.batches is share else share.state_dict()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _number(optimizer: Any, group: Mapping[str, Any], part: ParamSlice, value: Any) -> Any:
    """Returns a number of the state, such as Adam's step, on the device and in the dtype that torch's rule gives it."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(value, float):
        return value
    on_device = group.get("capturable") or group.get("fused")
    is_double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    dtype = torch.float64 if is_double else torch.float32
    number = torch.tensor(value, dtype=dtype, device=part.parameter.device if on_device else "cpu")
    return value if number.isfinite() and float(number) != value else number  # of more bits: Python's, in a script's


# ---- anything with a state ----


def check_object(name: str, thing: Any) -> None:
    """Raises UserError for an object that has no state to save."""
    has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    if not (isinstance(thing, dict | torch.Generator) or has_state):
        raise mistake(
            f"{name} is a {type(thing).__name__}, which has no state_dict() and load_state_dict(): give a "
            "Replica, a module, a schedule, a generator, what paceline.share returned, or a dict of JSON values"
        )


def kept_of(name: str, thing: Any, begun: BegunFrom | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns (JSON, tensors by name) of an object. begun: the data position at the beginning of the current step.
    Raises UserError if its state has anything but JSON values, tensors and arrays."""
    if isinstance(thing, torch.Generator):
        return generators.text_of(thing), {}
    if isinstance(thing, Share):
        state: Any = _position(thing, begun)
    else:
        state = thing if isinstance(thing, dict) else thing.state_dict()
    try:
        return encode(state, name)
    except (TypeError, ValueError):
        raise mistake(
            f"{name} cannot be kept: its state is to be made of numbers, texts, lists, dicts and tensors; "
            f"it is a {type(thing).__name__}"
        ) from None


def restore_to(thing: Any, kept: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restores an object from what `kept_of` returned."""
    if isinstance(thing, torch.Generator):
        thing.set_state(generators.state_of(kept))
    elif isinstance(thing, dict):
        thing.clear()
        thing.update(decode(kept, tensors))
    else:
        thing.load_state_dict(decode(kept, tensors))
