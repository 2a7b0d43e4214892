"""From --data.path and --data.mix to prepared folders: their own, or one in the cache, made once whoever asks."""

import errno
import hashlib
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import filelock

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import replace as replace_file
from paceline.data import corpora
from paceline.data.config import DataConfig
from paceline.data.corpora import PIECE_BYTES, Sources
from paceline.data.dataset import Dataset, is_dataset
from paceline.data.prepare import Report, prepare
from paceline.data.recipe import Recipe
from paceline.data.shard import FORMAT_VERSION, INDEX, WORK
from paceline.data.sources import digest, find, has_text, split_text
from paceline.data.tokenizer import SETTINGS

_PARALLEL_BYTES = 64 << 20  # of text below which starting workers costs more time than they save
_STALE_S = 7 * 24 * 3600.0  # an unfinished data set that nobody went on with for so long is removed


def cache_dir() -> Path:
    """Where prepared data is kept: PACELINE_CACHE, else XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache"), "paceline")


def inspect_data(config: DataConfig, vocab_size: int) -> None:
    """Raises UserError for what is wrong with the data's places, before any process starts; reads next to nothing."""
    config.check()
    for path, _ in config.parts:
        if not path:
            corpora.embedded()
            continue
        if is_dataset(path):
            Dataset.open(path, vocab_size).train.num_sequences(config.seq_len)
        else:
            has_text(path)


def ensure_datasets(config: DataConfig, report: Report, num_workers: int) -> list[Path]:
    """Returns a prepared folder for each part of the config's data, made first where it is missing.

    Any number of processes may call it at once: one tokenizes, the others wait for it. A cached folder is named by
    the content of the text and the tokenizer's settings, so changed text gives a new one. Raises UserError for missing
    or changing text and for a cache that can not be written.
    """
    config.check()
    return [_ensure(path, config.tokenizer_vocab, report, num_workers) for path, _ in config.parts]


def _ensure(path: str, vocab_size: int, report: Report, num_workers: int) -> Path:
    if path and is_dataset(path):
        return Path(os.path.expanduser(path))
    sources = _text_sources(path)
    cache = cache_dir()
    try:
        name = _name(sources, vocab_size, cache)
        final = cache / name
        if _is_complete(final):  # before the lock, so a cache that can only be read serves as well
            return final
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, name, report):
            if not _is_complete(final):
                _sweep(cache)
                _make(sources, vocab_size, final, report, num_workers)
    except (OSError, NotImplementedError) as error:  # the latter from filelock, where the file system has no locks
        raise UserError(_cache_message(cache, error)) from error
    return final


def _text_sources(path: str) -> Sources:
    """Plain text only: what needs more to be said about it is prepared by the command that asks for it."""
    sources = find([path]) if path else corpora.embedded()
    for file in sources.files:
        if file.format != "text" or file.compression:
            raise UserError(
                f"data.path {path} holds {file.name}, which is not plain text; make token shards of it first: "
                f"paceline data prepare {shlex.quote(path)} --out DIR, then --data.path DIR"
            )
    return replace(sources, files=split_text(sources.files))


def _make(sources: Sources, vocab_size: int, final: Path, report: Report, num_workers: int) -> None:
    began = time.perf_counter()
    size = sum(file.num_bytes or 0 for file in sources.files)
    report.say(f"data: preparing {sources.name}, {len(sources.files)} files, {units.size(size)}")
    unstamped = tuple(replace(file, stamp="") for file in sources.files)  # the folder's name says what they hold
    recipe = Recipe(tokenizer=f"train:{vocab_size}")
    workers = num_workers if size > _PARALLEL_BYTES else 1
    if not (final / WORK).exists():
        shutil.rmtree(final, ignore_errors=True)  # complete once, and somebody began to delete it
    try:
        index = prepare(replace(sources, files=unstamped), recipe, final, report, num_workers=workers)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):  # room on the disk can be made, other text is another data set
            shutil.rmtree(final, ignore_errors=True)
        raise
    if not final.name.endswith(_content_name(sources, vocab_size)):  # the name promises the content
        shutil.rmtree(final)
        raise UserError(f"the text of {sources.name} changed while it was read; start again")
    for what, number in (
        ("files are not UTF-8 text and were left out", index.origin["skipped_files"]),
        ("places in the text are not UTF-8 and became U+FFFD", index.origin["replaced_places"]),
    ):
        if number:
            report.say(f"data: {number} {what}")
    counts = ", ".join(f"{units.count(record.tokens)} {split} tokens" for split, record in index.splits.items())
    report.say(f"data: {counts} in {units.duration(time.perf_counter() - began)}, kept in {final}")


def _is_complete(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def _name(sources: Sources, vocab_size: int, cache: Path) -> str:
    """For people the corpus and the vocabulary; for us all that the bytes depend on.

    Hashing gigabytes takes seconds and every process of every start asks: the answer is kept under the files' names,
    sizes and times of change.
    """
    known = cache / ".known" / _memo_name(sources, vocab_size)
    try:
        return known.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    name = f"{sources.name[:60]}-bpe{vocab_size}-{_content_name(sources, vocab_size)}"
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        replace_file(known, name.encode())
    except OSError:
        pass  # a cache that can only be read: hashed each time
    return name


def _content_name(sources: Sources, vocab_size: int) -> str:
    return _short_hash(f"{FORMAT_VERSION}", SETTINGS, f"{vocab_size}", f"{PIECE_BYTES}", digest(sources))


def _memo_name(sources: Sources, vocab_size: int) -> str:
    stamps = [f"{file.path}\0{file.start}\0{file.stop}\0{file.stamp}" for file in sources.files]
    return _short_hash(f"{FORMAT_VERSION}", SETTINGS, f"{vocab_size}", f"{PIECE_BYTES}", *stamps)


def _short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _cache_message(cache: Path, error: Exception) -> str:
    where = getattr(error, "filename", None) or cache
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    need = "free some space" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return f"the cache {cache} can not be written: {where}: {reason}; {need} or set PACELINE_CACHE to another folder"


@contextmanager
def _locked(cache: Path, name: str, report: Report) -> Iterator[None]:
    """Holds the lock of one data set; the system lets go of a killed holder's."""
    lock = filelock.FileLock(cache / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report.say(f"data: waiting for another process that prepares {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep(cache: Path) -> None:
    """Removes what was begun long ago and never finished, where nobody works on it."""
    for lock_file in cache.glob(".*.lock"):
        folder = cache / lock_file.name[1 : -len(".lock")]
        if not folder.is_dir() or _is_complete(folder) or time.time() - folder.stat().st_mtime < _STALE_S:
            continue
        try:
            with filelock.FileLock(lock_file, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except filelock.Timeout:
            pass
