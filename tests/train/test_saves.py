"""Waiting for a save, and what is read of its progress."""

from types import SimpleNamespace

import pytest
import torch

from paceline.train import saves
from paceline.train.progress import Progress
from paceline.world.group import LocalGroup


class Slow:
    """A saver whose disk takes so many rounds, and writes a byte in each of the first ones."""

    begun_at = 2

    def __init__(self, num_rounds: int, num_growing: int) -> None:
        self.num_rounds, self._num_growing, self._round = num_rounds, num_growing, 0

    @property
    def is_busy(self) -> bool:
        return self._round < self.num_rounds

    @property
    def num_written_bytes(self) -> int:
        return min(self._round, self._num_growing)

    def finish(self, within_s: float | None = None) -> None:
        assert within_s, "waits without a limit"
        self._round += 1


@pytest.mark.parametrize("num_growing", [9, 3])
def test_the_watchdog_sees_progress_as_long_as_bytes_flow(monkeypatch: pytest.MonkeyPatch, num_growing: int) -> None:
    """A last save of more than 12 minutes was ended as a hang. Finds: a limit on the whole save."""
    monkeypatch.setattr(saves, "_DISK_TIMEOUT_S", 0.0)
    entered: list[str] = []
    setup = SimpleNamespace(
        world=SimpleNamespace(is_main=True),
        watchdog=SimpleNamespace(enter=lambda section, step: entered.append(section)),
        console=SimpleNamespace(say=lambda text: None),
    )
    waiting = saves.Saves.__new__(saves.Saves)
    waiting._setup, waiting._group = setup, LocalGroup(torch.device("cpu"))  # type: ignore[assignment]
    waiting._saver, waiting._progress = Slow(10, num_growing), SimpleNamespace(step=2)  # type: ignore[assignment]
    waiting._finish()
    assert len(entered) == num_growing + 1


def test_progress_with_a_field_of_a_later_version_is_read() -> None:
    progress = Progress()
    progress.restore({"step": 3, "tokens": 7, "invented_later": 1})
    assert (progress.step, progress.tokens) == (3, 7)
