"""What the user says about data. Standard library only, so that `--help` starts without numpy or torch."""

from dataclasses import dataclass

from paceline.base.errors import UserError

MIN_VOCAB = 257  # 256 byte values and <|endoftext|>: below this some text could not be written at all
MAX_VOCAB = 1 << 20  # far above any vocabulary in use (GPT-4o: 200k); a larger number is a slip of the keyboard


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from and how long a sequence is."""

    path: str = ""
    """A prepared folder (index.json), a folder of text files, or one text file; empty: the embedded corpus, which is
    the Python standard library's own sources."""

    tokenizer_vocab: int = 4096
    """Vocabulary of the byte-pair encoding that is trained when text has to be tokenized."""

    seq_len: int = 256
    """Tokens in a sequence."""

    def check(self) -> None:
        """Raises UserError for a value that can not work, naming the field as it is typed on the command line."""
        if self.seq_len < 1:
            raise UserError(f"data.seq-len is {self.seq_len}; a sequence has at least 1 token")
        if not MIN_VOCAB <= self.tokenizer_vocab <= MAX_VOCAB:
            raise UserError(
                f"data.tokenizer-vocab is {self.tokenizer_vocab}; a byte-level vocabulary has {MIN_VOCAB} "
                f"(256 bytes and <|endoftext|>) to {MAX_VOCAB} tokens"
            )
        if "\0" in self.path:
            raise UserError(f"data.path is {self.path!r}; a path has no NUL in it")
