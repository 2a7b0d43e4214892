"""A curve as text: each character is a cell of 2 x 4 dots (Unicode's braille patterns)."""

from bisect import bisect_left
from collections.abc import Sequence

_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # row, column -> bit


def lines_of(xs: Sequence[float], ys: Sequence[float], width: int, height: int) -> list[str]:
    """Returns `height` lines of `width` characters, the highest value on top. xs increase."""
    cells = [[0] * width for _ in range(height)]
    low, high = min(ys), max(ys)
    scale = (4 * height - 1) / (high - low) if high > low else 0.0
    before = None
    for column in range(2 * width):
        x = xs[0] + (xs[-1] - xs[0]) * column / max(1, 2 * width - 1)
        row = round((high - _at(x, xs, ys)) * scale)
        # Dots up to the column before, so that a steep curve is one line.
        for each in range(min(row, before + 1), max(row, before - 1) + 1) if before is not None else [row]:
            cells[each // 4][column // 2] |= _BITS[each % 4][column % 2]
        before = row
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def _at(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    right = bisect_left(xs, x)
    if right == 0 or right == len(xs):
        return ys[min(right, len(ys) - 1)]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])
