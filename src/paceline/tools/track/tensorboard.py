"""Event files for TensorBoard, without its library: records of protocol buffers, each with two checksums.

The formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, framework/summary.proto.
"""

import math
import os
import struct
import time
from collections.abc import Sequence
from typing import Any

from paceline.record.config import TrackConfig
from paceline.record.folder import RunFolder
from paceline.record.state import read_config
from paceline.tools.track.points import Point

_LARGEST = 3.4028234663852886e38  # of a float32


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(byte)
    return table


_CRC = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    coded = b""
    while number > 127:
        coded, number = coded + bytes([number & 127 | 128]), number >> 7
    return coded + bytes([number])


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _value(name: str, value: float | str) -> bytes:
    """A Summary.Value: simple_value, or a tensor of one string for the text plugin."""
    tag = _field(1, name.encode())
    if not isinstance(value, str):
        value = math.copysign(min(abs(value), _LARGEST), value)
        return _field(1, tag + _varint(2 << 3 | 5) + struct.pack("<f", value))
    text = _integer(1, 7) + _field(2, b"") + _field(8, value.encode())  # DT_STRING, a scalar
    return _field(1, tag + _field(9, _field(1, _field(1, b"text"))) + _field(8, text))


def _event(time_s: float, step: int, content: bytes) -> bytes:
    """A record with an Event."""
    body = _varint(1 << 3 | 1) + struct.pack("<d", time_s) + _integer(2, step) + content
    length = struct.pack("<Q", len(body))
    return length + _masked_crc(length) + body + _masked_crc(body)


_SESSION_START = _field(7, _integer(1, 1))  # a reader drops what was written before for this step and later ones


class TensorBoard:
    """Writes RUN/tensorboard/events.out.tfevents.*. What a crash or a full disk left after the last complete batch is
    cut off."""

    def __init__(self, folder: RunFolder, settings: TrackConfig, known: dict[str, Any]):
        self._known = known
        parent = folder.path / "tensorboard"
        parent.mkdir(exist_ok=True, mode=0o700)
        known.setdefault("file", f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}.{os.getpid()}")
        self._file = os.fdopen(os.open(parent / known["file"], os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        written_bytes = known.setdefault("bytes", 0)
        if os.fstat(self._file.fileno()).st_size < written_bytes:
            state = folder.path / "track" / "tensorboard.json"
            raise ValueError(f"{parent} lacks what was written there; remove {state} to write all of it again")
        if not written_bytes:
            config = "".join(f"    {name} = {value}\n" for name, value in read_config(folder.config).items())
            now = time.time()
            self._write(
                _event(now, 0, _field(3, b"brain.Event:2")) + _event(now, 0, _field(5, _value("config", config)))
            )

    def send(self, points: Sequence[Point]) -> None:
        data = b""
        for point in points:
            if "events/start" in point.values or "events/resume" in point.values:
                data += _event(point.time_s, point.step + 1, _SESSION_START)
            data += _event(
                point.time_s, point.step, _field(5, b"".join(_value(*item) for item in point.values.items()))
            )
        self._write(data)

    def _write(self, data: bytes) -> None:
        begin = self._known["bytes"]
        self._file.truncate(begin)
        self._file.seek(begin)
        while data:
            data = data[self._file.write(data) :]  # a full disk may take a part, and then raises
        self._known["bytes"] = self._file.tell()

    def close(self, is_failed: bool) -> None:
        self._file.close()
