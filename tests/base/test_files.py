"""Files that survive a crash."""

import errno
import os
from pathlib import Path

import pytest

from paceline.base.cache import cache_dir
from paceline.base.errors import UserError
from paceline.base.files import exists, replace, set_mode, sync
from paceline.base.jsonl import open_at_line_end


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


def test_a_file_system_that_cannot_sync_folders_or_set_modes_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shared file systems refuse both; a file that cannot be synced stays an error."""
    (tmp_path / "file").touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "chmod", refuse)
    sync(tmp_path)
    set_mode(tmp_path, 0o700)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/rider")
    assert cache_dir() == Path("/home/rider/.cache/paceline")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert cache_dir() == Path("/home/rider/own")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # as of a container's user without a name
    with pytest.raises(UserError, match="the cache is to be ~/own, and there is no such home folder"):
        cache_dir()


def test_a_path_that_cannot_be_looked_at_is_not_absent(tmp_path: Path) -> None:
    """Finds: another message for a long name, or for a folder that may not be entered, on Python 3.14."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert exists(tmp_path)
    assert exists(tmp_path / "file")
    for absent in ("nothing", "file/nothing", "loop", "dangling"):
        assert not exists(tmp_path / absent)
    with pytest.raises(OSError, match="too long"):
        exists(tmp_path / ("x" * 300))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors by /proc")
def test_a_file_that_cannot_be_read_to_its_end_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a descriptor lost at each try to append rows on a disk that is away, until no file could be opened."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n{")
    before = len(os.listdir("/proc/self/fd"))

    def away(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.ftruncate", away)
        for _ in range(3):
            with pytest.raises(OSError, match="Stale"):
                open_at_line_end(path)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(open_at_line_end(path))
    assert path.read_text() == "{}\n"
