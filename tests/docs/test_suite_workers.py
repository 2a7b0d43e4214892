"""The suite's own processes (workers.py): each test is reported once, whatever becomes of the process that runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CONFTEST = """
import workers

def pytest_configure(config):
    config.pluginmanager.register(workers.Runner(2, lambda item: item.name[-1], lambda number: None))
"""
SUITE = """
import os, pathlib, time, warnings, pytest

def test_passes_a():
    print("this")

def test_fails_a():
    assert False, "with a reason"

def test_dies_b():
    os._exit(7)

def test_is_behind_it_b(tmp_path):
    warnings.warn("look here")

@pytest.mark.skip(reason="not now")
def test_is_skipped_c():
    pass
"""


@pytest.mark.long
def test_all_are_reported_also_where_a_process_dies(tmp_path: Path) -> None:
    """Mutation: the tests behind the one that ended its process are forgotten."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--basetemp", str(tmp_path / "base")]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    said = ended.stdout
    assert "2 failed, 2 passed, 1 skipped, 1 warning" in said
    assert "FAILED test_suite.py::test_fails_a - AssertionError: with a reason" in said
    assert "FAILED test_suite.py::test_dies_b" in said
    assert "the process that ran it ended with 7" in said
    assert "UserWarning: look here" in said
