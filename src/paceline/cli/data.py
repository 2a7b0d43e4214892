"""paceline data prepare | info"""

import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.base import units
from paceline.base.errors import EXIT_RESUMABLE, UserError
from paceline.cli.flags import parse, run_verb
from paceline.data.config import Recipe, Share
from paceline.record.console import Console, facts, table
from paceline.world.cores import usable_cores

if TYPE_CHECKING:
    from paceline.data.dataset import Dataset

_USAGE = """paceline data prepare SRC... --out DIR     documents to token shards
paceline data info DIR [--verify]           what a dataset holds, and whether it is complete

`--help` after either shows its options.
"""
_MAX_SHARES = 100_000
_DOCUMENT_TOKENS = {"median": 50, "p95": 95, "longest": 100}  # percentiles


@dataclass(frozen=True, kw_only=True)
class PrepareArguments:
    """Turn documents into token shards: text files, folders and globs of them, .jsonl and .parquet (.gz, .zst, .bz2 and
    .lz4, too), - for standard input, hub:ORG/NAME for a dataset on the Hugging Face hub. If it was interrupted or
    killed, the same command resumes with the parts of the sources that are missing. Several hosts that share a disk
    give the same command, each with its --part-of."""

    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders, globs, -, hub:ORG/NAME[:GLOB]."""
    out: str
    """The dataset's folder, for --data.path."""
    validation: tuple[str, ...] = ()
    """Sources of the validation split; empty: some of the documents, see --validation-frac."""
    workers: int = 0
    """Processes that encode; 0: one per core. The result does not depend on it."""
    part_of: str = ""
    """I/N, such as 3/16: of the sources' parts only every N-th, from the I-th on; the last host makes the dataset."""
    finish: bool = False
    """Make the dataset if all parts are there, and no part: after hosts with --part-of."""
    restart: bool = False
    """Start again from the beginning if an earlier preparation was not finished."""
    recipe: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)


@dataclass(frozen=True, kw_only=True)
class InfoArguments:
    """Show what a dataset holds: one prepared here, nanoGPT's train.bin and val.bin, shards of llm.c, or token files of
    Megatron-LM or datatrove with their indexes."""

    folder: tyro.conf.Positional[str]
    """The dataset's folder."""
    verify: bool = False
    """Read every byte and compare it with the checksums; if there are none, check each token against the vocabulary."""
    vocab_size: int = 0
    """If the data does not tell it (GPT-2's: 50257)."""
    json: bool = False
    """One JSON object instead of a table."""


def main(arguments: list[str]) -> int:
    return run_verb("data", {"prepare": _prepare, "info": _info}, arguments, _USAGE)


def _prepare(arguments: list[str]) -> int:
    parsed = parse(PrepareArguments, PrepareArguments(sources=(), out=""), arguments, "data prepare")
    if not parsed.sources:
        raise UserError("no source is given: paceline data prepare SRC... --out DIR")
    if not parsed.out:
        raise UserError("--out is not given; it names the folder for the dataset")
    if not 0 <= parsed.workers <= 1024:
        raise UserError(f"--workers is {parsed.workers}; it is 1 to 1024, or 0 for one per core")
    parsed.recipe.check()
    share = _share(parsed)
    from paceline.data.dataset import Dataset
    from paceline.data.prepare import prepare
    from paceline.data.split import gather

    folder = Path(os.path.expanduser(parsed.out))
    sources = gather(parsed.sources, parsed.validation, parsed.recipe)
    console = Console(0)
    num_workers = parsed.workers or usable_cores()
    try:
        with console.reading() as report:
            index = prepare(
                sources, parsed.recipe, folder, report, num_workers=num_workers, restart=parsed.restart, share=share
            )
    except KeyboardInterrupt:
        console.say(f"interrupted; complete parts are kept in {folder}, and the same command makes the others")
        return EXIT_RESUMABLE
    if index is None:
        return EXIT_RESUMABLE if parsed.finish else 0
    _print(facts_of(Dataset.open(folder)))
    console.say(f"\nTry next:\n  paceline train --data.path {shlex.quote(str(folder))} --train.tokens-per-param 20")
    return 0


def _share(parsed: PrepareArguments) -> Share:
    """Raises UserError for an impossible --part-of."""
    if not parsed.part_of:
        return Share(only_finishes=parsed.finish)
    number, _, of = parsed.part_of.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of) <= _MAX_SHARES):
        raise UserError(f"--part-of is {parsed.part_of!r}; it is I/N with I from 1 to N, such as 3/16")
    for flag, is_given in (
        ("--finish", parsed.finish),
        ("--restart", parsed.restart),
        ("- (standard input)", "-" in (*parsed.sources, *parsed.validation)),
    ):
        if is_given:
            raise UserError(f"--part-of and {flag} are both given; give one")
    return Share(int(number), int(of))


def _info(arguments: list[str]) -> int:
    parsed = parse(InfoArguments, InfoArguments(folder=""), arguments, "data info")
    if not parsed.folder:
        raise UserError("no dataset is given: paceline data info DIR")
    from paceline.data.dataset import Dataset, is_dataset

    if not is_dataset(parsed.folder):
        raise UserError(
            f"{parsed.folder} is not a dataset: it has neither index.json nor train.bin and val.bin nor *_train_*.bin"
        )
    dataset = Dataset.open(parsed.folder, parsed.vocab_size)
    if parsed.verify:
        done = 0
        with Console(0).reading() as report:

            def advance(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                if not parsed.json:
                    report.advance(done, dataset.num_bytes)

            dataset.verify(advance)
    facts = facts_of(dataset)
    if parsed.json:
        print(json.dumps({**facts, "verified": parsed.verify}))
        return 0
    _print(facts)
    if parsed.verify:
        print(f"every byte was read: all {units.size(dataset.num_bytes)} are as they should be")
    return 0


def facts_of(dataset: "Dataset") -> dict[str, Any]:
    """Returns what a dataset holds, as plain dicts, lists, text and numbers; None for what is unknown."""
    import numpy as np

    index = dataset.index
    tokenizer = dataset.tokenizer() if dataset.tokenizer_json is not None else None
    splits: dict[str, dict[str, Any]] = {}
    for split, stream in (("train", dataset.train), ("validation", dataset.validation)):
        splits[split] = {"tokens": stream.num_tokens, "shards": len(stream.shards)}
        splits[split] |= dict.fromkeys(("documents", "text_bytes", "document_tokens"))
        if index is not None:
            record = index.splits[split]
            percentiles = np.percentile(dataset.documents(split).lengths, list(_DOCUMENT_TOKENS.values()))
            lengths = dict(zip(_DOCUMENT_TOKENS, percentiles.astype(int).tolist(), strict=True))
            splits[split] |= {
                "documents": record.documents,
                "text_bytes": record.text_bytes,
                "document_tokens": lengths,
            }
    return {
        "name": dataset.name,
        "folder": str(dataset.folder),
        "fingerprint": dataset.fingerprint,
        "vocab_size": dataset.vocab_size,
        "tokenizer_sha256": tokenizer.sha256 if tokenizer else None,
        "document_token": tokenizer.document_token if tokenizer else None,
        "splits": splits,
        "origin": dict(index.origin) if index else None,
    }


def _print(described: dict[str, Any]) -> None:
    console, origin = Console(0), described["origin"] or {}
    sha256 = described["tokenizer_sha256"]
    rows = {
        "dataset": f"{described['name']} in {described['folder']}",
        "vocabulary": f"{described['vocab_size']} tokens",
        "tokenizer": f"sha256 {sha256[:16]}" if sha256 else "none: its ids can not be turned into text",
        "documents begin with": described["document_token"] or "unknown",
        "fingerprint": described["fingerprint"][:16],
    }
    for name, what in (
        ("skipped_files", "files are neither text nor a known format and were left out"),
        ("empty_documents", "documents have no text and were left out"),
        ("replaced_places", "places are not UTF-8 and became U+FFFD"),
    ):
        if origin.get(name):
            rows[name.split("_")[0]] = f"{origin[name]} {what}"
    if "skipped" in rows and "skipped_bytes" in origin:
        rows["skipped"] += f" ({units.size(origin['skipped_bytes'])})"
    if by_source := origin.get("skipped_records"):
        which = units.listed([f"{number} of {source}" for source, number in by_source.items()])
        rows["unreadable"] = f"{sum(by_source.values())} records could not be read and were left out: {which}"
        rows["such as"] = "\n".join(origin["skipped_places"])
    console.say(facts(list(rows.items())))
    console.say()
    columns = ["", "documents", "tokens", "text", "bytes a token", "shards"]
    columns += ["tokens of a document: median", "95%", "longest"]
    console.say(table("", columns, [_row(split, part) for split, part in described["splits"].items()]))


def _row(split: str, part: dict[str, Any]) -> list[str]:
    lengths = part["document_tokens"] or dict.fromkeys(_DOCUMENT_TOKENS, "?")
    per_token = f"{part['text_bytes'] / part['tokens']:.2f}" if part["text_bytes"] and part["tokens"] else "?"
    return [
        split,
        "?" if part["documents"] is None else f"{part['documents']}",
        units.count(part["tokens"]),
        "?" if part["text_bytes"] is None else units.size(part["text_bytes"]),
        per_token,
        f"{part['shards']}",
        *map(str, lengths.values()),
    ]
