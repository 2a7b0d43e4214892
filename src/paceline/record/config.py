"""What the user decides about the log."""

from dataclasses import dataclass

from paceline.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Log lines and metrics rows."""

    every: int = 1
    """A row of metrics.jsonl every so many steps. Lines on the terminal are thinned on their own."""

    def check(self) -> None:
        """Raises UserError for what cannot be."""
        if self.every < 1:
            raise UserError(f"log.every is {self.every}; it must be at least 1")
