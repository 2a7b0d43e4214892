"""The progress of a run."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """A resume needs only this, the weights and the optimizer state: the order of data follows from the step."""

    step: int = 0  # updates made
    tokens: int = 0
    elapsed_s: float = 0.0  # training time, rank 0's
    skips_in_row: int = 0
    val_loss: float | None = None  # of exactly this step; None: not evaluated
    best_val_loss: float | None = None
    sequences: list[int] | None = None  # of the next step, by rank

    @property
    def is_best(self) -> bool:
        """Whether this step's validation loss is the lowest so far."""
        return self.val_loss is not None and self.val_loss == self.best_val_loss

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Progress":
        """Returns a manifest's progress, without fields that a later paceline has added."""
        return cls(**{name: value for name, value in saved.items() if name in cls.__dataclass_fields__})

    def restore(self, saved: dict[str, Any]) -> None:
        vars(self).update(vars(Progress.of(saved)))
