"""Random training scripts (fuzz.py) are right, or refused for a reason that their case names.

Two cases run always, more in the long suite, 300 at night (`python tests/replica/fuzz.py --seed N`). Planted by
tests/mutations.py, these are found: contiguous gradients of channels_last weights, a `finish` that does not wait for
weights, a save that does not wait for its copy, a restored position that is not taken.
"""

import fuzz
import pytest

SHORT = [2, 5]  # seeds of cases, in one set of ranks; these two find what is planted
LONG = [seed for seed in range(36) if seed not in SHORT]


@pytest.mark.parametrize("seeds", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["few", "more"])
def test_random_scripts_train_as_a_plain_loop_does(seeds: list[int]) -> None:
    problems, _ = fuzz.problems_of([case for seed in seeds for case in fuzz.cases_of(seed, 1)])
    assert not problems, "\n".join(f"{problem}\n  {case}" for case, problem in problems.items())
