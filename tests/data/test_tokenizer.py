"""The tokenizer gives text back unchanged, counts its bytes, and keeps text apart from special tokens."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data.tokenizer import END_OF_TEXT, Tokenizer, train

TEXT = 'def add(a, b):\n    """Sum."""\n    if a:\n        return a + b\n\n\nclass Größe:\n\tx = 1234567\n' * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train([TEXT], 400))


@given(st.text(max_size=80) | st.text(alphabet=" \n\t\r().:ab1'_", max_size=80))
@settings(max_examples=200, deadline=None)
def test_text_comes_back_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert list(tokenizer.encode_batch([text, TEXT])) == [ids, tokenizer.encode(TEXT)]


def test_indentation_is_a_token(tokenizer: Tokenizer) -> None:
    assert ":\n        " in [tokenizer.decode([i]) for i in tokenizer.encode("if a:\n        return a")]


def test_a_quoted_special_token_stays_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a {END_OF_TEXT} b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == f"a {END_OF_TEXT} b"
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == f"a {END_OF_TEXT} b"
    assert tokenizer.token_bytes()[tokenizer.end_of_text] == 0


def test_little_text_gives_a_smaller_vocabulary() -> None:
    tokenizer = Tokenizer(train(["ab ab"], 4096))
    assert 257 <= tokenizer.vocab_size < 270
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)


def test_load_names_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"\xff", train([TEXT], 300).replace(END_OF_TEXT, "<|other|>").encode()):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            Tokenizer.load(path)
    with pytest.raises(UserError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    path.write_text(train([TEXT], 400))
    assert Tokenizer.load(path).sha256 == tokenizer.sha256
