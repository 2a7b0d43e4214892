"""A disk that fails at any call of a save, or takes less than it was given: complete or absent, and it is said."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_whichever_call_of_a_save_fails_the_checkpoint_is_complete_or_absent(tmp_path: Path) -> None:
    """Mutation: a write that took less than it was given is not continued."""
    library = tmp_path / "failing.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    variables = {**os.environ, "LD_PRELOAD": str(library), "FS_ROOT": str(tmp_path / "disk")}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    ended = subprocess.run([sys.executable, __file__, str(library)], env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    cases = [line.split() for line in ended.stdout.splitlines()]
    assert {kind for kind, _, _ in cases} == {"EIO", "ENOSPC", "short"}
    assert len(cases) > 3 * 30
    assert all(number == "2" for kind, _, number in cases if kind == "short")  # which is no failure


def each_call(library: ctypes.CDLL, root: Path) -> None:
    """Prints a line a case: what failed, at which call, and the step of the newest good checkpoint."""
    from saving import keep, read

    from paceline.checkpoint import load
    from paceline.checkpoint.steps import folder_name

    for name, number in (("EIO", errno.EIO), ("ENOSPC", errno.ENOSPC), ("short", 0)):
        call, is_reached = 0, True
        while is_reached:
            call += 1
            shutil.rmtree(root, ignore_errors=True)
            checkpoints = root / "checkpoints"
            root.mkdir()
            keep(checkpoints, 1)
            problem = ""
            library.fs_arm(call, number)
            try:
                keep(checkpoints, 2)
            except OSError as error:
                problem = str(error)
            is_reached = library.fs_calls() >= call
            library.fs_arm(-1, 0)
            newest = load.find(checkpoints)[1]["step"]
            read(checkpoints / folder_name(1))
            assert problem or newest == 2, f"{name} at call {call}: nothing is said, and {newest} is the newest"
            keep(checkpoints, 3)
            assert load.find(checkpoints)[1]["step"] == 3
            print(name, call, newest)


if __name__ == "__main__":
    each_call(ctypes.CDLL(sys.argv[1]), Path(os.environ["FS_ROOT"]))
