"""Files that survive a crash."""

import os
from pathlib import Path

import pytest

from paceline.base.files import replace


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest"
    path.write_text("old")
    calls: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("sync", os.fstat(descriptor).st_size))

    def noted_rename(source: Path, target: Path) -> None:
        assert target.read_text() == "old"
        calls.append(("rename", source.stat().st_size))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_rename)
    replace(path, b"the new one")
    assert calls == [("sync", 11), ("rename", 11)]
    assert path.read_bytes() == b"the new one"
    assert list(tmp_path.iterdir()) == [path]
