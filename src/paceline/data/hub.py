"""Datasets on the Hugging Face hub: lists of their files, and their bytes, fetched while reading."""

import re
from collections.abc import Callable
from typing import Any

from paceline.base.errors import UserError

PREFIX = "hf://"
SPEC = "hub:"
_CONVERTED = "refs/convert/parquet"  # the hub's Parquet copy of datasets in other formats
_RANGE_BYTES = 4 << 20  # added to each request


def is_hub(path: str) -> bool:
    return path.startswith(PREFIX)


def is_spec(spec: str) -> bool:
    """Whether a spec names a dataset on the hub: hub:ORG/NAME[:GLOB], or hf://datasets/ORG/NAME[/GLOB]."""
    return spec.startswith((SPEC, PREFIX))


def list_files(spec: str, is_known: Callable[[str], bool]) -> tuple[str, list[tuple[str, str, int, str]]]:
    """Returns the repository ORG/NAME, and (name in it, hf:// path, bytes, stamp) of the files that `spec` names.

    Without a pattern: the files with known names, sorted; if there are none, the hub's Parquet copies. Raises UserError
    for a malformed name, or if the hub refuses; if it fails, or cannot be reached, the error `is_of_system`.
    """
    repository, pattern = _parse(spec)
    root = f"datasets/{repository}"
    try:
        system = _file_system()
        if pattern:
            return repository, _listed(system.glob(f"{root}/{pattern}", detail=True), root)
        files = _listed(system.find(root, detail=True), root)
        usable = [file for file in files if is_known(file[0])]
        if not usable:
            root = f"{root}@{_CONVERTED.replace('/', '%2F')}"
            usable = _converted(system, root)
    except UserError:
        raise
    except Exception as error:  # of the hub, its HTTP client or the system; no common class
        failed = UserError(message(f"{PREFIX}{root}", error))
        failed.is_of_system = not (_is_refused(error) or _is_missing(error))
        raise failed from error
    return repository, usable


def _parse(spec: str) -> tuple[str, str]:
    match = re.fullmatch(r"hub:([^/:]+/[^/:]+)(?::(.+))?|hf://datasets/([^/]+/[^/]+)(?:/(.+))?", spec)
    if match is None:
        raise UserError(
            f"{spec!r} names no dataset on the hub; write hub:ORG/NAME, hub:ORG/NAME:GLOB or "
            f"hf://datasets/ORG/NAME/GLOB, such as hub:HuggingFaceFW/fineweb-edu:sample/10BT/*.parquet"
        )
    return match[1] or match[3], match[2] or match[4] or ""


def _converted(system: Any, root: str) -> list[tuple[str, str, int, str]]:
    try:
        return [file for file in _listed(system.find(root, detail=True), root) if file[0].endswith(".parquet")]
    except FileNotFoundError:  # no Parquet copy
        return []


def _listed(entries: dict[str, Any], root: str) -> list[tuple[str, str, int, str]]:
    """Files sorted by name; the stamp is the hash of the content."""
    files = []
    for path, entry in sorted(entries.items()):
        if entry["type"] == "file" and entry["size"]:
            name = path.split("/", root.count("/") + 1)[-1]
            files.append((name, PREFIX + path, int(entry["size"]), str(entry.get("blob_id") or entry["size"])))
    return files


def open_file(path: str) -> Any:
    """Returns a file with read(size), seek and tell, which fetches a few MiB at a time."""
    return _file_system().open(path, "rb", block_size=_RANGE_BYTES)


def _file_system() -> Any:
    try:
        from huggingface_hub import HfFileSystem  # an optional extra, and slow to import
    except ImportError:
        raise UserError("a dataset on the hub is asked for: pip install huggingface_hub") from None
    return HfFileSystem(skip_instance_cache=True)


def message(path: str, error: Exception, remedy: str = "try again: what was prepared is kept") -> str:
    """Returns the error message if the hub does not give a file, a listing or a repository. remedy: what to do if it
    may have it."""
    reason = " ".join(str(error).split())[:200]
    if _is_refused(error):
        return f"{path} on the hub is gated or private ({reason}); accept its terms there and log in (`hf auth login`)"
    if _is_missing(error):
        return f"{path} is not on the hub, or is private ({reason}); look at its name, or log in (`hf auth login`)"
    return f"{path} could not be read from the hub ({type(error).__name__}: {reason}); {remedy}"


def _is_refused(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return "Gated" in type(error).__name__ or status in (401, 403)


def _is_missing(error: Exception) -> bool:
    # LocalEntryNotFoundError says that it is not in the cache, when there is no network or it is not to be used.
    name = type(error).__name__
    return name != "LocalEntryNotFoundError" and (isinstance(error, FileNotFoundError) or "NotFound" in name)
