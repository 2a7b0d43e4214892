"""Documents: which files are text, how they are read, and which side of the split they are on."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data import corpora
from paceline.data.config import DataConfig
from paceline.data.corpora import Corpus, Document


def text_of(documents: tuple[Document, ...]) -> str:
    return "".join(piece for document in documents for piece in corpora.pieces(document))


def read(path: Path) -> str:
    return text_of((Document(path.name, path, 0, path.stat().st_size),))


def test_the_embedded_corpus_is_the_library_and_not_its_tests() -> None:
    names = [name for name, _ in corpora.embedded().files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    for part in ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"):
        assert not [name for name in names if part in name.split("/")]
    split = corpora.split(corpora.embedded())
    assert 0.02 < len(split.validation) / len(names) < 0.1
    assert not {d.name for d in split.train} & {d.name for d in split.validation}


def test_a_folder_gives_its_text_sorted_and_counts_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "deep" / "x.txt").write_text("x")
    (tmp_path / "a.md").write_text("ä" * corpora.SNIFF_BYTES)  # the sniff ends in the middle of a character
    (tmp_path / "c.txt").write_text("odd" + "ä" * corpora.SNIFF_BYTES)
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "latin1.txt").write_bytes("Müller".encode("latin-1"))
    (tmp_path / "utf16.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "broken-link").symlink_to("nowhere")
    corpus = corpora.from_path(tmp_path)
    assert [name for name, _ in corpus.files] == ["a.md", "b/deep/x.txt", "c.txt"]
    assert corpus.skipped == 3


def test_what_is_wrong_with_a_path_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\0")
    (tmp_path / "latin1.txt").write_bytes("Müller".encode("latin-1"))
    for name, message in [
        ("nowhere", "does not exist"),
        ("x" * 300, "does not exist"),
        ("empty", "holds no text files"),
        ("empty.txt", "is empty"),
        ("binary", "none of its 1 files"),
        ("latin1.txt", "not UTF-8 text.*iconv"),
    ]:
        for find in (corpora.from_path, corpora.has_text):
            with pytest.raises(UserError, match=message):
                find(tmp_path / name)
    with pytest.raises(UserError, match="does not exist"):
        corpora.from_path("~nobody-of-this-name/text")


def test_line_ends_byte_order_mark_and_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\nM\xfcller \xef\xbb\xbf\xe2\x82")
    assert read(path) == "one\ntwo\nthree\nM\ufffdller \ufeff\ufffd"


@given(st.text(alphabet="aä€😀\r\n \t", max_size=60), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_text_wherever_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "x.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "PIECE_BYTES", size)
        assert read(path) == text.replace("\r\n", "\n").replace("\r", "\n")


def test_pieces_end_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a line of text\n" * 60_000)
    pieces = list(corpora.pieces(Document("x", path, 0, path.stat().st_size)))
    assert len(pieces) > 2
    assert all(piece.endswith("text\n") for piece in pieces)


@pytest.mark.parametrize(
    "content",
    ["a line\n" * 500, "a line\r\n" * 500, "no line end " * 300, "ä€😀" * 200, "head\n" + "tail " * 999, "xy"],
)
def test_one_file_gives_both_sides_and_loses_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content.encode())
    split = corpora.split(corpora.from_path(path))
    assert text_of(split.train) + text_of(split.validation) == content.replace("\r\n", "\n")
    assert split.train
    assert split.validation
    if len(content) > 1000:
        assert 0.05 < sum(d.num_bytes for d in split.validation) / path.stat().st_size < 0.15


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
@settings(max_examples=40, deadline=None)
def test_the_split_is_a_partition_with_two_sane_sides(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("split")
    for i, length in enumerate(lengths):
        (folder / f"{i}.txt").write_text("line of text\n" * length)
    corpus = corpora.from_path(folder)
    split = corpora.split(corpus)
    assert split == corpora.split(Corpus(corpus.name, corpus.files))
    covered = {name: 0 for name, _ in corpus.files}
    for document in split.train + split.validation:
        covered[document.name] += document.num_bytes
    assert covered == {name: path.stat().st_size for name, path in corpus.files}
    part = sum(d.num_bytes for d in split.validation) / sum(covered.values())
    assert sum(lengths) < 50 or 0.005 < part < 0.25


def test_the_digest_sees_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = corpora.digest(corpora.from_path(tmp_path))
    (tmp_path / "a.txt").write_text("two")
    second = corpora.digest(corpora.from_path(tmp_path))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    third = corpora.digest(corpora.from_path(tmp_path))
    assert len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (DataConfig(seq_len=0), "data.seq-len is 0"),
        (DataConfig(tokenizer_vocab=256), "data.tokenizer-vocab is 256"),
        (DataConfig(tokenizer_vocab=1 << 40), "data.tokenizer-vocab"),
        (DataConfig(path="a\0b"), "data.path"),
    ],
)
def test_config_names_the_field(config: DataConfig, field: str) -> None:
    DataConfig().check()
    with pytest.raises(UserError, match=field):
        config.check()
