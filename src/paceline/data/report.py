"""What a preparation says while it works."""

from typing import Protocol


class Report(Protocol):
    """Receives a preparation's messages."""

    def say(self, text: str) -> None:
        """Receives a line for the user."""

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """Receives how much of the sources has been read; total None: unknown."""


class Quiet:
    """Ignores a preparation's messages."""

    def say(self, text: str) -> None: ...
    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None: ...
