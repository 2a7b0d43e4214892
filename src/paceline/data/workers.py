"""Blocks to tokens, in any number of processes, with the same result."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.base.errors import RunError
from paceline.data.blocks import Block, Document, Skipped, documents
from paceline.data.config import Recipe
from paceline.data.encode import Encoder
from paceline.data.shard import DTYPES, SPLITS, version_for
from paceline.data.split import key_of
from paceline.data.tokenizer import Tokenizer

DIGEST_BYTES = 16  # 2**40 different documents have an equal pair with probability 2**-49
_BLOCKS_AHEAD = 3  # per worker: one in work, the others queued


@dataclass(frozen=True)
class Job:
    tokenizer_json: str
    library: str  # of the encoder
    recipe: Recipe
    validation_below: float  # see split.py


@dataclass(frozen=True)
class Encoded:
    """The tokens of a block in parts; a part is a document, or a slice of one."""

    ids: npt.NDArray[Any]  # (tokens,) of all parts in order, each document with its first token
    num_tokens: npt.NDArray[np.int64]  # (parts,)
    num_bytes: npt.NDArray[np.int64]  # (parts,) of text as UTF-8
    sides: npt.NDArray[np.int8]  # (parts,) index into SPLITS; -1 if the part continues a document
    digests: tuple[bytes, ...] = ()  # (parts,) of the text; empty if not needed
    is_complete: bool = True  # the last part ends its document
    num_replaced: int = 0  # places that were not UTF-8
    num_empty: int = 0  # documents without text
    skipped: tuple[Skipped, ...] = ()  # of the block, with --on-error skip

    def part(self, first: int, last: int) -> "Encoded":
        """Parts first..last-1."""
        borders = np.concatenate(([0], np.cumsum(self.num_tokens)))
        which = slice(first, last)
        ids = self.ids[borders[first] : borders[last]]
        return Encoded(ids, self.num_tokens[which], self.num_bytes[which], self.sides[which], self.digests[which])


def joined(several: list[Encoded]) -> Encoded:
    return Encoded(
        np.concatenate([each.ids for each in several]),
        np.concatenate([each.num_tokens for each in several]),
        np.concatenate([each.num_bytes for each in several]),
        np.concatenate([each.sides for each in several]),
        tuple(digest for each in several for digest in each.digests),
        several[-1].is_complete,
    )


class BlockEncoder:
    def __init__(self, job: Job) -> None:
        self.job = job
        tokenizer = Tokenizer(job.tokenizer_json)
        self._encoder = Encoder(tokenizer, library=job.library)
        self._dtype = DTYPES[version_for(tokenizer.vocab_size)]
        self._first = np.array([tokenizer.end_of_text], dtype=self._dtype)

    def encode(self, block: Block) -> Encoded:
        """Raises UserError, naming file and line, for a record that can not be read."""
        skipped: list[Skipped] = []
        found = list(documents(block, self.job.recipe, skipped))
        parts = [document for document in found if document.slices]
        ids = [self._ids(part) for part in parts]
        return Encoded(
            ids=np.concatenate(ids) if ids else np.empty(0, self._dtype),
            num_tokens=np.array([each.size for each in ids], dtype=np.int64),
            num_bytes=np.array([sum(map(_num_bytes, part.slices)) for part in parts], dtype=np.int64),
            sides=np.array([self._side(part) for part in parts], dtype=np.int8),
            digests=tuple(map(_digest, parts)) if self.job.recipe.dedup else (),
            is_complete=not parts or parts[-1].ends,
            num_replaced=sum(part.num_replaced for part in parts),
            num_empty=len(found) - len(parts),
            skipped=(*block.skipped, *skipped),
        )

    def _ids(self, part: Document) -> npt.NDArray[Any]:
        ids = [self._encoder.encode(each) for each in part.slices]
        joined: npt.NDArray[Any] = np.concatenate([self._first, *ids] if part.begins else ids)
        return joined.astype(self._dtype, copy=False)

    def _side(self, part: Document) -> int:
        if not part.begins:
            return -1
        if part.side is not None:
            return SPLITS.index(part.side)
        return int(key_of(part.slices[0]) < self.job.validation_below)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _digest(part: Document) -> bytes:
    """Hashes each slice, so that a document's digests do not depend on its parts."""
    return b"".join(blake2b(each.encode(), digest_size=DIGEST_BYTES).digest() for each in part.slices)


def encode_all(blocks: Iterator[Block], job: Job, num_workers: int) -> Iterator[tuple[Block, Encoded]]:
    """Yields the blocks with their tokens, in order; memory is a few blocks per worker.

    One worker is this process; several are processes, which scale better than threads of tiktoken. Raises the errors of
    reading and encoding, and RunError if a worker was killed.
    """
    if num_workers == 1:
        encoder = BlockEncoder(job)
        for block in blocks:
            yield block, encoder.encode(block)
        return
    # spawn: fork and forkserver would copy this process's threads and locks
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_start_worker, initargs=(job,))
    waiting: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in itertools.islice(blocks, num_workers * _BLOCKS_AHEAD):
            waiting.append((block, _submit(pool, block)))
        while waiting:
            block, future = waiting.popleft()
            encoded = future.result()
            following = next(blocks, None)
            if following is not None:
                waiting.append((following, _submit(pool, following)))
            yield block, encoded
    except BrokenProcessPool as error:
        message = "a worker that encodes text was killed, perhaps because memory ran out; try fewer --workers"
        raise RunError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, block: Block) -> Future[Encoded]:
    """Starts a worker, too, if all are busy, with SIGINT blocked from its first moment: Ctrl-C reaches all processes,
    and the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode, block)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: BlockEncoder  # of this process, in a worker


def _start_worker(job: Job) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core, without threads
    global _worker
    _worker = BlockEncoder(job)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> Encoded:
    return _worker.encode(block)
