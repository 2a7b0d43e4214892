"""The order of sequences: a pure function of (seed, epoch, position), with no list of anything kept.

An epoch is a keyed permutation of the sequence ids, computed for the asked positions only. It is a Feistel network on
a grid of rows x columns: a round adds to one coordinate a keyed hash of the other, which can be undone, so the whole is
a bijection of the grid. The grid is near-square with hardly more than `size` cells (powers of two would waste up to
three quarters of them). A result outside 0..size-1 is permuted again until it falls inside, which keeps the bijection
("cycle walking"; grid and walk are in Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
"""

import math

import numpy as np
import numpy.typing as npt

from paceline.base.seeds import key as seed_key

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

MAX_SIZE = 1 << 62
NUM_ROUNDS = 12  # 4 satisfy theory on large grids; grids of a few cells need more to come near uniform (see the tests)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele, Lea & Flood 2014), which keeps round keys apart


def _hash(values: UInt64s, round_key: int) -> UInt64s:
    """splitmix64's finaliser over values + round_key, elementwise modulo 2**64."""
    x = values + np.uint64(round_key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: int) -> list[int]:
    seeds = np.array([(key + (i + 1) * _GOLDEN) & _MASK for i in range(NUM_ROUNDS)], dtype=np.uint64)
    return [int(value) for value in _hash(seeds, 0)]


def _shuffle_grid(cells: UInt64s, rows: int, columns: int, round_keys: list[int]) -> UInt64s:
    """One pass of the network over cell numbers 0..rows*columns-1."""
    row, column = cells // np.uint64(columns), cells % np.uint64(columns)
    for i, round_key in enumerate(round_keys):
        if i % 2 == 0:
            row = (row + _hash(column, round_key) % np.uint64(rows)) % np.uint64(rows)
        else:
            column = (column + _hash(row, round_key) % np.uint64(columns)) % np.uint64(columns)
    result: UInt64s = row * np.uint64(columns) + column
    return result


def permute(index: npt.ArrayLike, size: int, key: int) -> Int64s:
    """Returns where the keyed permutation of 0..size-1 sends each index; same shape, int64.

    Memory is that of `index`, whatever the size (1 to 2**62). Raises ValueError for an index outside 0..size-1.
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size {size} is not in 1..2**62")
    wanted = np.asarray(index, dtype=np.int64)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < size):
        raise ValueError(f"an index is outside 0..{size - 1}")
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    round_keys = _round_keys(key)
    cells = wanted.astype(np.uint64).ravel()
    outside = np.arange(cells.size)
    while outside.size:  # fewer than `rows` cells of the grid lie outside, so a second pass is rare but for tiny sizes
        cells[outside] = _shuffle_grid(cells[outside], rows, columns, round_keys)
        outside = outside[cells[outside] >= np.uint64(size)]
    return cells.astype(np.int64).reshape(wanted.shape)


def sequence_ids(seed: int, start: int, count: int, num_sequences: int) -> Int64s:
    """Returns the sequence ids (count,) at the run's positions start..start+count-1.

    A position counts the sequences of the whole run from 0: step * global_batch_size + place in the step. It runs
    through the epochs, each a permutation of its own of all `num_sequences` sequences. The loader calls it for a
    micro-batch.
    """
    if start < 0 or count < 0 or num_sequences < 1:
        raise ValueError(
            f"start {start} and count {count} are not negative and num_sequences {num_sequences} is positive"
        )
    ids = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, within = divmod(start + done, num_sequences)
        taken = min(count - done, num_sequences - within)
        places = np.arange(within, within + taken, dtype=np.int64)
        ids[done : done + taken] = permute(places, num_sequences, seed_key("order", seed, epoch))
        done += taken
    return ids
