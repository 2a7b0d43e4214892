"""Random training scripts (fuzz.py) are right, or refused for a reason that their case names.

The first cases run always, more in the long suite; `python tests/replica/fuzz.py --seed N` takes others. Planted
by tests/mutations.py, these are found: contiguous gradients of channels_last weights, a `finish` that does not wait for
weights, a save that does not wait for its copy, a restored position that is not taken.
"""

import fuzz
import pytest

AT_ONCE = 30  # cases in one set of ranks


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(30, 330, 30))])
def test_random_scripts_train_as_a_plain_loop_does(first: int) -> None:
    print(f"seeds {first} to {first + AT_ONCE - 1}")
    problems, _ = fuzz.problems_of(fuzz.cases_of(first, AT_ONCE))
    assert not problems, "\n".join(f"{problem}\n  {case}" for case, problem in problems.items())
