"""Lines of the launcher on the terminal."""

import contextlib
import os


def say(line: str) -> None:
    """Prints a line of the launcher. A closed terminal does not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
