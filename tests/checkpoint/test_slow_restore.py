"""A disk that is slow, and no rank that hangs: reading may take longer than ranks wait for each other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from saving import save_by

from paceline.base import files
from paceline.base.ownership import Slice
from paceline.checkpoint import load, manifest, shards
from paceline.checkpoint.config import CheckpointConfig
from paceline.world.config import ParallelConfig
from paceline.world.runtime import World
from paceline.world.watchdog import Watchdog

TIMEOUT_S, CHUNK_S, NUM_CHUNKS = 2.0, 0.25, 16  # 4 s to verify, and as long to read
NUM_ELEMENTS = 1 << 16


def slow_down_this_process() -> None:
    """Each chunk of a file takes a while."""
    sha256_of, read_whole, read = manifest.sha256_of, shards.read_whole, shards.read

    def slowly(progress: Callable[[], object]) -> Callable[[], object]:
        return lambda: (time.sleep(CHUNK_S), progress())

    manifest.sha256_of = lambda path, progress: sha256_of(path, slowly(progress))
    shards.read_whole = lambda path, num_bytes, progress: read_whole(path, num_bytes, slowly(progress))
    shards.read = lambda path, places, shapes, progress, data: read(path, places, shapes, slowly(progress), data)


def restore(world: World, folder: Path, slow_rank: int, everyone_sees: bool) -> tuple[float, float, float]:
    """Seconds to agree and to read; the sum of what was read."""
    files._CHUNK_BYTES = shards.CHUNK_BYTES = NUM_ELEMENTS * 4 // NUM_CHUNKS
    if world.rank == slow_rank:
        slow_down_this_process()
    watchdog = Watchdog(
        world,
        timeout_s=TIMEOUT_S,
        on_verdict=lambda verdict: print(verdict.message, flush=True),
    )
    wanted = {Slice("w", 0, NUM_ELEMENTS): torch.float32}
    with watchdog:
        marks: dict[str, Any] = {"progress": lambda: watchdog.enter("restore", 0)}
        if everyone_sees:
            marks["verified"] = {}
        began = time.monotonic()
        path, found_manifest, _ = load.agree(world.group, folder, None, everyone_sees, **marks)
        agreed = time.monotonic()
        found = load.receive(world.group, path, found_manifest, "weights", wanted, everyone_sees, **marks)
        read = time.monotonic()
    return agreed - began, read - agreed, float(next(iter(found.values())).sum())


@pytest.mark.long
@pytest.mark.parametrize(("slow_rank", "everyone_sees"), [(1, True), (0, False)], ids=["a rank's disk", "rank 0's"])
def test_a_restore_may_take_longer_than_ranks_wait(tmp_path: Path, slow_rank: int, everyone_sees: bool) -> None:
    """The group's timeout and the watchdog's are half of what it takes; neither sees a rank that hangs."""
    tensor = torch.arange(NUM_ELEMENTS, dtype=torch.float32) % 97
    save_by(2, tmp_path, 1, {"w": tensor}, {"w/momentum": tensor}, {}, CheckpointConfig())  # two files for each rank
    config = ParallelConfig(device="cpu", threads=1, timeout_s=TIMEOUT_S)
    for agree_s, read_s, total in run_ranks(restore, 2, tmp_path, slow_rank, everyone_sees, config=config):
        assert agree_s > 2 * TIMEOUT_S - 1
        assert read_s > 2 * TIMEOUT_S - 1
        assert total == float(tensor.sum())
