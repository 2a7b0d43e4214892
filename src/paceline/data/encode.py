"""Text to arrays of ids, always equal to those of `tokenizers`.

`tiktoken`, seven times as fast, is used if it is known to give the same ids; numpy if ids are bytes.

Both libraries split text by a pattern and merge within a split. tests/data/test_encode.py shows that they split alike
for PATTERNS and GPT-2's, around every character. They merge by different rules: `tokenizers` in the order of its list
of merges, `tiktoken` any two neighbours that make a token, lowest id first. The results are equal if the list is in the
order of ids and each token, merged by lower ids only, becomes two parts that the list has: see `_merges_by_id`.

A text with an added token that is not special (Qwen's `<think>`), or with a megabyte of spaces, on which tiktoken's
regular expressions fail, goes to `tokenizers`.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken
from tokenizers import normalizers

from paceline.data.tokenizer import PATTERN, Tokenizer, byte_characters

# The authors' own patterns; possessive variants (`\p{L}++`) are slower in tiktoken.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2 splits off digits first, so a digit ends the text for the other pattern. `tokenizers` knows 13 more digits
# (Unicode 17) than regular expressions do (Unicode 16).
_DIGIT = r"\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}"
_GPT2_SINGLE_DIGITS = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+|[{_DIGIT}]| ?[^\s\p{{L}}{_DIGIT}]+|\s+(?![^\s{_DIGIT}])|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = (PATTERN, _GPT4, _QWEN2, _GPT4O)
"""paceline's own; Llama 3's and cl100k_base's; Qwen's since 2; o200k_base's."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_ALPHABET = frozenset(byte_characters())
_BYTE_OF = {ord(character): byte for character, byte in byte_characters().items()}
_NEVER = "\U0010ffff\U0010fffe"  # two code points that Unicode will never assign
_MAX_PLAIN = 64  # added tokens to search for in every text


class Encoder:
    """Encodes text as `tokenizer.encode` does. `library`: bytes, tiktoken or tokenizers."""

    def __init__(self, tokenizer: Tokenizer, library: str = "") -> None:
        """library: of another encoder of the same tokenizer, which saves the search."""
        description = tokenizer.description()
        model = description["model"]
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._plain = _plain_tokens(description)
        self._normalizer = normalizers.NFC() if description["normalizer"] else None
        self.library = library or _fastest_library(description)
        if self.library == "bytes":
            ranks = _ranks(model)
            self._of_byte = np.array([ranks[bytes([byte])] for byte in range(256)], dtype=self._dtype)
        if self.library == "tiktoken":
            self._fast = tiktoken.Encoding(
                "paceline",
                pat_str=_pattern(description["pre_tokenizer"]) or "",
                mergeable_ranks=_ranks(model),
                special_tokens={_NEVER: 0},  # with none at all it would search for the empty one everywhere
            )

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Returns the ids, (tokens,): uint16 if the vocabulary fits, else uint32. Raises UserError for a character that
        a vocabulary of characters lacks."""
        if self.library == "bytes":
            return self._of_byte[np.frombuffer(text.encode(), dtype=np.uint8)]
        fast = self._encode_fast(text) if self.library == "tiktoken" else None
        if fast is None:
            (ids,) = self._tokenizer.encode_batch([text])
            return np.array(ids, dtype=self._dtype)
        return fast

    def _encode_fast(self, text: str) -> npt.NDArray[Any] | None:
        normal = text if self._normalizer is None or text.isascii() else self._normalizer.normalize_str(text)
        if any(token in text or token in normal for token in self._plain):
            return None
        try:
            return self._fast.encode_to_numpy(normal, disallowed_special=()).astype(self._dtype)
        except ValueError:  # a million spaces exceed the stack of its regular expressions
            return None


def _fastest_library(description: dict[str, Any]) -> str:
    """Returns bytes or tiktoken if its ids are this tokenizer.json's; else tokenizers."""
    model, plain, normalizer = description["model"], _plain_tokens(description), description["normalizer"]
    if model["type"] != "BPE" or _pattern(description["pre_tokenizer"]) is None:
        return "tokenizers"
    if any(model[name] for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return "tokenizers"
    if normalizer not in (None, {"type": "NFC"}) or len(plain) > _MAX_PLAIN:
        return "tokenizers"
    if model["merges"]:
        return "tiktoken" if _merges_by_id(model) else "tokenizers"
    return "tokenizers" if normalizer or plain or model["ignore_merges"] else "bytes"


def _merges_by_id(model: dict[str, Any]) -> bool:
    """Whether merging by the list and merging by ids give the same result for any text.

    By induction over ids t, both libraries reach one state, in which no pair makes a token below t. There the bytes of
    t are `_halves(t)`: two parts that the list has, so both libraries merge them next, from the left.
    """
    ranks = _ranks(model)
    listed: dict[bytes, list[tuple[int, bytes]]] = {}  # by token: positions in the list, each with the left half
    for place, (left, right) in enumerate(_merges(model)):
        listed.setdefault(left + right, []).append((place, left))
    if len(set(ranks.values())) < len(ranks):
        return False
    reached = -1
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        if token not in listed:  # only a complete split makes it (ignore_merges)
            if any(token[:i] in ranks and token[i:] in ranks for i in range(1, len(token))):
                return False
            continue
        halves = _halves(token, ranks)
        in_order = listed[token][0][0] > reached
        if not in_order or len(halves) != 2 or halves[0] not in [left for _, left in listed[token]]:
            return False
        reached = listed[token][-1][0]
    return True


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merges a token's bytes, lowest id first, to tokens of lower ids than its own."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        made = [ranks.get(left + right, limit) for left, right in itertools.pairwise(parts)]
        lowest = min(made)
        if lowest >= limit:
            break
        i = made.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _pattern(pre_tokenizer: Any) -> str | None:
    """Returns the pattern by which tiktoken splits text alike; None if it is not known."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    *before, last = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    if last == {**_BYTE_LEVEL, "use_regex": True}:
        if not before:
            return _GPT2
        return _GPT2_SINGLE_DIGITS if before == [{"type": "Digits", "individual_digits": True}] else None
    if last != {**_BYTE_LEVEL, "use_regex": False}:
        return None
    if not before:
        return r"(?s).+"
    pattern = before[0].get("pattern", {}).get("Regex", "")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return pattern if pattern in PATTERNS and before == [split] else None


def _ranks(model: dict[str, Any]) -> dict[bytes, int]:
    """Returns the ids that text can have: bytes, results of merges, and with ignore_merges every token."""
    made = {left + right for left, right in _merges(model)}
    # A special token may have characters that stand for no byte: no text becomes it.
    ids = {_bytes(token): i for token, i in model["vocab"].items() if _ALPHABET.issuperset(token)}
    return {token: i for token, i in ids.items() if len(token) == 1 or model["ignore_merges"] or token in made}


def _merges(model: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    for left, right in model["merges"]:
        yield _bytes(left), _bytes(right)


def _bytes(token: str) -> bytes:
    return token.translate(_BYTE_OF).encode("latin-1")


def _plain_tokens(description: dict[str, Any]) -> list[str]:
    """Returns added tokens that are found in text, because they are not special."""
    return [added["content"] for added in description["added_tokens"] if not added["special"]]
