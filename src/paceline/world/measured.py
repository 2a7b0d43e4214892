"""Facts of this machine's processor that are measured, and kept in the cache folder: a measurement takes time at each
start, and is wrong on a busy machine."""

import contextlib
import hashlib
import json
import os
import socket
from typing import Any

import torch

from paceline.base.cache import cache_dir
from paceline.base.cores import cpu_flags, cpu_name

_SETTINGS = ("ONEDNN_", "DNNL_", "MKL_", "ATEN_CPU_CAPABILITY")  # how variables begin that choose kernels of the CPU


class Measured:
    """One fact and its file, which holds the value and all that it depends on: the processor, torch, the settings that
    choose kernels, and `depends_on`. Any number of processes may read and write it at once."""

    def __init__(self, fact: str, **depends_on: str | int):
        settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
        onednn = torch.backends.mkldnn
        self._key: dict[str, Any] = {
            "fact": fact,
            "processor": cpu_name(),
            "flags": " ".join(sorted(cpu_flags())),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "settings": settings,
            "onednn": [onednn.enabled, onednn.fp32_precision, onednn.matmul.fp32_precision],  # type: ignore[attr-defined]
            **depends_on,
        }
        self._path = cache_dir() / "measured" / f"{fact}-{_digest(self._key)[:16]}.json"

    def read(self) -> Any:
        """Returns the kept value; None if there is none, or the file is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self._path.read_bytes())
            if content.pop("sha256") == _digest(content):
                return content["value"]
        return None

    def keep(self, value: Any) -> None:
        """Writes the value, whole or not at all. In a read-only folder nothing is kept."""
        content = {**self._key, "value": value}
        aside = self._path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")  # other ranks write at the same time
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1))
            os.replace(aside, self._path)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
