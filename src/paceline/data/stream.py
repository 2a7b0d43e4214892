"""Shards as one long stream of tokens on disk: a rank reads the bytes of its own sequences only.

Uses `pread`, not memory maps: a truncated mapped file kills the process (SIGBUS), its pages stay in the process, and
the system reads around each fault.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.data.shard import AGAIN, DTYPES, HEADER_BYTES, MAGIC, reading, version_for

Int64s = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32, as stored

_SAMPLE_BYTES = 64 << 10
MAX_OPEN_FILES = 128  # kept open, of all streams; macOS lets a process open 256, Linux 1024
_SNIFFED_TOKENS = 32 << 10
_LARGEST_OF_CHARACTERS = 256  # of so small a vocabulary each second id may be 0 or 1: a space, a line end
LLAMA3_MAGIC, LLAMA3_VERSION = 20240801, 7  # llm.c's shards of Llama 3 tokens, uint32


class _Descriptor:
    """An open file that closes when its last reader releases it, so never during a read."""

    num_open = 0

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _Descriptor.num_open += 1

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)
            _Descriptor.num_open -= 1


class Shard:
    """A checked file of tokens, opened when it is first read. Reading takes no lock and moves no file position: any
    thread may read, and a forked process."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, num_tokens: int, first_byte: int) -> None:
        """first_byte: position of the first token."""
        self.path, self.dtype, self.num_tokens, self.first_byte = path, np.dtype(dtype), num_tokens, first_byte
        self._itemsize = self.dtype.itemsize
        self._descriptor: _Descriptor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.path, self.dtype, self.num_tokens, self.first_byte)

    @classmethod
    def open(cls, path: Path) -> "Shard":
        """Returns a file with llm.c's header, of GPT-2 tokens or Llama 3 tokens. Raises UserError, naming file and
        numbers, if magic, version or length are not a shard's."""
        with reading(f"shard {path}", f"; {AGAIN}"), path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            raise UserError(
                f"shard {path} is truncated: {len(head)} bytes, the header alone has {HEADER_BYTES}; {AGAIN}"
            )
        magic, version, num_tokens = (int(value) for value in np.frombuffer(head, dtype="<i4")[:3])
        shard = cls(path, _dtype(path, magic, version), num_tokens, HEADER_BYTES)
        shard.require_size()
        return shard

    @classmethod
    def without_header(cls, path: Path, vocab_size: int) -> "Shard":
        """Opens nanoGPT's tokens without a header: uint16, or uint32 if not all ids of the vocabulary fit into uint16.
        Raises UserError for a part of a token at the end, and for integers that were written wider."""
        dtype = DTYPES[version_for(vocab_size)]
        with reading(path):
            num_bytes = path.stat().st_size
        if num_bytes % dtype.itemsize:
            raise UserError(
                f"{path} is truncated: its {num_bytes} bytes are not whole {dtype.name} tokens, as a vocabulary of "
                f"{vocab_size} has; copy it again"
            )
        shard = cls(path, dtype, num_bytes // dtype.itemsize, 0)
        if vocab_size > _LARGEST_OF_CHARACTERS:
            _require_width(shard)
        return shard

    @property
    def num_bytes(self) -> int:
        return self.first_byte + self.num_tokens * self._itemsize

    def require_size(self) -> None:
        """Raises UserError if the file is missing, or has another size than its tokens make."""
        with reading(f"shard {self.path}", f"; {AGAIN}"):
            size = self.path.stat().st_size
        if size != self.num_bytes:
            what = "truncated" if size < self.num_bytes else "longer than its tokens"
            raise UserError(
                f"shard {self.path} is {what}: {self.num_tokens} tokens make {self.num_bytes} bytes, it has {size}; "
                f"{AGAIN}"
            )

    def fill(self, out: Tokens, start: int) -> None:
        """Reads the tokens start, start+1, ... into out (n,). Raises UserError, naming file and byte, if the file has
        become shorter or the disk fails."""
        if out.dtype != self.dtype:  # a stream with shards of both dtypes
            narrow = np.empty(out.size, dtype=self.dtype)
            self.fill(narrow, start)
            out[:] = narrow
            return
        position = self.first_byte + start * self._itemsize
        target: Any = out
        done, wanted = 0, out.nbytes
        while done < wanted:
            try:
                descriptor = self._descriptor or _Descriptor(self.path)
                if _Descriptor.num_open <= MAX_OPEN_FILES:  # else it is closed after the read
                    self._descriptor = descriptor
                got = os.preadv(descriptor.number, [target], position + done)
            except OSError as error:
                raise UserError(
                    f"shard {self.path} can not be read at byte {position + done}: {error.strerror}; {AGAIN}"
                ) from error
            if got == 0:
                raise UserError(
                    f"shard {self.path} ends at byte {position + done}: it became shorter since it was opened; {AGAIN}"
                )
            done += got
            if done < wanted:  # the system gives at most 2 GiB at a time, and less after a signal
                target = out.data.cast("B")[done:]


def _require_width(shard: Shard) -> None:
    """Raises UserError if the file's integers are wider than the shard's: if each second one, half of a wider integer,
    is 0 or 1."""
    ids: Tokens = np.empty(min(shard.num_tokens, _SNIFFED_TOKENS), dtype=shard.dtype)
    copy(shard).fill(ids, 0)  # its file is closed with the copy
    num_pairs, width = ids.size // 2, shard.dtype.itemsize
    while ids.size >= 16 and ids[1::2].max() <= 1 < ids[::2].max():
        ids, width = ids[::2], 2 * width
    if width > shard.dtype.itemsize:
        raise UserError(
            f"{shard.path} is not {shard.dtype.name} tokens: in all {num_pairs} pairs at its beginning the second is "
            f"0 or 1, as in uint{8 * width}. Give the tokenizer's --model.vocab-size (above 65,536 means uint32), or "
            f"write the ids anew: np.fromfile(IN, np.uint{8 * width}).astype(np.{shard.dtype.name}).tofile(OUT)"
        )


def _dtype(path: Path, magic: int, version: int) -> np.dtype[Any]:
    if magic == LLAMA3_MAGIC:
        if version == LLAMA3_VERSION:
            return np.dtype("<u4")
        raise UserError(f"shard {path} has magic {magic} and version {version}; known is {LLAMA3_VERSION} (Llama 3)")
    if magic != MAGIC:
        raise UserError(f"{path} is not a token shard: it begins with {magic}, not with {MAGIC} (llm.c's GPT-2 format)")
    if version not in DTYPES:
        raise UserError(f"shard {path} has version {version}; known are 1 (uint16 tokens) and 2 (uint32 tokens)")
    return DTYPES[version]


class TokenStream:
    """The tokens of one split as one long array over its shards."""

    def __init__(self, split: str, shards: Sequence[Shard], vocab_size: int) -> None:
        self.split, self.shards, self.vocab_size = split, tuple(shards), vocab_size
        self.dtype: np.dtype[Any] = np.result_type(np.uint16, *(shard.dtype for shard in shards))
        self.bytes_read = 0  # bytes read so far, for measurements
        self._starts = [0, *accumulate(shard.num_tokens for shard in shards)]

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    def num_sequences(self, seq_len: int) -> int:
        """Returns the number of sequences of seq_len tokens, at least 1. Raises UserError if the split is shorter."""
        number = (self.num_tokens - 1) // seq_len  # the last token is a target only
        if number < 1:
            raise UserError(
                f"the {self.split} split has {self.num_tokens} tokens, too few for one sequence of data.seq-len "
                f"{seq_len} (it takes {seq_len + 1}): give more text or a smaller --data.seq-len"
            )
        return number

    def windows(self, seq_len: int) -> "Windows":
        """Returns the sequences of seq_len tokens as a map-style dataset."""
        return Windows(self, seq_len)

    def read(self, start: int, count: int) -> Int64s:
        """Returns the tokens start..start+count-1, (count,) int64; see `gather`."""
        return self.gather([start], [count]).astype(np.int64)

    def gather(self, starts: Sequence[int], counts: Sequence[int]) -> Tokens:
        """Returns counts[i] tokens from starts[i] on, for each i, concatenated: (sum of counts,) as stored.

        Raises UserError, naming file and offset, for an id outside the vocabulary, which would index past the
        embedding, or for a file that cannot be read.
        """
        block = np.empty(sum(counts), dtype=self.dtype)
        done, num_tokens = 0, self._starts[-1]
        for start, count in zip(starts, counts, strict=True):
            if start < 0 or start + count > num_tokens:
                raise IndexError(f"tokens {start}..{start + count - 1} of {num_tokens} in the {self.split} split")
            self._fill(block[done : done + count], start, count)
            done += count
        self.bytes_read += block.nbytes
        if done and int(block.max()) >= self.vocab_size:
            self._refuse(starts, counts, int(np.argmax(block >= self.vocab_size)))
        return block

    def _fill(self, out: Tokens, start: int, count: int) -> None:
        number = bisect_right(self._starts, start) - 1  # the last that begins here, as shards may be empty
        offset = start - self._starts[number]
        while count and offset + count > self.shards[number].num_tokens:
            here = out[: self.shards[number].num_tokens - offset]
            self.shards[number].fill(here, offset)
            out, count, number, offset = out[here.size :], count - here.size, number + 1, 0
        if count:
            self.shards[number].fill(out, offset)

    def _refuse(self, starts: Sequence[int], counts: Sequence[int], place: int) -> None:
        """place: of the wrong id among all requested tokens."""
        ends = list(accumulate(counts))
        asked = bisect_right(ends, place)
        position = starts[asked] + place - (ends[asked] - counts[asked])
        number = bisect_right(self._starts, position) - 1
        offset = position - self._starts[number]
        raise UserError(wrong_id(self.shards[number], offset, self.vocab_size))


class Windows:
    """Sequence i is the tokens i*T .. i*T+T of a stream."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        """Raises UserError if the stream is shorter than one sequence."""
        self.num_sequences = stream.num_sequences(seq_len)
        self._stream, self._seq_len = stream, seq_len

    def read(self, ids: Sequence[int]) -> Tokens:
        """Returns (len(ids), T+1) tokens as stored."""
        length = self._seq_len + 1
        starts = [i * self._seq_len for i in ids]
        return self._stream.gather(starts, [length] * len(starts)).reshape(len(starts), length)

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, i: int) -> tuple[Int64s, Int64s]:
        """Returns sequence i's tokens and targets, (T,) int64 both."""
        if not 0 <= i < self.num_sequences:
            raise IndexError(f"sequence {i} of {self.num_sequences}")
        row = self.read([i])[0].astype(np.int64)
        return row[:-1], row[1:]


def wrong_id(shard: Shard, offset: int, vocab_size: int) -> str:
    ids = np.empty(1, dtype=shard.dtype)
    shard.fill(ids, offset)
    has_no_dtype = shard.first_byte == 0 and shard.dtype.itemsize == 4
    or_narrow = ", or is not uint32, which a vocabulary above 65,536 means"
    return (
        f"shard {shard.path} has id {int(ids[0])} at token {offset}; the vocabulary has {vocab_size}: the file is "
        f"damaged or was made with another tokenizer{or_narrow if has_no_dtype else ''}"
    )


def sample_digest(streams: Sequence[TokenStream], vocab_size: int, sample_bytes: int = _SAMPLE_BYTES) -> str:
    """Returns sha256 hex over each shard's name, size, and some bytes of its beginning, middle and end. Equal on hosts
    with equal files, and fast; changes elsewhere in a shard do not show.

    Raises UserError, naming file, place and id, for an id beyond the vocabulary in what it reads.
    """
    total = hashlib.sha256(f"vocab {vocab_size}\n".encode())
    for stream in streams:
        for shard in stream.shards:
            described = f"{stream.split} {shard.path.name} {shard.num_tokens} {shard.first_byte} {shard.dtype}\n"
            total.update(described.encode())
            count = min(shard.num_tokens, sample_bytes // shard.dtype.itemsize)
            sample: Tokens = np.empty(count, dtype=shard.dtype)
            reader = copy(shard)  # its file is closed with the copy
            for start in (0, (shard.num_tokens - count) // 2, shard.num_tokens - count):
                reader.fill(sample, start)
                total.update(sample.tobytes())
                if count and int(sample.max()) >= vocab_size:
                    raise UserError(wrong_id(shard, start + int(np.argmax(sample >= vocab_size)), vocab_size))
    return total.hexdigest()
