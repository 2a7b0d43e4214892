"""One arena holds what a training process allocates, in all its threads."""

import os
import platform
import subprocess
import sys

import pytest

ARENAS = """
import contextlib, ctypes, runpy, sys, tempfile, threading
{before}
import torch
thread = threading.Thread(target=lambda: torch.ones(500, 500) @ torch.ones(500, 500))
thread.start(), thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
with tempfile.NamedTemporaryFile() as file:
    stream = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, stream), libc.fclose(stream)
    print(file.read().decode().count("<heap nr="), file=sys.stderr)
"""
TRAIN = """
sys.argv = ["paceline", "train", "--help"]
with contextlib.suppress(SystemExit):
    runpy.run_module("paceline", run_name="__main__")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no arenas")
def test_threads_of_a_training_process_share_an_arena() -> None:
    assert arenas("") > 1
    assert arenas(TRAIN) == 1


def arenas(before: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", ARENAS.format(before=before)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return int(said.stderr.splitlines()[-1])
