"""Folders of prepared data for --data.path and --data.mix: the user's own, or cached ones, made once."""

import errno
import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import filelock

from paceline.base import units
from paceline.base.cache import cache_dir
from paceline.base.errors import UserError
from paceline.base.files import replace as replace_file
from paceline.base.locks import file_lock
from paceline.data.config import DataConfig, Recipe, Report, vocabulary_for
from paceline.data.dataset import Dataset, is_dataset
from paceline.data.find import digest, find, has_text
from paceline.data.hub import is_spec
from paceline.data.prepare import prepare
from paceline.data.shard import FORMAT_VERSION, WORK, is_complete
from paceline.data.sources import Sources, embedded
from paceline.data.split import split_text
from paceline.data.text import SLICE_BYTES
from paceline.data.tokenizer import SETTINGS

_NAME = re.compile(r"[^/]+-(bpe\d+|chars)-[0-9a-f]{16}")  # of a folder in the cache
_PARALLEL_BYTES = 64 << 20  # of text; starting workers for less costs more time than it saves
_STALE_S = 7 * 24 * 3600.0  # an unfinished dataset unchanged for this time is removed


def inspect_data(config: DataConfig, vocab_size: int) -> None:
    """Raises UserError for wrong data paths before any process starts; reads very little."""
    config.check()
    for path, _ in config.parts:
        if not path:
            embedded()
        elif is_dataset(path):
            Dataset.open(path, vocab_size, config.document_token).train.num_sequences(config.seq_len)
        else:
            try:
                has_text(path)
            except UserError as error:
                if _made_before(path, config.tokenizer_vocab, error) is None:
                    raise


def ensure_datasets(config: DataConfig, report: Report, num_workers: int) -> list[Path]:
    """Returns a prepared folder for each part of the config's data, made first if missing.

    Any number of processes may call it at once: one tokenizes, the others wait. A cached folder's name has a hash of
    the text and the tokenizer settings, so changed text gets a new folder. Raises UserError if text is missing or
    changes, or the cache cannot be written.
    """
    config.check()
    return [_ensure(path, config.tokenizer_vocab, report, num_workers) for path, _ in config.parts]


def _ensure(path: str, vocab_size: int, report: Report, num_workers: int) -> Path:
    if path and is_dataset(path):
        return Path(os.path.expanduser(path))
    try:
        sources = _text_sources(path)
    except UserError as error:
        before = _made_before(path, vocab_size, error)
        if before is None:
            raise
        report.say(f"data: {error}; {before}, which was prepared before, is taken as it is")
        return before
    final = _prepared(sources, vocab_size, cache_dir(), report, num_workers)
    if is_spec(path):
        with suppress(OSError):  # a read-only cache
            replace_file(_last_made(path, vocab_size), final.name.encode())
    return final


def _last_made(spec: str, vocab_size: int) -> Path:
    """Returns the file with the name of the folder that was made last of a dataset on the hub."""
    return cache_dir() / ".known" / _hash(vocab_size, spec)


def _made_before(path: str, vocab_size: int, error: UserError) -> Path | None:
    """Returns the folder that was made last of a dataset on the hub, if the hub fails now; so a run whose tokens are
    here can go on, and a checkpoint of other data refuses them by their fingerprint. None: there is none."""
    if not (is_spec(path) and error.is_of_system):
        return None
    name = _known_name(_last_made(path, vocab_size))
    return cache_dir() / name if name and is_complete(cache_dir() / name) else None


def _prepared(sources: Sources, vocab_size: int, cache: Path, report: Report, num_workers: int) -> Path:
    """Returns the cached folder of these sources, made first if missing. vocab_size: as data.tokenizer-vocab."""
    if vocab_size < 0:
        vocab_size = vocabulary_for(sum(file.num_bytes for file in sources.files))
    try:
        name = _name(sources, vocab_size, cache)
        final = cache / name
        if is_complete(final):  # before the lock, so that a read-only cache works
            return final
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, name, report):
            if not is_complete(final):
                _remove_stale(cache)
                _make(sources, vocab_size, final, report, num_workers)
    except OSError as error:
        raise UserError(_cache_message(cache, error)) from error
    return final


def _text_sources(path: str) -> Sources:
    """Plain text only; `data prepare` has options for other formats."""
    sources = find([path]) if path else embedded()
    for file in sources.files:
        if file.format != "text" or not file.is_seekable:
            raise UserError(
                f"data.path {path} holds {file.name}, which is not a plain text file; make token shards of it first: "
                f"paceline data prepare {shlex.quote(path)} --out DIR, then --data.path DIR"
            )
    return replace(sources, files=split_text(sources.files))


def _make(sources: Sources, vocab_size: int, final: Path, report: Report, num_workers: int) -> None:
    began = time.perf_counter()
    size, num_files = sum(file.num_bytes for file in sources.files), len({file.path for file in sources.files})
    report.say(f"data: preparing {sources.name}, {units.plural(num_files, 'file')}, {units.size(size)}")
    recipe = Recipe(tokenizer=f"train:{vocab_size}" if vocab_size else "chars")
    workers = num_workers if size > _PARALLEL_BYTES else 1
    if not (final / WORK).exists():
        shutil.rmtree(final, ignore_errors=True)  # complete once, partly deleted by a user
    try:
        index = prepare(sources, recipe, final, report, num_workers=workers)
    except UserError as error:
        # After a full disk, or one that could not be read, the same text can resume.
        if not (error.is_of_system or isinstance(error.__cause__, OSError)):
            shutil.rmtree(final, ignore_errors=True)
        raise
    if not final.name.endswith(_content_hash(sources, vocab_size)):  # the content changed meanwhile
        shutil.rmtree(final)
        raise UserError(f"the text of {sources.name} changed while it was read; start again")
    assert index is not None  # all parts are this process's
    if replaced := index.origin["replaced_places"]:
        report.say(f"data: {replaced} places in the text are not UTF-8 and became U+FFFD")
    counts = ", ".join(f"{units.count(record.tokens)} {split} tokens" for split, record in index.splits.items())
    report.say(f"data: {counts} in {units.duration(time.perf_counter() - began)}, kept in {final}")


def _name(sources: Sources, vocab_size: int, cache: Path) -> str:
    """Returns the folder's name: corpus, vocabulary, and a hash of everything that the tokens depend on. Hashing
    gigabytes takes seconds, so the result is cached under a hash of the files' paths, names, splits and stamps."""
    stamps = [
        f"{file.path}\0{file.name}\0{file.split}\0{file.start}\0{file.stop}\0{file.stamp}" for file in sources.files
    ]
    known = cache / ".known" / _hash(vocab_size, *stamps)
    if (name := _known_name(known)) is not None:
        return name
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(known.with_suffix(".lock")):  # one process of a host hashes, the others wait
            if (name := _known_name(known)) is None:
                name = _hashed_name(sources, vocab_size)
                replace_file(known, name.encode())
            return name
    except OSError:  # a read-only cache, or one without locks: hashed each time
        return _hashed_name(sources, vocab_size)


def _known_name(known: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        if _NAME.fullmatch(name := known.read_text(encoding="utf-8")):  # else a crash cut the file short
            return name
    return None


def _hashed_name(sources: Sources, vocab_size: int) -> str:
    tokenizer = f"bpe{vocab_size}" if vocab_size else "chars"
    return f"{sources.name[:60]}-{tokenizer}-{_content_hash(sources, vocab_size)}"


def _content_hash(sources: Sources, vocab_size: int) -> str:
    return _hash(vocab_size, digest(sources))


def _hash(vocab_size: int, *parts: str) -> str:
    settings = (f"{FORMAT_VERSION}", SETTINGS, f"{vocab_size}", f"{SLICE_BYTES}")
    return hashlib.sha256("\0".join((*settings, *parts)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _cache_message(cache: Path, error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    need = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return (
        f"the cache {cache} can not be written: {error.filename or cache}: {reason}; {need} or set PACELINE_CACHE to "
        "another folder"
    )


@contextmanager
def _locked(cache: Path, name: str, report: Report) -> Iterator[None]:
    """Holds the lock of one dataset; the system releases it if the holder is killed."""
    lock = file_lock(cache / f".{name}.lock")
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        report.say(f"data: waiting for another process that prepares {name}")
        held = lock.acquire()
    with held:
        yield


def _remove_stale(cache: Path) -> None:
    for lock_file in cache.glob(".*.lock"):
        folder = cache / lock_file.name[1 : -len(".lock")]
        with suppress(OSError):  # it is locked (Timeout is an OSError), another user's, or was removed meanwhile
            if folder.is_dir() and not is_complete(folder) and time.time() - folder.stat().st_mtime >= _STALE_S:
                with file_lock(lock_file, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
