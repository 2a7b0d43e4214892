"""What a host has free for ranks: the machine's memory, or what its container is granted."""

from pathlib import Path

import psutil
import pytest

from paceline.world.cores import _left_in_cgroup, free_memory

MANY = (1 << 63) - 1


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_the_machines_free_memory_is_the_most() -> None:
    assert 0 < free_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limit", "usage", "inactive", "left"),
    [("1000\n", "700\n", 100, 400), ("1000\n", "1200\n", 100, 0), ("max\n", "700\n", 100, MANY)],
)
def test_a_containers_limit_counts_in_both_versions(
    tmp_path: Path, limit: str, usage: str, inactive: int, left: int
) -> None:
    assert _left_in_cgroup(tmp_path) == MANY
    stat = f"anon 5\nfile 9\ninactive_file {inactive}\ntotal_inactive_file {inactive}\n"
    written(tmp_path / "memory", memory_limit_in_bytes=limit, memory_usage_in_bytes=usage, memory_stat=stat)
    assert _left_in_cgroup(tmp_path) == left
    written(tmp_path, memory_max="500\n", memory_current="100\n", memory_stat="inactive_file 0\n")
    assert _left_in_cgroup(tmp_path) == 400, "the second version is asked first"
