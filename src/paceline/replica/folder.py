"""Saving and restoring several objects together, in a folder that any number of ranks may share."""

import contextlib
import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.base import ownership
from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.base.units import listed
from paceline.checkpoint import load, retention
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.manifest import tensors as tensors_of
from paceline.checkpoint.save import Saver
from paceline.checkpoint.shards import CODES
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.writers import find_writers
from paceline.replica import contents, generators
from paceline.replica.contents import ReplicaContents
from paceline.replica.mistakes import warn
from paceline.replica.replica import BegunFrom, Replica
from paceline.replica.share import Share
from paceline.sync.strategy import Strategy
from paceline.world.calls import mistake
from paceline.world.group import SideChannel

_ROUND_S = 0.5  # how often ranks meet that wait for rank 0
_States = tuple[dict[str, Any], dict[str, torch.Tensor]]  # of other objects: JSON by object, tensors by name


class CheckpointFolder:
    """The checkpoints in one folder: `begin` writes one during training, `find` and `take` restore one. Collective."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        replicas: Mapping[str, Replica],
        others: Mapping[str, Any],
        keeps_generators: bool,
        keeps_frozen: bool = True,
        brings: bool = False,
        resume_step: int | None = None,
    ):
        """folder: exists on rank 0's host. others: objects that are equal on all ranks. keeps_generators: also save the
        global random generators. keeps_frozen: see ReplicaContents. brings: a folder without checkpoints gets those of
        `checkpoint.to`. resume_step: the one that the user has named. Collective."""
        self._replicas = {name: ReplicaContents(replica, name, keeps_frozen) for name, replica in replicas.items()}
        self._others, self._keeps_generators = dict(others), keeps_generators
        for thing in others.values():
            if isinstance(thing, Share):
                thing.is_named = True
        self._main = next(iter(replicas.values()))
        self.world, self._group = self._main.world, self._main.world.group
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.progress: Callable[[], None] = lambda: None
        """Called every second or so while a checkpoint is verified and read."""
        self.before_publishing: Callable[[], object] = lambda: None
        """Called in rank 0's writing thread when all parts are written, before the checkpoint is published."""
        self._config = config
        self.storage = self._open_storage(config, brings, resume_step)
        self.writers, token = find_writers(self._group, folder)
        self._verified: load.Verified = {}  # the bytes of the checkpoint that `find` returned
        self._everyone_sees = len(self.writers) == self.world.world_size
        self._shards_state = any(replica.sync.shards_state for replica in replicas.values())
        # Ranks that hold state that no other has, and do not see the folder, send theirs to rank 0.
        senders = [rank for rank in range(self._group.size) if rank not in self.writers] if self._shards_state else []
        ranks = [*self.writers, *senders]
        self.saver = Saver(
            self.checkpoints,
            config,
            ranks.index(self._group.rank) if self._group.rank in ranks else None,
            len(ranks),
            token=token,
            channel=SideChannel() if senders else None,
            senders=senders,
            before_publishing=lambda: self.before_publishing(),
            storage=self.storage,
        )
        for replica in replicas.values():
            replica.copies.append(self.saver.wait_copied)

    def _open_storage(self, config: CheckpointConfig, brings: bool, resume_step: int | None) -> Storage | None:
        """Returns on rank 0 what sends its checkpoints to `checkpoint.to`. Collective: ranks meet while it brings what
        is there, which may take any time. Raises on all ranks if it cannot be used."""
        if not config.to:
            return None
        storage = Storage(config.to, self.folder, config) if self.world.is_main else None

        def begin(progress: Callable[[], object]) -> None:
            assert storage is not None  # on rank 0
            storage.begin(brings, progress, resume_step)

        load.from_rank_0_in_rounds(self._group, self.progress, begin)
        return storage

    def send_the_rest(self, wait: Callable[[], object] = lambda: None) -> None:
        """Returns when `checkpoint.to` has all checkpoints, or that is given up. Collective: `wait` is called twice a
        second meanwhile."""

        def end(progress: Callable[[], object]) -> None:
            while self.storage is not None and self.storage.is_ending_within(_ROUND_S):
                progress()

        if self._config.to:
            load.in_rounds(self._group, wait, end)

    def report_news(self, event: Callable[..., object], say: Callable[[str], object]) -> None:
        """Records on rank 0 what was sent to `checkpoint.to`, and says what a user should see. event: takes the kind
        of an event and its facts."""
        for sentence, facts in self.storage.take_news() if self.storage else ():
            event(**facts)
            if sentence:
                say(sentence)

    # ---- save ----

    def begin(self, step: int, facts: Mapping[str, Any], states: _States | None = None) -> None:
        """Starts a save as of this step, with facts at the top of the manifest; no other may be under way. Collective.
        states: of the other objects, if known. Raises UserError on all ranks if something cannot be saved."""
        objects, extras = self._states_of_others() if states is None else states
        parts: dict[Kind, dict[Slice, torch.Tensor]] = {"weights": {}, "optimizer": {}, "extra": {}}
        shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in extras.items()}
        numbers: dict[str, Any] = {}
        for each in self._replicas.values():
            sync = each.replica.sync
            # Copied now: a forward pass changes batch-norm buffers while the weights are being copied.
            parts["weights"] |= {item: tensor.clone() for item, tensor in self._my_part(each.constants()).items()}
            weights, (state, own_shapes, own_numbers) = each.weights(), each.state()
            private, private_numbers = each.private_state()
            has_all = not sync.shards_state or sync.diverges
            parts["weights"] |= self._my_part(weights) if has_all else self._once(weights, sync)
            parts["optimizer"] |= self._once(state, sync) if sync.shards_state else self._my_part(state)
            parts["optimizer"] |= private
            shapes |= each.shapes() | own_shapes
            numbers |= own_numbers | private_numbers
        copies = {Slice(name, 0, tensor.numel()): tensor.reshape(-1).clone() for name, tensor in extras.items()}
        parts["extra"] = self._my_part(copies)
        stored = {item.name: tensor.dtype for part in parts.values() for item, tensor in part.items()}
        by_rank = self._gather_facts(shapes, numbers, stored)
        texts = [row["generators"] for row in by_rank if self._keeps_generators]
        manifest = {
            **facts,
            "world_size": self.world.world_size,
            "versions": {"paceline": __version__, "torch": torch.__version__},
            "numbers": {name: value for row in by_rank for name, value in row["numbers"].items()},
            "replicas": {name: each.facts() for name, each in self._replicas.items()},
            "objects": objects,
            "generators": texts[:1] if len(set(texts)) == 1 else texts,
        }
        shapes = {name: tuple(shape) for row in by_rank for name, shape in row["shapes"].items()}
        self.saver.begin(step, parts, shapes, manifest)

    def _gather_facts(
        self, shapes: Mapping[str, Any], numbers: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
    ) -> list[dict[str, Any]]:
        """Returns the facts of each rank's state. Collective. Raises UserError on all if a state cannot be saved."""
        states: generators.States | None = generators.states(self.world.device)
        problems = [each.replica.updates.not_kept() for each in self._replicas.values()]
        problems += [f"{name} is of {dtype}" for name, dtype in dtypes.items() if dtype not in CODES]
        if any(each.replica.sources.is_unnamed() for each in self._replicas.values()):
            problems.append(
                "the position of the batches that replica.step is given has no name (write net=replica, train=batches, "
                "with what paceline.share returned)"
            )
        if (begun := self._begun_from()) is not None:
            states = begun.states
            problems.append("" if states else "this step began before paceline.Checkpoints was made")
        facts_here = {
            "problem": next(filter(None, problems), ""),
            "shapes": dict(shapes) if self.world.is_main or self._shards_state else {},
            "numbers": dict(numbers),
            "generators": generators.to_text(states) if self._keeps_generators and states else "",
        }
        rows = self._group.share_json(facts_here)
        if problem := next(filter(None, (row["problem"] for row in rows)), ""):
            raise mistake(f"{problem}, and cannot be kept", reach="world")
        return rows

    def _begun_from(self) -> BegunFrom | None:
        """Returns where the current unfinished step began, of any replica; None between steps."""
        return next((r.replica.begun_from for r in self._replicas.values() if r.replica.begun_from is not None), None)

    def _states_of_others(self) -> _States:
        kept: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, thing in self._others.items():
            kept[name], tensors_there = contents.kept_of(name, thing, self._begun_from())
            tensors |= tensors_there
        return kept, dict(sorted(tensors.items()))  # a dict may have another order on another rank

    def _my_part(self, tensors: Mapping[Slice, torch.Tensor]) -> dict[Slice, torch.Tensor]:
        """Returns this rank's equal part of tensors that all ranks have; none if it does not see the folder."""
        if self.world.rank not in self.writers:
            return {}
        by_name = {item.name: tensor for item, tensor in tensors.items()}
        number = self.writers.index(self.world.rank)
        items = ownership.cut(tensors, len(self.writers))[number]
        items += [item for item in tensors if not number and not item.num_elements]
        return {item: by_name[item.name][item.start : item.stop] for item in items}

    def _once(self, tensors: Mapping[Slice, torch.Tensor], sync: Strategy) -> dict[Slice, torch.Tensor]:
        """Returns this rank's part of slices that several ranks may hold (hsdp)."""
        rank, (_, holders) = self.world.rank, sync.copies()
        ranks = next((ranks for ranks in holders if rank in ranks), (rank,))
        place = ranks.index(rank)
        return {item: tensor for i, (item, tensor) in enumerate(tensors.items()) if i % len(ranks) == place}

    # ---- restore ----

    def find(self, step: int | None = None) -> load.Whole | None:
        """Returns (folder, manifest, problems of newer ones) of the newest complete checkpoint, or of `step`; None if
        nothing was ever saved. Collective; every byte is verified, and held for `take` if all ranks see the folder and
        memory allows: the rank that has written a file verifies it."""
        if self.world.is_main:
            with contextlib.suppress(OSError):
                retention.take_back(self.checkpoints)
        verified = self._verified if self._everyone_sees else None
        with contextlib.suppress(load.NothingSaved):
            return load.agree(
                self._group, self.checkpoints, step, self._everyone_sees, self.progress, verified=verified
            )
        return None

    def take(self, path: Path, manifest: dict[str, Any]) -> None:
        """Fills all objects from this checkpoint. Collective."""
        self._require_fits(path, manifest)

        def receive(kind: Kind, wanted: Mapping[Slice, torch.dtype]) -> dict[Slice, torch.Tensor]:
            return load.receive(
                self._group, path, manifest, kind, wanted, self._everyone_sees, self.progress, self._verified
            )

        stored = manifest["tensors"]
        try:
            for name, each in self._replicas.items():
                kept = manifest["replicas"][name]
                each.take_weights(receive, kept)
                each.take_state(receive, stored["optimizer"], manifest["numbers"])
                each.take_private_state(receive, stored["optimizer"], manifest["numbers"], kept)
            extras = tensors_of(manifest, "extra")
            flats = receive("extra", {Slice(n, 0, math.prod(shape)): dtype for n, (shape, dtype) in extras.items()})
            tensors = {item.name: flat.view(extras[item.name][0]) for item, flat in flats.items()}
        except (RuntimeError, ValueError, KeyError) as error:
            # Perhaps on this rank alone, as where its memory is full, so that it has to say it.
            raise UserError(f"{path} does not fit these models and optimizers: {error}") from error
        self._verified.clear()
        if self.storage is not None:
            self.storage.supersede()
        for name, each in self._replicas.items():
            each.take_facts(manifest["replicas"][name])
        problem, cause = "", None
        for name, thing in self._others.items():
            try:
                contents.restore_to(thing, manifest["objects"][name], tensors)
            except (RuntimeError, ValueError, LookupError, TypeError) as error:
                problem, cause = f"{path}: {name} does not take back what was saved of it: {error}", error
                break
        if problem := next(filter(None, self._group.share_json(problem)), ""):  # perhaps of one rank
            raise UserError(problem, reach="world") from cause
        if texts := manifest["generators"]:  # in a larger world, new ranks get the last one's
            text = texts[min(self.world.rank, len(texts) - 1)]
            generators.put_back(generators.from_text(text), self.world.device)

    def _require_fits(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raises UserError on all ranks if the checkpoint has other objects, before anything is changed."""
        if "replicas" not in manifest:
            raise UserError(
                f"{path} is of format {manifest['format']}, which an earlier paceline wrote and this one does not "
                "resume. Resume with that version, or begin anew with its weights in another folder: `paceline train "
                f"--init-from {shlex.quote(str(self.folder))}`, in a script "
                f"paceline.load_weights({str(self.folder)!r})",
                reach="world",
            )
        for name, each in self._replicas.items():
            if name not in manifest["replicas"]:
                raise UserError(
                    f"{path} has {listed(list(manifest['replicas']))}, and no replica {name}", reach="world"
                )
            each.check(str(path), manifest["replicas"][name], manifest["tensors"]["weights"])
        if missing := [name for name in self._others if name not in manifest["objects"]]:
            raise UserError(
                f"{path} was saved without {listed(missing)}"
                + (", by paceline.Checkpoints: continue with that, or name another folder" if "run" in missing else ""),
                reach="world",
            )
        left = [n for n in (*manifest["replicas"], *manifest["objects"]) if n not in {**self._replicas, **self._others}]
        if left:
            warn(
                f"{listed(left)} was saved and is not restored: give it to paceline.Checkpoints, or it begins anew",
                self.world,
            )
