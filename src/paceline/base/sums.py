"""Sums that do not depend on the order of what is added."""

import math
from collections.abc import Iterable


def exact_sum(numbers: Iterable[float]) -> float:
    """Returns the exact sum, rounded once (math.fsum); nan for inf and -inf, and inf beyond the largest float64, where
    fsum raises."""
    terms = list(numbers)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return sum(terms)
