"""A rank ends with its status, and tells it to the launcher where it can."""

import os
from pathlib import Path

import pytest

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from paceline.base.process import ATTEMPT, LAUNCHER, STATUS_FOLDER, Status, read_statuses, record_status


def test_a_rank_that_cannot_tell_the_launcher_ends_with_its_status_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "ranks"
    variables = {STATUS_FOLDER: str(folder), LAUNCHER: str(os.getppid()), ATTEMPT: "0", "RANK": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for code in (EXIT_DONE, EXIT_RESUMABLE):
        assert record_status(code) == code
        assert read_statuses(folder, [3], {3: code}) == {3: Status(code)}, "a run that was done failed on a full disk"
    assert read_statuses(folder, [3], {3: EXIT_FAILED}) == {}, "Python ends with 1, too"
    folder.parent.mkdir()  # not `ranks`: somebody may have removed it
    assert record_status(EXIT_FAILED, "lost rank 2") == EXIT_FAILED
    assert read_statuses(folder, [3], {3: EXIT_FAILED}) == {3: Status(EXIT_FAILED, "lost rank 2")}
    assert read_statuses(folder, [2], {}) == {}, "those of another host's ranks"
    for name, value in ((ATTEMPT, "1"), (LAUNCHER, str(os.getpid()))):
        monkeypatch.setenv(name, value)
        assert read_statuses(folder, [3], {}) == {}, "a second command on a running run ended that one"
