"""Writes a folder atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import safetensors

from paceline.base.errors import UserError
from paceline.base.files import sync
from paceline.base.locks import file_lock
from paceline.record import folder as run_folder


def check_out(out: Path) -> None:
    """Raises UserError if `out` exists or cannot be written."""
    _require_new(out)
    run_folder.check_writable(out)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields the path of a folder to make beside `out`, which is renamed to `out` at the end. Raises UserError, leaving
    nothing new at `out`, if it cannot be written, another process writes it, or `out` exists by then."""
    aside = out.absolute().with_name(f".{out.name}.unfinished")
    lock = aside.with_suffix(".lock")
    try:
        with file_lock(lock, timeout=0):
            shutil.rmtree(aside, ignore_errors=True)  # of a killed process
            try:
                yield aside
                sync(aside)
                _require_new(out)
                os.rename(aside, out)
                sync(out.absolute().parent)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
                lock.unlink(missing_ok=True)
    except filelock.Timeout:
        raise UserError(f"{out} is being written by another process; wait for it, or stop it") from None
    except (OSError, safetensors.SafetensorError) as error:  # how safetensors reports a full disk
        raise UserError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error


def _require_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"--out is {out}, which exists; name a folder that does not exist yet")
