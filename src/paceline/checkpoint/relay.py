"""Sends the files of ranks that do not see the folder to the first writer, which writes them.

A message is JSON after its length in 8 bytes: the record of a rank's files, or {"problem": text}. After a record
come the bytes of its files. The receiver reads them even if it cannot use them, because the next save's bytes follow.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from paceline.base.files import sha256_of
from paceline.checkpoint import shards
from paceline.checkpoint.publish import Record
from paceline.checkpoint.shards import Bytes
from paceline.world.side import SideChannel


def send(channel: SideChannel, record: Record, images: Mapping[str, Bytes]) -> None:
    """Sends a record and the files that it names to rank 0."""
    message = json.dumps(record).encode()
    content = [len(message).to_bytes(8, "little"), message]
    for data in [*(np.frombuffer(bytearray(part), dtype=np.uint8) for part in content), *images.values()]:
        for chunk in shards.chunks(data):
            channel.send(torch.from_numpy(chunk), 0)


def receive(channel: SideChannel, rank: int, folder: Path | None) -> Record:
    """Receives a rank's files, writes them into `folder` and returns their record; without a folder discards them.
    Raises RuntimeError with the rank's problem or if the rank is gone, OSError if the disk fails."""
    length = int.from_bytes(_bytes(channel, rank, 8), "little")
    record: Record = json.loads(_bytes(channel, rank, length))
    if "problem" in record:
        raise RuntimeError(f"rank {rank}: {record['problem']}")
    failure: OSError | None = None
    for name, facts in record["files"].items():
        arriving = _arriving(channel, rank, facts["bytes"])
        try:
            if folder is not None and failure is None:
                shards.write_file(folder / name, arriving)
                if sha256_of(folder / name) != facts["sha256"]:
                    raise shards.not_as_written(folder / name)
        except OSError as error:
            failure = error
        for _ in arriving:  # what was not written
            pass
    if failure is not None:
        raise failure
    return record


def _bytes(channel: SideChannel, rank: int, num_bytes: int) -> bytes:
    return b"".join(chunk.tobytes() for chunk in _arriving(channel, rank, num_bytes))


def _arriving(channel: SideChannel, rank: int, num_bytes: int) -> Iterator[Bytes]:
    """Yields what the rank sends, in chunks; each is valid until the next."""
    buffer = torch.empty(min(num_bytes, shards.CHUNK_BYTES), dtype=torch.uint8)
    for begin in range(0, num_bytes, shards.CHUNK_BYTES):
        chunk = buffer[: num_bytes - begin]
        channel.receive(chunk, rank)
        yield chunk.numpy()
