"""Settings of the records."""

from dataclasses import dataclass

from paceline.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Log lines and metrics rows."""

    every: int = 1
    """Steps per row of metrics.jsonl. The terminal shows a line every few seconds in any case."""

    def check(self) -> None:
        """Raises UserError for an impossible value."""
        if self.every < 1:
            raise UserError(f"log.every is {self.every}; it must be at least 1")
