"""A run that only records, and a reader of TensorBoard's files that shares nothing with the writer."""

import json
import struct
from pathlib import Path
from typing import Any

from paceline.record.folder import COMPLETE, RunFolder, create
from paceline.tools.track.points import Position, Reader

Scalars = dict[str, list[tuple[int, float]]]


class Recorded:
    """Writes records as rank 0 does. It is running until `end`."""

    def __init__(self, path: Path):
        self.folder = create(path)
        self.folder.config.write_text("[train]\nsteps = 1000\n[optim]\nlr = 0.1\n")
        self.attempt = 0
        self.begin()

    def begin(self) -> None:
        self.folder.lock()
        self.folder.append_event("start", world_size=2)

    def steps(self, first: int, last: int) -> None:
        """Records these steps, every tenth with an evaluation."""
        for step in range(first, last + 1):
            row: dict[str, Any] = {"step": step, "loss": 5 - step / 256, "lr": 0.1, "skipped": False, "mfu": None}
            row |= {"step_ms": 10.0, "tokens": 64 * step, "tokens_per_s": float(self.attempt), "world_size": 2}
            self.folder.append_metrics(row | {"rank_compute_ms": [6.0, 8.0], "rank_data_ms": [1.0, 2.0]})
            if step % 10 == 0:
                self.folder.append_metrics({"step": step, "val_loss": 6 - step / 256, "eval_ms": 5.0})
                self.folder.append_event("checkpoint", step=step)

    def resume(self, step: int, reached: int) -> None:
        """Another attempt, from a checkpoint of this step."""
        self.folder.close()
        self.folder.lock()
        self.folder.forget_after(step)
        self.attempt += 1
        self.folder.append_event("resume", step=step, reached=reached)

    def end(self) -> None:
        self.folder.append_event("end", reason=COMPLETE)
        self.folder.close()


def put_back(folder: RunFolder, name: str, before: dict[str, Any]) -> None:
    """Makes RUN/track/NAME.json say that all since `before` was being sent: the follower was killed meanwhile."""
    at = Position(**before["position"])
    points, after = Reader(folder, at, False).read(at)
    batch = {"points": [{**vars(point), "row": {}} for point in points], "after": vars(after)}
    (folder.path / "track" / f"{name}.json").write_text(json.dumps({**before, "batch": batch}))


def losses(last: int) -> list[tuple[int, float]]:
    """What a tracker has of `train/loss` after these steps."""
    return [(step, 5 - step / 256) for step in range(1, last + 1)]


def val_losses(last: int) -> list[tuple[int, float]]:
    """What a tracker has of `eval/val_loss` after these steps."""
    return [(step, 6 - step / 256) for step in range(10, last + 1, 10)]


def scalars(run: Path) -> Scalars:
    """Tag -> (step, value) of each scalar in RUN/tensorboard; fails where a checksum is wrong."""
    found: Scalars = {}
    (path,) = (run / "tensorboard").iterdir()
    data = path.read_bytes()
    while data:
        length, crc = struct.unpack("<QI", data[:12])
        body, body_crc = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])[0]
        assert (masked(data[:8]), masked(body)) == (crc, body_crc)
        data = data[16 + length :]
        event = dict(fields(body))
        if 7 in event:  # a session begins: what was there from this step on is replaced
            found = {tag: [point for point in points if point[0] < event[2]] for tag, points in found.items()}
        for _, value in fields(event.get(5, b"")):
            parts = dict(fields(value))
            if 2 in parts:
                found.setdefault(parts[1].decode(), []).append((event.get(2, 0), struct.unpack("<f", parts[2])[0]))
    return found


def fields(body: bytes) -> list[tuple[int, Any]]:
    """The fields of a protocol buffer: (number, value); fixed-size values as bytes."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = body[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(body):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        found.append((key >> 3, body[at : at + size]))
        at += size
    return found


def masked(data: bytes) -> int:
    """CRC32C bit by bit, then TensorFlow's mask."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32)
