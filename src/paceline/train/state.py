"""What a run is while it runs: one rank's replica, where it stands, and with what it speaks."""

from dataclasses import dataclass, field
from typing import Any

from paceline.base import faults
from paceline.base.clock import Stopwatch
from paceline.checkpoint.save import Saver
from paceline.data.loader import FixedBatches, Loader
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.train.banner import Totals
from paceline.train.evaluate import Evaluation
from paceline.train.feed import Feed
from paceline.train.request import Request
from paceline.train.resolve import Settings
from paceline.train.step import Replica
from paceline.train.stragglers import Stragglers
from paceline.world.device import DeviceClock
from paceline.world.runtime import World
from paceline.world.watchdog import Watchdog


@dataclass
class Progress:
    """Where a run is. With the weights and the optimizer's state this is all that a resume needs: the order of data
    follows from the step."""

    step: int = 0  # updates made
    tokens: int = 0
    elapsed_s: float = 0.0  # training time, rank 0's
    skips_in_row: int = 0
    val_loss: float | None = None  # of this very step, where it was evaluated
    best_val_loss: float | None = None

    @property
    def is_best(self) -> bool:
        """Whether this very step's validation loss is the lowest so far."""
        return self.val_loss is not None and self.val_loss == self.best_val_loss


@dataclass
class Run:
    """One rank's part of a run."""

    request: Request
    world: World
    feed: Feed
    settings: Settings
    folder: RunFolder
    console: Console
    replica: Replica
    saver: Saver
    watchdog: Watchdog
    shapes: dict[str, tuple[int, ...]]  # of the parameters, whole
    writer: int | None  # this rank's number among those that see rank 0's run folder; None: it does not
    num_seers: int
    loader: Loader
    validation: FixedBatches
    world_peak: float | None  # FLOP/s of all ranks together; None where one's is unknown
    progress: Progress = field(default_factory=Progress)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    totals: Totals = field(default_factory=Totals)
    evaluation: Evaluation | None = None  # the last one
    before_trouble: Progress | None = None  # where the run was before the first of the steps just skipped in a row
    state_before: dict[str, int] | None = None  # digests of the optimizer's state, while no update may change it
    somebody_saves: bool = False  # a save is under way on some rank, as all ranks know since the last exchange
    timeout_s: float | None = None  # of silence, from the first step on
    owes_a_save: bool = False  # one was due while another was under way
    saved_at_s: float = 0.0  # training time when the last save was begun

    def __post_init__(self) -> None:
        self.group = self.world.group
        self.config = self.settings.config
        self.clock = DeviceClock(self.world.device)
        self.stragglers = Stragglers(self.settings.plan)

    def at(self, phase: str) -> str | None:
        """Notes for the watchdog what this rank begins to do now; returns a fault that is to be injected there."""
        step = self.progress.step + 1
        self.watchdog.enter(phase, step)
        return faults.strike(phase, step)

    def event(self, kind: str, **facts: Any) -> None:
        """Notes on rank 0 what happened."""
        if self.world.is_main:
            self.folder.append_event(kind, **facts)

    def hosts(self) -> list[str]:
        """Returns the host names, by rank."""
        return [peer.host for peer in self.world.peers]

    def share_done(self) -> float:
        """The share of the horizon that is behind, alike on all ranks: elapsed_s is rank 0's, shared each step."""
        if self.settings.num_steps is not None:
            return self.progress.step / self.settings.num_steps
        return self.progress.elapsed_s / self.config.train.time_budget
