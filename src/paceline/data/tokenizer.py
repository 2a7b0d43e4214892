"""Text to ids and back by a `tokenizer.json` (the `tokenizers` library's format), ours or anybody's.

There are two kinds. Byte-level: ids are bytes and their merges, so any text can be encoded and decoded. Characters: an
id is a character, as in nanoGPT's small datasets; other characters have none.

A document begins with a token that no text contains. The file names it (its post-processor puts it before a text), or
its vocabulary has one of the usual names.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.base.errors import UserError, nearest
from paceline.base.files import exists
from paceline.data import hub
from paceline.data.config import MAX_VOCAB, MIN_VOCAB
from paceline.data.shard import reading

END_OF_TEXT = "<|endoftext|>"
DOCUMENT_TOKENS = (END_OF_TEXT, "<|begin_of_text|>", "<|bos|>", "<s>")
"""Tokens that begin documents if the file names none: of GPT-2, Qwen and SmolLM; Llama 3; nanochat; old models."""
_GPT2 = "openai-community/gpt2"  # the repository that `gpt2` means
FILE = "tokenizer.json"

# The split before merges are learnt; no merge crosses a split. GPT-4's pattern (cl100k_base) with one change for source
# code: a line end stays with the signs before it and the next line's indentation, so `):\n        ` can be one token.
# Every character matches some branch, so nothing is lost.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with one space or sign before it: ` def`, `.path`, `_name`
    r"|\p{N}{1,3}"  # numbers three digits at a time
    r"| ?[^\s\p{L}\p{N}]+(?:\n[ \t]*)*"  # signs, with following line ends and indentation
    r"|\s*\n[ \t]*"  # line ends, blank lines, indentation
    r"|\s+(?!\S)"  # spaces except the last, which goes with the next word
    r"|\s+"
)
# The trainer's time grows with the square of a word: DNA, base64, spaces, Thai are words of a whole document. It sees
# them in pieces of at most 1,024 letters, signs or spaces.
_SHORTER_WORDS = PATTERN.replace("+", "{1,1024}").replace("*", "{0,1024}")
SETTINGS = f"byte-level BPE 1; {END_OF_TEXT} is id 0; {PATTERN}"
"""All settings of training except the vocabulary's size; part of a cached dataset's name."""


def train(texts: Iterable[str], vocab_size: int) -> str:
    """Returns the `tokenizer.json` of a BPE trained on texts, with at most `vocab_size` tokens (fewer on little text).
    Depends on the texts and their order only: the trainer breaks ties by token id."""
    model = tokenizers.Tokenizer(models.BPE())
    words, shorter = (
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in (PATTERN, _SHORTER_WORDS)
    )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([shorter, to_bytes])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so nothing is unknown
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    model.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    return model.to_str(pretty=True)


def byte_characters() -> dict[str, int]:
    """Returns the byte of each of the 256 characters in the byte-level alphabet. A vocabulary is text, so GPT-2 wrote
    bytes as characters: printable ones of Latin-1 as themselves, the others, in order, as U+0100 and on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_tokenizer() -> "Tokenizer":
    """Returns a tokenizer without merges: byte b is id b, `<|endoftext|>` is id 256."""
    model = tokenizers.Tokenizer(models.BPE(vocab=byte_characters(), merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([END_OF_TEXT])
    return Tokenizer(model.to_str(pretty=True))


def character_tokenizer(itos: Mapping[int, str], document_token: str = "") -> "Tokenizer":
    """Returns a tokenizer in which `itos[i]`, one character, is id i; document_token has the next id; empty: no token
    begins documents. Raises UserError if an entry is not one character, or two are the same."""
    for i, character in itos.items():
        if len(character) != 1:
            raise UserError(f"id {i} of the character vocabulary is {character!r}; each must be one character")
    if len(set(itos.values())) < len(itos):
        raise UserError("the character vocabulary has one character under two ids")
    # The unknown token needs a name; with more than one character it matches no text.
    model = tokenizers.Tokenizer(models.WordLevel({itos[i]: i for i in sorted(itos)}, unk_token="unknown"))
    model.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = decoders.Fuse()
    if document_token:
        model.add_special_tokens([document_token])
    return Tokenizer(model.to_str(pretty=True))


class Tokenizer:
    """Text to ids and back. `<|endoftext|>` written in a document stays text and does not become the token.

    `json` is its tokenizer.json, `sha256` the digest of that, `vocab_size` the highest id plus one; `document_token`
    begins a document and has the id `end_of_text`, both None if there is none.
    """

    def __init__(self, json: str, document_token: str = "") -> None:
        """json: content of a tokenizer.json. document_token: overrides the file's.

        Raises UserError if it is no tokenizer, if decoding ids would not restore the text (it is neither byte-level nor
        of characters), or if it has no such special token.
        """
        try:
            self._model = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"this is not a tokenizer.json that `tokenizers` can read: {error}") from error
        if getattr(self._model.model, "dropout", None):  # merges left out at random: other ids at each reading
            self._model.model.dropout = None
            json = self._model.to_str(pretty=True)
        # Else a document that quotes the token's name would be split in two, and a prompt could inject it.
        self._model.encode_special_tokens = True
        self._model.no_truncation()  # some files truncate to a short context, and text would be lost
        self._model.no_padding()
        self._characters = _characters(self._model)
        if self._characters is None:
            _require_byte_level(self._model)
        self.json: str = json
        self.sha256: str = hashlib.sha256(json.encode()).hexdigest()
        self.vocab_size: int = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.document_token: str | None = self._find(document_token)
        self.end_of_text: int | None = self._model.token_to_id(self.document_token) if self.document_token else None

    @classmethod
    def load(cls, path: Path | str, document_token: str = "") -> "Tokenizer":
        """Raises UserError, naming the file, if it cannot be read or used."""
        try:
            return cls(Path(path).read_bytes().decode(), document_token)
        except (OSError, UnicodeDecodeError, UserError) as error:
            raise UserError(f"{path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text, without a document token; a lone surrogate is read as U+FFFD. Raises UserError for a
        character that a character vocabulary lacks."""
        ids: list[int] = self._model.encode(self._checked(text), add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yields the `encode` of each text, on all cores (RAYON_NUM_THREADS limits them)."""
        checked = [self._checked(text) for text in texts]
        for encoding in self._model.encode_batch_fast(checked, add_special_tokens=False):
            yield encoding.ids

    def _checked(self, text: str) -> str:
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self._characters is not None and (unknown := set(text) - self._characters):
            raise UserError(
                f"the character {min(unknown)!r} is not one of the {len(self._characters)} that the tokenizer knows"
            )
        return text

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a document that begins with text, for generation."""
        return ([] if self.end_of_text is None else [self.end_of_text]) + self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return str(self._model.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        """(vocab_size,) bytes of text of each id; 0 for special tokens. For bits per byte."""
        lengths = np.zeros(self.vocab_size, dtype=np.uint16)
        added = self._model.get_added_tokens_decoder()
        for token, i in self._model.get_vocab(with_added_tokens=True).items():
            if i not in added and self._characters is None:
                lengths[i] = len(token)  # each character of the byte-level alphabet is one byte
            elif i not in added or not added[i].special:
                lengths[i] = len(token.encode())
        return lengths

    def description(self) -> dict[str, Any]:
        """The tokenizer.json as the library parsed it, with defaults filled in."""
        parsed: dict[str, Any] = json.loads(self._model.to_str())
        return parsed

    def beginning_documents_with(self, token: str) -> "Tokenizer":
        """Returns a tokenizer whose tokenizer.json puts `token` before texts, for all readers of the format. Raises
        UserError if it has no such special token."""
        chosen = Tokenizer(self.json, token)
        if chosen.document_token == self.document_token:
            return self
        text = [{"Sequence": {"id": kind, "type_id": 0}} for kind in "AB"]
        begin = {"SpecialToken": {"id": token, "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [begin, text[0]],
            "pair": [begin, *text],
            "special_tokens": {token: {"id": token, "ids": [chosen.end_of_text], "tokens": [token]}},
        }
        changed = {**json.loads(self.json), "post_processor": processor}
        return Tokenizer(json.dumps(changed, indent=2, ensure_ascii=False))

    def _find(self, wanted: str) -> str | None:
        special = sorted(added.content for added in self._model.get_added_tokens_decoder().values() if added.special)
        if wanted and wanted not in special:
            there = (
                f"it has {', '.join(special[:10])}{' ...' if len(special) > 10 else ''}" if special else "it has none"
            )
            raise UserError(f"the tokenizer has no special token {wanted!r}{nearest(wanted, special)}; {there}")
        if wanted:
            return wanted
        # The file's post-processor puts it before a text. A character tokenizer has none, and may lack the "a".
        first = self._model.encode("a").tokens[:1] if self._characters is None else []
        return next((token for token in (*first, *DOCUMENT_TOKENS) if token in special), None)


def _characters(model: tokenizers.Tokenizer) -> set[str] | None:
    vocabulary = model.get_vocab(with_added_tokens=False)
    if not isinstance(model.model, models.WordLevel) or any(len(token) != 1 for token in vocabulary):
        return None
    return set(vocabulary)


def _require_byte_level(model: tokenizers.Tokenizer) -> None:
    instead = "give a byte-level one (GPT-2's, Llama 3's, Qwen's), `bytes`, or train:VOCAB"
    if not isinstance(model.decoder, decoders.ByteLevel) or not isinstance(model.model, models.BPE):
        raise UserError(f"the tokenizer is not byte-level BPE: its ids do not give the text back; {instead}")
    vocabulary = model.get_vocab(with_added_tokens=False)
    missing = sorted(byte for character, byte in byte_characters().items() if character not in vocabulary)
    if missing:
        raise UserError(
            f"the tokenizer lacks {len(missing)} of the 256 bytes, the first 0x{missing[0]:02x}: "
            f"text with them would be lost; {instead}"
        )


def resolve(spec: str, sample: Callable[[], Iterator[str]], document_token: str = "") -> Tokenizer:
    """Returns the tokenizer that `spec` names.

    spec: `bytes`; `chars`, all characters of `sample`; `train:VOCAB`, trained on the texts of `sample`; a
    tokenizer.json or a folder with one; gpt2; or ORG/NAME, a repository on the hub. Raises UserError for anything else,
    or if the hub fails.
    """
    tokenizer = _resolve(spec, sample)
    return tokenizer.beginning_documents_with(document_token) if document_token else tokenizer


def _resolve(spec: str, sample: Callable[[], Iterator[str]]) -> Tokenizer:
    if spec == "bytes":
        return bytes_tokenizer()
    if spec == "chars":
        characters = set[str]()
        for text in sample():  # one at a time: arguments of `union` would all be in memory
            characters.update(text)
        return character_tokenizer(dict(enumerate(sorted(characters))), END_OF_TEXT)
    kind, _, size = spec.partition(":")
    if kind == "train":
        if not (size.isascii() and size.isdigit() and MIN_VOCAB <= int(size[:9]) <= MAX_VOCAB):
            raise UserError(
                f"tokenizer {spec!r}: a byte-level vocabulary has {MIN_VOCAB} (256 bytes and {END_OF_TEXT}) to "
                f"{MAX_VOCAB} tokens; give for example train:32768"
            )
        return Tokenizer(train(sample(), int(size)))
    path = Path(os.path.expanduser(spec))
    with reading(f"tokenizer {spec[:80]!r}"):  # a long name, or a folder that may not be entered
        if exists(path) and path.is_dir():
            path /= FILE
        is_there = exists(path)
    if is_there:
        return Tokenizer.load(path)
    if spec == "gpt2" or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.json)", spec):
        return Tokenizer.load(_from_hub(_GPT2 if spec == "gpt2" else spec, spec))
    known = ["bytes", "chars", "train:VOCAB", "gpt2"]
    raise UserError(
        f"there is no tokenizer {spec!r}{nearest(spec, known)}: it is not a file or folder here, and not one of "
        f"{', '.join(known)}, or ORG/NAME on the hub"
    )


def _from_hub(repository: str, spec: str) -> str:
    instead = f"give --tokenizer the path of a {FILE} instead"
    try:
        import huggingface_hub  # an optional extra
        from huggingface_hub.errors import LocalEntryNotFoundError
        from huggingface_hub.utils import logging as hub_logging
    except ImportError:
        raise UserError(f"tokenizer {spec!r} is on the hub: pip install huggingface_hub, or {instead}") from None
    hub_logging.set_verbosity(logging.CRITICAL)  # it prints many retries
    try:
        try:  # look here first: without a network the hub's client tries for 23 s
            return huggingface_hub.hf_hub_download(repository, FILE, local_files_only=True)
        except LocalEntryNotFoundError:
            return huggingface_hub.hf_hub_download(repository, FILE)
    except Exception as error:  # of the hub, its HTTP client or the system; no common class
        raise UserError(f"tokenizer {spec!r}: {hub.message(repository, error, 'try again')}, or {instead}") from error
