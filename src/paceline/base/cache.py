"""The folder in which paceline keeps what it need not make or measure again."""

import os
from pathlib import Path

from paceline.base.errors import UserError


def cache_dir() -> Path:
    """Returns PACELINE_CACHE, else XDG_CACHE_HOME/paceline, else ~/.cache/paceline. Raises UserError without a home."""
    folder = os.environ.get("PACELINE_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/paceline"
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):
        raise UserError(f"the cache is to be {folder}, and there is no such home folder: export PACELINE_CACHE=FOLDER")
    return Path(folder)
