"""Random training scripts (fuzz.py) are right, or refused for a reason that their case names.

The first cases run always, more of them in the long suite; `python tests/replica/fuzz.py --seed N` takes others.
Found by these cases when planted: contiguous gradients of channels_last weights, a step's weight taken from the last of
two sums, a position that is kept by the order of use, weights of `zero` read before they have arrived.
"""

import fuzz
import pytest

AT_ONCE = 30  # cases in one set of ranks


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(30, 330, 30))])
def test_random_scripts_train_as_a_plain_loop_does(first: int) -> None:
    print(f"seeds {first} to {first + AT_ONCE - 1}")
    problems, _ = fuzz.problems_of(fuzz.cases_of(first, AT_ONCE))
    assert not problems, "\n".join(f"{problem}\n  {case}" for case, problem in problems.items())
