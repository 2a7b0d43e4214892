"""Prints lines of launchers, labs and signal handlers, which go on if the terminal is closed."""

import contextlib
import os


def say(line: str) -> None:
    """Prints a line on standard error. A closed terminal does not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))  # a path need not be UTF-8
