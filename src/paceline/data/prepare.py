"""Text to a prepared folder, once: in the cache, by one process, all or nothing."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import filelock
import numpy as np

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import sync, write_synced
from paceline.data import corpora
from paceline.data.config import DataConfig
from paceline.data.corpora import Corpus, Document, Split
from paceline.data.dataset import Dataset
from paceline.data.shard import (
    FORMAT_VERSION,
    INDEX,
    SHARD_TOKENS,
    Index,
    SplitRecord,
    SplitWriter,
    TokenizerRecord,
    write_index,
)
from paceline.data.tokenizer import SETTINGS, Tokenizer, train

Say = Callable[[str], None]

TRAINING_BYTES = 64 << 20  # of text is enough to learn merges from; on more, every n-th piece is taken
BATCH_BYTES = 4 << 20  # of text tokenized at a time; an encoding takes about 100 bytes a token while it lives
_BUILDING = ".building-"  # + the data set's name: its builder's folder, under the same name's lock


def cache_dir() -> Path:
    """Where prepared data is kept: PACELINE_CACHE, else XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache"), "paceline")


def inspect_path(config: DataConfig) -> None:
    """Raises UserError for what is wrong with the data's place, before any process starts; reads next to nothing."""
    config.check()
    if not config.path:
        corpora.embedded()
    elif _is_prepared(config):
        Dataset.open(config.path).train.num_sequences(config.seq_len)
    else:
        corpora.has_text(config.path)


def ensure_dataset(config: DataConfig, say: Say) -> Path:
    """Returns a prepared folder for the config: its own, or one in the cache, which is made first where it is missing.

    Any number of processes may call it at once: one tokenizes, the others wait for it. The cached folder is named by
    the content of the text and the tokenizer's settings, so changed text gives a new one. `say` gets lines for the
    terminal. Raises UserError for missing or changing text and for a cache that can not be written.
    """
    config.check()
    if _is_prepared(config):
        return Path(os.path.expanduser(config.path))
    corpus = corpora.from_path(config.path) if config.path else corpora.embedded()
    cache = cache_dir()
    name = _cache_name(corpus, config.tokenizer_vocab)
    final = cache / name
    if _is_complete(final):  # before the lock, so a cache that can only be read serves as well
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, name, say):
            if not _is_complete(final):
                _sweep(cache, name)
                _build_aside(corpus, config.tokenizer_vocab, final, say)
    except (OSError, NotImplementedError) as error:  # the latter from filelock, where the file system has no locks
        raise UserError(_cache_message(cache, error)) from error
    return final


def _is_prepared(config: DataConfig) -> bool:
    return bool(config.path) and os.path.isfile(os.path.join(os.path.expanduser(config.path), INDEX))


def _is_complete(folder: Path) -> bool:
    """Whether a data set is there: its folder appears by one rename, with the index in it."""
    return (folder / INDEX).is_file()


def _cache_name(corpus: Corpus, vocab_size: int) -> str:
    """For people the corpus and the vocabulary; for us all that the bytes depend on."""
    parts = (f"{FORMAT_VERSION}", SETTINGS, f"{vocab_size}", f"{corpora.PIECE_BYTES}", corpora.digest(corpus))
    return f"{corpus.name[:60]}-bpe{vocab_size}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _cache_message(cache: Path, error: Exception) -> str:
    where = getattr(error, "filename", None) or cache
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    need = "free some space" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return f"the cache {cache} can not be written: {where}: {reason}; {need} or set PACELINE_CACHE to another folder"


@contextmanager
def _locked(cache: Path, name: str, say: Say) -> Iterator[None]:
    """Holds the lock of one data set; the system lets go of a killed holder's."""
    lock = filelock.FileLock(cache / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"data: waiting for another process that prepares {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep(cache: Path, name: str) -> None:
    """Removes what killed builders left: a builder holds its lock, so where the lock is free nobody builds."""
    for folder in cache.glob(f"{_BUILDING}*"):
        other = folder.name.removeprefix(_BUILDING)
        if other == name:
            shutil.rmtree(folder)
            continue
        try:
            with filelock.FileLock(cache / f".{other}.lock", timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except filelock.Timeout:
            pass  # alive and building another data set


def _build_aside(corpus: Corpus, vocab_size: int, final: Path, say: Say) -> None:
    """Builds beside the final place and moves it there in one rename, everything on the disk first."""
    aside = final.with_name(_BUILDING + final.name)
    aside.mkdir()
    try:
        build(corpus, aside, vocab_size, say)
        if _cache_name(corpus, vocab_size) != final.name:  # the name promises the content
            raise UserError(f"the text of {corpus.name} changed while it was read; start again")
        if final.exists():
            shutil.rmtree(final)  # without its index: somebody began to delete it
        aside.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    say(f"data: kept in {final}")


def build(corpus: Corpus, folder: Path, vocab_size: int, say: Say, *, shard_tokens: int = SHARD_TOKENS) -> None:
    """Fills an empty folder with the data set of a corpus; index.json comes last. The same bytes on any machine.

    Raises UserError where there is too little text for both splits.
    """
    began = time.perf_counter()
    split = corpora.split(corpus)
    size = sum(document.num_bytes for document in split.train)
    say(f"data: training {vocab_size} BPE tokens on {len(split.train)} files of {corpus.name}, {units.size(size)}")
    json = train(_training_text(split), vocab_size)
    tokenizer = Tokenizer(json)
    write_synced(folder / "tokenizer.json", json.encode())
    np.save(folder / "token_bytes.npy", tokenizer.token_bytes(), allow_pickle=False)
    sync(folder / "token_bytes.npy")
    splits = {}
    for side, documents in (("train", split.train), ("validation", split.validation)):
        writer = SplitWriter(
            folder, side, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text, shard_tokens=shard_tokens
        )
        splits[side] = _write_split(writer, tokenizer, documents, say)
    record = TokenizerRecord("tokenizer.json", tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text)
    origin = {"corpus": corpus.name, "files": len(corpus.files), "skipped_files": corpus.skipped}
    write_index(folder, Index(corpus.name, tokenizer.vocab_size, splits, record, "token_bytes.npy", origin))
    sync(folder)
    if corpus.skipped:
        say(f"data: {corpus.skipped} files are not UTF-8 text and were left out")
    counts = ", ".join(f"{units.count(splits[side].tokens)} {side} tokens" for side in splits)
    say(f"data: {counts} in {units.duration(time.perf_counter() - began)}")


def _training_text(split: Split) -> Iterator[str]:
    total = sum(document.num_bytes for document in split.train)
    texts = chain.from_iterable(corpora.pieces(document) for document in split.train)
    return islice(texts, 0, None, max(1, -(-total // TRAINING_BYTES)))


def _write_split(writer: SplitWriter, tokenizer: Tokenizer, documents: Iterable[Document], say: Say) -> SplitRecord:
    """Tokenizes documents a batch of pieces at a time, on all cores, and writes them in order."""
    text_bytes = num_replaced = 0
    try:
        for batch in _batches(documents):
            texts = [text for _, text in batch]
            for (begins, text), ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
                if begins:
                    writer.start_document()
                writer.write(ids)
                text_bytes += len(text.encode())
                num_replaced += text.count(corpora.REPLACEMENT)
        record = writer.finish(text_bytes)
    finally:
        writer.abandon()
    if not record.tokens:
        raise UserError(f"there is too little text for a {writer.split} split: give more")
    if num_replaced:
        say(f"data: {num_replaced} places in the {writer.split} text are not UTF-8 and became U+FFFD")
    return record


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[bool, str]]]:
    """Lists of (is the first of its document, text) that come to about BATCH_BYTES."""
    batch: list[tuple[bool, str]] = []
    size = 0
    for document in documents:
        for number, text in enumerate(corpora.pieces(document)):
            batch.append((number == 0, text))
            size += len(text)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
