"""Parts of the sources, and the tokens of one part: the unit of work, of resume, and of what another host can do.

A part is a range of bytes of a large file, a compressed file, or a run of small files. A process reads it, writes
its tokens and then a record; who finds the record leaves the part alone. Parts share nothing, so any number of
processes on any number of hosts give the same tokens.

    .preparing/parts/KEY.train         ids of the part's training documents as in a shard, then where each begins in
    .preparing/parts/KEY.validation    them, int64; KEY is a hash of all that the tokens depend on
    .preparing/parts/KEY.json          the record, written last

So with three files of 10, 40 and 1 MB there are five parts: a.jsonl; bytes 0 to 16 MiB, 16 to 32 MiB and the rest of
b.jsonl; c.txt. If b.jsonl is mended, a.jsonl's and c.txt's are kept.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.base.errors import RunError
from paceline.base.files import replace, sync
from paceline.data.config import Recipe
from paceline.data.documents import Range, Skipped, can_be_cut, read, whole
from paceline.data.encode import Encoder
from paceline.data.shard import DTYPES, SPLITS, Written, version_for
from paceline.data.sources import SourceFile, require_unchanged
from paceline.data.split import key_of
from paceline.data.tokenizer import Tokenizer

PART_BYTES = 16 << 20  # three seconds of encoding on a core
_MAX_PART_BYTES = 256 << 20
_MAX_PARTS = 4096  # of which more are made larger first
_FILE_COST_BYTES = 256  # a million files may have one byte each
_WRITTEN_BYTES = 1 << 20  # at once

Part = tuple[Range, ...]


def cut(files: Sequence[SourceFile], recipe: Recipe, part_bytes: int = 0) -> Iterator[Part]:
    """Yields the parts of these files, in order; a pure function of them. part_bytes: 0 for those of a preparation."""
    size = part_bytes or _part_bytes(sum(file.num_bytes for file in files))
    run: list[Range] = []
    num_bytes = 0
    for file in files:
        if can_be_cut(file, recipe) and file.num_bytes > size:
            if run:
                yield tuple(run)
            run, num_bytes = [], 0
            end = file.start + file.num_bytes
            for start in range(file.start, end, size):
                yield (Range(file, start, min(start + size, end)),)
            continue
        if run and num_bytes + file.num_bytes > size:
            yield tuple(run)
            run, num_bytes = [], 0
        run.append(whole(file))
        num_bytes += file.num_bytes + _FILE_COST_BYTES
    if run:
        yield tuple(run)


def _part_bytes(total: int) -> int:
    size = PART_BYTES
    while size < _MAX_PART_BYTES and size * _MAX_PARTS < total:
        size *= 2  # so that a few files more leave most parts as they are
    return size


@dataclass(frozen=True)
class Job:
    """What is the same for all parts."""

    folder: Path  # of the parts' files
    tokenizer_json: str
    library: str  # of the encoder
    recipe: Recipe
    validation_below: float  # see split.py

    def keys(self, parts: Sequence[Part]) -> list[str]:
        """Returns the name of each part's files."""
        tokens = hashlib.sha256(self.tokenizer_json.encode()).hexdigest()
        how = [tokens, self.validation_below, self.recipe.text_key, self.recipe.separator]
        return [hash_of([*how, [[*asdict(of.file).values(), of.start, of.stop] for of in part]])[:32] for part in parts]


def hash_of(content: Any) -> str:
    """Returns the sha256 hex of content as JSON."""
    return hashlib.sha256(json.dumps(content).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class Record:
    """What a part's files hold, by split; what it left out."""

    tokens: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    documents: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    text_bytes: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    empty: int = 0  # documents without text
    replaced: int = 0  # places that were not UTF-8
    skipped: list[list[str]] = field(default_factory=list)  # [source, why] of each record that could not be read

    def written(self, job: Job, key: str, split: int) -> Written:
        """Returns where a split's tokens of the part are."""
        return Written(job.folder / f"{key}.{SPLITS[split]}", self.tokens[split], self.documents[split])


def record_of(job: Job, key: str) -> Record | None:
    """Returns a part's record; None if it is not done, or its record is damaged: it is made again."""
    try:
        return Record(**json.loads((job.folder / f"{key}.json").read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


class PartEncoder:
    """Makes the tokens of parts, one after the other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        tokenizer = Tokenizer(job.tokenizer_json)
        self._encoder = Encoder(tokenizer, library=job.library)
        self._dtype = DTYPES[version_for(tokenizer.vocab_size)]
        self._first = np.array([tokenizer.end_of_text], dtype=self._dtype)

    def encode(self, key: str, part: Part) -> Record:
        """Writes a part's tokens and its record. Raises UserError, naming file and line, for what cannot be read, and
        for a file that has changed since it was listed."""
        record, skipped = Record(), list[Skipped]()
        number = 0
        with contextlib.ExitStack() as files:  # closes each, also if the disk is too full to close another
            writers = [_Writer(self._job.folder / f"{key}.{split}", files) for split in SPLITS]
            for of in part:
                for document in read(of, self._job.recipe, skipped):
                    record.replaced += document.num_replaced
                    record.empty += document.begins and not document.slices
                    if not document.slices:
                        continue
                    if of.file.split is not None:
                        number = SPLITS.index(of.file.split)
                    elif document.begins:
                        number = int(key_of(document.slices[0]) < self._job.validation_below)
                    ids = [self._encoder.encode(each) for each in document.slices]
                    writers[number].append([self._first, *ids] if document.begins else ids, document.begins)
                    record.text_bytes[number] += sum(len(text.encode()) for text in document.slices)
            for number, writer in enumerate(writers):
                record.tokens[number], record.documents[number] = writer.finish()
        require_unchanged(of.file for of in part)  # other row groups: rows would be missing, or there twice
        record.skipped = [list(each) for each in skipped]
        sync(self._job.folder)
        replace(self._job.folder / f"{key}.json", json.dumps(asdict(record)).encode())
        return record


class _Writer:
    """Writes a part's tokens of one split, and behind them where its documents begin."""

    def __init__(self, path: Path, files: contextlib.ExitStack) -> None:
        self._file = files.enter_context(path.open("wb", buffering=_WRITTEN_BYTES))
        self._num_tokens = 0
        self._starts: list[int] = []

    def append(self, ids: "list[np.ndarray[Any, Any]]", begins: bool) -> None:
        if begins:
            self._starts.append(self._num_tokens)
        for some in ids:
            self._file.write(some.data)
            self._num_tokens += some.size

    def finish(self) -> tuple[int, int]:
        """Returns the numbers of tokens and documents, which are on the disk then."""
        self._file.write(np.array(self._starts, dtype="<i8").data)
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._num_tokens, len(self._starts)


# ---- in any number of processes ----


def encode_all(parts: Sequence[tuple[str, Part]], job: Job, num_workers: int) -> Iterator[tuple[Part, Record]]:
    """Yields each part when it is done, in order. One worker is this process.

    Raises the errors of reading and encoding, the first in the order of parts, and RunError if a worker was killed.
    Records of other parts are kept.
    """
    if num_workers == 1 or len(parts) < 2:
        encoder = PartEncoder(job)
        for key, part in parts:
            yield part, encoder.encode(key, part)
        return
    # spawn: fork and forkserver would copy this process's threads and locks
    spawn = multiprocessing.get_context("spawn")
    num_processes = min(num_workers, len(parts))
    pool = ProcessPoolExecutor(num_processes, mp_context=spawn, initializer=_start_worker, initargs=(job,))
    try:
        futures = [_submit(pool, key, part) for key, part in parts]
        for (_, part), future in zip(parts, futures, strict=True):
            yield part, future.result()
    except BrokenProcessPool as error:
        message = "a worker that encodes text was killed, perhaps because memory ran out; try fewer --workers"
        raise RunError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, key: str, part: Part) -> "Future[Record]":
    """Starts a worker, too, if all are busy, with SIGINT blocked from its first moment: Ctrl-C reaches all processes,
    and the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode, key, part)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: PartEncoder  # of this process, in a worker


def _start_worker(job: Job) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core, without threads
    global _worker
    _worker = PartEncoder(job)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(key: str, part: Part) -> Record:
    return _worker.encode(key, part)
