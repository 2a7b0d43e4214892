"""Fifty inputs as people have them: each is read right, left out and counted, or named with what to do."""

import bz2
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_data import zstd

from paceline.base.errors import UserError
from paceline.data.config import Quiet, Recipe
from paceline.data.prepare import prepare
from paceline.data.shard import Index
from paceline.data.split import gather

NUM_GOOD = 40
TEXTS = [f"document {i} about trains and rails" for i in range(NUM_GOOD)]
LINES = [json.dumps({"text": text}) for text in TEXTS]


class Case(NamedTuple):
    """A file beside 40 good records. `documents`: how many it gives; `skipped`: records that --on-error skip leaves
    out, `left_out`: whole files; `says`: the message of --on-error stop, empty if it is read."""

    name: str
    content: bytes
    documents: int
    skipped: int = 0
    left_out: int = 0
    says: str = ""
    separator: str = ""


def jsonl(*lines: str, end: str = "\n") -> bytes:
    return "".join(line + end for line in lines).encode("utf-8", "surrogateescape")


def parquet(column: Any, name: str = "text", **options: Any) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({name: column}), content, **options)
    return content.getvalue()


GOOD, MORE = '{"text": "a good one"}', '{"text": "another"}'
THREE = jsonl(GOOD, MORE, '{"text": "third"}')
ONE_TEXT = pa.array(["one", "two"])
CASES = {
    # records that are not what they should be
    "two objects on a line": Case("x.jsonl", jsonl(GOOD, GOOD + MORE, MORE), 2, 1, says="x.jsonl line 2 is not JSON"),
    "a last line that is cut": Case("x.jsonl", THREE[:-6], 2, 1, says="x.jsonl line 3 is not JSON"),
    "cut inside a character": Case("x.jsonl", THREE + '{"text": "grö'.encode()[:-1], 3, 1, says="line 4 is not JSON"),
    "an array on a line": Case("x.jsonl", jsonl("[1]", GOOD), 1, 1, says="line 1 is a list, not an object"),
    "a string on a line": Case("x.jsonl", jsonl(GOOD, '"text"'), 1, 1, says="line 2 is a string, not an object"),
    "null on a line": Case("x.jsonl", jsonl(GOOD, "null"), 1, 1, says="line 2 is null, not an object"),
    "no key": Case("x.jsonl", jsonl(GOOD, '{"id": 1}'), 1, 1, says="line 2 has no key 'text'; it has id"),
    "a key of another name": Case("x.jsonl", jsonl('{"texts": "a"}', GOOD), 1, 1, says="did you mean 'texts'"),
    "a list for a text": Case("x.jsonl", jsonl(GOOD, '{"text": ["a"]}'), 1, 1, says="has a list under 'text'"),
    "a number for a text": Case("x.jsonl", jsonl(GOOD, '{"text": 5}'), 1, 1, says="has a number under 'text'"),
    "an object for a text": Case("x.jsonl", jsonl(GOOD, '{"text": {}}'), 1, 1, says="has an object under 'text'"),
    "null for a text": Case("x.jsonl", jsonl(GOOD, '{"text": null}'), 1),
    "an empty text": Case("x.jsonl", jsonl(GOOD, '{"text": ""}'), 1),
    "blank lines": Case("x.jsonl", jsonl(GOOD, "", "  ", "\t", MORE), 2),
    "Windows line ends": Case("x.jsonl", jsonl(GOOD, "", MORE, end="\r\n"), 2),
    "a byte order mark": Case("x.jsonl", b"\xef\xbb\xbf" + THREE, 3),
    "no line end at the end": Case("x.jsonl", THREE[:-1], 3),
    "half of a surrogate pair": Case("x.jsonl", jsonl(GOOD, '{"text": "bad \\ud83d"}'), 2),
    "a byte that is not UTF-8": Case("x.jsonl", jsonl(GOOD, '{"text": "M\udcfcller"}'), 2),
    "NaN and infinity": Case("x.jsonl", jsonl('{"text": "a", "n": NaN, "m": -Infinity}'), 1),
    "a key twice": Case("x.jsonl", jsonl('{"text": 1, "text": "last"}'), 1),
    "a hundred thousand brackets": Case("x.jsonl", jsonl(GOOD, "[" * 100_000), 1, 1, says="line 2"),
    "a number of 6,000 digits": Case("x.jsonl", jsonl(GOOD, '{"n": ' + "1" * 6000 + "}"), 1, 1, says="line 2"),
    "single quotes": Case("x.jsonl", jsonl("{'text': 'a'}", GOOD), 1, 1, says="line 1 is not JSON"),
    "a comment": Case("x.jsonl", jsonl("// text", GOOD), 1, 1, says="line 1 is not JSON"),
    "a comma behind each line": Case("x.jsonl", jsonl(GOOD + ",", MORE), 1, 1, says="line 1 is not JSON"),
    "records in UTF-16": Case("x.jsonl", THREE.decode().encode("utf-16"), 0, left_out=1, says="iconv -f UTF-16"),
    "a page of HTML": Case("x.jsonl", b"<html>\n404\n</html>\n", 0, 3, says="x.jsonl line 1 is not JSON"),
    "a NUL in a record": Case("x.jsonl", jsonl(GOOD, '{"text": "a\0b"}'), 0, left_out=1, says="contains NUL bytes"),
    # compressed files
    "gzip": Case("x.jsonl.gz", gzip.compress(THREE), 3),
    "gzip of two members": Case("x.jsonl.gz", gzip.compress(THREE) + gzip.compress(THREE), 6),
    "gzip with zeros behind it": Case("x.jsonl.gz", gzip.compress(THREE) + bytes(512), 0, 1, says="is damaged"),
    "gzip that is cut": Case("x.jsonl.gz", gzip.compress(THREE)[:-9], 0, 1, says="is damaged or cut short"),
    "gzip with a wrong checksum": Case("x.jsonl.gz", gzip.compress(THREE)[:-8] + bytes(8), 0, 1, says="is damaged"),
    "a .json.gz that is cut": Case("x.json.gz", gzip.compress(THREE)[:-9], 0, 1, says="is damaged or cut short"),
    "text that is named gzip": Case("x.jsonl.gz", THREE, 0, 1, says="x.jsonl.gz is damaged or cut short"),
    "zstd of two frames": Case("x.jsonl.zst", zstd(THREE) * 2, 6),
    "zstd that is cut": Case("x.jsonl.zst", zstd(THREE)[:-3], 0, 1, says="is damaged or cut short"),
    "an archive": Case("x.tar.gz", gzip.compress(b"file\0\0\0"), 0, left_out=1, says="is an archive; unpack it"),
    "bzip2": Case("x.jsonl.bz2", bz2.compress(THREE), 3),
    "bzip2 that is cut": Case("x.jsonl.bz2", bz2.compress(THREE)[:-3], 0, 1, says="is damaged or cut short"),
    # Parquet
    "nulls": Case("x.parquet", parquet(pa.array(["one", None])), 1),
    "a dictionary": Case("x.parquet", parquet(ONE_TEXT.dictionary_encode()), 2),
    "large strings": Case("x.parquet", parquet(ONE_TEXT.cast(pa.large_string())), 2),
    "string views": Case("x.parquet", parquet(ONE_TEXT.cast(pa.string_view())), 2),
    "bytes that are not UTF-8": Case("x.parquet", parquet(pa.array([b"M\xfcller"])), 1),
    "no rows": Case("x.parquet", parquet(pa.array([], pa.string())), 0),
    "lists": Case("x.parquet", parquet(pa.array([["a"]])), 0, 1, says="column 'text' is of list"),
    "a column of nulls": Case("x.parquet", parquet(pa.array([None], pa.null())), 0, 1, says="column 'text' is of null"),
    "a column of another name": Case("x.parquet", parquet(ONE_TEXT, "body"), 0, 1, says="no column 'text'"),
    "a page of HTML for Parquet": Case("x.parquet", b"<html>404</html>", 0, 1, says="can not be read as Parquet"),
    "Parquet that is cut": Case("x.parquet", parquet(ONE_TEXT)[:-9], 0, 1, says="can not be read as Parquet"),
    # text
    "text in Latin-1": Case("x.txt", "Müller".encode("latin-1"), 0, left_out=1, says="iconv -f LATIN1"),
    "text in UTF-32": Case("x.txt", "text".encode("utf-32"), 0, left_out=1, says="iconv -f UTF-32"),
    "a picture": Case("x.png", b"\x89PNG\r\n\x1a\n\0\0", 0, left_out=1, says="contains NUL bytes"),
    "an empty file": Case("x.jsonl", b"", 0),
    "a separator of Windows": Case("x.txt", b"one\r\n\r\ntwo\n\nthree", 3, separator="\n\n"),
    "a separator at both ends": Case("x.txt", b"##one##two##\n", 2, separator="##"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.jsonl"
    path.write_text("".join(line + "\n" for line in LINES))
    return path


@pytest.mark.parametrize("name", CASES)
def test_each_is_read_left_out_or_named(tmp_path: Path, good: Path, name: str) -> None:
    """(mutation: a record that cannot be read ends its file with --on-error skip; or is no error with stop)"""
    case = CASES[name]
    path = tmp_path / case.name
    path.write_bytes(case.content)

    def make(on_error: Literal["stop", "skip"]) -> Index:
        recipe = Recipe(tokenizer="bytes", validation_frac=0.1, on_error=on_error, separator=case.separator)
        sources = gather([str(good), str(path)], [], recipe)
        index = prepare(sources, recipe, tmp_path / on_error, Quiet(), num_workers=1)
        assert index is not None
        assert sum(split.documents for split in index.splits.values()) == NUM_GOOD + case.documents
        return index

    if case.says:
        with pytest.raises(UserError, match=re.escape(case.says)) as error:
            make("stop")
        assert str(path) in str(error.value)
    else:
        make("stop")
    origin = make("skip").origin
    assert origin.get("skipped_records", {}) == ({str(path): case.skipped} if case.skipped else {})
    assert origin["skipped_files"] == case.left_out
