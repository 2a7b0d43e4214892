"""Blocks of documents to tokens, on any number of processes; what comes out does not depend on how many."""

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
from paceline.data.blocks import Block, ReadOptions, Text, texts
from paceline.data.dedup import digest_of
from paceline.data.encode import Encoder
from paceline.data.shard import DTYPES, SPLITS, version_for
from paceline.data.tokenizer import Tokenizer

_UNDECIDED = -1
_HASHED_CHARACTERS = 1024  # of a document's beginning, for its side: equal documents are on one side
_BLOCKS_AHEAD = 3  # a worker: one in work, the others in its queue and in ours


@dataclass(frozen=True)
class Job:
    """All that a worker needs; sent to it once."""

    tokenizer_json: str
    library: str  # of the encoder: found once, by the process that reads
    options: ReadOptions
    validation_frac: float
    digests: bool  # wanted for de-duplication only


@dataclass(frozen=True)
class Encoded:
    """The tokens of a block, part by part: a part is a document, or a piece of one that is longer than a piece."""

    ids: npt.NDArray[Any]  # (tokens,) of all parts in order, each document with its first token
    num_tokens: npt.NDArray[np.int64]  # (parts,)
    num_bytes: npt.NDArray[np.int64]  # (parts,) of text as UTF-8
    sides: npt.NDArray[np.int8]  # (parts,) place in SPLITS; -1 where a part goes on with a document
    begins: npt.NDArray[np.bool_]  # (parts,)
    ends: npt.NDArray[np.bool_]  # (parts,)
    digests: tuple[bytes, ...]  # (parts,) of the text; empty where they are not wanted
    num_replaced: int = 0  # places that were not UTF-8
    num_empty: int = 0  # documents without text

    def part(self, first: int, last: int) -> "Encoded":
        """The parts first..last-1, for which nothing is counted again."""
        borders = np.concatenate(([0], np.cumsum(self.num_tokens)))
        chosen = slice(first, last)
        return Encoded(
            self.ids[borders[first] : borders[last]],
            self.num_tokens[chosen],
            self.num_bytes[chosen],
            self.sides[chosen],
            self.begins[chosen],
            self.ends[chosen],
            self.digests[chosen],
        )


class BlockEncoder:
    """What one worker does."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tokenizer = Tokenizer(job.tokenizer_json)
        self._encoder = Encoder(tokenizer, library=job.library)
        self._dtype = DTYPES[version_for(tokenizer.vocab_size)]
        self._first = np.array([tokenizer.end_of_text], dtype=self._dtype)

    def encode(self, block: Block) -> Encoded:
        """Raises UserError, naming file and line, for a record that can not be read."""
        found = texts(block, self.job.options)
        pieces: list[npt.NDArray[Any]] = []
        for part in found.texts:
            if part.begins:
                pieces.append(self._first)
            pieces.append(self._encoder.encode(part.text))
        ids = np.concatenate(pieces) if pieces else np.empty(0, self._dtype)
        begins = np.array([part.begins for part in found.texts], dtype=np.bool_)
        sizes = iter(piece.size for piece in pieces)
        num_tokens = [next(sizes) + (next(sizes) if part.begins else 0) for part in found.texts]
        return Encoded(
            ids=ids.astype(self._dtype, copy=False),
            num_tokens=np.array(num_tokens, dtype=np.int64),
            num_bytes=np.array([_num_bytes(part.text) for part in found.texts], dtype=np.int64),
            sides=np.array([self._side(part) for part in found.texts], dtype=np.int8),
            begins=begins,
            ends=np.array([part.ends for part in found.texts], dtype=np.bool_),
            digests=tuple(digest_of(part.text) for part in found.texts) if self.job.digests else (),
            num_replaced=sum(part.num_replaced for part in found.texts),
            num_empty=found.num_empty,
        )

    def _side(self, part: Text) -> int:
        if not part.begins:
            return _UNDECIDED
        if part.side is not None:
            return SPLITS.index(part.side)
        key = blake2b(part.text[:_HASHED_CHARACTERS].encode(), digest_size=8).digest()
        return int(int.from_bytes(key, "little") < self.job.validation_frac * 2.0**64)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def encode_all(blocks: Iterator[Block], job: Job, num_workers: int) -> Iterator[tuple[Block, Encoded]]:
    """Yields the blocks with their tokens, in their order; memory is that of a few blocks a worker.

    One worker is this process; more are processes, since two threads of tiktoken come to 1.4 of one and two processes
    to 1.9. Raises what reading and encoding raise, and RunError where a worker was killed.
    """
    if num_workers == 1:
        encoder = BlockEncoder(job)
        for block in blocks:
            yield block, encoder.encode(block)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        # forkserver and fork would copy whatever threads and locks this process has
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_be_worker,
        initargs=(job,),
    )
    waiting: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in itertools.islice(blocks, num_workers * _BLOCKS_AHEAD):
            waiting.append((block, pool.submit(_encode, block)))
        while waiting:
            block, future = waiting.popleft()
            encoded = future.result()
            following = next(blocks, None)
            if following is not None:
                waiting.append((following, pool.submit(_encode, following)))
            yield block, encoded
    except BrokenProcessPool as error:
        message = "a worker that encodes text was killed, perhaps for want of memory; try fewer --workers"
        raise RunError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: BlockEncoder  # of this process, where it is a worker


def _be_worker(job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core; no threads besides
    global _worker
    _worker = BlockEncoder(job)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> Encoded:
    return _worker.encode(block)
