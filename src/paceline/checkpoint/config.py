"""Settings of checkpoints."""

from dataclasses import dataclass

from paceline.base.errors import require_at_least


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep. The end of a run and an early stop always save."""

    every: int = 0
    """Save every N steps; 0: by time, see every-s."""
    every_s: float = 600.0
    """Save after N seconds of training if `every` is 0; 0: at the end only."""
    keep: int = 2
    """Number of newest complete checkpoints to keep; at least 2, so that one remains if the other is damaged."""
    keep_every: int = 0
    """Also keep those of steps that are multiples of this; 0: none. Give `every`, too: saves by time are rarely of such
    a step."""
    keep_best: bool = False
    """Also keep the one with the lowest validation loss; the file `best` names it."""
    retry_s: float = 300.0
    """If the last checkpoint of a run cannot be saved (a full disk), try again for N seconds."""
    grace_s: float = 120.0
    """How long a launcher waits after SIGTERM before it kills the ranks: to finish the step and save. Each time a
    checkpoint has grown within it, it begins again. Give more if the disk is slow: 1B parameters are 12 GB."""
    to: str = ""
    """Also send each complete checkpoint and the records to this address: s3://BUCKET/RUN, gs://BUCKET/RUN or
    file:///FOLDER/RUN, from which `paceline resume ADDRESS` continues on any machine."""

    def check(self) -> None:
        """Raises UserError for an impossible value."""
        require_at_least(self, "checkpoint.", every=0, every_s=0, retry_s=0, grace_s=1, keep=2, keep_every=0)
