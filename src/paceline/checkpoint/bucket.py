"""The address of a run on object storage (`checkpoint.to`), and what is there.

URL/owner.json                     the process that writes here, and a number that it raises every 10 s
URL/config.toml, events.jsonl ...  the records, as of the last checkpoint that was sent
URL/checkpoints/step-00000500/     its files, then its manifest: without that it does not count

storage.py copies each complete checkpoint there; bring.py fetches them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from paceline.base.errors import UserError
from paceline.base.files import sync
from paceline.checkpoint.steps import MANIFEST, STEP, folder_name

RECORDS = ("config.toml", "tokenizer.json", "metrics.jsonl", "ranks.jsonl", "events.jsonl")
IDENTITY = "storage.json"  # in the run folder: the address, and the id by which its owner.json names this run
OWNER, BEST = "owner.json", "checkpoints/best"
_CHUNK_BYTES = 8 << 20
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}


class Bucket:
    """The few operations on an address that are needed, by fsspec. Names are relative to it."""

    def __init__(self, url: str):
        """Raises UserError for an address of another form, or if its library is not installed."""
        protocol, _, path = url.partition("://")
        if protocol not in _PACKAGES or not path.strip("/"):
            raise UserError(f"checkpoint.to is {url!r}; it is s3://BUCKET/RUN, gs://BUCKET/RUN or file:///FOLDER/RUN")
        self._is_local = protocol == "file"
        if not self._is_local and any(character in path for character in "*?["):
            raise UserError(
                f"checkpoint.to is {url!r}: '*', '?' and '[' would name other runs there, too; leave them out"
            )
        options = {"auto_mkdir": True} if self._is_local else {}
        try:
            import fsspec  # only for those who use it, as is what it imports

            self._files = fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError:
            raise UserError(f"{url} needs a package: pip install {_PACKAGES[protocol]}") from None
        self.url, self._root = url.rstrip("/"), self._files._strip_protocol(url).rstrip("/")

    def read(self, name: str) -> bytes | None:
        """Returns a small object; None if there is none."""
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a small object, at once."""
        with self._complete(name) as path:
            self._files.pipe_file(path, data)

    def send(self, file: Path, name: str, progress: Callable[[], object]) -> None:
        from fsspec.callbacks import Callback

        callback = Callback(hooks={"progress": lambda size, value, **_: progress()})
        with self._complete(name) as path:
            if self._is_local:  # fsspec would call nobody before it is over
                with file.open("rb") as source, self._files.open(path, "wb") as target:
                    _copy(source, target, progress)
            else:
                self._files.put_file(str(file), path, callback=callback)
        progress()

    @contextlib.contextmanager
    def _complete(self, name: str) -> Iterator[str]:
        """Yields where to write an object that must never be seen in part: a bucket shows none before it is whole."""
        path = f"{self._root}/{name}"
        aside = f"{path}.new" if self._is_local else path
        yield aside
        if self._is_local:
            self._files.mv(aside, path)

    def fetch(self, name: str, path: Path, progress: Callable[[], object]) -> str | None:
        """Writes an object to a new file. Returns its sha256; None if there is no object."""
        try:
            with self._files.open(f"{self._root}/{name}", "rb", block_size=_CHUNK_BYTES) as source:
                with open(path, "xb", opener=partial(os.open, mode=0o600)) as target:
                    sha256 = _copy(source, target, progress)
                sync(path)
        except FileNotFoundError:
            return None
        return sha256

    def rename(self, name: str, target: str) -> None:
        """Renames a checkpoint's folder, its manifest first: complete or absent. There may be none."""
        paths = self._files.find(f"{self._root}/{name}")
        for path in sorted(paths, key=lambda path: not path.endswith(MANIFEST)):
            self._files.mv(path, f"{self._root}/{target}/{path.rpartition('/')[2]}")
        self.remove(name)

    def remove(self, name: str) -> None:
        """Removes an object, or all below a folder; there may be none."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, complete or not."""
        try:
            paths = self._files.ls(f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for path in paths if (match := STEP.fullmatch(path.rstrip("/").rpartition("/")[2])))

    def manifest(self, step: int) -> bytes | None:
        return self.read(f"checkpoints/{folder_name(step)}/{MANIFEST}")

    def owner(self) -> dict[str, Any]:
        """Returns what owner.json says; an empty dict if there is none, or it is no such object."""
        return object_of(self.read(OWNER))


def identity(folder: Path) -> dict[str, Any]:
    """Returns what the run folder says of its address: `to`, `id`, `is_brought` if its records came from there, and
    until they are set aside `later`: steps there after the one that was brought, with the marks of their manifests."""
    try:
        return object_of((folder / IDENTITY).read_bytes())
    except OSError:
        return {}


def mark(manifest: bytes | None) -> str:
    """Returns the sha256 of a manifest (of nothing, if there is none), by which two checkpoints of one step differ."""
    return hashlib.sha256(manifest or b"").hexdigest()


def _copy(source: BinaryIO, target: BinaryIO, progress: Callable[[], object]) -> str:
    """Copies the rest of a file, and returns its sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
        progress()
    return digest.hexdigest()


def object_of(raw: bytes | None) -> dict[str, Any]:
    """Returns a JSON object; an empty one if it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(raw or b"{}")
        return content if isinstance(content, dict) else {}
    return {}


def text_of(error: Exception) -> str:
    """Returns what a library says of its error, on one line."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).partition("\n")[0]
