"""Tokenizers give text back unchanged, count its bytes, and keep text apart from special tokens; foreign files too."""

import json
import os
import pickle
import random
import string
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program import Program
from tokenizers import pre_tokenizers

from paceline.base.errors import UserError
from paceline.data.encode import Encoder
from paceline.data.foreign import read_meta
from paceline.data.tokenizer import (
    END_OF_TEXT,
    PATTERN,
    Tokenizer,
    byte_characters,
    bytes_tokenizer,
    character_tokenizer,
    resolve,
    train,
)

TEXT = 'def add(a, b):\n    """Sum."""\n    if a:\n        return a + b\n\n\nclass Größe:\n\tx = 1234567\n' * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train([TEXT], 400))


def changed(tokenizer: Tokenizer, **changes: Any) -> str:
    return json.dumps(json.loads(tokenizer.json) | changes)


def with_special(tokenizer: Tokenizer, *tokens: str) -> str:
    """The tokenizer with other special tokens instead of its own."""
    content = json.loads(tokenizer.json)
    (added,) = content["added_tokens"]
    del content["model"]["vocab"][END_OF_TEXT]
    for i, token in enumerate(tokens):
        content["model"]["vocab"][token] = 0 if i == 0 else len(content["model"]["vocab"])
    content["added_tokens"] = [{**added, "id": content["model"]["vocab"][token], "content": token} for token in tokens]
    return json.dumps(content)


@given(st.text(max_size=80) | st.text(alphabet=" \n\t\r().:ab1'_", max_size=80))
def test_text_comes_back_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert list(tokenizer.encode_batch([text, TEXT])) == [ids, tokenizer.encode(TEXT)]


def test_indentation_is_a_token(tokenizer: Tokenizer) -> None:
    assert ":\n        " in [tokenizer.decode([i]) for i in tokenizer.encode("if a:\n        return a")]


def test_a_quoted_special_token_stays_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a {END_OF_TEXT} b")
    assert tokenizer.end_of_text is not None
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == f"a {END_OF_TEXT} b"
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == f"a {END_OF_TEXT} b"
    assert tokenizer.token_bytes()[tokenizer.end_of_text] == 0


def test_little_text_gives_a_smaller_vocabulary() -> None:
    tokenizer = Tokenizer(train(["ab ab"], 4096))
    assert 257 <= tokenizer.vocab_size < 270
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)


@pytest.mark.parametrize("alphabet", ["ACGT", "กขคงจฉช", string.ascii_letters])
def test_training_and_encoding_take_time_in_proportion_to_a_word(alphabet: str) -> None:
    """DNA, Thai and base64 are one word, and the trainer's time grew with its square: sixteenfold here (mutation: no
    cut before training). Processor time of four times the text."""
    draw, cpu_s = random.Random(0), []
    for length in (1 << 14, 1 << 16):
        text, began = "".join(draw.choices(alphabet, k=length)), time.process_time()
        found = Tokenizer(train([text], 400))
        assert found.decode(Encoder(found).encode(text).tolist()) == text
        cpu_s.append(time.process_time() - began)
    assert cpu_s[1] < 9 * cpu_s[0]


def test_a_tokenizer_splits_as_it_says_and_not_as_it_was_trained() -> None:
    (split, _) = json.loads(train(["a" * 5000], 300))["pre_tokenizer"]["pretokenizers"]
    assert split["pattern"] == {"Regex": PATTERN}


def test_load_names_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"\xff", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            Tokenizer.load(path)
    with pytest.raises(UserError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    path.write_text(train([TEXT], 400))
    assert Tokenizer.load(path).sha256 == tokenizer.sha256


def test_truncation_and_padding_in_a_file_lose_no_text(tokenizer: Tokenizer) -> None:
    truncation = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 4096}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": END_OF_TEXT}
    short = Tokenizer(changed(tokenizer, truncation=truncation, padding=padding))
    assert short.encode(TEXT) == tokenizer.encode(TEXT)
    assert list(short.encode_batch([TEXT])) == [tokenizer.encode(TEXT)]


def test_dropout_in_a_file_is_switched_off(tokenizer: Tokenizer) -> None:
    """Else each preparation gives other ids (mutation: keep the model's dropout). The file that a data set keeps has
    none either, so that other programs, too, encode as the shards were."""
    content = json.loads(tokenizer.json)
    content["model"]["dropout"] = 0.5
    found = Tokenizer(json.dumps(content))
    assert found.encode(TEXT) == tokenizer.encode(TEXT)
    assert found.sha256 == tokenizer.sha256


def test_what_is_no_unicode_text_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a\ufffdb"  # as an argument of a program can be


# The token that begins a document.


@pytest.mark.parametrize("token", [END_OF_TEXT, "<|begin_of_text|>", "<|bos|>", "<s>"])
def test_the_usual_names_are_found(token: str, tokenizer: Tokenizer) -> None:
    found = Tokenizer(with_special(tokenizer, "<|pad|>", token, "<|other|>"))
    assert found.document_token == token
    assert found.end_of_text == found.vocab_size - 2
    assert found.prompt("a b") == [found.vocab_size - 2, *found.encode("a b")]
    assert found.decode(found.prompt("a b")) == "a b"


def test_without_one_nothing_is_put_before(tokenizer: Tokenizer) -> None:
    found = Tokenizer(with_special(tokenizer, "<|im_start|>"))
    assert (found.document_token, found.end_of_text) == (None, None)
    assert found.prompt("a b") == found.encode("a b")


def test_the_one_that_is_asked_for(tokenizer: Tokenizer) -> None:
    content = with_special(tokenizer, "<|pad|>", END_OF_TEXT, "<|document|>")
    assert Tokenizer(content, "<|document|>").document_token == "<|document|>"
    with pytest.raises(
        UserError, match=r"no special token '<\|documents\|>' \(did you mean '<\|document\|>'\?\); it has"
    ):
        Tokenizer(content, "<|documents|>")
    with pytest.raises(UserError, match="it has none"):
        Tokenizer(character_tokenizer({0: "a"}).json, END_OF_TEXT)


def test_the_choice_travels_in_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(with_special(tokenizer, "<|pad|>", END_OF_TEXT, "<|document|>"))
    chosen = resolve(str(path), no_text, "<|document|>")
    again = Tokenizer(chosen.json)
    assert again.document_token == "<|document|>"
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert resolve(str(path), no_text, END_OF_TEXT).json == path.read_text()  # it says so already


# What is no byte-level tokenizer.


def test_other_kinds_are_refused_with_what_to_do(tokenizer: Tokenizer) -> None:
    pieces = {"▁a": 0, "b": 1, "<unk>": 2}
    model = {"type": "BPE", "vocab": pieces, "merges": [], "unk_token": "<unk>", "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    sentencepiece = changed(tokenizer, model=model, decoder=decoder, added_tokens=[], pre_tokenizer=None)
    with pytest.raises(UserError, match=r"not byte-level BPE.*train:VOCAB"):
        Tokenizer(sentencepiece)
    content = json.loads(tokenizer.json)
    del content["model"]["vocab"]["Ã"]  # 0xc3, the first byte of é
    content["model"]["merges"] = []
    with pytest.raises(UserError, match="lacks 1 of the 256 bytes, the first 0xc3"):
        Tokenizer(json.dumps(content))


# Tokenizers that are made here.


def test_bytes_are_ids() -> None:
    tokenizer = bytes_tokenizer()
    assert set(byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("aé\0\n") == list("aé\0\n".encode())
    assert tokenizer.decode(range(256)) == bytes(range(256)).decode(errors="replace")
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    assert tokenizer.json == bytes_tokenizer().json


@given(st.text(alphabet="ab\n é🎉'\\\"", max_size=40))
def test_characters_are_ids(text: str) -> None:
    itos = dict(enumerate("\n '\"\\abé🎉"))
    tokenizer = character_tokenizer(itos)
    ids = tokenizer.encode(text)
    assert [itos[i] for i in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.prompt(text) == ids
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert Tokenizer(tokenizer.json).sha256 == tokenizer.sha256


def test_a_character_that_is_not_there_is_named() -> None:
    tokenizer = character_tokenizer({0: "b", 1: "c"})
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (2, None)
    with pytest.raises(UserError, match="character 'a' is not one of the 2"):
        tokenizer.encode("bca")
    with pytest.raises(UserError, match=r"id 1 .* 'cd'"):
        character_tokenizer({0: "b", 1: "cd"})
    with pytest.raises(UserError, match="two ids"):
        character_tokenizer({0: "b", 1: "b"})


# What a person asks for.


def no_text() -> Iterator[str]:
    raise AssertionError("nothing is to be trained")


def test_the_characters_of_a_text_are_taken_one_document_at_a_time() -> None:
    """(mutation: all texts are in memory, as arguments of a call)"""

    class Text(str):
        __slots__ = ("__weakref__",)

    texts = weakref.WeakSet[Text]()
    most = 0

    def documents() -> Iterator[str]:
        nonlocal most
        for letter in string.ascii_letters:
            text = Text(letter * 100)
            texts.add(text)
            most = max(most, sum(1 for _ in texts))
            yield text

    assert resolve("chars", documents).vocab_size == len(string.ascii_letters) + 1
    assert most <= 2


def test_resolve(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("bytes", no_text).json == bytes_tokenizer().json
    assert resolve("train:400", lambda: iter([TEXT])).json == tokenizer.json
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "tokenizer.json").write_text(tokenizer.json)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    chars = resolve("chars", lambda: iter(["ba\n", "c"]))
    assert (chars.vocab_size, chars.document_token, chars.encode("\nabc")) == (5, END_OF_TEXT, [0, 1, 2, 3])
    for spec in ("my model", "my model/tokenizer.json", "~/my model", str(tmp_path / "my model")):
        assert resolve(spec, no_text).json == tokenizer.json


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train:256", "257 .* to 1048576"),
        ("train:99999999999999999999", "to 1048576"),
        ("train:", "train:32768"),
        ("train:4k", "train:32768"),
        ("train", "train:32768"),
        ("gpt-2", "did you mean 'gpt2'"),
        ("nowhere/tokenizer.json", "not a file or folder"),
        ("a/b/c", "not a file or folder"),
        ("../x", "not a file or folder"),
        ("", "not a file or folder"),
        ("x" * 300, "tokenizer 'x{80}' can not be read: File name too long"),
    ],
)
def test_what_can_not_be_resolved(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        resolve(spec, no_text)


# The hub: a server on this machine that speaks the little of it that a download needs, and a process for each try, as
# huggingface_hub reads its settings when it is imported.

NOBODY = "http://127.0.0.1:9"
RESOLVE = """
import sys
from paceline.base.errors import UserError
from paceline.data.tokenizer import resolve
for spec in sys.argv[1:]:
    try:
        print(resolve(spec, lambda: iter([])).sha256)
    except UserError as error:
        print(f"refused: {error}")
"""


@pytest.fixture
def hub(tokenizer: Tokenizer) -> Iterator[str]:
    files = {"/openai-community/gpt2/resolve/main/tokenizer.json": tokenizer.json.encode()}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, with_body: bool) -> None:
            body = files.get(self.path, b"")
            self.send_response(200 if body else 403 if "gated" in self.path else 404)
            self.send_header("Content-Length", str(len(body)))
            if body:
                self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
                self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
            else:
                self.send_header("X-Error-Code", "GatedRepo" if "gated" in self.path else "RepoNotFound")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_by(endpoint: str, cache: Path, *specs: str, **settings: str) -> list[str]:
    """One line for each name."""
    (cache / "resolve.py").write_text(RESOLVE)
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **settings}
    with Program(*specs, command=(sys.executable, str(cache / "resolve.py")), env=env, cwd=cache) as program:
        return program.wait().require(0).out.splitlines()


def test_names_come_from_the_hub_and_then_from_its_cache(hub: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("huggingface_hub")
    known, *refused = resolve_by(hub, tmp_path, "gpt2", "some/thing", "some/gated")
    assert known == tokenizer.sha256
    assert resolve_by(NOBODY, tmp_path, "openai-community/gpt2") == [tokenizer.sha256]
    refused += resolve_by(hub, tmp_path, "some/thing", HF_HUB_OFFLINE="1")
    reasons = (
        "is not on the hub, or is private",
        "accept its terms there and log in",
        "could not be read from the hub",
    )
    for said, told in zip(refused, reasons, strict=True):
        assert said.startswith("refused: ")
        assert told in said
        assert "give --tokenizer the path of a tokenizer.json instead" in said


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install huggingface_hub, or give --tokenizer"):
        resolve("gpt2", no_text)


# nanoGPT's meta.pkl.

ITOS = dict(enumerate("\n !abcé你🎉"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_meta_of_nanogpt(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "meta.pkl"
    meta = {"vocab_size": len(ITOS), "itos": ITOS, "stoi": {c: i for i, c in ITOS.items()}}
    path.write_bytes(pickle.dumps(meta, protocol))
    assert read_meta(path) == (len(ITOS), ITOS)
    path.write_bytes(pickle.dumps({"vocab_size": 50304}, protocol))
    assert read_meta(path) == (50304, None)
    many = {i: chr(i + 1) for i in range(0xD000)}
    path.write_bytes(pickle.dumps({"vocab_size": 0xD000, "itos": many}, protocol))
    assert read_meta(path)[1] == many


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_nothing_in_a_meta_is_executed(tmp_path: Path) -> None:
    trace, path = tmp_path / "executed", tmp_path / "meta.pkl"
    pickle.loads(pickle.dumps(Payload(trace)))
    trace.rmdir()  # it does work
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"vocab_size": 65, "itos": Payload(trace)}, protocol))
        with pytest.raises(UserError, match=r"meta\.pkl .* nothing in it was executed: it names \w+.mkdir"):
            read_meta(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "meta.pkl"),
        (b"\x80\x04", "meta.pkl"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", "vocab_size"),  # 2**31 entries of a memo: 32 GB
        (pickle.dumps({"vocab_size": 3})[:-4], "meta.pkl"),
        (pickle.dumps([1]), "vocab_size"),
        (pickle.dumps({}), "vocab_size is not a number from 1 to"),
        (pickle.dumps({"vocab_size": 1 << 70}), "vocab_size is not a number"),
        (pickle.dumps({"vocab_size": "65"}), "vocab_size is not a number"),
        (pickle.dumps({"vocab_size": np.int64(65)}), "it names numpy"),
        (pickle.dumps({"vocab_size": 2, "itos": {2: "a"}}), "ids below 2"),
        (pickle.dumps({"vocab_size": 2, "itos": {0: 1}}), "ids below 2"),
        (pickle.dumps({"vocab_size": 2, "itos": "ab"}), "ids below 2"),
        (pickle.dumps({"vocab_size": 2, "more": "x" * (5 << 20)}), "larger than"),
    ],
)
def test_a_meta_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "meta.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_meta(path)
    with pytest.raises(UserError, match="No such file"):
        read_meta(tmp_path / "nowhere")


def test_a_damaged_meta_is_refused_or_read(tmp_path: Path) -> None:
    path, dice = tmp_path / "meta.pkl", random.Random(1)
    good = pickle.dumps({"vocab_size": len(ITOS), "itos": ITOS}, 4)
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        path.write_bytes(bytes(bad))
        try:
            found = read_meta(path)
        except UserError:
            continue
        assert isinstance(found[0], int)
