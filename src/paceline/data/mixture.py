"""Several data sets mixed by weight: the data set at a position of the run, and how many of its sequences came before.

The first data set, of share a, has c(n) = floor(a n + 1/2) of the first n positions, so it has position p if c(p + 1) >
c(p): the most even spacing (a Sturmian, or Beatty, sequence). The remaining positions, counted from 0, are divided
among the other data sets in the same way. So in every prefix of the run data set i has its weight to within (i + 1) / 2
positions, without state or random numbers. Another order of the data sets changes neighbouring positions only.

With simple weights the pattern is periodic: 1 to 1 alternates. A micro-batch of consecutive positions has its share of
every data set. order.py chooses the sequences at random.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError

Int64s = npt.NDArray[np.int64]

# Shares are integers in units of 2**-30, so that all products below fit in 63 bits. This changes a count by n * 2**-31.
_BITS = 30
_ONE = 1 << _BITS
_MIN_SHARE = 1e-6  # rounding to 2**-30 keeps it right to 0.05%


class Mixture:
    """Data sets 0, 1, ... with these weights, of any sum."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises UserError if a weight is not a positive number, or less than a millionth of the sum."""
        self.weights = tuple(weights)
        _check(self.weights)
        # Shares of the positions that earlier data sets leave; the last takes the rest.
        self._shares = [round(w / math.fsum(weights[i:]) * _ONE) for i, w in enumerate(weights[:-1])]

    def locate(self, positions: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Returns, for each position 0..2**62-1 (n,), its data set and number there; int64 (n,) both."""
        rest = np.asarray(positions, dtype=np.int64).copy()
        sources = np.full(rest.shape, len(self._shares), dtype=np.int64)
        open_ = np.arange(rest.size)
        for number, share in enumerate(self._shares):
            before = _count(share, rest[open_])
            mine = _count(share, rest[open_] + 1) > before
            sources[open_[mine]] = number
            rest[open_] = np.where(mine, before, rest[open_] - before)
            open_ = open_[~mine]
        return sources, rest

    def counts(self, num_positions: int) -> tuple[int, ...]:
        found, rest = [], num_positions
        for share in self._shares:
            found.append(int(_count(share, np.array([rest], dtype=np.int64))[0]))
            rest -= found[-1]
        return (*found, rest)


def _check(weights: tuple[float, ...]) -> None:
    said = f"the weights {', '.join(f'{weight:g}' for weight in weights)} of the data sets"
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"{said} are not all numbers above 0")
    if min(weights) < _MIN_SHARE * sum(weights):  # also where the sum is infinite
        raise UserError(f"{said} have one of less than a millionth of all: leave that data set out, or give it more")


def _count(share: int, num_positions: Int64s) -> Int64s:
    """floor(share / 2**30 * n + 1/2), exact: n = high * 2**30 + low, and high * share is an integer."""
    high, low = num_positions >> _BITS, num_positions & (_ONE - 1)
    counted: Int64s = high * share + ((low * share + (_ONE >> 1)) >> _BITS)
    return counted
