"""Makes the golden files anew, all or those named: what the code as it is does on this machine.

    python tests/golden/record.py                       # all
    python tests/golden/record.py curves                # some of: orders curves runs

Read README.md first: a rebuilding does not change these files.
"""

import importlib
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as the tests, before torch is imported
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "golden")]
NAMES = ("orders", "curves", "runs", "mistakes")


def main(names: list[str]) -> int:
    if unknown := set(names) - set(NAMES):
        print(f"there is nothing named {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
        return 2
    for name in NAMES:
        if not names or name in names:
            importlib.import_module(f"test_golden_{name}").record()
            print(f"{name}: recorded", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
