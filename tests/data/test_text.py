"""What is text, which text it is, and where a long one is cut."""

import itertools
import re
import subprocess
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from paceline.base.errors import UserError
from paceline.data import text as text_module
from paceline.data.config import DataConfig
from paceline.data.encode import PATTERNS
from paceline.data.sources import embedded


def test_the_embedded_corpus_is_the_library_and_not_its_tests() -> None:
    found = embedded()
    names = [file.name for file in found.files]
    assert re.fullmatch(r"python-3\.\d+-library", found.name)
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    for part in ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"):
        assert not [name for name in names if part in name.split("/")]
    assert all(file.num_bytes and file.format == "text" and file.stamp for file in found.files)


@pytest.mark.parametrize(
    ("head", "why", "is_trusted"),
    [
        (b"x", None, True),
        (b"", "is empty", False),
        (b"a\0b", "contains NUL bytes", False),
        ("M\u00fcller".encode("latin-1"), "is not UTF-8 text", True),
        ("text".encode("utf-16"), "is UTF-16", False),
        ("\u6570\u5b57".encode("utf-16"), "is UTF-16", False),  # no NUL in it
        (b"\xfe\xff" + "text".encode("utf-16-be"), "is UTF-16", False),
        ("text".encode("utf-16-le"), "contains NUL bytes", False),
        ("text".encode("utf-32"), "is UTF-32", False),
        (b"\0\0\xfe\xff" + "text".encode("utf-32-be"), "is UTF-32", False),
        (("odd" + "\u00e4" * 9000).encode()[:8192], None, True),  # ends in the middle of a character
        (b"\xef\xbb\xbfbyte order mark", None, True),
    ],
)
def test_what_is_text(head: bytes, why: str | None, is_trusted: bool) -> None:
    assert text_module.why_not_text(head) == why
    assert (text_module.why_not_text(head, trusted=True) is None) == is_trusted


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_the_advice_for_another_encoding_gives_the_text(tmp_path: Path, encoding: str) -> None:
    content = "M\u00fcller, na\u00efve\n" * 9
    (tmp_path / "IN").write_bytes(content.encode(encoding))
    why = text_module.why_not_text((tmp_path / "IN").read_bytes())
    assert why is not None
    command = re.search(r"iconv -f \S+ -t UTF-8 IN > OUT", text_module.REMEDIES[why])
    assert command is not None
    subprocess.run(command[0], shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "OUT").read_bytes().removeprefix(b"\xef\xbb\xbf").decode() == content


@pytest.mark.parametrize(
    ("content", "text", "num_replaced"),
    [
        (b"one\r\ntwo\rthree\n\n\r\r\nx", "one\ntwo\nthree\n\n\n\nx", 0),
        (b"M\xfcller \xef\xbb\xbf\xe2\x82", "M\ufffdller \ufeff\ufffd", 2),
        ("\ufffd is a character".encode() + b" \xff", "\ufffd is a character \ufffd", 1),
    ],
)
def test_line_ends_and_bytes_that_are_not_utf8(content: bytes, text: str, num_replaced: int) -> None:
    assert text_module.plain_text(content) == (text, num_replaced)


ODD = st.text(alphabet=" \n\r\t\xa0'sSa1\u00bd\u0663.,/\u00e9\u0301\u01c5\u02b0\u017f\u4f60\U0001f389\u1885\ufffd\x00")


def places(text: str) -> list[int]:
    """Where the rule has a cut, in characters, from its words."""
    return [
        i
        for i in range(1, len(text))
        if text[i] in " \r\n" and text[i - 1].isalnum() and unicodedata.ucd_3_2_0.category(text[i - 1])[0] in "LN"
    ]


@given(ODD, st.integers(8, 40))
def test_pieces_are_the_document_cut_at_the_last_place_there_is(text: str, size: int) -> None:
    content = text.encode()
    wanted = {len(text[:i].encode()) for i in places(text)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "SLICE_BYTES", size)
        found = list(text_module.slices(content))
    assert b"".join(found) == content
    assert "".join(piece.decode() for piece in found) == text  # characters are whole
    at = 0
    for piece, following in itertools.pairwise(found):
        assert 0 < len(piece) <= size
        assert not (piece.endswith(b"\r") and following.startswith(b"\n"))
        possible = [place for place in wanted if at < place <= at + size]
        at += len(piece)
        assert at == max(possible) if possible else at > 0
    assert len(found[-1]) <= size


@given(st.binary(max_size=200), st.integers(8, 40))
def test_what_is_not_utf8_is_the_same_in_pieces(content: bytes, size: int) -> None:
    content = content.replace(b" ", b"\xe2\x82").replace(b"a", b"\xf0\x9f")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "SLICE_BYTES", size)
        parts = [text_module.plain_text(piece) for piece in text_module.slices(content)]
    text, num_replaced = text_module.plain_text(content)
    assert "".join(part for part, _ in parts) == text
    assert sum(count for _, count in parts) == num_replaced


def cutters() -> Iterator[pre_tokenizers.PreTokenizer]:
    """How text is cut before merges are made, by the patterns that people's tokenizers have."""
    for pattern in PATTERNS:
        yield pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    yield pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


CUTTERS = list(cutters())


@given(ODD | st.text(max_size=40))
def test_where_a_document_is_cut_every_pattern_has_a_border(text: str) -> None:
    for cutter in CUTTERS:
        whole = [stop - start for _, (start, stop) in cutter.pre_tokenize_str(text)]
        borders = {0, *itertools.accumulate(whole)}
        assert borders >= set(places(text)), cutter


@pytest.mark.long
def test_programs_are_cut_into_the_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are cut apart as they are together; 400 bytes of signs, which have no such place, are passed over."""
    monkeypatch.setattr(text_module, "SLICE_BYTES", 400)
    compared = passed = 0
    for file in embedded().files[::25]:
        with open(file.path, "rb") as stored:
            found = [text_module.plain_text(piece)[0] for piece in text_module.slices(stored.read(20_000))]
        for piece, following in itertools.pairwise(found):
            if not (piece[-1].isalnum() and following[0] in " \n"):
                passed += 1
                continue
            compared += 1
            for cutter in CUTTERS:
                parts = [part for one in (piece, following) for part, _ in cutter.pre_tokenize_str(one)]
                assert parts == [part for part, _ in cutter.pre_tokenize_str(piece + following)], (file.name, cutter)
    assert compared > 400
    assert passed < 0.05 * compared


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (DataConfig(seq_len=0), "data.seq-len is 0"),
        (DataConfig(tokenizer_vocab=256), "data.tokenizer-vocab is 256"),
        (DataConfig(tokenizer_vocab=-2), "data.tokenizer-vocab is -2"),
        (DataConfig(tokenizer_vocab=1 << 40), "data.tokenizer-vocab"),
        (DataConfig(path="a\0b"), "data.path"),
    ],
)
def test_config_names_the_field(config: DataConfig, field: str) -> None:
    DataConfig().check()
    with pytest.raises(UserError, match=field):
        config.check()
