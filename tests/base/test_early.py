"""Signals while Python imports."""

import os
import subprocess
import sys

from paceline.base.errors import EXIT_RESUMABLE

IMPORTS = """
import os, time
from paceline.base.process import end_on_signals
end_on_signals()
os.write(1, b"ready")
try:
    time.sleep(20)
except OSError:  # as of a library that tries to import another
    os._exit(1)
"""


def test_a_signal_ends_the_process_though_its_terminal_is_closed() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", IMPORTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as process:
        os.close(writer)
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        os.close(reader)  # to write there is an OSError now
        process.terminate()
        assert process.wait(20) == EXIT_RESUMABLE
