"""The folder in which paceline keeps what it need not make or measure again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Returns PACELINE_CACHE, else XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "paceline")
