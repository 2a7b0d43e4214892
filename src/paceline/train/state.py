"""What a run is while it runs: one rank's replica, where it stands, and with what it speaks."""

from dataclasses import dataclass, field
from typing import Any

from paceline.base.clock import Stopwatch
from paceline.data.loader import FixedBatches, Loader
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.train.banner import Totals
from paceline.train.evaluate import Evaluation
from paceline.train.feed import Feed
from paceline.train.request import Request
from paceline.train.resolve import Settings
from paceline.train.step import Replica
from paceline.world.device import DeviceClock
from paceline.world.runtime import World


@dataclass
class Progress:
    """Where a run is. With the weights and the optimizer's state this is all that a resume needs: the order of data
    follows from the step."""

    step: int = 0  # updates made
    tokens: int = 0
    elapsed_s: float = 0.0  # training time, rank 0's
    skips_in_row: int = 0


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
    loader: Loader
    validation: FixedBatches
    world_peak: float | None  # FLOP/s of all ranks together; None where one's is unknown
    progress: Progress = field(default_factory=Progress)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    totals: Totals = field(default_factory=Totals)
    evaluation: Evaluation | None = None  # the last one

    def __post_init__(self) -> None:
        self.group = self.world.group
        self.config = self.settings.config
        self.clock = DeviceClock(self.world.device)

    def event(self, kind: str, **facts: Any) -> None:
        """Notes on rank 0 what happened."""
        if self.world.is_main:
            self.folder.append_event(kind, **facts)

    def share_done(self) -> float:
        """The share of the horizon that is behind, alike on all ranks: elapsed_s is rank 0's, shared each step."""
        if self.settings.num_steps is not None:
            return self.progress.step / self.settings.num_steps
        return self.progress.elapsed_s / self.config.train.time_budget
