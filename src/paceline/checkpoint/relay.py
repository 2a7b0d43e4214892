"""The parts of ranks that do not see the folder: sent to the first writer, who writes them as those ranks' files.

One message of a few bytes with the length of the next, one of JSON with what comes or what went wrong, then the bytes
of each kind in chunks. The receiver takes all of it also when it can use none, so that the next save's is the next.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from paceline.base.ownership import Slice
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import shards
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.publish import Record
from paceline.checkpoint.shards import Bytes, Layout

_CHUNK_BYTES = 16 << 20


class Relay(Protocol):
    """A way between ranks that no collective of a step uses."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when the bytes (uint8, flat, on the CPU) are on their way. Raises RuntimeError where that rank is
        gone."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with the bytes that come from that rank. Raises RuntimeError where it is gone."""
        ...


def send_part(relay: Relay, layouts: Mapping[Kind, Layout], images: Mapping[Kind, torch.Tensor]) -> int:
    """Returns the bytes of what was sent to rank 0: all that this rank owns."""
    content = {kind: [_listed(piece) for piece in layout.pieces] for kind, layout in layouts.items()}
    _send_json(relay, {"content": content})
    for image in images.values():
        for begin in range(0, len(image), _CHUNK_BYTES):
            relay.send(image[begin : begin + _CHUNK_BYTES], 0)
    return sum(len(image) for image in images.values())


def send_problem(relay: Relay, problem: str) -> None:
    """Tells rank 0 that nothing will come, and why."""
    _send_json(relay, {"problem": problem})


def receive_part(
    relay: Relay,
    source: int,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path | None,
    writer: int,
    num_writers: int,
) -> Record:
    """Returns the record of that rank's files, now in `folder` and on the disk; None: what comes is thrown away.

    Raises RuntimeError with the rank's problem, or where it is gone; OSError where the disk fails.
    """
    length = torch.empty(8, dtype=torch.uint8)
    relay.receive(length, source)
    text = torch.empty(int.from_bytes(bytes(length.tolist()), "little"), dtype=torch.uint8)
    relay.receive(text, source)
    message = json.loads(bytes(text.numpy()))
    if "problem" in message:
        raise RuntimeError(f"rank {source}: {message['problem']}")
    record: Record = {"files": {}, "dtypes": {}}
    failure: OSError | None = None
    for kind, pieces in message["content"].items():
        items = {Slice(name, start, stop): shards.dtype_of(dtype) for name, start, stop, dtype in pieces}
        layout = shards.lay_out(items, {item.name: mf.tensor_shape(kind, item.name, shapes) for item in items})
        arriving = _arriving(relay, source, layout.num_data_bytes)
        path = None if folder is None or failure else folder / mf.file_name(kind, writer, num_writers)
        try:
            if path is not None:
                written = _write(path, layout, arriving)
                record["files"][path.name] = shards.file_facts(written, layout)
                record["dtypes"][kind] = shards.dtype_names(layout)
        except OSError as error:
            failure = error
        for _ in arriving:
            pass
    if failure is not None:
        raise failure
    return record


def _write(path: Path, layout: Layout, arriving: Iterator[Bytes]) -> shards.Written:
    file = shards.NewFile(path)
    try:
        file.write(np.frombuffer(layout.header, dtype=np.uint8))
        for chunk in arriving:
            file.write(chunk)
        file.sync()
    finally:
        written = file.close()
    shards.require_digest(path, written.sha256)
    return written


def _arriving(relay: Relay, source: int, num_bytes: int) -> Iterator[Bytes]:
    """The chunks of one file, each valid until the next."""
    room = torch.empty(min(num_bytes, _CHUNK_BYTES), dtype=torch.uint8)
    for begin in range(0, num_bytes, _CHUNK_BYTES):
        chunk = room[: min(_CHUNK_BYTES, num_bytes - begin)]
        relay.receive(chunk, source)
        yield chunk.numpy()


def _send_json(relay: Relay, message: dict[str, object]) -> None:
    data = json.dumps(message).encode()
    for part in (len(data).to_bytes(8, "little"), data):
        relay.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0)


def _listed(piece: shards.Piece) -> list[str | int]:
    return [piece.item.name, piece.item.start, piece.item.stop, shards.dtype_name(piece.dtype)]
