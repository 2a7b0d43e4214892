"""Brings a run from object storage (bucket.py) to a folder on this disk."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.files import replace, sync
from paceline.base.locks import file_lock
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.bucket import BEST, IDENTITY, RECORDS, Bucket, identity, mark, text_of
from paceline.checkpoint.retention import hide
from paceline.checkpoint.steps import MANIFEST, STEP, folder_name, is_whole, list_steps


def bring(
    url: str,
    folder: Path,
    step: int | None = None,
    progress: Callable[[], object] = lambda: None,
    must_exist: bool = True,
) -> list[str]:
    """Brings the newest complete checkpoint (or that of `step`), the best one and the records to a run folder on this
    disk, unless it has them. Returns what is wrong with newer ones. All bytes are compared with the manifest.

    Safe if several processes do it at once. Raises UserError if there is no run (unless it need not exist), or the
    folder holds another one, RunError if no checkpoint is complete.
    """
    bucket = Bucket(url)
    try:
        if not (must_exist or bucket.steps()):
            return []
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(f".{folder.name}.lock"), mode=0o600):
            return _bring(bucket, folder, step, progress)
    except PacelineError:
        raise
    except Exception as error:  # each library has its own
        raise UserError(f"{url} cannot be brought to {folder}: {text_of(error)}") from None


def _bring(bucket: Bucket, folder: Path, step: int | None, progress: Callable[[], object]) -> list[str]:
    checkpoints, steps, run = folder / "checkpoints", bucket.steps(), bucket.owner().get("id")
    if not steps or (step is not None and step not in steps):
        which = "" if step is None else f" of step {step}; it has {steps or 'none'}"
        raise UserError(f"{bucket.url} holds no checkpoint{which}: give the address that was checkpoint.to of a run")
    is_taken = bool(list_steps(checkpoints)) or (folder / "config.toml").exists()
    known = identity(folder)
    if is_taken and (known.get("id") != run or (run is None and known.get("to") != bucket.url)):
        raise UserError(f"{folder} is there, and is not the run of {bucket.url}: rename it, or start elsewhere")
    folder.mkdir(exist_ok=True, mode=0o700)
    checkpoints.mkdir(exist_ok=True, mode=0o700)
    here = [number for number in list_steps(checkpoints) if is_whole(checkpoints / folder_name(number))]
    problems: list[str] = []
    newest = max(steps) if step is None else step
    if step is None and here and max(here) > newest:
        return problems  # this folder is where the run was last
    if newest not in here:
        known = {"to": bucket.url, "id": run, "is_brought": True}
        replace(folder / IDENTITY, json.dumps(known).encode(), 0o600)
        _fetch_records(bucket, folder, progress)  # first: a resume drops rows of later steps, and needs those before
    # A folder that was not brought has its own best one. One that was may lack it: an earlier call was interrupted.
    name_of_best = (bucket.read(BEST) or b"") if known.get("is_brought") else b""
    best = STEP.fullmatch(name_of_best.decode(errors="replace").strip())
    marks = {later: mark(bucket.manifest(later)) for later in steps if later > newest}
    for wanted in reversed(steps if step is None else [step]):
        marks[wanted] = mark(bucket.manifest(wanted))
        try:
            _fetch(bucket, checkpoints, wanted, progress)
        except mf.Damaged as damage:
            problems.append(str(damage))
            continue
        if best and int(best[1]) in steps and int(best[1]) < wanted:
            with contextlib.suppress(mf.Damaged):
                _fetch(bucket, checkpoints, int(best[1]), progress)
                replace(folder / BEST, f"{best[0]}\n".encode(), 0o600)
        # The run continues from this one: once restored, `Storage` sets later ones aside at the address.
        known["later"] = {
            later: marks[later] for later in steps if later > wanted and (newest not in here or later not in here)
        }
        known["is_asked"] = step is not None
        replace(folder / IDENTITY, json.dumps(known).encode(), 0o600)
        return problems
    raise RunError(f"no checkpoint of {bucket.url} is complete:\n  " + "\n  ".join(problems))


def _fetch_records(bucket: Bucket, folder: Path, progress: Callable[[], object]) -> None:
    for name in RECORDS:
        aside = folder / f".{name}.new"
        aside.unlink(missing_ok=True)
        if bucket.fetch(name, aside, progress):
            os.replace(aside, folder / name)


def _fetch(bucket: Bucket, checkpoints: Path, step: int, progress: Callable[[], object]) -> None:
    """Brings a checkpoint unless it is here: complete in its place, or absent. Raises Damaged if it is not as its
    manifest says."""
    name = folder_name(step)
    if is_whole(checkpoints / name):
        return
    folder = checkpoints / f".{name}.brought.unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        raw = bucket.manifest(step)
        if raw is None:
            raise mf.Damaged(f"{name}: no {MANIFEST}: it was not sent completely")
        for file, facts in mf.parse(raw, name)["files"].items():  # only names of a checkpoint's files
            sha256 = bucket.fetch(f"checkpoints/{name}/{file}", folder / file, progress)
            if sha256 != facts["sha256"]:
                what = "is not there" if sha256 is None else "has other bytes than were written (sha256 differs)"
                raise mf.Damaged(f"{name}: {file} {what}")
        replace(folder / MANIFEST, raw, 0o600)
        sync(folder)
        if (checkpoints / name).exists():  # a damaged one
            hide(checkpoints / name)
        os.rename(folder, checkpoints / name)
        sync(checkpoints)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
