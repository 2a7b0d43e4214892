"""Documents to a data set: read in order, encoded on all cores, written in order. Killed, it goes on where it was.

    sources -> blocks -> workers -> builder -> shards, and index.json last: a folder with it is complete
                                       |
                                   .preparing/progress.json, replaced every few seconds: the place in the
                                   sources and the lengths of the files, both of one moment

Whoever starts the same preparation again cuts the files back to that moment and reads on from that place. Blocks are a
pure function of the place and tokens of the block, so the bytes are those of an undisturbed run.
"""

import errno
import hashlib
import io
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import replace as replace_file
from paceline.base.files import sync
from paceline.data.blocks import Block, Place, ReadOptions, read_blocks, texts
from paceline.data.build import Builder, Counts
from paceline.data.corpora import STANDARD_INPUT, Sources
from paceline.data.encode import Encoder
from paceline.data.recipe import Recipe
from paceline.data.shard import (
    FORMAT_VERSION,
    INDEX,
    SPLITS,
    TOKEN_BYTES,
    WORK,
    Index,
    SplitRecord,
    TokenizerRecord,
    read_index,
    write_index,
)
from paceline.data.sources import find, split_text
from paceline.data.tokenizer import Tokenizer, resolve
from paceline.data.workers import Job, encode_all

TOKENIZER = "tokenizer.json"
_SAVE_EVERY_S = 2.0
_COPIED_BYTES = 1 << 20  # of standard input at once
_SAMPLE_BYTES = 64 << 20  # of text is enough to learn merges from; on more, every n-th block is taken


class Report(Protocol):
    """Who hears how it goes."""

    def say(self, text: str) -> None:
        """A line for people."""

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """How much has been read of the sources; total None: unknown."""


class Quiet:
    """A report that nobody hears."""

    def say(self, text: str) -> None:
        """Nothing."""

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """Nothing."""


def gather(specs: Sequence[str], validation: Sequence[str], recipe: Recipe) -> Sources:
    """Returns the sources' files, each with its side where that does not depend on the documents' text.

    `validation` names sources of their own for that split. Raises UserError for what can not be found or read.
    """
    found = find(specs, format=recipe.format)
    if not validation:
        if not recipe.separator:
            found = replace(found, files=split_text(found.files))
        (first, *others) = found.files
        if not others and first.side is None and first.format == "text" and not recipe.separator:
            raise UserError(
                f"{first.where} is one document, and the two splits need one each: say what stands between documents "
                f"(--separator), give --validation SRC, or name an uncompressed file, which is cut"
            )
        return found
    held = find(validation, format=recipe.format)
    both = {file.path for file in found.files} & {file.path for file in held.files}
    if both:
        raise UserError(f"{min(both)} is among the sources and under --validation; it can be on one side only")
    files = [replace(file, side="train") for file in found.files]
    files += [replace(file, side="validation") for file in held.files]
    return Sources(found.name, tuple(files), found.skipped + held.skipped)


def prepare(
    sources: Sources,
    recipe: Recipe,
    folder: Path,
    report: Report,
    *,
    num_workers: int,
    restart: bool = False,
    save_every_s: float = _SAVE_EVERY_S,
) -> Index:
    """Returns the index of the folder's data set, made if it is not there: from the beginning, or from where a killed
    preparation stopped. The same bytes for any number of workers.

    One process at a time; another gets a UserError, as for a folder that holds something else, sources that changed
    since the beginning, and whatever is wrong with a document. What was done until then stays and is gone on with.
    """
    recipe.check()
    if (folder / INDEX).is_file():
        index = _same(folder, _asked(sources, recipe))
        report.say(f"data: {folder} is prepared already")
        shutil.rmtree(folder / WORK, ignore_errors=True)  # left by a process killed right after the index
        return index
    try:
        with _work_folder(folder) as work:
            if (folder / INDEX).is_file():  # by a process that was faster
                return _same(folder, _asked(sources, recipe))
            if restart:
                _clear(folder, work)
            index = _Preparation(sources, recipe, folder, work, report, num_workers, save_every_s).run()
        shutil.rmtree(work)
        sync(folder)
        return index
    except OSError as error:
        raise UserError(_disk_message(folder, error)) from error


def _asked(sources: Sources, recipe: Recipe) -> dict[str, Any]:
    """What tells one preparation from another."""
    files = [[f.name, f.format, f.compression, f.num_bytes, f.start, f.stop, f.side] for f in sources.files]
    return {"format": FORMAT_VERSION, "recipe": asdict(recipe), "sources": _hash(files)}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode("utf-8", "surrogatepass")).hexdigest()


def _same(folder: Path, asked: dict[str, Any]) -> Index:
    """Returns the index of a complete folder; raises UserError where something else was asked for."""
    index = read_index(folder)
    found = {key: index.origin.get(key) for key in ("recipe", "sources")}
    if found != {key: asked[key] for key in found}:
        raise UserError(f"{folder} holds a data set that was prepared {_difference(found, asked)}; give another --out")
    return index


def _difference(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """How what is there differs from what is asked for, in the words of the command line."""
    before, now = found.get("recipe") or {}, asked["recipe"]
    for name, value in now.items():
        if before.get(name) != value:
            return f"with --{name.replace('_', '-')} {before.get(name)!r}, not {value!r}"
    return "from other sources, or they have changed since"


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """The folder for what is needed only while a data set is made; held by one process at a time."""
    work = folder / WORK
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder, which is made")
    if folder.is_dir() and not work.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no data set; give another --out")
    work.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(work / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"another process is preparing {folder}; wait for it, or give another --out") from None
    except NotImplementedError as error:
        raise UserError(f"{folder}: {error}; give an --out on a file system that has locks") from error
    try:
        yield work
    finally:
        lock.release()


def _disk_message(folder: Path, error: OSError) -> str:
    where = error.filename or folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full; what was done is kept: free some space and give the same command again"
    return f"{where}: {error.strerror or error}; give an --out that can be written"


class _Journal:
    """Where the work is: one file, replaced whole."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self._path, self._asked = path, asked

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Returns what was saved last; None at the very beginning. Raises UserError where something else was begun."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{self._path} is damaged ({error}); --restart begins anew") from error
        if found["asked"] != self._asked:
            if found["builder"] is None:
                return None  # nothing was made of it yet: a mistake that was noticed at once
            what = _difference(found["asked"], self._asked)
            raise UserError(f"{folder} was begun {what}; ask for the same again, or --restart to begin anew")
        return found

    def write(self, tokenizer: Tokenizer, library: str, builder: Builder | None, place: Place) -> None:
        """Keeps a moment at which all blocks before `place` are with the builder; `library` encodes."""
        content = {
            "asked": self._asked,
            "encoder": {"library": library, "tokenizer_sha256": tokenizer.sha256},
            "builder": builder.save() if builder else None,
            "place": asdict(place),
        }
        replace_file(self._path, json.dumps(content).encode())


class _Preparation:
    """One data set being made by this process."""

    def __init__(
        self,
        sources: Sources,
        recipe: Recipe,
        folder: Path,
        work: Path,
        report: Report,
        num_workers: int,
        save_every_s: float,
    ) -> None:
        self._asked = _asked(sources, recipe)
        self._journal = _Journal(
            work / "progress.json", {**self._asked, "stamps": _hash([file.stamp for file in sources.files])}
        )
        self._saved = self._journal.read(folder)
        if recipe.tokenizer.startswith("train:") and sources.files[0].path == STANDARD_INPUT:
            if self._saved is not None and self._saved["builder"] is None:
                self._saved = None  # a tokenizer and nothing else, and perhaps another stream's
            sources = _readable_twice(sources, work, report, is_begun=self._saved is not None)
        self._sources = sources
        self._recipe, self._folder, self._work, self._report = recipe, folder, work, report
        self._num_workers, self._save_every_s = num_workers, save_every_s
        self._options = ReadOptions(text_key=recipe.text_key, separator=recipe.separator)

    def run(self) -> Index:
        """Returns the index; it is the last file written."""
        tokenizer, library = self._tokenizer()
        builder = Builder(
            self._folder,
            self._work,
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=tokenizer.sha256,
            shard_tokens=self._recipe.shard_tokens,
            dedup=self._recipe.dedup,
            saved=self._saved["builder"] if self._saved else None,
        )
        try:
            self._encode(tokenizer, library, builder)
            splits = builder.finish()
        finally:
            builder.close()
        _require_both(splits, builder.counts, self._recipe)
        assert tokenizer.end_of_text is not None  # one without was refused
        record = TokenizerRecord(TOKENIZER, tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text)
        origin = {**_origin(self._sources, builder.counts), **self._asked}
        index = Index(self._sources.name, tokenizer.vocab_size, splits, record, TOKEN_BYTES, origin)
        sync(self._folder)
        write_index(self._folder, index)
        return index

    def _tokenizer(self) -> tuple[Tokenizer, str]:
        """Returns the tokenizer and the library that encodes with it; by then its files are in the folder."""
        if self._saved is not None:
            self._report.say(f"data: going on with {self._folder}")
            tokenizer, encoder = Tokenizer.load(self._folder / TOKENIZER), self._saved["encoder"]
            if tokenizer.sha256 != encoder["tokenizer_sha256"]:
                raise UserError(f"{self._folder / TOKENIZER} was changed since this was begun; --restart begins anew")
            return tokenizer, encoder["library"]
        tokenizer, library = _choose_tokenizer(self._sources, self._options, self._recipe, self._folder, self._report)
        self._journal.write(tokenizer, library, None, Place())
        return tokenizer, library

    def _encode(self, tokenizer: Tokenizer, library: str, builder: Builder) -> None:
        """Hands all documents to the builder, and notes every so often how far it is."""
        recipe = self._recipe
        job = Job(tokenizer.json, library, self._options, recipe.validation_frac, recipe.dedup)
        start = Place(**self._saved["place"]) if self._saved else Place()
        blocks = read_blocks(self._sources, self._options, start)
        told = self._teller(builder)
        saved_at = time.monotonic()
        reached: Place | None = None
        try:
            for block, encoded in encode_all(blocks, job, self._num_workers):
                reached = None  # until the builder has all of it
                builder.take(encoded)
                if block.resumable and builder.can_save:
                    reached = block.next
                told(block)
                if reached is not None and time.monotonic() - saved_at > self._save_every_s:
                    self._journal.write(tokenizer, library, builder, reached)
                    saved_at = time.monotonic()
        except (UserError, KeyboardInterrupt):
            if reached is not None:  # a document that can not be read, or a person who has enough for today
                self._journal.write(tokenizer, library, builder, reached)
            raise

    def _teller(self, builder: Builder) -> Callable[[Block], None]:
        sizes = [file.num_bytes for file in self._sources.files]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        before = [0, *accumulate(size or 0 for size in sizes)]

        def tell(block: Block) -> None:
            done = before[block.file] + block.read_bytes
            self._report.advance(done, total, f"{units.count(builder.num_tokens)} tokens")

        return tell


def _choose_tokenizer(
    sources: Sources, options: ReadOptions, recipe: Recipe, folder: Path, report: Report
) -> tuple[Tokenizer, str]:
    """Finds or trains the tokenizer and writes its files; returns it and the library that is to encode with it."""

    def sample() -> Iterator[str]:
        report.say(f"data: training a tokenizer, {recipe.tokenizer.removeprefix('train:')} tokens, on {sources.name}")
        return _sample(sources, options)

    tokenizer = resolve(recipe.tokenizer, sample, recipe.document_token)
    if tokenizer.end_of_text is None:
        raise UserError(f"--tokenizer {recipe.tokenizer} has no token that begins a document; give --document-token")
    encoder = Encoder(tokenizer)
    replace_file(folder / TOKENIZER, tokenizer.json.encode())
    lengths = io.BytesIO()
    np.save(lengths, tokenizer.token_bytes(), allow_pickle=False)
    replace_file(folder / TOKEN_BYTES, lengths.getvalue())
    return tokenizer, encoder.library


def _sample(sources: Sources, options: ReadOptions) -> Iterator[str]:
    """Text to learn merges from: all of it, or blocks at even distances through all training files."""
    files = tuple(file for file in sources.files if file.side != "validation")
    total = sum(file.num_bytes or 0 for file in files)
    blocks = read_blocks(Sources(sources.name, files, 0), options)
    taken = 0
    for block in islice(blocks, 0, None, max(1, math.ceil(total / _SAMPLE_BYTES))):
        for text in texts(block, options).texts:
            yield text.text
            taken += len(text.text)
        if taken > _SAMPLE_BYTES:  # compressed files hold more than their size says
            return


def _readable_twice(sources: Sources, work: Path, report: Report, *, is_begun: bool) -> Sources:
    """Standard input as a file: a tokenizer is trained on it before it is encoded.

    Raises UserError where a preparation that is begun is given another stream than it began with.
    """
    (piped, *held) = sources.files
    kept = work / "input"
    if is_begun:
        _require_same_stream(kept)
    else:
        report.say("data: keeping standard input on the disk, to train a tokenizer on it first")
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, _COPIED_BYTES)
    size = kept.stat().st_size
    return replace(sources, files=(replace(piped, path=str(kept), num_bytes=size), *held))


def _require_same_stream(kept: Path) -> None:
    """Reads standard input to its end, or to where it is not what was kept of it."""
    with kept.open("rb") as file:
        while before := file.read(_COPIED_BYTES):
            if sys.stdin.buffer.read(_COPIED_BYTES) != before:
                break
        else:
            if not sys.stdin.buffer.read(1):
                return
    raise UserError(
        f"standard input is not the {units.size(kept.stat().st_size)} that were read before; give the same again, or "
        f"--restart to begin anew"
    )


def _require_both(splits: dict[str, SplitRecord], counts: Counts, recipe: Recipe) -> None:
    if not splits["train"].documents + splits["validation"].documents:
        raise UserError(f"there is no text in the sources ({counts.empty} documents are empty)")
    for split, other in (("train", "validation"), ("validation", "train")):
        if not splits[split].documents:
            raise UserError(
                f"all {splits[other].documents} documents fell into the {other} split and none into {split} "
                f"(--validation-frac {recipe.validation_frac:g}); give more documents, another --validation-frac, "
                f"a --separator between documents, or --validation SRC; and --restart"
            )


def _origin(sources: Sources, counts: Counts) -> dict[str, Any]:
    return {
        "files": len({file.path for file in sources.files}),
        "skipped_files": sources.skipped,
        "duplicate_documents": counts.duplicates,
        "empty_documents": counts.empty,
        "replaced_places": counts.replaced,
    }


def _clear(folder: Path, work: Path) -> None:
    """Removes what an unfinished preparation wrote, and nothing else; the lock stays held."""
    for split in SPLITS:
        for path in folder.glob(f"{split}-[0-9]*"):
            path.unlink()
    for path in work.iterdir():
        if path.name != "lock":
            path.unlink()
