"""What any rank may print on the terminal: errors. It imports little, since a refused command imports it, too."""

import contextlib
import os
import sys
from pathlib import Path

_terminal_fd = 2  # the terminal, also after a rank's stderr was redirected to its log
_own_log: Path | None = None


def own_log() -> Path | None:
    """Returns the path of this rank's log; None before it is open."""
    return _own_log


# C0 and C1 controls and DEL, which a terminal acts on, without newline and tab; and lone surrogates, which also
# stand for bytes of a path that are not UTF-8.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_ESCAPES |= {code: f"\\u{code:x}" for code in range(0xD800, 0xE000)}


def printable(text: str) -> str:
    """Returns the text with what no terminal should get as escapes: control characters, except newline and tab, which
    could move the cursor, and bytes that are not UTF-8."""
    return text.translate(_ESCAPES)


def print_error(text: str) -> None:
    """Writes an error to the terminal, from any rank, in one write, so that lines of ranks do not mix."""
    flush()
    with contextlib.suppress(OSError):
        os.write(_terminal_fd, (printable(text).rstrip("\n") + "\n").encode(errors="backslashreplace"))


def flush() -> None:
    """Flushes standard output and standard error; a terminal that is gone, or a full disk, is no error."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: a script's that was closed
        with contextlib.suppress(OSError):
            stream.flush()


def has_log(path: Path) -> None:
    """Notes that this rank has a log, for messages that name it."""
    global _own_log
    _own_log = path


def redirect(fd: int) -> None:
    """Sends what this process prints later on standard output and standard error to a file; errors still reach the
    terminal."""
    global _terminal_fd
    sys.stdout.flush()
    sys.stderr.flush()
    _terminal_fd = os.dup(2)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
