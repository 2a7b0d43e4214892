"""The checks of the run folder's disk and of the data set."""

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.base import units
from paceline.base.cache import cache_dir
from paceline.base.errors import UserError
from paceline.base.files import write_synced
from paceline.data.cache import inspect_data
from paceline.data.dataset import Dataset, is_dataset
from paceline.model import cost
from paceline.record.folder import check_writable
from paceline.tools.doctor.finding import Verdict, failure, ok, warning
from paceline.tools.doctor.host import Place

_BYTES_A_PARAMETER = 12  # of a checkpoint: the weight and AdamW's two moments
_WRITTEN_BYTES = 32 << 20
_SLOW_SAVE_S = 60.0
_SLOW_BYTES_PER_S = 20e6
_VERIFY_S = 5.0  # all data sets together


def run_folder(place: Place) -> Iterator[Verdict]:
    """Writes to the disk where the run folder is, or is to be. Leaves a small file, by which other hosts see whether
    they share it, for `remove_token`."""
    check_writable(place.out)
    existing = next(folder for folder in (place.out.absolute(), *place.out.absolute().parents) if folder.exists())
    token = existing / f".paceline-doctor-{secrets.token_hex(6)}"
    free = shutil.disk_usage(existing).free
    num_bytes = min(_WRITTEN_BYTES, free // 4)
    written = os.urandom(num_bytes)  # some file systems store no zeros
    place.notes["token"] = str(token)
    try:
        began = time.perf_counter()
        write_synced(token, written)
        speed = num_bytes / (time.perf_counter() - began)
        os.truncate(token, 0)
    except OSError as error:
        raise UserError(f"{existing} takes no {units.size(num_bytes)}: {error.strerror}; free space there") from None
    seen = f"{existing}: {units.size(free)} free, {units.size(speed)}/s written and synced"
    if not place.has_config:
        slow = speed < _SLOW_BYTES_PER_S
        yield warning(f"{seen}: slow", "--out on a local disk") if slow else ok(seen)
        return
    size = _BYTES_A_PARAMETER * cost.num_parameters(place.config.model_of_data(place.notes.get("vocab_size", 0))).total
    kept = place.config.checkpoint.keep + 1  # while a new one is written, the oldest is still there
    seen += f"; a checkpoint takes {units.size(size)} and {units.duration(size / speed)}"
    if free < kept * size:
        yield failure(
            f"{seen}, and the run needs space for {kept}", f"free {units.size(kept * size - free)}, or --out elsewhere"
        )
    elif size / speed > _SLOW_SAVE_S:
        yield warning(seen, "--out on a faster disk, or a longer --checkpoint.every-s")
    else:
        yield ok(f"{seen}: space for {free // size}")


def remove_token(place: Place) -> None:
    with contextlib.suppress(OSError):
        Path(place.notes.get("token", "")).unlink()


def data(place: Place) -> Iterator[Verdict]:
    """Reads the data set for some seconds, and notes its fingerprint and vocabulary."""
    config = place.config
    inspect_data(config.data, config.model.vocab_size)
    place.notes["data"] = []
    seconds = _VERIFY_S / len(config.data.parts)
    for path, _ in config.data.parts:
        if not path or not is_dataset(path):
            yield _cache(path or "the embedded corpus")
            continue
        dataset = Dataset.open(path, config.model.vocab_size)
        place.notes["vocab_size"] = config.model.vocab_size or dataset.vocab_size
        place.notes["data"].append(dataset.fingerprint)
        try:
            verified = _verify(dataset, seconds)
        except UserError as error:
            yield failure(str(error), f"copy {path} from its source again, or prepare it again")
            continue
        whole = "all" if verified == dataset.num_bytes else f"{units.size(verified)} in {seconds:.2g} s"
        rest = "" if whole == "all" else f"; all of it: paceline data info {path} --verify"
        yield ok(f"{path}: {units.size(dataset.num_bytes)}, {whole} verified{rest}")


def _cache(text: str) -> Verdict:
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        return failure(f"the tokens of {text} go to {cache}: {error.strerror}", "export PACELINE_CACHE=another folder")
    return ok(f"{text}: its tokens go to {cache}")


def _verify(dataset: Dataset, seconds: float) -> int:
    """Returns how many bytes were verified within the time. Raises UserError for damage."""
    deadline, done = time.monotonic() + seconds, 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if time.monotonic() > deadline:
            raise TimeoutError

    with contextlib.suppress(TimeoutError):
        dataset.verify(advance)
    return done
