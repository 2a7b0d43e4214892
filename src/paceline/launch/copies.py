"""Copies the newest checkpoint and the records of a run from the host that has rank 0 to another, through two ssh
connections: `copies send` there, `copies receive` here. No port is opened, and no module that reads checkpoints is
needed: files are bytes, whose sizes and sha256 the manifest has.

The records come first: a copy that is cut short leaves rows of later steps, which a resume drops, and never a
checkpoint without the rows before it.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import resource
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from paceline.base.files import replace, sha256_of, sync
from paceline.base.process import discard_output, say
from paceline.launch.restarts import Records

_RECORDS = ("config.toml", "tokenizer.json", "metrics.jsonl", "ranks.jsonl", "events.jsonl", "job", "storage.json")
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{8,}")
_FILE = re.compile(r"[a-z]+-\d{5}-of-\d{5}\.safetensors")
_KEPT = "kept"  # the names of all checkpoints of the sender
_BEST = "best"  # the name of the one with the lowest validation loss
_RECEIVED = Path("ranks", "received")  # checkpoints of this folder that are copies: those that the sender removes go
_CHUNK_BYTES = 1 << 20


class Damaged(Exception):
    """What arrived is not what was sent."""


def send(run: Path, step: int, stream: IO[bytes]) -> None:
    """Writes a tar archive of the run's records and the checkpoint of this step. It may be removed meanwhile, as on a
    slow link: its files are open. Raises OSError if it is not there."""
    checkpoints = run / "checkpoints"
    folder = checkpoints / f"step-{step:08d}"
    with contextlib.ExitStack() as stack:
        manifest = (folder / _MANIFEST).read_bytes()
        files = [stack.enter_context((folder / name).open("rb")) for name in json.loads(manifest)["files"]]
        archive = stack.enter_context(tarfile.open(fileobj=stream, mode="w|"))
        kept = json.dumps([path.name for path in checkpoints.iterdir() if _STEP.fullmatch(path.name)]).encode()
        _add(archive, _KEPT, kept)
        for path in (*(run / name for name in _RECORDS), checkpoints / _BEST):
            with contextlib.suppress(FileNotFoundError):
                _add(archive, path.name, path.read_bytes())  # it grows meanwhile
        _add(archive, f"{folder.name}/{_MANIFEST}", manifest)
        for file in files:
            archive.addfile(archive.gettarinfo(arcname=f"{folder.name}/{Path(file.name).name}", fileobj=file), file)


def receive(run: Path, step: int, stream: IO[bytes]) -> None:
    """Reads what `send` writes. The checkpoint is complete in its place, or absent. Does nothing if rank 0 writes into
    this folder, at first (hosts share it) or at last (this host got rank 0), or if another copy is received. Raises
    Damaged, OSError or tarfile.TarError."""
    name = f"step-{step:08d}"
    checkpoints = run / "checkpoints"
    folder = checkpoints / f".{name}.copy.unfinished"
    for made in (run, run / "ranks", checkpoints):
        made.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(run / "ranks" / "copy.lock") as is_alone:
        with _locked(run / "lock") as is_free:
            if is_free and (checkpoints / name).exists() and _is_new(run, step):  # a copy was cut short before this
                replace(checkpoints / "latest", f"{name}\n".encode(), 0o600)
        if not is_alone or not is_free or (checkpoints / name).exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            kept, records = _unpack(folder, name, stream)
            _check(folder)
            sync(folder)
            # Until here the lock is free: rank 0 of this host would be refused, and minutes may have passed.
            with _locked(run / "lock") as is_free:
                if is_free and _is_new(run, step):
                    _publish(run, folder, name, records)
                    _prune(run, name, kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields whether this process has the lock inside."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb+") as lock:
        is_free = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        yield is_free


def _is_new(run: Path, step: int) -> bool:
    newest = Records(run).newest_checkpoint()
    return newest is None or newest < step


def _publish(run: Path, folder: Path, name: str, records: dict[str, bytes]) -> None:
    """Gives a checkpoint that has arrived its name."""
    checkpoints, best = run / "checkpoints", records.pop(_BEST, b"")
    for record, data in records.items():
        replace(run / record, data, 0o600)
    os.rename(folder, checkpoints / name)
    sync(checkpoints)
    replace(checkpoints / "latest", f"{name}\n".encode(), 0o600)
    if _STEP.fullmatch(best.decode().strip()) and (checkpoints / best.decode().strip()).is_dir():
        replace(checkpoints / _BEST, best, 0o600)


def _unpack(folder: Path, name: str, stream: IO[bytes]) -> tuple[list[str], dict[str, bytes]]:
    """Writes the checkpoint's files; returns the names of the sender's checkpoints, and the records."""
    kept: list[str] = []
    records: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isreg() else None
            parent, _, file = member.name.rpartition("/")
            if source is None:
                raise Damaged(f"{member.name} is not a file")
            if member.name == _KEPT:
                kept = [str(each) for each in json.load(source)]
            elif member.name in (*_RECORDS, _BEST):
                records[member.name] = source.read()
            elif parent == name and (file == _MANIFEST or _FILE.fullmatch(file)):
                with os.fdopen(os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
                    shutil.copyfileobj(source, target, _CHUNK_BYTES)
                    target.flush()
                    os.fsync(target.fileno())
            else:
                raise Damaged(f"{member.name} is not a file of a checkpoint")
    return kept, records


def _check(folder: Path) -> None:
    """Raises Damaged if the files are not those of the manifest."""
    if not (folder / _MANIFEST).exists():
        raise Damaged("the connection has ended before the checkpoint did")
    manifest = json.loads((folder / _MANIFEST).read_bytes())
    unsealed = {name: value for name, value in manifest.items() if name != "sha256"}
    if hashlib.sha256(json.dumps(unsealed).encode()).hexdigest() != manifest["sha256"]:
        raise Damaged(f"{folder.name}: {_MANIFEST} did not arrive as it was written (sha256 differs)")
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != facts["bytes"]:
            raise Damaged(f"{folder.name}: {name} did not arrive whole")
        if sha256_of(path) != facts["sha256"]:
            raise Damaged(f"{folder.name}: {name} did not arrive as it was written (sha256 differs)")


def _prune(run: Path, name: str, kept: Sequence[str]) -> None:
    """Removes copies that the sender no longer has. What this host has saved itself stays."""
    known = (run / _RECEIVED).read_text().split() if (run / _RECEIVED).exists() else []
    for old in known:
        if _STEP.fullmatch(old) and old not in kept:
            shutil.rmtree(run / "checkpoints" / old, ignore_errors=True)
    copies = [old for old in known if old in kept]
    replace(run / _RECEIVED, "\n".join([*copies, name]).encode(), 0o600)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def main(arguments: list[str]) -> int:
    verb, run, step = arguments
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses "unlimited", Linux more than its fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # `send` opens the files of all ranks
    deed: Any = {"send": partial(send, stream=sys.stdout.buffer), "receive": partial(receive, stream=sys.stdin.buffer)}
    try:
        deed[verb](Path(run), int(step))
    except BrokenPipeError:  # the receiver has ended, and has said why
        discard_output()
    except (Damaged, OSError, tarfile.TarError, ValueError, KeyError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
