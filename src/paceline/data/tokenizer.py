"""Byte-level BPE over a `tokenizer.json` (the `tokenizers` library's format): trained here, or anybody's."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.base.errors import UserError

END_OF_TEXT = "<|endoftext|>"

# How text is cut before merges are learnt; no merge crosses a cut. It follows GPT-4's pattern (tiktoken, cl100k_base)
# with one change for source code: a line's end and the next line's indentation are one piece, together with the signs
# before them, so `):\n        ` can be one token. On the standard library at 4096 tokens that gives 3.7 bytes a token
# where GPT-4's own pattern gives 3.5. Every character matches some branch, so the pieces are the text.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with the one space or sign before it: ` def`, `.path`, `_name`
    r"|\p{N}{1,3}"  # numbers three digits at a time
    r"| ?[^\s\p{L}\p{N}]+(?:\n[ \t]*)*"  # signs, with the line ends and indentation that follow
    r"|\s*\n[ \t]*"  # line ends, blank lines, indentation
    r"|\s+(?!\S)"  # spaces up to the last, which goes with the word that follows
    r"|\s+"
)
SETTINGS = f"byte-level BPE 1; {END_OF_TEXT} is id 0; {PATTERN}"
"""Everything but the vocabulary's size that training depends on; part of the name of a cached data set."""


def train(texts: Iterable[str], vocab_size: int) -> str:
    """Returns the `tokenizer.json` of a BPE trained on texts, with at most `vocab_size` tokens (fewer on little text).

    Depends on the texts and their order only, not on threads or hash seeds: the trainer breaks ties by token id.
    """
    model = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so nothing is ever unknown
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model.to_str(pretty=True)


class Tokenizer:
    """Text to ids and back. Text is only ever text: `<|endoftext|>` written in a document does not become the token."""

    def __init__(self, json: str) -> None:
        """`json` is the content of a tokenizer.json. Raises UserError where it is none or lacks `<|endoftext|>`."""
        try:
            self._model = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"this is not a tokenizer.json that `tokenizers` can read: {error}") from error
        end_of_text = self._model.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise UserError(f"the tokenizer has no {END_OF_TEXT} token, which begins every document")
        if not isinstance(self._model.decoder, decoders.ByteLevel):
            raise UserError(
                "the tokenizer is not byte-level (GPT-2's and Llama 3's are): bytes per token are not known"
            )
        # Left off, a document that merely quotes the token's name would be cut in two, and a prompt could inject it.
        self._model.encode_special_tokens = True
        self.end_of_text: int = end_of_text
        self.vocab_size: int = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.sha256: str = hashlib.sha256(json.encode()).hexdigest()

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Raises UserError, naming the file, where it can not be read or understood."""
        try:
            return cls(Path(path).read_bytes().decode())
        except (OSError, UnicodeDecodeError, UserError) as error:
            raise UserError(f"{path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of text, without `<|endoftext|>` before or after."""
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The ids of each text, on all cores (RAYON_NUM_THREADS bounds them)."""
        for encoding in self._model.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, bytes that are not UTF-8 (a character cut short) become U+FFFD."""
        return str(self._model.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        """(vocab_size,) bytes of text that each id stands for; 0 for special tokens. Bits per byte are made with it."""
        lengths = np.zeros(self.vocab_size, dtype=np.uint16)
        added = self._model.get_added_tokens_decoder()
        for token, i in self._model.get_vocab(with_added_tokens=True).items():
            if i not in added:
                lengths[i] = len(token)  # the byte-level alphabet writes each byte as one character
            elif not added[i].special:
                lengths[i] = len(token.encode())
        return lengths
