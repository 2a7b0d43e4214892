"""Random training scripts (fuzz.py) are right, or refused for a reason that their case names.

The first cases run always, more in the long suite; `python tests/replica/fuzz.py --seed N` takes others. Planted
by tests/mutations.py, these are found: contiguous gradients of channels_last weights, a `finish` that does not wait for
weights, a save that does not wait for its copy, a restored position that is not taken.
"""

import fuzz
import pytest

SHORT, AT_ONCE = 9, 60  # cases in one set of ranks, in the short suite and in the long one
LONG = [pytest.param(first, AT_ONCE, marks=pytest.mark.long) for first in range(SHORT, 300 + SHORT, AT_ONCE)]


@pytest.mark.parametrize(("first", "num_cases"), [(0, SHORT), *LONG])
def test_random_scripts_train_as_a_plain_loop_does(first: int, num_cases: int) -> None:
    print(f"seeds {first} to {first + num_cases - 1}")
    problems, _ = fuzz.problems_of(fuzz.cases_of(first, num_cases))
    assert not problems, "\n".join(f"{problem}\n  {case}" for case, problem in problems.items())
