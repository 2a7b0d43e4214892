"""Checks of the shards' content when they are opened: ids beyond the vocabulary, and a digest for ranks to compare.

Small data sets are read completely; large ones by a fixed sample of blocks of each shard, so that opening stays fast.
`Dataset.verify` reads everything.
"""

import hashlib
from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np

from paceline.base.errors import UserError
from paceline.data.stream import Shard, Tokens, TokenStream, wrong_id

_SCANNED_TOKENS = 64 << 20  # of all splits: a second from a disk
_SCANNED_AT_ONCE = 2 << 20  # tokens
_NUM_BLOCKS, _BLOCK_BYTES = 64, 64 << 10  # of a sample: 4 MiB
_MIN_BLOCK_BYTES = 4 << 10  # if there are very many shards


def digest(streams: Sequence[TokenStream]) -> str:
    """Returns sha256 hex over the lengths of all shards and a sample of their content, in order.

    Equal on hosts with the same data. A change of a few tokens outside the sample does not change it. Raises UserError
    for a file that cannot be read.
    """
    lengths = [f"{stream.split} {shard.num_tokens} {shard.dtype}\n" for stream in streams for shard in stream.shards]
    total = hashlib.sha256("".join(lengths).encode())
    for shard, start, count in _sample(_shards(streams)):
        total.update(_read(shard, start, count).data)
    return total.hexdigest()


def require_known_ids(streams: Sequence[TokenStream], vocab_size: int) -> None:
    """Raises UserError, naming file, place and id, for an id beyond the vocabulary, which would index past the
    embedding. Checks all ids of data sets up to 64M tokens, a sample of larger ones; reading checks the others."""
    shards = _shards(streams)
    is_small = sum(shard.num_tokens for shard in shards) <= _SCANNED_TOKENS
    for shard, start, count in _all(shards) if is_small else _sample(shards):
        found = _read(shard, start, count)
        if int(found.max()) >= vocab_size:
            raise UserError(wrong_id(shard, start + int(np.argmax(found >= vocab_size)), vocab_size))


_Block = tuple[Shard, int, int]  # shard, first token, number of tokens


def _shards(streams: Sequence[TokenStream]) -> list[Shard]:
    """Copies of the shards, whose files are closed with them."""
    return [copy(shard) for stream in streams for shard in stream.shards]


def _all(shards: Sequence[Shard]) -> Iterator[_Block]:
    for shard in shards:
        for start in range(0, shard.num_tokens, _SCANNED_AT_ONCE):
            yield shard, start, min(_SCANNED_AT_ONCE, shard.num_tokens - start)


def _sample(shards: Sequence[Shard]) -> Iterator[_Block]:
    """Yields evenly spaced blocks of each shard, with its first and last tokens; a small shard completely."""
    blocks_each = max(2, _NUM_BLOCKS // max(1, len(shards)))
    share = _NUM_BLOCKS * _BLOCK_BYTES // (blocks_each * max(1, len(shards)))
    block_bytes = max(_MIN_BLOCK_BYTES, min(_BLOCK_BYTES, share))
    for shard in shards:
        size = min(block_bytes // shard.dtype.itemsize, shard.num_tokens)
        count = min(blocks_each, -(-shard.num_tokens // max(1, size)))
        for i in range(count):
            yield shard, (shard.num_tokens - size) * i // max(1, count - 1), size


def _read(shard: Shard, start: int, count: int) -> Tokens:
    found: Tokens = np.empty(count, dtype=shard.dtype)
    shard.fill(found, start)
    return found
