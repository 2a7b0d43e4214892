"""What a host has for ranks: the machine's cores and memory, or what its cgroups grant."""

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.world.cores import _left, _quota, cgroup_quota, free_memory

MANY = (1 << 63) - 1


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_the_machines_free_memory_is_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr("paceline.world.cores._own_groups", lambda controller: iter(()))  # as on macOS
    assert 0 < free_memory() <= psutil.virtual_memory().total
    assert cgroup_quota() == math.inf


@pytest.mark.parametrize(
    ("limit", "usage", "inactive", "left"),
    [("1000\n", "700\n", 100, 400), ("1000\n", "1200\n", 100, 0), ("max\n", "700\n", 100, MANY)],
)
def test_a_containers_limit_counts_in_both_versions(
    tmp_path: Path, limit: str, usage: str, inactive: int, left: int
) -> None:
    assert _left(tmp_path) == MANY
    stat = f"anon 5\nfile 9\ninactive_file {inactive}\ntotal_inactive_file {inactive}\n"
    written(tmp_path, memory_limit_in_bytes=limit, memory_usage_in_bytes=usage, memory_stat=stat)
    assert _left(tmp_path) == left
    written(tmp_path, memory_max="500\n", memory_current="100\n", memory_stat="inactive_file 0\n")
    assert _left(tmp_path) == 400, "the second version is asked first"


def test_a_quota_counts_in_both_versions(tmp_path: Path) -> None:
    assert _quota(tmp_path) == math.inf
    written(tmp_path, cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert _quota(tmp_path) == math.inf
    written(tmp_path, cpu_cfs_quota_us="50000\n")
    assert _quota(tmp_path) == 0.5
    written(tmp_path, cpu_max="150000 100000\n")
    assert _quota(tmp_path) == 1.5
    written(tmp_path, cpu_max="max 100000\n")
    assert _quota(tmp_path) == 0.5


SEEN = """
import os, sys
for folder in sys.argv[1:]:
    with open(folder + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from paceline.world.cores import cgroup_quota, free_memory
print(cgroup_quota(), free_memory())
"""
TOPS = [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory")]
IS_FIRST_VERSION = all(top.is_dir() for top in TOPS)


@pytest.mark.skipif(os.geteuid() != 0 or not IS_FIRST_VERSION, reason="takes root and cgroups of version 1")
def test_limits_of_a_nested_cgroup_count() -> None:
    outer = [top / f"paceline-test-{os.getpid()}" for top in TOPS]
    inner = [folder / "inner" for folder in outer]
    try:
        for folder in (*outer, *inner):
            folder.mkdir()
        (outer[0] / "cpu.cfs_quota_us").write_text("70000")
        (outer[1] / "memory.limit_in_bytes").write_text("700M")
        command = [sys.executable, "-c", SEEN, *map(str, inner)]
        seen = subprocess.run(command, capture_output=True, text=True, check=True)
        quota, free = map(float, seen.stdout.split())
        assert quota == 0.7
        assert 500 << 20 < free < 700 << 20
    finally:
        for folder in (*inner, *outer):
            folder.rmdir()
