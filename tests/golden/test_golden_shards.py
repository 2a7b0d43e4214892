"""The token shards that `paceline data prepare` made of the sources here at commit 3c0a85c, byte for byte, whatever the
number of workers: JSONL beside text files of several alphabets, a trained tokenizer and one that is given, documents
between separators, empty documents, and validation splits of other files and by a hash."""

import shutil
from pathlib import Path

import golden
import pytest
from program import run

RECORDS, PARTS, NOTES = "sources/records.jsonl", "sources/parts.txt", "sources/notes"
DATA_SETS = {  # in this order: the last takes the tokenizer of the first
    "trained": (
        *(RECORDS, NOTES, "--validation", "sources/held-out.txt"),
        *("--tokenizer", "train:320", "--shard-tokens", "8000"),
    ),
    "bytes": (PARTS, "--separator", "<|endoftext|>", "--tokenizer", "bytes", "--validation-frac", "0.1"),
    "again": (RECORDS, "--tokenizer", "trained/tokenizer.json", "--validation-frac", "0.2"),
}


def prepare(folder: Path, num_workers: int) -> None:
    """Makes all data sets in this folder, from a copy of the sources."""
    shutil.copytree(golden.HERE / "sources", folder / "sources")
    for name, arguments in DATA_SETS.items():
        command = ("data", "prepare", *arguments, "--workers", str(num_workers), "--out", name)
        run(*command, cwd=folder).require(0)


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_shards_are_those_recorded(tmp_path: Path, num_workers: int) -> None:
    prepare(tmp_path, num_workers)
    for name in DATA_SETS:
        recorded, made = (sorted(path for path in (root / name).iterdir()) for root in (golden.SHARDS, tmp_path))
        assert [path.name for path in made] == [path.name for path in recorded]
        for before, now in zip(recorded, made, strict=True):
            assert now.read_bytes() == before.read_bytes(), f"{name}/{before.name}"
