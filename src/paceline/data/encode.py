"""Text to arrays of ids, with the fastest library that is proven to give the ids of `tokenizers`.

Measured on one core, in MB of text a second: numpy for bytes 500 and more, `tiktoken` 30 to 38, `tokenizers` 4 to 5
(bench/encode.py). `tokenizers` understands every tokenizer.json and is what the ids are defined by. `tiktoken` knows
neither files nor lists of merges: it merges whatever two neighbours make a token of the vocabulary, lowest id first.
Before it is used, `Encoder` proves for the tokenizer at hand that this comes to the same:

**Pieces.** Both libraries cut text by a pattern, and no merge crosses a cut. The pre-tokenizer must be one that
`_pattern` knows. That it cuts alike in both is held by tests (every code point of Unicode in many contexts) and looked
at again as installed, where the libraries may be of different versions of Unicode.

**Merges.** `tokenizers` merges, of all neighbours that its list has, those first in the list; of equals the leftmost.
Let halves(t) be what the bytes of token t come to when `tiktoken` merges with the tokens of ids below t only. It is
asked, for every token t that the list makes, that

1. the list is in the order of ids: what makes t stands before all that makes a token of a higher id;
2. halves(t) is two parts, and the list has these two.

Then both give the same ids. By induction over ids t: both come to one state S(t) of the piece, in which nothing makes
a token below t any more and nothing was merged to t or above. Look at any stretch of S(t) that begins and ends where
tokens do, and whose bytes are those of t. No merge so far crossed its ends, for merges are never undone, so what
happened inside is what happens to these bytes alone, with ids below t: it reads halves(t). By 2 both libraries may
merge it, no other neighbours make t, and by 1 both do so next, from the left. That opens nothing below t: a stretch
with the bytes of some u < t had the same ends in S(u), read halves(u) there, and was merged then. So both come to
S(t + 1).

**Whole pieces.** `tiktoken` looks a piece up before it merges, and so does a tokenizer with `ignore_merges`. A piece
that is t comes to t anyway, by 2. A token that the list does not make is left out of what `tiktoken` knows; with
`ignore_merges` it stays, to be looked up, and it is asked that no two tokens make it.

**What else there is.** Normalizers but NFC, prefix spaces, dropout and the like are not taken. A text that holds a
token added beside the vocabulary that is not special (Qwen's `<think>`), or a megabyte of spaces, on which the
pattern's engine gives up, goes to `tokenizers`, text by text.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken
from tokenizers import normalizers

from paceline.data.tokenizer import PATTERN, Tokenizer, byte_characters

# Patterns as their authors wrote them: those that never go back (`\p{L}++`) are a quarter slower in tiktoken 0.14.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut off first, so to the rest a digit is the end of the text. `tokenizers` asks Rust itself what a digit
# is, which is of Unicode 17 and knows 13 more than the regular expressions, of Unicode 16.
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
"""What cuts alike in both libraries: paceline's own; Llama 3's and cl100k_base's; Qwen's since 2; o200k_base's."""
_WHOLE = r"(?s).+"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_ALPHABET = frozenset(byte_characters())
_BYTE_OF = {ord(character): byte for character, byte in byte_characters().items()}
_NEVER = "\U0010ffff\U0010fffe"  # two code points that Unicode promises never to assign
_MAX_PLAIN = 64


class Encoder:
    """Text to ids, always those of `tokenizer.encode`.

    `library` is what does it: bytes, tiktoken or tokenizers; where the last, `reason` says why nothing faster may.
    Finding out takes a second; `Encoder(tokenizer, library)` takes the word of an encoder that did.
    """

    def __init__(self, tokenizer: Tokenizer, library: str = "") -> None:
        description = tokenizer.description()
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._plain = _plain_tokens(description)
        self._normalizer = normalizers.NFC() if description["normalizer"] else None
        self.reason = "" if library else _reason_against(description)
        found = "tokenizers" if self.reason else "tiktoken" if description["model"]["merges"] else "bytes"
        self.library = library or found
        if self.library == "bytes":
            ranks = _ranks(description["model"])
            self._of_byte = np.array([ranks[bytes([byte])] for byte in range(256)], dtype=self._dtype)
        if self.library == "tiktoken":
            self._fast = _tiktoken(description)
        if not library and self.library == "tiktoken" and not cuts_alike(description, _codes()):
            self.library, self.reason = "tokenizers", "tiktoken, as installed here, takes other characters for letters"

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Returns the ids of text, (tokens,): uint16 where the whole vocabulary fits, else uint32.

        Raises UserError for a character that a vocabulary of characters lacks.
        """
        if self.library == "bytes":
            return self._of_byte[np.frombuffer(text.encode(), dtype=np.uint8)]
        fast = self._encode_fast(text) if self.library == "tiktoken" else None
        if fast is None:
            (ids,) = self._tokenizer.encode_batch([text])
            return np.array(ids, dtype=self._dtype)
        return fast

    def _encode_fast(self, text: str) -> npt.NDArray[Any] | None:
        """The ids by `tiktoken`; None for a text that is not for it."""
        if any(token in text for token in self._plain):
            return None
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text)
            if any(token in text for token in self._plain):
                return None
        try:
            return self._fast.encode_to_numpy(text, disallowed_special=()).astype(self._dtype)
        except ValueError:  # the pattern's engine keeps a stack, and a run of a million spaces is too much for it
            return None


def cuts_alike(description: Mapping[str, Any], codes: Iterable[int]) -> bool:
    """Whether both libraries, as installed, cut a text apart at the same places around each of these code points.

    A cut shows where a merge would cross it: a vocabulary is made in which a letter, a digit, a space, a line end and a
    sign each merge with any byte before or after.
    """
    character_of = {byte: character for character, byte in byte_characters().items()}
    around = [character_of[ord(one)] for one in "a1 \n."]
    pairs = [(one, byte) for one in around for byte in _ALPHABET - {*around}]
    merges = sorted([*pairs, *((byte, one) for one, byte in pairs)])
    vocabulary = [*sorted(_ALPHABET), *(left + right for left, right in merges)]
    model = {**description["model"], "vocab": {token: i for i, token in enumerate(vocabulary)}, "merges": merges}
    probe = {**description, "model": model, "added_tokens": [], "post_processor": None}
    encoder = Encoder(Tokenizer(json.dumps(probe)), "tiktoken")
    text = "".join(f"a{c}1{c} {c}\n{c}.{c}" for c in map(chr, codes))
    fast = encoder._encode_fast(text)
    return fast is not None and np.array_equal(fast, next(encoder._tokenizer.encode_batch([text])))


def _codes() -> Iterator[int]:
    """Code points enough to tell one version of Unicode from another: a version brings whole alphabets."""
    yield from range(0x3400)
    yield from range(0x3400, 0xD800, 64)  # Chinese and Korean
    yield from range(0xE000, 0x20000, 8)
    yield from range(0x20000, 0x110000, 512)


def _reason_against(description: dict[str, Any]) -> str:
    """Why ids of a faster library could differ, as far as the file tells; empty where they can not."""
    model, plain, normalizer = description["model"], _plain_tokens(description), description["normalizer"]
    if model["type"] != "BPE":
        return "it is not made of merges"
    for quirk in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[quirk]:
            return f"it has a {quirk}"
    if _pattern(description["pre_tokenizer"]) is None:
        return "it cuts text in a way that is not among those known to be the same"
    if normalizer not in (None, {"type": "NFC"}):
        return "it changes text before it cuts it"
    if len(plain) > _MAX_PLAIN:
        return f"it has {len(plain)} added tokens that are not special, and each would be looked for in every text"
    if not model["merges"]:
        only_bytes = not (normalizer or plain or model["ignore_merges"])
        return "" if only_bytes else "it has neither merges nor bytes only"
    return _merges_differ(model)


def _merges_differ(model: dict[str, Any]) -> str:
    """Why merging by the list and merging by ids could differ: where 1 or 2 above fails; empty where nothing does."""
    ranks = _ranks(model)
    listed: dict[bytes, list[tuple[int, bytes]]] = {}  # of a token: places in the list, each with the left half
    for place, (left, right) in enumerate(_merges(model)):
        listed.setdefault(left + right, []).append((place, left))
    if len(set(ranks.values())) < len(ranks):
        return "two of its tokens have one id"
    reached = -1
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        if token not in listed:  # is there to be looked up
            if any(token[:i] in ranks and token[i:] in ranks for i in range(1, len(token))):
                return f"the token {token!r} is made by no merge, though two others make it"
            continue
        if listed[token][0][0] <= reached:
            return f"its merges are not in the order of its ids at {token!r}"
        reached = listed[token][-1][0]
        halves = _halves(token, ranks)
        if len(halves) != 2 or halves[0] not in [left for _, left in listed[token]]:
            return f"no merge of {token!r} is the one that lower ids lead to"
    return ""


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What the bytes of a token come to, merged lowest id first to tokens of lower ids than its own."""
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


def _tiktoken(description: dict[str, Any]) -> tiktoken.Encoding:
    """The tokenizer as tiktoken has it, without special tokens: what is written in a text is text."""
    return tiktoken.Encoding(
        "paceline",
        pat_str=_pattern(description["pre_tokenizer"]) or "",
        mergeable_ranks=_ranks(description["model"]),
        special_tokens={_NEVER: 0},  # with none at all it looks for the empty one, at every character
    )


def _pattern(pre_tokenizer: Any) -> str | None:
    """The pattern that cuts text for tiktoken as this does for `tokenizers`; None where it is not known."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    *before, last = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    if last == {**_BYTE_LEVEL, "use_regex": True}:
        if not before:
            return _GPT2
        return _GPT2_SINGLE_DIGITS if before == [{"type": "Digits", "individual_digits": True}] else None
    if last != {**_BYTE_LEVEL, "use_regex": False}:
        return None
    if not before:
        return _WHOLE
    pattern = before[0].get("pattern", {}).get("Regex", "")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return pattern if pattern in PATTERNS and before == [split] else None


def _ranks(model: dict[str, Any]) -> dict[bytes, int]:
    """The ids of what merging can come to: bytes, what merges make, and what is looked up as a whole."""
    made = {left + right for left, right in _merges(model)}
    # A special token in the vocabulary may have characters that no byte is written as: no text comes to it.
    ids = {_bytes(token): i for token, i in model["vocab"].items() if _ALPHABET.issuperset(token)}
    return {token: i for token, i in ids.items() if len(token) == 1 or model["ignore_merges"] or token in made}


def _merges(model: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    for left, right in model["merges"]:
        yield _bytes(left), _bytes(right)


def _bytes(token: str) -> bytes:
    return token.translate(_BYTE_OF).encode("latin-1")


def _plain_tokens(description: dict[str, Any]) -> list[str]:
    """Tokens beside the vocabulary that are found in text, because they are not special."""
    return [added["content"] for added in description["added_tokens"] if not added["special"]]
