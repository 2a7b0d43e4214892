"""What a launcher keeps beside the run: gone with it, and after kill -9 of it, with the next."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.launch.local import scratch

HOLD = """
from paceline.launch.local import scratch
with scratch() as made:
    print(made, flush=True)
    input()
"""


def test_what_dead_launchers_left_is_swept_and_that_of_the_living_and_of_others_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    holders = [subprocess.Popen([sys.executable, "-c", HOLD], env=env, **options) for _ in range(2)]
    dead, living = (Path(holder.stdout.readline().strip()).parent for holder in holders)
    other = tmp_path / "paceline-notes"
    other.mkdir()
    holders[0].send_signal(signal.SIGKILL)
    holders[0].communicate()
    try:
        with scratch() as made:
            assert made.is_dir()
            assert not list(made.iterdir())
            assert dead.exists(), "too young: it may be one that is not locked yet"
        for folder in (dead, living, other):
            os.utime(folder, (time.time() - 100,) * 2)
        with scratch() as made:
            assert sorted(tmp_path.iterdir()) == sorted([made.parent, living, other])
    finally:
        holders[1].communicate("\n")
    assert holders[1].returncode == 0
    assert list(tmp_path.iterdir()) == [other]
