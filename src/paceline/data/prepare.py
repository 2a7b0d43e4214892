"""Makes a data set from documents: reads in order, encodes on all cores, writes in order.

    find -> blocks -> workers -> build -> shards; index.json comes last: a folder with it is complete

A restarted preparation resumes after the last complete shard (see build.py); the number of workers does not change the
result. `.preparing` in the folder has a lock, the request, and the progress.
"""

import errno
import hashlib
import io
import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import replace as replace_file
from paceline.base.files import sync
from paceline.data.blocks import documents, read_blocks
from paceline.data.build import PROGRESS, Builder, Counts
from paceline.data.config import Recipe
from paceline.data.encode import Encoder
from paceline.data.find import describe_left_out
from paceline.data.shard import (
    FORMAT_VERSION,
    SPLITS,
    TOKEN_BYTES,
    WORK,
    Index,
    SplitRecord,
    TokenizerRecord,
    is_complete,
    read_index,
    write_index,
)
from paceline.data.sources import STANDARD_INPUT, Sources
from paceline.data.split import validation_below
from paceline.data.tokenizer import FILE, Tokenizer, resolve
from paceline.data.workers import Job, encode_all

_BEGUN = "begun.json"  # the request and the tokenizer
_COPIED_BYTES = 1 << 20  # of standard input at a time
_SAMPLE_BYTES = 64 << 20  # of text, enough to learn merges; of more text, every n-th block is read


class Report(Protocol):
    """Receives a preparation's messages."""

    def say(self, text: str) -> None:
        """Receives a line for the user."""

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """Receives how much of the sources has been read; total None: unknown."""


class Quiet:
    """Ignores a preparation's messages."""

    def say(self, text: str) -> None: ...
    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None: ...


def prepare(
    sources: Sources, recipe: Recipe, folder: Path, report: Report, *, num_workers: int, restart: bool = False
) -> Index:
    """Returns the index of the folder's data set, made first if it is not complete.

    One process at a time: others get a UserError. Also raises UserError if the folder has other content, if sources
    have changed since the beginning, or for a bad document. Complete shards are kept.
    """
    recipe.check()
    request = _request(sources, recipe)
    if is_complete(folder):
        index = _same(folder, request)
        report.say(f"data: {folder} is prepared already, from sources of the same names and sizes")
        shutil.rmtree(folder / WORK, ignore_errors=True)  # of a process killed just after it wrote the index
        return index
    try:
        with _work_folder(folder) as work:
            if is_complete(folder):  # another process was faster
                return _same(folder, request)
            for line in [*describe_left_out(sources), *_without_effect(sources, recipe)]:
                report.say(f"data: {line}")
            index = _make(sources, recipe, folder, work, report, num_workers, restart)
        shutil.rmtree(work, ignore_errors=True)  # another process may be opening the lock in it
        sync(folder)
        return index
    except OSError as error:
        raise UserError(_disk_message(folder, error)) from error


def _without_effect(sources: Sources, recipe: Recipe) -> Iterator[str]:
    """Yields a line for each option that was given and that no file uses."""
    formats = {file.format for file in sources.files}
    if recipe.validation_frac != Recipe().validation_frac and all(file.side for file in sources.files):
        yield (
            f"--validation-frac {recipe.validation_frac:g} has no effect here: text files are split by their names or "
            "at their ends, or by --validation"
        )
    if recipe.separator and "text" not in formats:
        yield f"--separator {recipe.separator!r} has no effect here: it separates documents of text files"
    if recipe.text_key != Recipe().text_key and formats == {"text"}:
        yield f"--text-key {recipe.text_key} has no effect here: it is for JSONL and Parquet, and all files are text"


def _request(sources: Sources, recipe: Recipe) -> dict[str, Any]:
    files = [[f.name, f.format, f.compression, f.num_bytes, f.start, f.stop, f.side] for f in sources.files]
    settings = {name: value for name, value in asdict(recipe).items() if name != "on_error"}  # may change at a resume
    return {"format": FORMAT_VERSION, "recipe": settings, "sources": _hash(files)}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode("utf-8", "surrogatepass")).hexdigest()


def _same(folder: Path, request: dict[str, Any]) -> Index:
    index = read_index(folder)
    found = {key: index.origin.get(key) for key in ("recipe", "sources")}
    if found != {key: request[key] for key in found}:
        raise UserError(
            f"{folder} holds a data set that was prepared {_difference(found, request)}; give another --out"
        )
    return index


def _difference(found: dict[str, Any], request: dict[str, Any]) -> str:
    """Describes how a found preparation differs from the request, by command-line names."""
    before, now = found.get("recipe") or {}, request["recipe"]
    for name, value in now.items():
        if before.get(name) != value:
            return f"with --{name.replace('_', '-')} {before.get(name)!r}, not {value!r}"
    return "from other sources, or they have changed since"


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Yields the folder of temporary files, locked for one process."""
    work = folder / WORK
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder, which is made")
    if folder.is_dir() and not work.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no data set; give another --out")
    work.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(work / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"another process is preparing {folder}; wait for it, or give another --out") from None
    except NotImplementedError as error:
        raise UserError(f"{folder}: {error}; give an --out on a file system that has locks") from error
    try:
        yield work
    finally:
        lock.release()


def _disk_message(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full; complete shards are kept: free some space and give the same command"
    return f"{error.filename or folder}: {error.strerror or error}; give an --out that can be written"


def _make(
    sources: Sources, recipe: Recipe, folder: Path, work: Path, report: Report, num_workers: int, restart: bool
) -> Index:
    """Returns the index, which is the last file written."""
    request = _request(sources, recipe)
    begun = {**request, "stamps": _hash([file.stamp for file in sources.files])}
    is_piped = any(file.path == STANDARD_INPUT for file in sources.files)
    tokenizer = None if restart else _begun_with(begun, folder, work)
    if tokenizer is None or (is_piped and not (work / PROGRESS).exists()):  # perhaps the tokenizer is another stream's
        tokenizer = None
        _clear(folder, work)
    else:
        report.say(f"data: resuming {folder}")
    if is_piped:
        report.say(f"data: keeping standard input on the disk, as {work / 'input'}, while the data set is made")
        sources = _kept_input(sources, work / "input", is_begun=tokenizer is not None)
    below = validation_below(sources, recipe)
    if tokenizer is None:
        tokenizer = _choose_tokenizer(sources, recipe, folder, report)
        replace_file(work / _BEGUN, json.dumps({**begun, "tokenizer": tokenizer.sha256}).encode())
    job = Job(tokenizer.json, Encoder(tokenizer).library, recipe, below)
    builder = Builder(
        folder,
        work,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
        shard_tokens=recipe.shard_tokens,
        dedup=recipe.dedup,
    )
    try:
        _encode(sources, job, builder, report, num_workers)
        splits = builder.finish()
    finally:
        builder.close()
    _require_both(splits, builder.counts, recipe)
    assert tokenizer.end_of_text is not None  # _choose_tokenizer requires it
    record = TokenizerRecord(FILE, tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text)
    origin = {**_origin(sources, builder.counts), **request}
    index = Index(sources.name, tokenizer.vocab_size, splits, record, TOKEN_BYTES, origin)
    sync(folder)
    write_index(folder, index)
    return index


def _begun_with(request: dict[str, Any], folder: Path, work: Path) -> Tokenizer | None:
    """Returns the tokenizer of an unfinished preparation; None if there is none, or nothing was made of it yet. Raises
    UserError if the request or the tokenizer has changed."""
    try:
        found: dict[str, Any] = json.loads((work / _BEGUN).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{work / _BEGUN} is damaged ({error}); --restart begins anew") from error
    sha256 = found.pop("tokenizer", "")
    if found != request:
        if not any(path for split in SPLITS for path in folder.glob(f"{split}-[0-9]*")):
            return None
        raise UserError(
            f"{folder} was begun {_difference(found, request)}; ask for the same again, or --restart to begin anew"
        )
    tokenizer = Tokenizer.load(folder / FILE)
    if tokenizer.sha256 != sha256:
        raise UserError(f"{folder / FILE} was changed since this was begun; --restart begins anew")
    return tokenizer


def _clear(folder: Path, work: Path) -> None:
    for path in [*work.iterdir(), *(path for split in SPLITS for path in folder.glob(f"{split}-[0-9]*"))]:
        if path.name != "lock":
            path.unlink()


def _encode(sources: Sources, job: Job, builder: Builder, report: Report, num_workers: int) -> None:
    is_known = all(file.num_bytes is not None for file in sources.files)
    total = None if not is_known else sum(file.size for file in sources.files)
    before = [0, *accumulate(file.size for file in sources.files)]
    blocks = read_blocks(sources, job.recipe, builder.place)
    for block, encoded in encode_all(blocks, job, num_workers):
        builder.take(block, encoded)
        done = before[block.next.file] + block.read_bytes
        report.advance(done, total, f"{units.count(builder.num_tokens)} tokens")


def _choose_tokenizer(sources: Sources, recipe: Recipe, folder: Path, report: Report) -> Tokenizer:
    def sample() -> Iterator[str]:
        report.say(f"data: training a tokenizer, {recipe.tokenizer.removeprefix('train:')} tokens, on {sources.name}")
        num_characters = 0
        for text in _sample(sources, recipe):
            num_characters += len(text)
            yield text
        report.say(f"data: {units.count(num_characters)} characters are read for the tokenizer; it learns its merges")

    tokenizer = resolve(recipe.tokenizer, sample, recipe.document_token)
    if tokenizer.end_of_text is None:
        raise UserError(f"--tokenizer {recipe.tokenizer} has no token that begins a document; give --document-token")
    replace_file(folder / FILE, tokenizer.json.encode())
    lengths = io.BytesIO()
    np.save(lengths, tokenizer.token_bytes(), allow_pickle=False)
    replace_file(folder / TOKEN_BYTES, lengths.getvalue())
    return tokenizer


def _sample(sources: Sources, recipe: Recipe) -> Iterator[str]:
    """Yields text to learn merges from: all of it, or evenly spaced blocks of all training files; of compressed ones,
    which hold more than their size, perhaps only the first."""
    files = tuple(file for file in sources.files if file.side != "validation")
    total = sum(file.size for file in files)
    blocks = read_blocks(Sources(sources.name, files), recipe)
    taken = 0
    for block in islice(blocks, 0, None, max(1, math.ceil(total / _SAMPLE_BYTES))):
        for document in documents(block, recipe):
            yield from document.slices
            taken += sum(map(len, document.slices))
        if taken > _SAMPLE_BYTES:
            return


def _kept_input(sources: Sources, kept: Path, *, is_begun: bool) -> Sources:
    """Copies standard input to a file, since it is read more than once. Raises UserError if a preparation that has
    begun gets another stream."""
    if is_begun:
        _require_same_stream(kept)
    else:
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, _COPIED_BYTES)
    size = kept.stat().st_size
    files = [
        replace(file, path=str(kept), num_bytes=size) if file.path == STANDARD_INPUT else file for file in sources.files
    ]
    return replace(sources, files=tuple(files))


def _require_same_stream(kept: Path) -> None:
    """Reads standard input to its end, or to the first difference from its copy."""
    with kept.open("rb") as file:
        while before := file.read(_COPIED_BYTES):
            if sys.stdin.buffer.read(_COPIED_BYTES) != before:
                break
        else:
            if not sys.stdin.buffer.read(1):
                return
    raise UserError(
        f"standard input is not the {units.size(kept.stat().st_size)} that were read before; give the same again, or "
        f"--restart to begin anew"
    )


def _require_both(splits: dict[str, SplitRecord], counts: Counts, recipe: Recipe) -> None:
    if not splits["train"].documents + splits["validation"].documents:
        skipped = f"; {sum(counts.skipped.values())} are skipped: {counts.skipped_places[0]}" if counts.skipped else ""
        raise UserError(f"there is no text in the sources ({counts.empty} documents are empty{skipped})")
    for split, other in (("train", "validation"), ("validation", "train")):
        if not splits[split].documents:
            raise UserError(
                f"all {splits[other].documents} documents fell into the {other} split and none into {split} "
                f"(--validation-frac {recipe.validation_frac:g}); give more documents, another --validation-frac, "
                f"a --separator between documents, or --validation SRC; and --restart"
            )


def _origin(sources: Sources, counts: Counts) -> dict[str, Any]:
    skipped = {"skipped_records": counts.skipped, "skipped_places": counts.skipped_places} if counts.skipped else {}
    return {
        **skipped,
        "files": len({file.path for file in sources.files}),
        "skipped_files": len(sources.left_out),
        "skipped_bytes": sum(file.num_bytes for file in sources.left_out),
        "duplicate_documents": counts.duplicates,
        "empty_documents": counts.empty,
        "replaced_places": counts.replaced,
    }
