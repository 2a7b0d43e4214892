"""Any documents are found, read in parts cut anywhere, and become the texts that they are."""

import bz2
import gzip
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_data import zstd

from paceline.base.errors import UserError
from paceline.data import documents as documents_module
from paceline.data import text as text_module
from paceline.data.config import Recipe
from paceline.data.documents import Document, read, whole
from paceline.data.find import describe_left_out, digest, find, has_text
from paceline.data.parts import cut
from paceline.data.sources import SourceFile, Sources, kept_input
from paceline.data.split import split_text
from paceline.record import folder as run_folder

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def pieces(sources: Sources, part_bytes: int = 0, **options: str) -> Iterator[Document]:
    """The documents of all parts, as a worker gets them."""
    recipe = Recipe(**options)
    for part in cut(sources.files, recipe, part_bytes):
        for of in pickle.loads(pickle.dumps(part)):
            yield from read(of, recipe, [])


def documents(sources: Sources, part_bytes: int = 0, **options: str) -> list[str]:
    """All documents with text, put together from their pieces."""
    found: list[list[str]] = []
    for document in pieces(sources, part_bytes, **options):
        assert all(0 < len(part.encode()) <= 3 * text_module.SLICE_BYTES for part in document.slices)
        if document.begins:
            found.append([])
        found[-1] += document.slices
    return ["".join(parts) for parts in found if parts]


def names(sources: Sources) -> list[str]:
    return [file.name for file in sources.files]


def write_gzip(path: Path, content: bytes) -> None:
    half = len(content) // 2
    path.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))  # two members


def write_zstd(path: Path, content: bytes) -> None:
    half = len(content) // 2
    path.write_bytes(zstd(content[:half]) + zstd(content[half:]))  # two frames


WRITERS: dict[str, Callable[[Path, bytes], Any]] = {"": Path.write_bytes, ".gz": write_gzip, ".zst": write_zstd}


# Finding


def test_a_folder_gives_its_files_sorted_and_counts_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "deep" / "x.txt").write_text("x")
    (tmp_path / "a.md").write_text("ä" * text_module.SNIFF_BYTES)
    (tmp_path / "ü name with spaces.txt").write_text("odd")
    (tmp_path / "c.txt").write_text("odd" + "ä" * text_module.SNIFF_BYTES)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/latin\xfc.txt")).write_text("a name that is not UTF-8")
    (tmp_path / "C:\\Users\\win.txt").write_text("a name made by Windows")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "latin1.txt").write_bytes("Müller".encode("latin-1"))
    (tmp_path / "utf16.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "archive.tar.gz").write_bytes(gzip.compress(b"file\0\0\0"))
    (tmp_path / "broken-link").symlink_to("nowhere")
    (tmp_path / "link-to-folder").symlink_to(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")
    for name in ("r.jsonl", "r.ndjson"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    write_gzip(tmp_path / "r.jsonl.gz", b'{"text": "b"}\n')
    write_zstd(tmp_path / "t.TXT.zst", b"compressed")
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "t.parquet")
    sources = find([str(tmp_path)])
    found = {file.name: (file.format, file.compression) for file in sources.files}
    assert list(found) == sorted(found)
    plain = {name: ("text", "") for name in ("C:\\Users\\win.txt", "a.md", "b/deep/x.txt", "c.txt", "latin\udcfc.txt")}
    assert found == {
        **plain,
        "r.jsonl": ("jsonl", ""),
        "r.jsonl.gz": ("jsonl", "gzip"),
        "r.ndjson": ("jsonl", ""),
        "t.TXT.zst": ("text", "zstd"),
        "t.parquet": ("parquet", ""),
        "ü name with spaces.txt": ("text", ""),
    }
    assert [(file.name, file.why) for file in sources.left_out] == [
        ("archive.tar.gz", "is an archive"),
        ("latin1.txt", "is not UTF-8 text"),
        ("picture.png", "contains NUL bytes"),
        ("utf16.txt", "is UTF-16"),
    ]
    assert sources.name == tmp_path.name
    assert len(documents(sources)) == len(found)


@pytest.mark.parametrize("gone", ["", "checkpoints", "config.toml"])
def test_a_run_in_the_folder_is_no_text(tmp_path: Path, gone: str) -> None:
    """runs/ is made in the current folder, and --data.path may be that: a resume has to find the data of the start."""
    for name in ("a.txt", "ranks/b.txt", "runs/notes.txt"):
        (tmp_path / "text" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "text" / name).write_text(name)
    before = find([str(tmp_path / "text")])
    folder = run_folder.create(tmp_path / "text" / "runs" / "mine")
    folder.lock()
    folder.write_setup("[model]\n", "{}")
    folder.append_metrics({"step": 1})
    folder.append_event("start")
    folder.rank_log(0).write_text("step 1")
    (folder.checkpoints / "index.jsonl").write_text("{}\n")
    folder.close()
    if gone:
        made = folder.path / gone
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    assert find([str(tmp_path / "text")]) == before
    assert names(before) == ["a.txt", "ranks/b.txt", "runs/notes.txt"]
    with pytest.raises(UserError, match="holds no text files"):
        find([str(folder.path)])


def test_what_a_start_that_failed_left_is_no_text(tmp_path: Path) -> None:
    """Finds: `ranks/rank-00000.end` of a run that never began, as text of `--data.path .` at the next start."""
    (tmp_path / "a.txt").write_text("a")
    ended = tmp_path / "runs" / "mine" / "ranks"
    ended.mkdir(parents=True)
    (ended / "rank-00000.end").write_text("2")
    (ended / "rank-00001.log").write_text("error: no")
    assert names(find([str(tmp_path)])) == ["a.txt"]


def test_patterns_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/1.txt", "b/2.txt", "b/c/3.txt", "a.txt", "b/x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"\0" if name.endswith("bin") else name.encode())
    monkeypatch.chdir(tmp_path)
    assert names(find(["b/*.txt", "a.txt"])) == ["1.txt", "2.txt", "a.txt"]
    assert names(find([f"{tmp_path}/**/*.txt"])) == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.txt"]
    several = find(["b/c", "b", "./b/1.txt", str(tmp_path / "a.txt")])
    assert documents(several) == ["b/c/3.txt", "b/1.txt", "b/2.txt", "a.txt"]
    assert several.name == "c-and-3-more"
    assert len(find(["b/*"]).left_out) == len(several.left_out) == 1
    (tmp_path / "what[1].txt").write_text("no pattern")
    assert documents(find(["what[1].txt"])) == ["no pattern"]


def test_json_is_lines_or_a_text_or_refused(tmp_path: Path) -> None:
    content = {
        "lines": '\n {"text": "a"}\n{"text": "b"}\n',
        "one": '{"text": "a"}\n',
        "array": '[{"text": "a"},\n{"text": "b"}]',
        "pretty": '{\n  "text": "a"\n}\n',
    }
    for name, text in content.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert {f.name: f.format for f in find([str(tmp_path)]).files} == {
        "lines.json": "jsonl",
        "one.json": "text",
        "array.json": "text",
        "pretty.json": "text",
    }
    long = json.dumps({"text": random.Random(1).randbytes(50_000).hex()})
    for suffix, write in WRITERS.items():  # the first record is longer than what a decompressor gives at once
        (tmp_path / f"long{suffix}").mkdir()
        write(tmp_path / f"long{suffix}" / f"x.json{suffix}", f'{long}\n{{"text": "b"}}\n'.encode())
        assert [file.format for file in find([str(tmp_path / f"long{suffix}")]).files] == ["jsonl"]
    assert documents(find([str(tmp_path / "lines.json"), str(tmp_path / "one.json")])) == ["a", "b", "a"]
    for name in ("array", "pretty"):
        with pytest.raises(UserError, match=rf"{name}\.json is one JSON value .* jq -c .*--format text"):
            find([str(tmp_path / f"{name}.json")])
        assert documents(find([str(tmp_path / f"{name}.json")], format="text")) == [content[name]]


def test_a_format_that_is_said_is_believed(tmp_path: Path) -> None:
    (tmp_path / "records.data").write_text('{"text": "a"}\n')
    assert documents(find([str(tmp_path / "records.data")], format="jsonl")) == ["a"]
    (tmp_path / "latin.txt").write_bytes("Müller".encode("latin-1"))
    assert documents(find([str(tmp_path / "latin.txt")], format="text")) == ["M\ufffdller"]


def test_what_is_wrong_with_a_source_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\0")
    (tmp_path / "latin1.txt").write_bytes("Müller".encode("latin-1"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "x.txt").write_text("text")
    (tmp_path / "half" / "y").write_bytes(b"\0")
    for name, message in [
        ("nowhere", "does not exist"),
        ("nowhere*", "holds no text files, JSONL or Parquet"),
        ("x" * 300, "does not exist"),
        ("a\0b", "NUL"),
        ("empty", "holds no text files"),
        ("empty.txt", "is empty"),
        ("binary", "none of its 1 files"),
        ("latin1.txt", "not UTF-8 text.*iconv"),
    ]:
        with pytest.raises(UserError, match=message):
            find([str(tmp_path / name)])
        with pytest.raises(UserError, match=rf"^data\.path .*{message}"):
            has_text(tmp_path / name)
    for specs, message in [
        ([], "no source"),
        (["-", "x"], "give it alone"),
        (["~nobody-of-this-name/text"], "does not exist"),
        (["hub:nonsense"], "hub:ORG/NAME"),
        ([str(tmp_path / "half"), str(tmp_path / "empty")], "empty holds no text files"),  # not what `half` has
    ]:
        with pytest.raises(UserError, match=message):
            find(specs)
    with pytest.raises(UserError, match="did you mean 'jsonl'"):
        find([str(tmp_path)], format="json")


def test_files_left_out_are_named_with_how_much_they_are(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("x" * 10_000)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0" * 1000)
    for number in range(5):
        (tmp_path / f"latin{number}.txt").write_bytes("Müller".encode("latin-1") * 100)
    (tmp_path / "small.txt").write_text("a", encoding="utf-16")
    latin, picture, small = describe_left_out(find([str(tmp_path)]))
    assert latin.startswith(
        "warning: 5 of 8 files, 2.9 KiB of 17.6 KiB, are left out (latin0.txt, latin1.txt, latin2.txt"
    )
    assert "and 2 more): each is not UTF-8 text; " in latin
    assert picture.startswith("1 of 8 files, 4.9 KiB of 17.6 KiB, are left out (picture.png): each contains NUL bytes")
    assert small.startswith("1 of 8 files, 4 B of 17.6 KiB, are left out (small.txt): each is UTF-16")
    assert describe_left_out(find([str(tmp_path / "good.txt")])) == []


def test_files_left_out_that_hold_text_are_a_warning_with_a_fitting_remedy(tmp_path: Path) -> None:
    """A folder of datasets.save_to_disk trained on its README alone, with the advice to run iconv."""
    (tmp_path / "README.md").write_text("a data set")
    for name in ("data.arrow", "text.tar.gz", "web_text_document.bin", "web_text_document.idx"):
        (tmp_path / name).write_bytes(b"\xff\0" * 1000)
    (tmp_path / "text.tar.gz").write_bytes(gzip.compress(b"file\0" * 1000, 0))
    arrow, archive, megatron = describe_left_out(find([str(tmp_path)]))
    assert arrow.startswith("warning: 1 of 5 files")
    assert "(data.arrow): each is an Arrow file; if datasets" in arrow
    assert archive.startswith("warning: 1 of 5 files")
    assert "(text.tar.gz): each is an archive; unpack it first" in archive
    assert megatron.startswith("2 of 5 files")
    assert "each is Megatron's; " in megatron
    for name, says in (("text.tar.gz", "unpack it first"), ("web_text_document.bin", "is Megatron's")):
        with pytest.raises(UserError, match=says):
            find([str(tmp_path / name)])


@pytest.mark.parametrize("is_named", [True, False])
def test_records_of_another_encoding_are_refused_before_they_are_read(tmp_path: Path, is_named: bool) -> None:
    """As PowerShell's `>` writes them."""
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "r.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(UserError, match=r"r.jsonl is UTF-16; make it UTF-8: iconv -f UTF-16 -t UTF-8 IN > OUT"):
        find([str(tmp_path / "r.jsonl" if is_named else tmp_path)])


# Splitting and hashing


@pytest.mark.parametrize(
    "content",
    ["a line\n" * 500, "a line\r\n" * 500, "no line end " * 300, "ä€😀" * 200, "head\n" + "tail " * 999, "xy"],
)
def test_one_file_gives_both_sides_and_loses_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content.encode())
    files = split_text(find([str(path)]).files)
    assert [file.split for file in files] == ["train", "validation"]
    assert "".join(documents(Sources("x", files))) == content.replace("\r\n", "\n")
    assert sum(file.num_bytes for file in files) == path.stat().st_size
    if len(content) > 1000:
        assert 0.05 < files[1].num_bytes / path.stat().st_size < 0.15


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_the_split_is_a_partition_with_two_sane_sides(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("split")
    for i, length in enumerate(lengths):
        (folder / f"{i}.txt").write_text("line of text\n" * length)
    (folder / "r.jsonl").write_text('{"text": "a"}\n')
    write_gzip(folder / "z.txt.gz", b"text")
    sources = find([str(folder)])
    files = split_text(sources.files)
    assert files == split_text(sources.files)
    covered = {file.name: 0 for file in sources.files}
    sizes = {"train": 0, "validation": 0, None: 0}
    for file in files:
        covered[file.name] += file.num_bytes
        sizes[file.split] += file.num_bytes
    assert covered == {file.name: file.num_bytes for file in sources.files}
    assert {file.name for file in files if file.split is None} == {"r.jsonl", "z.txt.gz"}
    part = sizes["validation"] / (sizes["train"] + sizes["validation"])
    assert sum(lengths) < 50 or 0.005 < part < 0.25


def test_the_digest_sees_names_bytes_and_sides(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n" * 40)
    digests = [digest(find([str(tmp_path)]))]
    os.utime(tmp_path / "a.txt", (1, 1))
    assert digest(find([str(tmp_path)])) == digests[0]
    sources = find([str(tmp_path)])
    digests.append(digest(replace(sources, files=split_text(sources.files))))
    (tmp_path / "a.txt").write_text("two\n" * 40)
    digests.append(digest(find([str(tmp_path)])))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    digests.append(digest(find([str(tmp_path)])))
    assert len({*digests}) == 4


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    os.utime(path, ns=(5, 5))
    first = find([str(path)]).files[0].stamp
    os.utime(path, ns=(5, 6))
    assert find([str(path)]).files[0].stamp != first


def test_a_changed_file_of_equal_size_and_time_has_another_stamp(tmp_path: Path) -> None:
    """As rsync -t, cp -p, tar and SOURCE_DATE_EPOCH leave it (mutation: size and modification time alone)."""
    path = tmp_path / "a.txt"
    stamps = set()
    for text in ("one", "two"):
        path.write_text(text)
        os.utime(path, ns=(5, 5))
        stamps.add(find([str(path)]).files[0].stamp)
        time.sleep(0.02)  # two ticks of the clock that the file system takes its times from
    assert len(stamps) == 2


# Reading


def write_parquet(path: Path, found: list[str | None], row_group_size: int, dtype: pa.DataType) -> None:
    column = pa.array(found, pa.string()).cast(dtype) if not pa.types.is_dictionary(dtype) else pa.array(found, dtype)
    table = pa.table({"id": list(range(len(found))), "text": column})
    pq.write_table(table, path, row_group_size=row_group_size)


DOCUMENTS = st.lists(
    st.text(alphabet="ab \n\r\té€😀\u2028", max_size=30) | st.text(alphabet="a ", max_size=300), max_size=12
)


def shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(text_module, "SLICE_BYTES", 16)
    patch.setattr(documents_module, "_CELL_BYTES", 60)
    patch.setattr(documents_module, "_READ_BYTES", 13)
    patch.setattr(documents_module, "_SCAN_BYTES", 7)


@given(
    DOCUMENTS,
    st.sampled_from([*WRITERS]),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=12)
def test_all_documents_whatever_they_are_in_and_wherever_parts_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    found: list[str],
    suffix: str,
    rows: int,
    is_ascii: bool,
    part_bytes: int,
    draw: random.Random,
) -> None:
    """In three formats, with sizes so small that everything that can be cut is cut; the parts give the pieces of whole
    files, also where a file begins with a byte order mark (mutation: a part skips to the record behind its first byte;
    or reads no record beyond its end)."""
    folder = tmp_path_factory.mktemp("any")
    plain = [text.replace("\r\n", "\n").replace("\r", "\n") for text in found]
    write = WRITERS[suffix]
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        for i, text in enumerate(found):
            write(folder / f"a{i:02d}.txt{suffix}", text.encode())
        write(folder / f"b.txt{suffix}", "<|end|>".join(found).encode())
        lines = [json.dumps({"n": [{"text": 1}], "text": text}, ensure_ascii=is_ascii) for text in [*found, None]]
        write(folder / f"c.jsonl{suffix}", "\n".join(lines).encode())
        write_parquet(folder / "d.parquet", [*found, None], rows, draw.choice([pa.string(), pa.large_string()]))
        sources = find([str(folder / "*")])
        apart = Sources("x", tuple(file for file in sources.files if not file.name.startswith("b")))
        with_text = [text for text in found if text]
        assert documents(apart) == [text for text in plain if text] + 2 * with_text
        separated = Sources("x", tuple(file for file in sources.files if file.name.startswith("b")))
        between = [text.replace("\r\n", "\n").replace("\r", "\n") for text in "<|end|>".join(found).split("<|end|>")]
        # Only ASCII white space makes a document empty.
        kept = [t for t in between if t.strip()]
        assert [t for t in documents(separated, separator="<|end|>") if t.strip()] == kept
        for some, options in ((apart, {}), (separated, {"separator": "<|end|>"})):
            assert list(pieces(some, part_bytes, **options)) == list(pieces(some, **options))
        marked = folder / "marked"
        marked.mkdir()
        for name in ("b.txt", "c.jsonl") if not suffix else ():
            (marked / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
            options = {"separator": "<|end|>"} if name == "b.txt" else {}
            one = find([str(marked / name)])
            assert list(pieces(one, part_bytes, **options)) == list(pieces(one, **options))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=20), min_size=2, max_size=12), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_separator_with_line_ends_matches_every_kind(
    tmp_path_factory: pytest.TempPathFactory, found: list[str], data: st.DataObject
) -> None:
    """The text is cut after CRLF and CR have become LF (mutation: search the bytes as stored), wherever a read or part
    ends, also between CR and LF (mutation: accept a match at the end of the buffer)."""
    path, end = tmp_path_factory.mktemp("any") / "a.txt", st.sampled_from(["\n", "\r\n", "\r"])
    texts = [text.replace("b", data.draw(end)).strip("\r\n") or "x" for text in found]
    texts = [re.sub(r"(\r\n|\r|\n)+", r"\1", text) for text in texts]  # no separator inside
    ends = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))  # one kind between two documents
    path.write_bytes((ends * 2).join(texts).encode())
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        sources = find([str(path)])
        plain = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
        for separator in ("\n\n", "\r\n\r\n"):
            assert documents(sources, separator=separator) == plain
            for part_bytes in (1, 2, 3, 7, 20):
                assert documents(sources, part_bytes, separator=separator) == plain


@given(st.text(alphabet="a\n\r ", max_size=40), st.sampled_from(["\n\n", "a", "aa", "a\na", "\n"]), st.integers(1, 9))
@example(content="\n\n\naaaaaaa", separator="\n\n", part_bytes=4)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_separator_that_overlaps_itself_is_found_alike_wherever_parts_are_cut(
    tmp_path_factory: pytest.TempPathFactory, content: str, separator: str, part_bytes: int
) -> None:
    """Of three line ends which two separate is decided from the left (mutation: search from a part's first byte)."""
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_bytes(("x" + content).encode())
    plain = ("x" + content).replace("\r\n", "\n").replace("\r", "\n")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        sources = find([str(path)])
        *before, rest = plain.split(separator)
        expected = [text for text in [*before, rest] if text.strip()]
        for size in (part_bytes, 100):
            assert documents(sources, size, separator=separator) == expected


@pytest.mark.parametrize("part_bytes", [pytest.param(1, marks=pytest.mark.long), 20, 1000, 40_000])
def test_a_long_text_has_the_same_slices_wherever_parts_are_cut(tmp_path: Path, part_bytes: int) -> None:
    """Also where it has no space for longer than a slice (mutation: cut a part at any byte). The tokens of a slice are
    those of the text; so are those of a part."""
    draw = random.Random(3)
    words = ["word " * draw.randrange(9) + "ä€" * draw.randrange(60) + "\r\n" * draw.randrange(2) for _ in range(100)]
    (tmp_path / "x.txt").write_bytes("".join(words).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "SLICE_BYTES", 100)
        patch.setattr(documents_module, "_SCAN_BYTES", 11)
        sources = Sources("x", split_text(find([str(tmp_path / "x.txt")]).files))
        cuts = [
            {len("".join(slices[:i])) for i in range(len(slices))}
            for slices in (
                [slice for document in pieces(sources, size) for slice in document.slices] for size in (0, part_bytes)
            )
        ]
        assert documents(sources, part_bytes) == documents(sources)
        text = "".join(documents(sources))
        for place in cuts[0] ^ cuts[1]:
            assert text[place - 1].isalnum(), "only places where no token lies across differ"
            assert text[place] in " \n", "only places where no token lies across differ"


def test_empty_documents_are_counted_and_give_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n{"text": null}\n{"text": "x"}')
    write_parquet(tmp_path / "c.parquet", ["", None, "y"], 2, pa.string())
    write_gzip(tmp_path / "d.txt.gz", b"z")
    found = [document.slices for document in pieces(find([str(tmp_path)]))]
    assert found == [(), (), (), ("x",), (), (), ("y",), ("z",)]
    (tmp_path / "e.txt").write_text("one|  \n|two||three|\n")
    found = [document.slices for document in pieces(find([str(tmp_path / "e.txt")]), separator="|")]
    assert found == [("one",), (), ("two",), (), ("three",)]


def test_a_byte_order_mark_is_one_at_the_beginning_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\n\xef\xbb\xbfb"}\r\n')
    sources = find([str(tmp_path)])
    assert documents(sources) == ["one\n\ufefftwo", "a\r\n\ufeffb"]  # a record is the string that it is
    head = replace(sources.files[0], start=8, num_bytes=6, stop=14)
    assert documents(Sources("x", (head,))) == ["\ufefftwo"]


def test_what_is_replaced_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * text_module.SNIFF_BYTES + b"M\xfcller")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "M\xfcller \\ud800 \\ud83d\\ude00 \xef\xbf\xbd"}\n')
    binary = pa.table({"text": pa.array([b"M\xfcller \xe2\x82"], pa.binary())})
    pq.write_table(binary, tmp_path / "c.parquet")
    found = list(pieces(find([str(tmp_path)])))
    assert [document.num_replaced for document in found] == [1, 2, 2]
    assert found[1].slices == ("M\ufffdller \ufffd 😀 \ufffd",)


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_record_longer_than_a_block(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_READ_BYTES", 1 << 17)
    monkeypatch.setattr(documents_module, "_CELL_BYTES", 1 << 17)
    text = "".join(path.read_text() for path in sorted(STDLIB.glob("[a-c]*.py"))) + "é\ud800😀"
    assert len(text) > 2 * documents_module._READ_BYTES
    lines = [{"text": "first"}, {"meta": {"a": [1, "}{"]}, "text": text, "n": None}, {"text": None}, {"text": "last"}]
    path = tmp_path / f"x.jsonl{suffix}"
    WRITERS[suffix](path, "\n".join(map(json.dumps, lines)).encode())
    sources = find([str(path)])
    expected = ["first", text.replace("\ud800", "\ufffd"), "last"]
    assert documents(sources) == expected
    write_parquet(tmp_path / "x.parquet", expected, 10, pa.string())
    assert documents(find([str(tmp_path / "x.parquet")])) == expected
    WRITERS[suffix](tmp_path / f"x.txt{suffix}", "|".join(expected).encode())
    separated = find([str(tmp_path / f"x.txt{suffix}")])
    assert documents(separated, separator="<|none|>") == ["|".join(expected)]
    limit = 1 << (len(text.encode("utf-8", "replace")).bit_length() - 1)  # more than half of the longest record
    monkeypatch.setattr(documents_module, "MAX_RECORD_BYTES", limit)
    for some, options in ((sources, {}), (separated, {"separator": "<|none|>"})):
        with pytest.raises(UserError, match=r"has a record of more than .* at byte \d+; cut it"):
            documents(some, **options)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'text': 1}", ["is not JSON", "at character 2"]),
        ('{"text": "a}', ["is not JSON"]),
        ('{"text": "a"} {', ["is not JSON", "at character 15"]),
        ('["text"]', ["not an object"]),
        ('{"texts": "a", "id": 1}', ["no key 'text'", "did you mean 'texts'", "it has texts, id", "--text-key"]),
        ('{"id": 1}', ["no key 'text'; it has id"]),
        ("{}", ["no key 'text'; it has none"]),
        ('{"text": ["a"]}', ["has a list under 'text'"]),
        ('{"text": {"a": 1}}', ["has an object under 'text'"]),
        ('{"text": 1.5}', ["has a number under 'text'"]),
        ('{"text": true}', ["has true or false under 'text'"]),
        ('{"text": "a", "n": ' + "[" * 100_000, ["can not be read as JSON"]),
        ('{"n": ' + "1" * 6000 + ', "text": "a"}', ["JSON", "digits"]),
        ('{"text": "\\q"}', ["JSON", "escape"]),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path: Path, line: str, says: list[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    for part_bytes in (0, 5):  # a part counts the lines before it
        with pytest.raises(UserError) as error:
            documents(find([str(tmp_path / "x.jsonl")]), part_bytes)
        assert f"{tmp_path}/x.jsonl line 3 " in str(error.value)
    assert all(each in str(error.value) for each in says)


KINDS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_parquet_with_a_text_column(tmp_path: Path, kind: str) -> None:
    found = ["one", None, "", "zwei é", "one", "x" * 500]
    table = pa.table({"n": list(range(6)), "body": pa.array(found, pa.string()).cast(KINDS[kind])})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=4, compression="zstd")
    assert documents(find([str(tmp_path)]), text_key="body") == [text for text in found if text]


def test_a_part_holds_many_tiny_files(tmp_path: Path) -> None:
    for i in range(1000):
        (tmp_path / f"{i:05d}.txt").write_bytes(b"%d" % i)
    sources = find([str(tmp_path)])
    assert [len(part) for part in cut(sources.files, Recipe())] == [1000]
    assert documents(sources) == [str(i) for i in range(1000)]


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("x.jsonl", b'{"text": "a"}\n\n{"text": 1}\n', {}, "x.jsonl line 3 has a number under 'text'"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', {}, "x.jsonl line 2 is not JSON"),
        ("x.jsonl", b'{"body": "a"}\n', {"text_key": "boddy"}, "has no key 'boddy' (did you mean 'body'?)"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-30], {}, "x.jsonl.gz is damaged or cut short"),
        ("x.jsonl.gz", b"no gzip", {}, "x.jsonl.gz is damaged or cut short"),
        ("x.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-8] + b"\0" * 8, {}, "x.jsonl.gz is damaged or cut short"),
        (
            "x.jsonl.zst",
            zstd(b'{"text": "a"}\n' * 99)[:-3],
            {},
            "x.jsonl.zst is damaged or cut short",
        ),
        ("x.jsonl.zst", b"no zstd at all", {}, "x.jsonl.zst is damaged or cut short"),
        ("x.parquet", b"no parquet", {}, "x.parquet can not be read as Parquet"),
    ],
)
def test_what_is_wrong_inside_a_file_is_said(
    tmp_path: Path, name: str, content: bytes, options: dict[str, str], says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        documents(find([str(tmp_path / name)]), **options)
    assert f"{tmp_path}/" in str(error.value)
    assert says in str(error.value)


def test_what_is_wrong_with_a_parquet_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    noise = [random.Random(i).randbytes(300).hex() for i in range(3000)]
    pq.write_table(pa.table({"body": noise, "tokens": [[1]] * 3000}), path, write_page_checksum=True)
    for key, says in [
        ("bodi", r"has no column 'bodi' \(did you mean 'body'\?\); it has body, tokens"),
        ("tokens", r"column 'tokens' is of list<.*int64>"),
    ]:
        with pytest.raises(UserError, match=says):
            documents(find([str(path)]), text_key=key)
    whole = path.read_bytes()
    for broken in (whole[:-10], whole[: len(whole) // 2], whole[:5000] + b"\xff" + whole[5001:]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"x\.parquet can not be read as Parquet"):
            documents(find([str(path)]), text_key="body")


def test_a_file_that_goes_or_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("text " * 100)
    sources = find([str(path)])
    path.write_text("text")
    with pytest.raises(UserError, match="became shorter"):
        documents(sources)
    path.write_text("text " * 200)  # what was added since is not read: the split has been made
    assert documents(sources) == ["text " * 100]
    path.unlink()
    with pytest.raises(UserError, match=r"x\.txt can not be read: No such file"):
        documents(sources)


# Standard input


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))  # type: ignore[arg-type]


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps({"text": f"document {i}" * 50}) + "\n" for i in range(9000)).encode()
    stdin(monkeypatch, b"\n " + lines)
    sources = find(["-"])
    assert sources.files == (SourceFile("-", "-", "jsonl"),)
    assert len(documents(kept_input(sources, tmp_path / "input", is_begun=False))) == 9000
    stdin(monkeypatch, b"plain\r\ntext")
    assert documents(kept_input(find(["-"]), tmp_path / "input", is_begun=False)) == ["plain\ntext"]
    packed = (gzip.compress(b"text"), bz2.compress(b"text"))
    for content in (*packed, *(pa.compress(b"text", codec, asbytes=True) for codec in ("zstd", "lz4"))):
        stdin(monkeypatch, content)
        with pytest.raises(UserError, match="compressed: unpack it first"):
            find(["-"])


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
@pytest.mark.parametrize(
    "kind", ["txt", "parquet", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("jsonl", "gz", "separator"))]
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.jsonl.gz" if kind == "gz" else "x.txt" if kind == "separator" else f"x.{kind}")
    text = (STDLIB / "argparse.py").read_text() * 4
    with path.open("wb") as file:
        if kind == "parquet":
            pq.write_table(pa.table({"text": [text[: 9000 + i % 7] for i in range(9000)]}), file, use_dictionary=False)
        elif kind in ("txt", "separator"):
            file.writelines(text.encode() + b"@@@" for _ in range(200))
        else:
            lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for _ in range(200))
            file.write(gzip.compress(lines, 1) if kind == "gz" else lines)
    separator = "@@@" if kind == "separator" else ""
    script = f"""
import resource, pyarrow.parquet
from paceline.data.documents import read, whole
from paceline.data.find import find
from paceline.data.config import Recipe
sources = find([{str(path)!r}])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = 0
for document in read(whole(sources.files[0]), Recipe(separator={separator!r}), []):
    total += sum(map(len, document.slices))
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    total, kilobytes = map(int, done.stdout.split())
    assert total > 75e6
    assert kilobytes < 40_000


def test_nothing_is_left_open(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"x" * (3 << 20))
    before = os.listdir("/proc/self/fd")
    reader = read(whole(find([str(tmp_path)]).files[0]), Recipe(), [])
    next(reader)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
