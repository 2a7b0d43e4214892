"""Printing that continues if the terminal, or the reader of a pipe, is gone."""

import contextlib
import os


def say(line: str) -> None:
    """Prints a line on standard error. A closed terminal does not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))  # a path need not be UTF-8


def discard_output() -> None:
    """Sends standard output to /dev/null: at its end Python would try again to write the rest, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
