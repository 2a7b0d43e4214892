"""Random training scripts (fuzz.py) are right, or refused for a reason that their case names.

The first cases run always, more in the long suite, 300 at night (`python tests/replica/fuzz.py --seed N`). Planted
by tests/mutations.py, these are found: contiguous gradients of channels_last weights, a `finish` that does not wait for
weights, a save that does not wait for its copy, a restored position that is not taken.
"""

import fuzz
import pytest

SHORT, LONG = 6, 30  # cases in one set of ranks


@pytest.mark.parametrize(("first", "num_cases"), [(0, SHORT), pytest.param(SHORT, LONG, marks=pytest.mark.long)])
def test_random_scripts_train_as_a_plain_loop_does(first: int, num_cases: int) -> None:
    print(f"seeds {first} to {first + num_cases - 1}")
    problems, _ = fuzz.problems_of(fuzz.cases_of(first, num_cases))
    assert not problems, "\n".join(f"{problem}\n  {case}" for case, problem in problems.items())
