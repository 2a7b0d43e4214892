"""The order of sequences: a pure function of (seed, epoch, position); no list is stored.

An epoch is a keyed permutation of the sequence ids, computed for the given positions only. It is a Feistel network on a
grid of rows x columns: each round adds to one coordinate a keyed hash of the other, which is invertible, so it is a
bijection of the grid. The near-square grid has few more than `size` cells. A result outside 0..size-1 is permuted again
until it falls inside, which is still a bijection ("cycle walking"; grid and walk are in Black & Rogaway 2002, "Ciphers
with Arbitrary Finite Domains").
"""

import math

import numpy as np
import numpy.typing as npt

from paceline.base.seeds import key as seed_key

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

NUM_ROUNDS = 12  # 4 are enough in theory on large grids; tiny grids need more to be near uniform

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment (Steele, Lea & Flood 2014); makes round keys differ


def _hash(values: UInt64s, round_key: UInt64s | np.uint64) -> UInt64s:
    """splitmix64's finaliser over values + round_key, elementwise modulo 2**64."""
    x = values + round_key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def round_keys_of(keys: list[int]) -> UInt64s:
    """(NUM_ROUNDS, len(keys)): the round keys of each permutation."""
    increments = np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _hash(np.array([key & _MASK for key in keys], dtype=np.uint64) + increments[:, None], np.uint64(0))


def _shuffle_grid(cells: UInt64s, rows: int, columns: int, round_keys: UInt64s) -> UInt64s:
    """One pass of the network over cells 0..rows*columns-1; round_keys (NUM_ROUNDS, 1 or one a cell)."""
    row, column = cells // np.uint64(columns), cells % np.uint64(columns)
    for i, round_key in enumerate(round_keys):
        if i % 2 == 0:
            row = (row + _hash(column, round_key) % np.uint64(rows)) % np.uint64(rows)
        else:
            column = (column + _hash(row, round_key) % np.uint64(columns)) % np.uint64(columns)
    result: UInt64s = row * np.uint64(columns) + column
    return result


def permute(index: Int64s, size: int, round_keys: UInt64s) -> Int64s:
    """Returns where a permutation of 0..size-1 maps each index; (n,) both. Memory does not depend on size (1 to
    2**62). round_keys: of one permutation for all, or of one for each index."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    cells = _shuffle_grid(index.astype(np.uint64), rows, columns, round_keys)
    outside = np.flatnonzero(cells >= np.uint64(size))
    while outside.size:  # rare except for tiny sizes: fewer than `rows` cells lie outside
        keys = round_keys if round_keys.shape[1] == 1 else round_keys[:, outside]
        cells[outside] = _shuffle_grid(cells[outside], rows, columns, keys)
        outside = outside[cells[outside] >= np.uint64(size)]
    return cells.astype(np.int64)


def ids_at(seed: int, positions: Int64s, num_sequences: int) -> Int64s:
    """Returns the sequence ids (n,) at these positions (n,) of a dataset's run, in any order and from any epochs.

    A position counts the sequences that the run takes from the dataset, from 0. Each epoch is its own permutation of
    all `num_sequences` sequences. With one dataset: position = step * global_batch_size + place in the step.
    """
    if num_sequences < 1 or (positions.size and int(positions.min()) < 0):
        raise ValueError(f"positions are not negative and num_sequences {num_sequences} is positive")
    epochs, within = np.divmod(positions, num_sequences)
    epoch, which = np.unique(epochs, return_inverse=True)
    round_keys = round_keys_of([seed_key("order", seed, number) for number in epoch.tolist()])
    return permute(within, num_sequences, round_keys if epoch.size == 1 else round_keys[:, which])


def source_seed(seed: int, number: int) -> int:
    """Returns the seed of dataset `number`'s order: the run's seed for the first, so that a mixture of one equals the
    dataset alone; other seeds for the others, so that their orders are independent."""
    return seed if number == 0 else seed_key("order", seed, "source", number)
