"""The law: what is wrong with sources, a data set or the words about them is refused with status 2 and one message that
names file and place; what was half made never counts as a data set."""

import gzip
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from in_process import here
from program import Ended, run

from paceline.data import parts

PREPARE = ("data", "prepare")
BYTES = ("--tokenizer", "bytes")
TRAIN = ("train", "--preset", "tiny", "--train.steps", "3", "--train.sample-tokens", "0")
HEADER_BYTES = 1024


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start commands in, with a text file, records and a cache of its own."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "book.txt").write_text("".join(f"This is line {i}, not the last.\n" for i in range(400)))
    records(folder / "records.jsonl")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return folder


def records(path: Path, key: str = "text", count: int = 200) -> None:
    path.write_text("".join(json.dumps({key: f"document {i} " * (i % 9 + 1)}) + "\n" for i in range(count)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole data sets, copied by the tests that damage them: `bytes`, and `trained` with a vocabulary of 300."""
    root = tmp_path_factory.mktemp("made")
    records(root / "records.jsonl", count=400)
    for name, tokenizer in (("bytes", "bytes"), ("trained", "train:300")):
        options = ("--tokenizer", tokenizer, "--validation-frac", "0.2", "--shard-tokens", "3000")
        here(*PREPARE, "records.jsonl", "--out", name, *options, cwd=root).require(0)
    return root


@pytest.fixture
def data(place: Path, made: Path) -> Path:
    """A whole data set of bytes in two shards or more, for the test to damage."""
    shutil.copytree(made / "bytes", place / "data")
    assert (place / "data/train-00001.bin").exists()
    return place / "data"


def refused(place: Path, *arguments: str, says: tuple[str, ...], alone: bool = False) -> Ended:
    """Runs the command in `place`; returns how it was refused: status 2 and one message, with all of `says` in it.

    `alone`: in a process of its own, for what is refused only when a rank has begun.
    """
    ended = (run if alone else here)(*arguments, cwd=place).require(2)
    lines = ended.err.strip().splitlines()
    is_box = lines[0].startswith("╭") and lines[-1].startswith("╰") and ended.err.count("╭") == 1
    assert len(lines) == 1 or is_box, ended.err
    assert "Traceback" not in ended.err + ended.out
    for text in says:
        assert text in ended.err, f"{text!r} is not in:\n{ended.err}"
    return ended


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def counts(folder: Path) -> bool:
    """Whether a folder has anything by which it could be taken for a data set."""
    return (folder / "index.json").exists() or (folder / "val.bin").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("data", "prepar"), ("paceline data prepar", "did you mean 'prepare'?", "info")),
        (PREPARE, ("no source is given", "paceline data prepare SRC... --out DIR")),
        ((*PREPARE, "--out", "x"), ("no source is given",)),
        ((*PREPARE, "book.txt"), ("--out is not given",)),
        ((*PREPARE, "book.txt", "--out"), ("--out",)),
        ((*PREPARE, "book.txt", "--outt", "x"), ("--outt", "did you mean '--out'?")),
        ((*PREPARE, "book.txt", "--out", "x", "--workers", "-1"), ("--workers is -1", "1 to 1024")),
        ((*PREPARE, "book.txt", "--out", "x", "--workers", "many"), ("--workers", "many")),
        ((*PREPARE, "book.txt", "--out", "x", "--validation-frac", "1.5"), ("--validation-frac is 1.5",)),
        ((*PREPARE, "book.txt", "--out", "x", "--validation-frac", "nan"), ("--validation-frac is nan",)),
        ((*PREPARE, "book.txt", "--out", "x", "--shard-tokens", "0"), ("--shard-tokens is 0", "1 to 2147483647")),
        ((*PREPARE, "book.txt", "--out", "x", "--text-key", ""), ("--text-key is empty",)),
        ((*PREPARE, "book.txt", "--out", "x", "--format", "csv"), ("csv", "jsonl", "parquet")),
        ((*PREPARE, "missing.txt", "--out", "x"), ("missing.txt does not exist",)),
        ((*PREPARE, "book.txt", "missing.txt", "--out", "x"), ("missing.txt does not exist",)),
        ((*PREPARE, "*.nothing", "--out", "x"), ("*.nothing holds no text files, JSONL or Parquet",)),
        ((*PREPARE, "book.txt", "-", "--out", "x"), ("- (standard input)", "alone")),
        ((*PREPARE, "hub:one-word", "--out", "x"), ("'hub:one-word'", "hub:ORG/NAME")),
        ((*PREPARE, "book.txt", "--out", "x", "--validation", "book.txt"), ("book.txt", "one split only")),
        ((*PREPARE, "book.txt", "--out", "x", "--validation", "missing"), ("missing does not exist",)),
        ((*PREPARE, "book.txt", "--validation", "--out", "x"), ("--validation is given without a value",)),
        (("data", "info"), ("no dataset is given", "paceline data info DIR")),
        (("data", "info", "missing"), ("missing is not a dataset", "index.json", "train.bin")),
        (("data", "info", "book.txt"), ("book.txt is not a dataset",)),
        (("data", "info", ".", "--jsn"), ("--jsn", "did you mean '--json'?")),
        ((*TRAIN, "--data.mix", "a"), ("data.mix has 'a'", "PATH=WEIGHT")),
        ((*TRAIN, "--data.mix", "a=x"), ("data.mix has 'a=x'", "PATH=WEIGHT")),
        ((*TRAIN, "--data.mix", "a=-1"), ("data.mix has a=-1", "above 0")),
        ((*TRAIN, "--data.mix", "a=nan"), ("data.mix has a=nan", "above 0")),
        ((*TRAIN, "--data.mix", "a=1,", "b=1"), ("data.mix has 'a=1,'",)),
        ((*TRAIN, "--data.mix", "missing=1"), ("missing does not exist",)),
        ((*TRAIN, "--data.mix", "--data.seq-len", "8"), ("--data.mix is given without a value",)),
        ((*TRAIN, "--data.path", "book.txt", "--data.mix", "a=1"), ("data.path and data.mix", "give one")),
    ],
    ids=lambda value: " ".join(value).replace("/", ":")[-60:] if isinstance(value, tuple) else None,
)
def test_is_refused_and_leaves_nothing(place: Path, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    before = files(place)
    refused(place, *arguments, says=says)
    assert files(place) == before, "something was left behind"


def test_records_are_no_text_to_train_on(place: Path) -> None:
    before = files(place)
    says = ("records.jsonl", "paceline data prepare")
    refused(place, *TRAIN, "--data.path", "records.jsonl", says=says, alone=True)
    assert files(place) == before, "something was left behind"


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        ("gpt22", ("'gpt22'", "did you mean 'gpt2'?", "ORG/NAME")),
        ("train:5", ("'train:5'", "257", "train:32768")),
        ("train:", ("'train:'", "train:32768")),
        ("train:many", ("'train:many'",)),
        ("", ("--tokenizer is empty",)),
        ("missing/tokenizer.json", ("'missing/tokenizer.json'", "not a file")),
        ("broken.json", ("broken.json", "line 1 column 5")),
        ("book.txt", ("book.txt", "not a tokenizer.json")),
        ("words.json", ("words.json", "not byte-level BPE")),
    ],
)
def test_a_tokenizer_is_refused(place: Path, tokenizer: str, says: tuple[str, ...]) -> None:
    (place / "broken.json").write_text('{"a": 1')
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "unk": 1}, unk_token="unk"))
    (place / "words.json").write_text(words.to_str())
    refused(place, *PREPARE, "book.txt", "--out", "x", "--tokenizer", tokenizer, says=says)
    assert not counts(place / "x")


def source_files(folder: Path) -> None:
    """Files that have something wrong with them, each named by it."""
    (folder / "folder").mkdir()
    (folder / "latin1.txt").write_bytes("café naïve\n".encode("latin-1") * 50)
    (folder / "utf16.txt").write_bytes("some text\n".encode("utf-16") * 50)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "other-key.jsonl").write_text('{"text": "one"}\n\n{"txt": "two"}\n')
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three\n{"text": "four"}\n')
    (folder / "number.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    (folder / "list.jsonl").write_text('["text", "one"]\n')
    (folder / "array.json").write_text('[{"text": "one"},\n {"text": "two"}]\n')
    (folder / "nothing.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    (folder / "one.jsonl").write_text('{"text": "one"}\n')
    content = (folder / "records.jsonl").read_bytes()
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(content)[:-20])
    flipped = bytearray(gzip.compress(content))
    flipped[len(flipped) // 2] ^= 16
    (folder / "flipped.jsonl.gz").write_bytes(flipped)
    compressed = pa.compress(content, "zstd", asbytes=True)
    (folder / "cut.jsonl.zst").write_bytes(compressed[: len(compressed) // 2])
    (folder / "text.jsonl.gz").write_bytes(content)
    (folder / "text.jsonl.zst").write_bytes(content)
    table = pa.table({"content": [f"row {i} " * 50 for i in range(3000)], "length": list(range(3000))})
    pq.write_table(table, folder / "rows.parquet", compression="NONE", use_dictionary=False)
    whole = (folder / "rows.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "text.parquet").write_bytes(content)
    (folder / "empty.parquet").write_bytes(b"")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("folder",), ("folder holds no text files",)),
        (("latin1.txt",), ("latin1.txt is not UTF-8 text", "iconv -f LATIN1 -t UTF-8")),
        (("utf16.txt",), ("utf16.txt is UTF-16", "iconv -f UTF-16 -t UTF-8")),
        (("utf16.txt", "--format", "text"), ("utf16.txt is UTF-16",)),
        (("empty.txt",), ("empty.txt is empty",)),
        (("other-key.jsonl",), ("other-key.jsonl line 3", "no key 'text'", "did you mean 'txt'?", "--text-key")),
        (("records.jsonl", "--text-key", "txt"), ("records.jsonl line 1", "did you mean 'text'?")),
        (("broken.jsonl",), ("broken.jsonl line 3 is not JSON", "character 10")),
        (("number.jsonl",), ("number.jsonl line 2 has a number under 'text'", "--text-key")),
        (("list.jsonl",), ("list.jsonl line 1 is a list",)),
        (("array.json",), ("array.json is one JSON value", "jq -c '.[]'")),
        (("nothing.jsonl",), ("there is no text in the sources", "2 documents are empty")),
        (("one.jsonl",), ("one document", "--separator", "--validation SRC")),
        (("records.jsonl", "--validation-frac", "0"), ("--validation-frac is 0", "above 0", "--validation SRC")),
        (("book.txt", "--validation-frac", "0"), ("--validation-frac is 0", "above 0", "--validation SRC")),
        (("cut.jsonl.gz",), ("cut.jsonl.gz is damaged or cut short",)),
        (("flipped.jsonl.gz",), ("flipped.jsonl.gz",)),
        (("cut.jsonl.zst",), ("cut.jsonl.zst is damaged or cut short",)),
        (("text.jsonl.gz",), ("text.jsonl.gz is damaged", "incorrect header check")),
        (("text.jsonl.zst",), ("text.jsonl.zst is damaged",)),
        (("rows.parquet",), ("rows.parquet has no column 'text'", "content, length", "--text-key")),
        (("rows.parquet", "--text-key", "contents"), ("did you mean 'content'?",)),
        (("rows.parquet", "--text-key", "length"), ("rows.parquet: column 'length' is of int64, not of text",)),
        (("cut.parquet", "--text-key", "content"), ("cut.parquet can not be read as Parquet", "cut short?")),
        (("text.parquet",), ("text.parquet can not be read as Parquet",)),
        (("empty.parquet",), ("empty.parquet can not be read as Parquet",)),
        (("book.txt", "--document-token", "<s>"), ("no special token '<s>'", "<|endoftext|>")),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else None,
)
def test_a_source_is_refused(place: Path, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    source_files(place)
    refused(place, *PREPARE, *arguments, "--out", "x", *BYTES, says=says)
    assert not counts(place / "x")
    if (place / "x").exists():
        refused(place, "data", "info", "x", says=("x was not prepared to the end", "`paceline data prepare`"))


def test_a_flipped_page_of_a_parquet_file_is_refused(place: Path) -> None:
    """Where the file has checksums; without them nobody can know."""
    table = pa.table({"text": [f"row {i} " * 50 for i in range(3000)]})
    pq.write_table(table, place / "rows.parquet", compression="NONE", use_dictionary=False, write_page_checksum=True)
    content = bytearray((place / "rows.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (place / "rows.parquet").write_bytes(content)
    refused(place, *PREPARE, "rows.parquet", "--out", "x", *BYTES, says=("rows.parquet", "damaged"))
    assert not counts(place / "x")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the sources were two thousand times as large."""
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 13)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--part-of", "0/3"), "--part-of is '0/3'; it is I/N"),
        (("--part-of", "4/3"), "--part-of is '4/3'; it is I/N"),
        (("--part-of", "3"), "--part-of is '3'; it is I/N"),
        (("--part-of", "1/3", "--finish"), "--part-of and --finish are both given"),
        (("--part-of", "1/3", "--restart"), "--part-of and --restart are both given"),
    ],
)
def test_a_share_that_is_none(place: Path, flags: tuple[str, ...], says: str) -> None:
    refused(place, *PREPARE, "records.jsonl", *BYTES, "--out", "x", *flags, says=(says,))


def test_two_shares_make_the_data_set_of_one(place: Path, small_parts: None) -> None:
    """The first says what is missing, and so does --finish, which tells a script by its status."""
    command = (*PREPARE, "records.jsonl", *BYTES, "--workers", "1", "--out")
    ended = here(*command, "x", "--part-of", "1/2", cwd=place).require(0)
    assert "parts are there; the last share makes the dataset" in ended.out
    here(*command, "x", "--finish", cwd=place).require(75)
    here(*command, "x", "--part-of", "2/2", cwd=place).require(0)
    here(*command, "y", cwd=place).require(0)
    assert same_shards(place / "x", place / "y")


def test_a_source_that_was_repaired_costs_its_own_parts(place: Path, small_parts: None) -> None:
    good = (place / "records.jsonl").read_text() * 10
    cut = good.rindex('{"text": "document 1 ')
    (place / "some.jsonl").write_text(good[:cut] + good[cut:].replace("{", "[", 1))
    command = (*PREPARE, "records.jsonl", "some.jsonl", *BYTES, "--shard-tokens", "100000", "--workers", "1")
    refused(place, *command, "--out", "x", says=("some.jsonl line 1802",))
    assert not counts(place / "x")
    (place / "some.jsonl").write_text(good)
    ended = here(*command, "--out", "x", cwd=place).require(0)
    assert "data: resuming x: 2 of 21 parts are there" in ended.out
    here(*command, "--out", "y", cwd=place).require(0)
    assert same_shards(place / "x", place / "y")


def same_shards(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_folders_that_are_no_place_for_it(place: Path) -> None:
    (place / "full").mkdir()
    (place / "full/letter.txt").write_text("mine")
    command = (*PREPARE, "book.txt", *BYTES, "--out")
    before = files(place)
    refused(place, *command, "full", says=("full is not empty and holds no dataset", "another --out"))
    refused(place, *command, "book.txt", says=("--out book.txt is a file",))
    refused(place, *command, "book.txt/x", says=("book.txt", "Not a directory", "give an --out that can be written"))
    refused(
        place, *command, "/proc/x", says=("/proc/x", "No such file or directory", "give an --out that can be written")
    )
    assert files(place) == before


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_read_only_disk_is_refused(place: Path, mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    says = (str(mount / "x"), "Read-only file system")
    refused(place, *PREPARE, "book.txt", *BYTES, "--out", str(mount / "x"), says=says)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # 3.13 tells of a file left open
def test_a_disk_that_fills_is_refused_and_gone_on_with(place: Path, mount: Path) -> None:
    big = place / "big.jsonl"
    big.write_text("".join(json.dumps({"text": f"document {i} " * 300}) + "\n" for i in range(500)))  # 1.8 MB
    command = (*PREPARE, "big.jsonl", *BYTES, "--shard-tokens", "300000", "--workers", "1")
    command = (*command, "--validation-frac", "0.05", "--out")
    (mount / "ballast").write_bytes(b"x" * (1 << 20))
    out = mount / "x"
    for _ in range(2):  # again without having made room: the same message, and no harm
        refused(place, *command, str(out), says=(f"the disk of {out} is full", "free some space", "same command"))
        assert not counts(out)
        refused(place, "data", "info", str(out), says=("`paceline data prepare`",))
    (mount / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=30m", mount], check=True)
    here(*command, str(out), cwd=place).require(0)
    here(*command, "undisturbed", cwd=place).require(0)
    assert same_shards(out, place / "undisturbed")
    here("data", "info", str(out), "--verify", cwd=place).require(0)


def test_another_recipe_for_a_finished_folder(place: Path, data: Path) -> None:
    command = (*PREPARE, "records.jsonl", "--out", "done")
    here(*command, *BYTES, "--validation-frac", "0.1", cwd=place).require(0)
    before = {path: path.read_bytes() for path in (place / "done").iterdir()}
    frac = ("--validation-frac", "0.1")
    refused(place, *command, *BYTES, says=("--validation-frac 0.1, not 0.01", "another --out"))
    refused(place, *command, "--tokenizer", "train:300", *frac, says=("--tokenizer 'bytes', not 'train:300'",))
    refused(place, *command, *BYTES, *frac, "--text-key", "body", says=("--text-key 'text', not 'body'",))
    records(place / "records.jsonl", count=201)
    refused(place, *command, *BYTES, *frac, says=("other sources", "changed since"))
    assert {path: path.read_bytes() for path in (place / "done").iterdir()} == before


def test_another_recipe_for_a_begun_folder(place: Path, small_parts: None) -> None:
    (place / "broken.jsonl").write_text((place / "records.jsonl").read_text() * 10 + "{\n")
    how = (*BYTES, "--workers", "1")
    refused(place, *PREPARE, "broken.jsonl", "--out", "x", *how, says=("broken.jsonl line 2001",))
    says = ("x was begun", "--shard-tokens 100000000, not 5000", "--restart")
    refused(place, *PREPARE, "broken.jsonl", "--out", "x", *how, "--shard-tokens", "5000", says=says)
    here(*PREPARE, "records.jsonl", "--out", "x", *how, "--restart", cwd=place).require(0)


def change(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(value)


def flip(path: Path, at: int) -> None:
    content = path.read_bytes()
    change(path, at, bytes([content[at] ^ 4]))


INFO = ("data", "info", "data")
TRAIN_DATA = (*TRAIN, "--data.path", "data", "--out", "run")


def test_a_truncated_shard_is_refused_at_open(place: Path, data: Path) -> None:
    path = data / "train-00000.bin"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    says = ("data/train-00000.bin is truncated", f"{size} bytes", f"{size - 2}", "prepare")
    refused(place, *TRAIN_DATA, "--nproc", "2", says=says, alone=True)
    assert not (place / "run").exists()


def test_a_flipped_byte_in_the_tokens_is_found_by_verify(place: Path, data: Path) -> None:
    path = data / "train-00001.bin"
    change(path, HEADER_BYTES + 2 * 1234, b"!\0")
    here(*INFO, cwd=place).require(0)  # an id like others
    refused(place, *INFO, "--verify", says=("data/train-00001.bin is damaged", "sha256"))


@pytest.mark.parametrize("name", ["tokenizer.json", "token_bytes.npy", "index.json"])
def test_a_flipped_byte_beside_the_shards_is_found_by_verify(place: Path, data: Path, name: str) -> None:
    """Each byte of index.json either changes what is checked, or is refused; here, one of a checksum."""
    content = (data / name).read_bytes()
    at = content.index(b'"sha256": "') + 11 if name == "index.json" else len(content) - 9
    flip(data / name, at)
    refused(place, *INFO, "--verify", says=("data/",))


@pytest.mark.parametrize(
    "name", ["train-00000.bin", "train-00000.starts.npy", "tokenizer.json", "token_bytes.npy", "validation-00000.bin"]
)
def test_a_missing_file_is_refused(place: Path, data: Path, name: str) -> None:
    (data / name).unlink()
    refused(place, *INFO, "--verify", says=(f"data/{name}", "No such file"))


@pytest.mark.parametrize(
    ("change_to", "says"),
    [
        (b"", "data/index.json is damaged"),
        (b"{}", "not the index of a paceline dataset"),
        (b'{"format": "paceline-shards", "version": 1}', "version 1; this paceline reads 2"),
        (b'{"format": "paceline-shards", "version": 2}', "data/index.json is damaged"),
        (b"[1]", "not the index of a paceline dataset"),
    ],
)
def test_an_index_is_refused(place: Path, data: Path, change_to: bytes, says: str) -> None:
    (data / "index.json").write_bytes(change_to)
    refused(place, *TRAIN_DATA, says=(says,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("tokenizer", "sha256"), "g" * 64),
        (("tokenizer", "sha256"), None),
        (("tokenizer", "end_of_text"), "256"),
        (("splits", "train", "shards", 0, "file"), "../train-00000.bin"),
        (("splits", "train", "shards", 0, "sha256"), 5),
        (("splits", "train", "tokens"), 5),
        (("vocab_size",), "many"),
        (("vocab_size",), -1),
        (("token_bytes",), 5),
        (("token_bytes",), "/etc/passwd"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:20],
)
def test_an_index_that_lies_is_refused(place: Path, data: Path, field: tuple[str | int, ...], value: object) -> None:
    index = json.loads((data / "index.json").read_text())
    inner = index
    for name in field[:-1]:
        inner = inner[name]
    inner[field[-1]] = value
    (data / "index.json").write_text(json.dumps(index))
    refused(place, *INFO, "--verify", says=("data/",))


def test_an_id_beyond_the_vocabulary_is_refused_at_open(place: Path, data: Path) -> None:
    """One among thousands: no process starts and no step is made with it."""
    change(data / "train-00001.bin", HEADER_BYTES + 2 * 1234, struct.pack("<H", 999))
    says = ("data/train-00001.bin has id 999 at token 1234", "the vocabulary has 257", "another tokenizer")
    refused(place, *TRAIN_DATA, says=says, alone=True)
    assert not (place / "run").exists()


def test_a_mixture_of_two_tokenizers_is_refused(place: Path, made: Path, data: Path) -> None:
    shutil.copytree(made / "trained", place / "trained")
    says = ("data was made with the tokenizer of sha256", "trained with", "cannot be mixed", "prepare one")
    refused(place, *TRAIN, "--data.mix", "data=1", "trained=1", "--out", "run", says=says, alone=True)
    assert not (place / "run").exists()
    says = ("below a millionth",)
    refused(place, *TRAIN, "--data.mix", "data=1", "data=1e-9", "--out", "run", says=says, alone=True)


def test_a_vocabulary_smaller_than_the_data_s_is_refused(place: Path, data: Path) -> None:
    says = ("model.vocab-size is 100", "257")
    refused(place, *TRAIN_DATA, "--model.vocab-size", "100", says=says)
    refused(place, *TRAIN_DATA, "--data.seq-len", "1000000", says=("too few", "--data.seq-len"))


def nanogpt(folder: Path, count: int = 4000) -> Path:
    folder.mkdir()
    np.arange(count, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(count, dtype=np.uint16).tofile(folder / "val.bin")
    return folder


def test_foreign_files_of_which_nothing_tells_what_is_asked(place: Path) -> None:
    folder = nanogpt(place / "data")
    size = ("--model.vocab-size", "5000")
    refused(place, *TRAIN_DATA, says=("data does not say", "--model.vocab-size 50257"))
    refused(place, *INFO, says=("data does not say", "-size 50257"))
    says = ("data does not say where its documents begin", "paceline data prepare")
    refused(place, *TRAIN_DATA, *size, "--data.packing", "bestfit", says=says, alone=True)
    refused(place, *TRAIN_DATA, *size, "--data.mask-documents", says=("data", "paceline data prepare"), alone=True)
    refused(place, *INFO, "--vocab-size", "100", "--verify", says=("data/train.bin has id 100 at token 100",))
    assert not (place / "run").exists()
    with (folder / "val.bin").open("ab") as file:
        file.write(b"x")
    refused(place, *TRAIN_DATA, *size, says=("data/val.bin is truncated", "8001"))
    (folder / "val.bin").unlink()
    refused(place, *TRAIN_DATA, *size, says=("data has token files but none for validation",))


def test_a_shard_that_is_none_is_refused(place: Path) -> None:
    folder = place / "data"
    folder.mkdir()
    (folder / "web_train_000000.bin").write_bytes(b"not a shard at all" * 100)
    (folder / "web_val_000000.bin").write_bytes(b"x")
    says = ("data/web_train_000000.bin is not a token shard", "20240520")
    refused(place, *TRAIN_DATA, "--model.vocab-size", "50257", says=says)


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch RAN",)


@pytest.mark.parametrize(
    "what",
    [Payload(), {"vocab_size": 10**9}, {"vocab_size": 5, "itos": [1]}, [1, 2]],
    ids=["code", "huge", "short", "list"],
)
def test_a_malicious_vocabulary_runs_nothing(place: Path, what: object) -> None:
    folder = nanogpt(place / "data")
    (folder / "meta.pkl").write_bytes(pickle.dumps(what))
    refused(place, *TRAIN_DATA, says=("data/meta.pkl", "nothing in it was executed", "--model.vocab-size"))
    refused(place, *INFO, says=("data/meta.pkl",))
    assert not (place / "RAN").exists()


def test_an_unfinished_data_set_is_not_trained_on(place: Path, small_parts: None) -> None:
    """Neither before its first part, when only the tokenizer is there, nor after."""
    (place / "broken.jsonl").write_text("{\n")
    refused(place, *PREPARE, "broken.jsonl", "--out", "data", *BYTES, says=("broken.jsonl line 1",))
    refused(place, *TRAIN_DATA, says=("data was not prepared to the end", "paceline data prepare"))
    (place / "broken2.jsonl").write_text((place / "records.jsonl").read_text() * 10 + "{\n")
    command = (*PREPARE, "broken2.jsonl", "--out", "data2", *BYTES, "--workers", "1")
    refused(place, *command, says=("broken2.jsonl line 2001",))
    assert list((place / "data2/.preparing/parts").glob("*.json"))
    says = ("data2 was not prepared to the end", "paceline data prepare")
    refused(place, *TRAIN, "--data.path", "data2", "--out", "run", says=says)


def test_standard_input_that_is_closed_is_refused(place: Path) -> None:
    command = 'exec "$0" -m paceline data prepare - --out x --tokenizer bytes <&-'
    ended = subprocess.run(["sh", "-c", command, sys.executable], cwd=place, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "standard input" in ended.stderr


def test_a_named_pipe_is_refused_and_not_waited_for(place: Path) -> None:
    """It can be read once, and a source is looked at before it is read."""
    os.mkfifo(place / "pipe")
    ended = run(*PREPARE, "pipe", "--out", "x", *BYTES, cwd=place).require(2)
    assert len(ended.err.strip().splitlines()) == 1
    assert "pipe" in ended.err


def test_a_second_preparation_of_the_same_folder_is_refused_meanwhile(place: Path) -> None:
    (place / "x/.preparing").mkdir(parents=True)
    with filelock.FileLock(place / "x/.preparing/lock"):
        says = ("another process is preparing x", "another --out")
        refused(place, *PREPARE, "book.txt", "--out", "x", *BYTES, says=says)


def test_a_wrong_key_is_corrected_without_more_ado(place: Path) -> None:
    """Nothing was prepared with it, so there is nothing to protect."""
    refused(place, *PREPARE, "records.jsonl", "--out", "x", *BYTES, "--text-key", "txt", says=("line 1", "'text'"))
    here(*PREPARE, "records.jsonl", "--out", "x", *BYTES, cwd=place).require(0)


def test_a_data_set_in_the_folder_of_its_sources_is_no_source(place: Path) -> None:
    """`prepare . --out data`, twice: the second finds what the first made, and nothing new to read."""
    here(*PREPARE, ".", "--out", "data", *BYTES, cwd=place).require(0)
    here(*PREPARE, ".", "--out", "data", *BYTES, cwd=place).require(0)
