"""What the user decides about checkpoints."""

from dataclasses import dataclass

from paceline.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep. The end of a run and an early stop always save."""

    every: int = 0
    """Save every so many steps; 0: at the end only."""
    keep: int = 2
    """Complete checkpoints to keep, the newest; at least 2, so that a damaged one leaves another."""
    keep_every: int = 0
    """Keep besides those of steps that are multiples of this; 0: none."""
    keep_best: bool = False
    """Keep besides the one with the lowest validation loss; the file `best` names it."""

    def check(self) -> None:
        """Raises UserError for what cannot be."""
        if self.every < 0:
            raise UserError(f"checkpoint.every is {self.every}; it must be at least 0 (0: at the end only)")
        if self.keep < 2:
            raise UserError(f"checkpoint.keep is {self.keep}; it must be at least 2")
        if self.keep_every < 0:
            raise UserError(f"checkpoint.keep-every is {self.keep_every}; it must be at least 0 (0: none)")
