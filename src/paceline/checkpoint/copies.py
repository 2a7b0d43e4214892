"""Takes a complete checkpoint from another host, as that host's launcher serves it."""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Protocol

from paceline.base.files import sync
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import publish, retention
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.shards import CHUNK_BYTES


class Readable(Protocol):
    def read(self, amount: int, /) -> bytes: ...
    def close(self) -> None: ...


Open = Callable[[str], Readable]  # a file in the other host's run folder, by its path there


def take(checkpoints: Path, step: int, open_file: Open, config: CheckpointConfig) -> int:
    """Copies the checkpoint of this step, prunes older ones, and returns its size in bytes when it is on the disk. The
    run's metrics.jsonl has been copied before.

    Like a save, it is complete or absent. Raises Damaged if bytes are not those in the manifest, and OSError; what
    `open_file` raises passes through. Nobody else may write into the folder meanwhile.
    """
    name = mf.folder_name(step)
    folder = publish.unfinished_folder(checkpoints, step, "copy")
    checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
    publish.sweep(checkpoints, but=checkpoints)
    folder.mkdir(mode=0o700)
    try:
        _receive(open_file(f"checkpoints/{name}/{mf.MANIFEST}"), folder / mf.MANIFEST)
        manifest = mf.parse((folder / mf.MANIFEST).read_bytes(), name)
        for file, facts in manifest["files"].items():
            if _receive(open_file(f"checkpoints/{name}/{file}"), folder / file) != facts["sha256"]:
                raise mf.Damaged(f"{name}: {file} did not arrive as it was written (sha256 differs)")
        sync(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    publish.put_in_place(checkpoints, folder, step)
    if config.keep_best:
        retention.take_losses(checkpoints, retention.recorded_losses(checkpoints))
    retention.prune(checkpoints, step, config)
    return mf.num_bytes(manifest)


def _receive(source: Readable, path: Path) -> str:
    """Writes what arrives to a new file; returns its sha256 when it is on the disk."""
    digest = hashlib.sha256()
    with closing(source), _new(path) as file:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _new(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
