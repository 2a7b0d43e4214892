"""Makes a dataset from documents: parts of the sources become tokens, and these become shards.

    find -> documents -> parts -> shards; index.json comes last: a folder with it is complete

A restarted preparation leaves out the parts that have a record (see parts.py), and so does another host that takes
every n-th part (--part-of). The shards depend on the documents alone: neither on workers, nor on hosts, nor on how the
sources were cut into parts. `.preparing` in the folder has what was begun, locks, and the parts' files.
"""

import errno
import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import filelock

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import replace as replace_file
from paceline.base.files import sha256_of, sync
from paceline.base.locks import file_lock
from paceline.data.config import ALL_PARTS, Recipe, Report, Share
from paceline.data.encode import Encoder
from paceline.data.find import describe_left_out
from paceline.data.parts import Job, Part, Record, cut, encode_all, hash_of, record_of
from paceline.data.sample import make_tokenizer
from paceline.data.shard import (
    FORMAT_VERSION,
    SPLITS,
    TOKEN_BYTES,
    WORK,
    Index,
    Shards,
    SplitRecord,
    TokenizerRecord,
    is_complete,
    read_index,
    write_index,
)
from paceline.data.sources import STANDARD_INPUT, Sources, kept_input
from paceline.data.split import validation_below
from paceline.data.tokenizer import FILE, Tokenizer

SKIPPED = "skipped.jsonl"  # what was left out, with --on-error skip: {"source": ..., "why": ...} a line
_BEGUN = "begun.json"  # the request, the tokenizer's sha256, and the limit of the validation split
_PARTS = "parts"
_INPUT = "standard_input"  # in the index: its sha256
_NUM_PLACES = 5  # of skipped records, to look at in the index


def prepare(
    sources: Sources,
    recipe: Recipe,
    folder: Path,
    report: Report,
    *,
    num_workers: int,
    restart: bool = False,
    share: Share = ALL_PARTS,
) -> Index | None:
    """Returns the index of the folder's dataset, made first if it is not complete; None if other shares are missing.

    One process a share at a time: others get a UserError. Also raises UserError if the folder has other content or was
    begun in another way, or for a bad document. Complete parts are kept.
    """
    recipe.check()
    return _Preparation(sources, recipe, folder, report, num_workers, share).run(restart)


@dataclass
class _Preparation:
    sources: Sources
    recipe: Recipe
    folder: Path
    report: Report
    num_workers: int
    share: Share
    input_sha256: str = ""  # of standard input, once it was read

    @property
    def work(self) -> Path:
        return self.folder / WORK

    @cached_property
    def is_piped(self) -> bool:
        """Whether standard input is among the sources."""
        return any(file.path == STANDARD_INPUT for file in self.sources.files)

    @cached_property
    def request(self) -> dict[str, Any]:
        return _request(self.sources, self.recipe)

    def run(self, restart: bool) -> Index | None:
        """Returns what `prepare` does."""
        if is_complete(self.folder):
            complete = self._complete()
            self.report.say(f"data: {self.folder} is prepared already, from sources of the same names and sizes")
            shutil.rmtree(self.work, ignore_errors=True)  # of a process killed just after it wrote the index
            return complete
        try:
            with _locked(self.folder, self.share):
                if is_complete(self.folder):  # another process was faster
                    return self._complete()
                for line in [*describe_left_out(self.sources), *_without_effect(self.sources, self.recipe)]:
                    self.report.say(f"data: {line}")
                index = self._make(restart)
            if index is not None:
                shutil.rmtree(self.work, ignore_errors=True)  # another process may be opening the lock in it
                sync(self.folder)
            return index
        except OSError as error:
            if isinstance(error, FileNotFoundError) and is_complete(self.folder):
                return self._complete()  # another share made it, and removed what this one was waiting for
            raise UserError(_disk_message(self.folder, error)) from error

    def _make(self, restart: bool) -> Index | None:
        """Returns the index, which is the last file written; None if parts of other shares are missing."""
        with file_lock(self.work / "lock-begin"):  # one share makes the tokenizer, the others wait for it
            if restart or not self.share.only_finishes:
                _require_one_division(self.work, self.share, restart)
            job = self._begin(restart)
        parts = list(cut(self.sources.files, self.recipe))
        keys = job.keys(parts)
        self._encode(job, keys, parts)
        with file_lock(self.work / "lock-end"):  # the last share makes the shards
            if is_complete(self.folder):
                return self._complete()
            records = [record for key in keys if (record := record_of(job, key))]
            if len(records) == len(keys):
                return self._finish(job, keys, records)
        there = f"{len(records)} of {len(keys)} parts are there"
        self.report.say(f"data: {there}; the last share makes the dataset of them, or this command with --finish")
        return None

    def _complete(self) -> Index:
        """Returns the index of the folder. Raises UserError if it is of another recipe, sources, or standard input."""
        index = _same(self.folder, self.request)
        recorded = index.origin.get(_INPUT)  # earlier versions have none
        if self.is_piped and recorded:
            if not self.input_sha256:
                stream: Any = sys.stdin.buffer  # typed without its readinto
                self.input_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            if recorded != self.input_sha256:
                raise UserError(f"{self.folder} was made of another standard input; give another --out")
        return index

    def _begin(self, restart: bool) -> Job:
        """Returns what is the same for all parts: as it was begun, or made anew. Standard input becomes a file."""
        request, is_piped = self.request, self.is_piped  # before the kept file stands for standard input
        begun = None if restart else _begun(request, self.folder)
        if begun is None or (is_piped and not _has_parts(self.work)):  # perhaps the tokenizer is another stream's
            begun = None
            _clear(self.folder)
        if is_piped:
            kept = self.work / "input"
            self.report.say(f"data: keeping standard input on the disk, as {kept}, while the dataset is made")
            self.sources = kept_input(self.sources, kept, is_begun=begun is not None)
            self.input_sha256 = sha256_of(kept)
        if begun is None:
            below = validation_below(self.sources, self.recipe)
            tokenizer = make_tokenizer(self.sources, self.recipe, self.folder, self.report)
            begun = tokenizer, below
            made = {**request, "tokenizer": tokenizer.sha256, "validation_below": below}
            replace_file(self.work / _BEGUN, json.dumps(made).encode())
        tokenizer, below = begun
        return Job(self.work / _PARTS, tokenizer.json, Encoder(tokenizer).library, self.recipe, below)

    def _encode(self, job: Job, keys: Sequence[str], parts: Sequence[Part]) -> None:
        """Makes this share's parts, without those that are there."""
        missing = [number for number, key in enumerate(keys) if record_of(job, key) is None]
        if len(missing) < len(keys):
            num_there = len(keys) - len(missing)
            self.report.say(f"data: resuming {self.folder}: {num_there} of {len(keys)} parts are there")
        todo = [(keys[number], parts[number]) for number in missing if self.share.takes(number)]
        total = sum(of.num_bytes for _, part in todo for of in part)
        done = num_tokens = 0
        for part, record in encode_all(todo, job, self.num_workers):
            done += sum(of.num_bytes for of in part)
            num_tokens += sum(record.tokens)
            self.report.advance(done, total, f"{units.count(num_tokens)} tokens")

    def _finish(self, job: Job, keys: Sequence[str], records: Sequence[Record]) -> Index:
        """Makes the shards of all parts, and the index, which is written last."""
        _require_both(records, self.recipe)
        tokenizer = Tokenizer(job.tokenizer_json)
        splits: dict[str, SplitRecord] = {}
        for number, split in enumerate(SPLITS):
            written = tuple(record.written(job, key, number) for key, record in zip(keys, records, strict=True))
            shards = Shards(split, written, tokenizer.vocab_size, tokenizer.sha256, self.recipe.shard_tokens)
            made = shards.write_all(self.folder, self.work, self.num_workers)
            text_bytes = sum(record.text_bytes[number] for record in records)
            documents = sum(record.documents[number] for record in records)
            splits[split] = SplitRecord(shards.num_tokens, text_bytes, documents, made)
        skipped = [(source, why) for record in records for source, why in record.skipped]
        if skipped:
            lines = (json.dumps({"source": source, "why": why}) + "\n" for source, why in skipped)
            replace_file(self.folder / SKIPPED, "".join(lines).encode())
        assert tokenizer.end_of_text is not None  # make_tokenizer requires it
        listed = TokenizerRecord(FILE, tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text)
        origin = {**_origin(self.sources, records, skipped), **self.request}
        if self.input_sha256:
            origin[_INPUT] = self.input_sha256
        index = Index(self.sources.name, tokenizer.vocab_size, splits, listed, TOKEN_BYTES, origin)
        sync(self.folder)
        write_index(self.folder, index)
        return index


def _without_effect(sources: Sources, recipe: Recipe) -> Iterator[str]:
    """Yields a line for each option that was given and that no file uses."""
    formats = {file.format for file in sources.files}
    if recipe.validation_frac != Recipe().validation_frac and all(file.split for file in sources.files):
        yield (
            f"--validation-frac {recipe.validation_frac:g} has no effect here: text files are split by their names or "
            "at their ends, or by --validation"
        )
    if recipe.separator and "text" not in formats:
        yield f"--separator {recipe.separator!r} has no effect here: it separates documents of text files"
    if recipe.text_key != Recipe().text_key and formats == {"text"}:
        yield f"--text-key {recipe.text_key} has no effect here: it is for JSONL and Parquet, and all files are text"


def _request(sources: Sources, recipe: Recipe) -> dict[str, Any]:
    files = [[f.name, f.format, f.compression, f.num_bytes, f.start, f.stop, f.split] for f in sources.files]
    settings = {name: value for name, value in asdict(recipe).items() if name != "on_error"}  # may change at a resume
    return {"format": FORMAT_VERSION, "recipe": settings, "sources": hash_of(files)}


def _same(folder: Path, request: dict[str, Any]) -> Index:
    index = read_index(folder)
    difference = _difference(index.origin.get("recipe") or {}, request["recipe"])
    if not difference and index.origin.get("sources") != request["sources"]:
        difference = "from other sources, or they have changed since"
    if difference:
        raise UserError(f"{folder} holds a dataset that was prepared {difference}; give another --out")
    return index


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describes how a recipe differs from the one asked for, by command-line names; empty if it does not."""
    for name, value in now.items():
        if before.get(name) != value:
            return f"with --{name.replace('_', '-')} {before.get(name)!r}, not {value!r}"
    return ""


@contextmanager
def _locked(folder: Path, share: Share) -> Iterator[None]:
    """Makes the folder, and the one of temporary files in it, and locks them for one process a share."""
    work = folder / WORK
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder, which is made")
    if folder.is_dir() and not work.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no dataset; give another --out")
    (work / _PARTS).mkdir(parents=True, exist_ok=True)
    try:
        held = file_lock(work / share.lock).acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"another process is preparing {folder}; wait for it, or give another --out") from None
    with held:
        yield


def _require_one_division(work: Path, share: Share, restart: bool) -> None:
    """Raises UserError while a process makes parts that this one would make, too, or delete: one with another N of
    --part-of, or any other one at a restart. Called under lock-begin, so no two processes try the locks at once."""
    for path in work.glob("lock*"):
        is_beside = path.name == "lock-finish" or (share.of > 1 and path.name.endswith(f"-of-{share.of}"))
        if path.name in (share.lock, "lock-begin", "lock-end") or (is_beside and not restart):
            continue
        try:
            with file_lock(path, timeout=0):
                pass
        except filelock.Timeout:
            raise UserError(
                f"another process is preparing {work.parent} and divides the parts otherwise ({path.name}); wait for "
                "it, or give the same N of --part-of I/N to all"
            ) from None


def _disk_message(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full; complete parts are kept: free some space and give the same command"
    if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        return f"{folder} cannot be locked ({error.strerror}); give an --out on a file system that has locks"
    return f"{error.filename or folder}: {error.strerror or error}; give an --out that can be written"


def _begun(request: dict[str, Any], folder: Path) -> tuple[Tokenizer, float] | None:
    """Returns the tokenizer of an unfinished preparation, and its limit of the validation split; None if there is none,
    or nothing was made of it yet. Raises UserError if recipe or tokenizer have changed; sources may."""
    work = folder / WORK
    try:
        before: dict[str, Any] = json.loads((work / _BEGUN).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{work / _BEGUN} is damaged ({error}); --restart begins anew") from error
    if "validation_below" not in before:
        raise UserError(f"{folder} was begun by an earlier version of paceline; --restart begins anew")
    if difference := _difference(before["recipe"], request["recipe"]):
        if not _has_parts(work):
            return None
        raise UserError(f"{folder} was begun {difference}; ask for the same again, or --restart to begin anew")
    tokenizer = Tokenizer.load(folder / FILE)
    if tokenizer.sha256 != before["tokenizer"]:
        raise UserError(f"{folder / FILE} was changed since this was begun; --restart begins anew")
    return tokenizer, before["validation_below"]


def _has_parts(work: Path) -> bool:
    return any((work / _PARTS).glob("*.json"))


def _clear(folder: Path) -> None:
    work = folder / WORK
    made = [path for split in SPLITS for path in folder.glob(f"{split}-[0-9]*")]
    for path in [*work.iterdir(), *(work / _PARTS).iterdir(), *made]:
        if path.is_file() and not path.name.startswith("lock"):
            path.unlink()


def _require_both(records: Sequence[Record], recipe: Recipe) -> None:
    documents = dict(zip(SPLITS, map(sum, zip(*(record.documents for record in records), strict=True)), strict=True))
    skipped = [why for record in records for _, why in record.skipped]
    if not any(documents.values()):
        num_empty = sum(record.empty for record in records)
        rest = f"; {len(skipped)} are skipped: {skipped[0]}" if skipped else ""
        raise UserError(f"there is no text in the sources ({num_empty} documents are empty{rest})")
    for split, other in (("train", "validation"), ("validation", "train")):
        if not documents[split]:
            raise UserError(
                f"all {documents[other]} documents fell into the {other} split and none into {split} "
                f"(--validation-frac {recipe.validation_frac:g}); give more documents, another --validation-frac, "
                f"a --separator between documents, or --validation SRC; and --restart"
            )


def _origin(sources: Sources, records: Sequence[Record], skipped: Sequence[Sequence[str]]) -> dict[str, Any]:
    by_source = {
        "skipped_records": dict(Counter(source for source, _ in skipped)),
        "skipped_places": [why for _, why in skipped[:_NUM_PLACES]],
    }
    return {
        **(by_source if skipped else {}),
        "files": len({file.path for file in sources.files}),
        "skipped_files": len(sources.left_out),
        "skipped_bytes": sum(file.num_bytes for file in sources.left_out),
        "empty_documents": sum(record.empty for record in records),
        "replaced_places": sum(record.replaced for record in records),
    }
