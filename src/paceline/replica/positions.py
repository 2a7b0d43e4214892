"""The sources that a replica's `steps` and `evaluate` were given, and the positions of those of `steps` in checkpoints.

A position belongs to a source's place in the order of first use. After a restore `steps` is given all sources of the
checkpoint before it makes a step: if a script left one out, another would take its position. Shares that
paceline.Checkpoints has by a name are not counted.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.base.units import listed
from paceline.replica.share import Share, share
from paceline.world.calls import mistake
from paceline.world.runtime import World

Position = Mapping[str, Any]
_MOST_EVALUATED = 4


@dataclass(eq=False)
class _Source:
    source: Any  # as the script gave it; a weak reference after `drop`
    sharing: dict[str, Any]
    share: Share | None  # None: dropped
    position: Position | None = None  # of a dropped share; None: at its beginning

    def is_of(self, source: Any) -> bool:
        return self.source is source or (isinstance(self.source, weakref.ref) and self.source() is source)

    def drop(self) -> None:
        """Frees the share, with its data set and workers, after a pass. It is made again if the script gives the source
        again."""
        if self.share is not None:
            self.position, self.share = self.share.state_dict(), None
            with contextlib.suppress(TypeError):  # a list has no weak references
                self.source = weakref.ref(self.source)


class Sources:
    def __init__(self, world: World) -> None:
        self._world = world
        self._all: list[_Source] = []  # of `steps`, in the order of first use
        self._evaluated: list[_Source] = []  # the newest few
        self._waiting: list[Position] = []  # restored, for sources that `steps` has not been given yet
        self._stepped: weakref.ref[Share] | None = None  # what the newest step reads, if a share deals it out

    def of_steps(self, source: Any, sharing: dict[str, Any]) -> Share:
        """Returns this rank's part of the source, shared at its first use. Collective then. Raises UserError for
        arguments that would have no effect."""
        if isinstance(source, Share):
            if sharing:
                raise mistake(f"{listed(list(sharing))} goes to paceline.share, which has made this source already")
            if source.is_named:
                return source
        known = next((each for each in self._all if each.is_of(source)), None)
        if known is None:
            return self._add(source, sharing)
        if known.sharing != sharing:
            raise mistake(
                f"this source was shared with other arguments before: {known.sharing}. Give these, or make it anew"
            )
        if known.share is None:
            made = self._shared(source, sharing)
            if known.position is None:  # restored to a checkpoint from before its first use
                made.rewound()
            else:
                made.load_state_dict(known.position)
            known.source, known.share = source, made
        return known.share

    @contextlib.contextmanager
    def of_evaluation(self, source: Any, sharing: dict[str, Any]) -> Iterator[Share]:
        """Yields this rank's part of the source, at the beginning of its first pass; afterwards the script's objects
        are where they were, for training may draw from them, too. Collective if the source is new."""
        if isinstance(source, Share):
            yield self.of_steps(source, sharing) if sharing else source
            return
        if self._all and self._all[-1].share is not None:
            sharing.setdefault("shares", self._all[-1].share.shares)
        known = next((each for each in self._evaluated if each.is_of(source) and each.sharing == sharing), None)
        if known is None or known.share is None:
            known = _Source(source, sharing, self._shared(source, sharing))
            self._evaluated = [*self._evaluated[1 - _MOST_EVALUATED :], known]
        assert known.share is not None
        with known.share.first_pass():
            yield known.share

    def begin_step(self, dealt_by: Share | None) -> None:
        """Notes what a step reads. Raises UserError on all ranks if restored positions wait for their sources: this
        source may have taken the position of one of them."""
        self._stepped = None if dealt_by is None else weakref.ref(dealt_by)
        if self._waiting and dealt_by is not None and any(each.share is dealt_by for each in self._all):
            raise mistake(
                f"when the checkpoint was saved, replica.steps had been given {len(self._all) + len(self._waiting)} "
                f"sources, and this step is made after {len(self._all)}. After a restore give replica.steps the same "
                "sources in the same order, with max_steps= or epochs=: the finished ones give no step. Or share one "
                "source before the restore and name it: paceline.Checkpoints(folder, net=replica, "
                "train=paceline.share(loader, world))",
                reach="world",
            )

    def kept(self, position_of: Callable[[Share], Position]) -> dict[str, Any]:
        """Returns what a checkpoint stores."""
        positions = [each.position if each.share is None else position_of(each.share) for each in self._all]
        return {"positions": [*positions, *self._waiting]}

    def restore(self, kept: Position) -> None:
        """Takes what `kept` returned; sources of later steps begin anew."""
        self._waiting = list(kept["positions"])
        for each in self._all:
            each.position = self._waiting.pop(0) if self._waiting else None
            if each.share is not None and each.position is not None:
                each.share.load_state_dict(each.position)
            elif each.share is not None:
                each.share.rewound()

    def is_unnamed(self) -> bool:
        """Whether the newest step reads a share of which no position is kept here."""
        share = None if self._stepped is None else self._stepped()
        return share is not None and not share.is_named and all(each.share is not share for each in self._all)

    def _add(self, source: Any, sharing: dict[str, Any]) -> Share:
        made = self._shared(source, sharing)
        if self._waiting:
            made.load_state_dict(self._waiting[0])  # an error leaves the position to the right source
            self._waiting.pop(0)
        finished = [each for each in self._all if each.share is not None and each.share.epoch and not each.share.step]
        for each in finished[:-1]:  # scripts may alternate between two
            each.drop()
        self._all.append(_Source(source, sharing, made))
        return made

    def _shared(self, source: Any, sharing: dict[str, Any]) -> Share:
        return source if isinstance(source, Share) else share(source, self._world, **sharing)
