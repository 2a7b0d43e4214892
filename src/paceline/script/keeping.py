"""A script's checkpoints: the same files as a run's, which any number of ranks and any strategy reads.

What the manifest has besides: the optimizers' settings and the numbers in their state, the generators' states, and what
the script gave, all as JSON.
"""

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import torch

from paceline import __version__
from paceline.base import ownership
from paceline.base.errors import RunError, UserError
from paceline.base.ownership import Slice
from paceline.checkpoint import load, save
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.save import Saver
from paceline.checkpoint.seers import open_saver, who_sees
from paceline.record.console import cry
from paceline.script.joining import at_leaving
from paceline.script.mistakes import plain, warn
from paceline.sync.replicas import differences
from paceline.world.calls import place

if TYPE_CHECKING:
    from paceline.script.replica import Replica

_LOCK = ".script.lock"
_OPEN: dict[Path, "Keeper"] = {}  # by folder: a notebook's cell makes its replica again
_PAIRS = "(key, value)"  # what a dict with keys that are no texts is kept under


class Keeper:
    """One replica's part in saving and restoring."""

    def __init__(self, replica: "Replica"):
        self._replica, self._world, self._group = replica, replica.world, replica.world.group
        self._folder: Path | None = None
        self._saver: Saver | None = None
        self._seers: list[int] = []
        self._lock: filelock.BaseFileLock | None = None
        self._problem: str | None = None  # of the last save that ended

    # ---- during steps ----

    def before_update(self) -> None:
        """Returns when weights may change: whoever copies them is done."""
        if self._saver is not None:
            self._saver.wait_copied()

    def tell(self) -> None:
        """Says, once, how a save ended that failed. Training goes on."""
        outcome = self._saver.take_outcome() if self._saver is not None else None
        if outcome is None or not self._world.is_main:
            return
        self._problem = outcome.problem
        if outcome.problem:
            cry(f"the checkpoint of step {outcome.step} could not be saved: {outcome.problem}")

    def after_first_update(self) -> None:
        """Warns, before hours have gone into it, of state that no save will keep."""
        if problem := self._not_kept():
            warn(
                f"{problem}, so replica.save will refuse; take another optimizer where the run is to be kept",
                self._world,
            )

    def _finish(self) -> None:
        """At the end of the script: the last save is on the disk, or that is an error."""
        if self._saver is not None:
            self._saver.finish()
            self.tell()
            if self._problem:
                raise RunError(f"the last checkpoint could not be saved: {self._problem}")

    # ---- save ----

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """See Replica.save."""
        given = {name: _as_json(name, value) for name, value in state.items()}
        saver = self._open(folder)
        saver.finish()
        if self._world.is_main:
            self._make_room(folder / "checkpoints", given)
        self._group.barrier()  # a writer sweeps away what it takes for unfinished
        self.tell()
        replica, sync = self._replica, self._replica.sync
        sync.settle()
        # Copied here: a forward changes batch norms' while weights, which it does not change, are still being copied.
        named = replica.buffers().items()
        buffers = {Slice(plain(name), 0, buffer.numel()): _flat(buffer).clone() for name, buffer in named}
        weights = {_plain(item): tensor for item, tensor in sync.weights().items()}
        self._require_equal({item.name: t for item, t in ({} if sync.shards_weights else weights | buffers).items()})
        moments, scalars = self._state()
        facts = {
            "num_updates": replica.num_steps,
            "world_size": self._world.world_size,
            "versions": {"paceline": __version__, "torch": torch.__version__},
            "script": {
                "optimizers": [type(optimizer).__name__ for optimizer in replica.optimizers],
                "groups": self._settings(),
                "scalars": scalars,
                "total_before": replica.total_before,
                "generators": self._generators(),
                "given": given,
                "objects": [name for name, value in state.items() if hasattr(value, "state_dict")],
            },
        }
        whole = buffers if sync.shards_weights else weights | buffers
        parts = self._my_part(whole) | (weights if sync.shards_weights else {})
        state_parts = moments if sync.shards_state else self._my_part(moments)
        saver.begin(replica.num_steps, parts, state_parts, self._shapes(), facts)

    def _open(self, folder: Path) -> Saver:
        """The saver into this folder, which all ranks open together the first time."""
        if self._saver is not None and folder == self._folder:
            return self._saver
        if self._saver is not None and self._saver.begun_at is not None:
            raise UserError(f"{place()}: this replica keeps its checkpoints in {self._folder}, not in {folder}")
        self._close()  # restored from another folder, as for fine-tuning, which others may use
        if (earlier := _OPEN.get(folder.resolve())) is not None:  # another replica of this process, done with
            earlier._close()
        problem: str | None = None
        if self._world.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = filelock.FileLock(folder / _LOCK)
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                problem = f"{folder} is in use by another process; give each run a folder of its own"
            except OSError as error:
                problem = f"cannot write to {folder}: {error.strerror}"
        if problem := self._group.broadcast_json(problem):
            raise UserError(problem, reach="world")
        with contextlib.suppress(OSError):  # on a host that does not see rank 0's
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._seers, token = who_sees(self._group, folder)
        owns_alone = self._replica.sync.shards_state
        checkpoints, config = folder / "checkpoints", CheckpointConfig()
        self._saver = open_saver(self._group, checkpoints, config, self._seers, token, owns_alone=owns_alone)
        _OPEN[folder.resolve()] = self
        at_leaving(self._finish)
        return self._saver

    def _close(self) -> None:
        """The folder may be another's: the last save into it is done."""
        self._finish()
        if self._lock is not None:
            self._lock.release()
        if self._folder is not None:
            _OPEN.pop(self._folder.resolve(), None)
        self._saver = self._lock = self._folder = None

    def _make_room(self, checkpoints: Path, given: Mapping[str, Any]) -> None:
        """Where this step was saved with other values, that checkpoint counts no longer: one that is there is not
        written again."""
        step = self._replica.num_steps
        with contextlib.suppress(mf.Damaged, OSError):
            kept = mf.read_manifest(checkpoints / mf.folder_name(step))
            if kept.get("script", {}).get("given") != given:
                earlier = [number for number in mf.list_steps(checkpoints) if number < step]
                save.set_aside(checkpoints, max(earlier, default=-1))

    def _require_equal(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if found := differences(tensors, self._group, quick=True):
            raise RunError(
                f"{place()}: replicas are not equal, so nothing is saved: {found[0]}. A buffer that each rank changes "
                "by its own data, or weights that the script changed on one rank, must be made equal",
                reach="world",
            )

    def _my_part(self, tensors: Mapping[Slice, torch.Tensor]) -> dict[Slice, torch.Tensor]:
        """What this rank writes of tensors that all have: equal parts for the ranks that see the folder."""
        if self._world.rank not in self._seers:
            return {}
        by_name = {item.name: tensor for item, tensor in tensors.items()}
        mine = ownership.cut(tensors, len(self._seers))[self._seers.index(self._world.rank)]
        return {item: by_name[item.name][item.start : item.stop] for item in mine}

    def _state(self) -> tuple[dict[Slice, torch.Tensor], dict[str, float]]:
        """This rank's state of the optimizers: tensors by element, and the numbers of all ranks. Collective."""
        moments: dict[Slice, torch.Tensor] = {}
        mine: dict[str, float] = {}
        for piece, optimizer in self._updated():
            for key, value in optimizer.state.get(piece.parameter, {}).items():
                name = f"{plain(piece.name)}/{key}"
                if _is_moment(key, value, piece):
                    moments[Slice(name, piece.start, piece.stop)] = _flat(value)
                elif _is_number(value):
                    mine[name] = float(value)
        rows = [json.loads(text) for text in self._group.share_text(json.dumps([self._not_kept(), mine]))]
        if problem := next(filter(None, (row[0] for row in rows)), ""):
            raise UserError(f"{place()}: {problem}, and cannot be kept", reach="world")
        return moments, {name: value for _, scalars in rows for name, value in scalars.items()}

    def _not_kept(self) -> str:
        """The first state of an optimizer on this rank that has no place in a checkpoint; empty where all has."""
        for piece, optimizer in self._updated():
            for key, value in optimizer.state.get(piece.parameter, {}).items():
                if not (_is_moment(key, value, piece) or _is_number(value)):
                    return f"{type(optimizer).__name__}'s state {key} of {piece.name} is not one number an element"
        return ""

    def _settings(self) -> list[list[dict[str, Any]]]:
        """The optimizers' groups, without their parameters."""
        return [
            [
                {
                    key: float(value) if isinstance(value, torch.Tensor) else value
                    for key, value in group.items()
                    if isinstance(value, int | float | str | list | tuple | torch.Tensor | None) and key != "params"
                }
                for group in optimizer.param_groups
            ]
            for optimizer in self._replica.optimizers
        ]

    def _generators(self) -> list[str]:
        """The states of torch's generators, by rank; of the first alone where all are alike. Collective."""
        states = [torch.get_rng_state()]
        if self._world.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._world.device))
        text = " ".join(base64.b64encode(bytes(state.numpy())).decode() for state in states)
        texts = self._group.share_text(text)
        return texts[:1] if len(set(texts)) == 1 else texts

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        tensors = {**dict(self._replica.model.named_parameters()), **self._replica.buffers()}
        return {plain(name): tuple(tensor.shape) for name, tensor in tensors.items()}

    def _updated(self) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
        """This rank's pieces, each with the optimizer that updates it."""
        for piece in self._replica.pieces:
            for optimizer in self._replica.optimizers:
                if any(piece.parameter is p for group in optimizer.param_groups for p in group["params"]):
                    yield piece, optimizer

    # ---- restore ----

    def restore(self, folder: Path, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """See Replica.restore."""
        self._open(folder)
        checkpoints = folder / "checkpoints"
        everyone_sees = len(self._seers) == self._world.world_size
        try:
            path, manifest, problems = load.agree(self._group, checkpoints, None, everyone_sees=everyone_sees)
        except load.NothingSaved:
            return None
        for problem in problems:
            self._world.say(f"passed over a damaged checkpoint: {problem}")
        kept = self._require_fits(path, manifest.get("script"), state)
        try:
            self._take_weights(path, manifest, everyone_sees)
            self._take_state(path, manifest, everyone_sees)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"{path} does not fit this model and optimizer: {error}", reach="world") from error
        self._take_settings(kept)
        self._replica.num_steps, self._replica.total_before = manifest["step"], kept["total_before"]
        if self._world.is_main:
            save.set_aside(checkpoints, manifest["step"])
        for name, target in state.items():
            target.load_state_dict(_decoded(kept["given"][name]))
        self._world.say(f"restored step {manifest['step']} from {path}")
        return {name: _decoded(value) for name, value in kept["given"].items() if name not in state}

    def _require_fits(self, path: Path, kept: dict[str, Any] | None, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a script's save noted, if it is of these optimizers and values. Nothing has been changed yet."""
        if kept is None:
            raise UserError(f"{path} was not saved by a script's replica", reach="world")
        names = [type(optimizer).__name__ for optimizer in self._replica.optimizers]
        if kept["optimizers"] != names:
            raise UserError(f"{path} has the state of {kept['optimizers']}, and the script has {names}", reach="world")
        if odd := [name for name, target in state.items() if not hasattr(target, "load_state_dict")]:
            raise UserError(f"{place()}: {', '.join(odd)} has no load_state_dict: what was a JSON value is returned")
        self._require_groups(kept)
        if left := [name for name in kept["objects"] if name not in state]:
            warn(
                f"{', '.join(left)} was saved and is not restored: give it to replica.restore, too, or it begins anew",
                self._world,
            )
        missing = [name for name in state if name not in kept["given"]]
        if missing:
            raise UserError(f"{path} was saved without {', '.join(missing)}", reach="world")
        return kept

    def _take_weights(self, path: Path, manifest: dict[str, Any], everyone_sees: bool) -> None:
        sync = self._replica.sync
        sync.settle()
        held = {_plain(item): tensor for item, tensor in sync.weights().items()}
        buffers = self._replica.buffers()
        for name, buffer in buffers.items():
            held[Slice(plain(name), 0, buffer.numel())] = _flat(buffer)
        # Flat is a copy where memory has another order than the dimensions, as channels_last: the tensor itself is set.
        whole = buffers if sync.shards_weights else {**dict(self._replica.model.named_parameters()), **buffers}
        targets = {plain(name): tensor.detach() for name, tensor in whole.items()}
        found = self._receive(path, manifest, "weights", held, everyone_sees)
        for item, tensor in held.items():
            target = targets.get(item.name, tensor)
            target.copy_(found[item].view_as(target))

    def _take_state(self, path: Path, manifest: dict[str, Any], everyone_sees: bool) -> None:
        stored = manifest["tensors"]["optimizer"]
        scalars = manifest["script"]["scalars"]
        wanted: dict[Slice, tuple[Any, torch.optim.Optimizer, str]] = {}
        for piece, optimizer in self._updated():
            for name in stored:
                if name.rpartition("/")[0] == plain(piece.name):
                    wanted[Slice(name, piece.start, piece.stop)] = piece, optimizer, name.rpartition("/")[2]
        dtypes = {item: getattr(torch, stored[item.name]["dtype"]) for item in wanted}
        like = {item: torch.empty(0, dtype=dtype) for item, dtype in dtypes.items()}
        found = self._receive(path, manifest, "optimizer", like, everyone_sees)
        for optimizer in self._replica.optimizers:
            optimizer.state.clear()
        for piece, optimizer in self._updated():
            for name, value in scalars.items():
                if name.rpartition("/")[0] == plain(piece.name):
                    optimizer.state[piece.parameter][name.rpartition("/")[2]] = _number(optimizer, piece, value)
        for item, (piece, optimizer, key) in wanted.items():
            tensor = found[item].to(piece.parameter.device).view(piece.parameter.shape)
            optimizer.state[piece.parameter][key] = tensor

    def _receive(
        self, path: Path, manifest: dict[str, Any], kind: Kind, held: Mapping[Slice, torch.Tensor], everyone_sees: bool
    ) -> dict[Slice, torch.Tensor]:
        """The stored elements, dtype by dtype. Collective: all ranks go through what is stored in the same order."""
        found: dict[Slice, torch.Tensor] = {}
        shapes = self._shapes()
        stored = {name: spec["dtype"] for name, spec in manifest["tensors"][kind].items()}
        here = {str(tensor.dtype).removeprefix("torch.") for tensor in held.values()} if kind == "weights" else set()
        for dtype_name in sorted({*stored.values(), *here}):
            dtype = getattr(torch, dtype_name)
            items = [item for item, tensor in held.items() if tensor.dtype == dtype]
            found |= load.receive(self._group, path, manifest, kind, items, shapes, everyone_sees, dtype)
        return found

    def _require_groups(self, kept: Mapping[str, Any]) -> None:
        for optimizer, groups in zip(self._replica.optimizers, kept["groups"], strict=True):
            if len(groups) != len(optimizer.param_groups):
                raise UserError(
                    f"the checkpoint has {len(groups)} parameter groups of {type(optimizer).__name__}, the script "
                    f"{len(optimizer.param_groups)}",
                    reach="world",
                )

    def _take_settings(self, kept: Mapping[str, Any]) -> None:
        for optimizer, groups in zip(self._replica.optimizers, kept["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(value, list) else value
        generators = kept["generators"]
        if len(generators) in (1, self._world.world_size):
            texts = (generators[0] if len(generators) == 1 else generators[self._world.rank]).split()
            states = [torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for text in texts]
            torch.set_rng_state(states[0])
            if len(states) > 1 and self._world.device.type == "cuda":
                torch.cuda.set_rng_state(states[1], self._world.device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _is_moment(key: str, value: Any, piece: Any) -> bool:
    return isinstance(value, torch.Tensor) and key != "step" and value.shape == piece.parameter.shape


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(item: Slice) -> Slice:
    return Slice(plain(item.name), item.start, item.stop)


def _number(optimizer: torch.optim.Optimizer, piece: Any, value: float) -> torch.Tensor:
    """A number of the state, such as Adam's step, where the optimizer wants it (torch's own rule)."""
    group = next(g for g in optimizer.param_groups if any(piece.parameter is p for p in g["params"]))
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(value, dtype=torch.float32, device=piece.parameter.device if on_device else "cpu")


def _as_json(name: str, value: Any) -> Any:
    """What is kept of a value that the script gave. Raises UserError where JSON does not hold it."""
    value = value.state_dict() if hasattr(value, "state_dict") else value
    try:
        return json.loads(json.dumps(_encoded(value)))
    except (TypeError, ValueError):
        raise UserError(
            f"{place()}: {name} cannot be kept: give JSON values (numbers, texts, lists, dicts), or an object whose "
            f"state_dict() is made of them; it is a {type(value).__name__}"
        ) from None


def _encoded(value: Any) -> Any:
    """The value without dicts whose keys JSON would make texts of: MultiStepLR has steps for keys, and would find none
    of them again."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        return {_PAIRS: [[key, _encoded(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.item()  # a learning rate that is a tensor is one in its schedule, too
    return [_encoded(item) for item in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = value.get(_PAIRS)
        items = value.items() if pairs is None else pairs
        return {key: _decoded(item) for key, item in items}
    return [_decoded(item) for item in value] if isinstance(value, list) else value
