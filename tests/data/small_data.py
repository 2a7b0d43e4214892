"""Small data sets of real files, for the tests of whatever reads them."""

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow

from paceline.data.order import ids_at
from paceline.data.shard import DTYPES, Index, Shards, SplitRecord, TokenizerRecord, Written, version_for, write_index
from paceline.data.stream import Int64s
from paceline.data.tokenizer import Tokenizer, bytes_tokenizer

Documents = Sequence[Sequence[int]]


def write_split(
    folder: Path, split: str, documents: Documents, *, vocab_size: int, begin: int, sha256: str = "", shard: int = 10**6
) -> SplitRecord:
    """Writes documents, each after the token `begin`, in shards of `shard` tokens."""
    ids = np.array(flat(documents, begin), dtype=DTYPES[version_for(vocab_size)])
    starts = np.cumsum([0, *(1 + len(document) for document in documents)], dtype="<i8")[:-1]
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        (Path(work) / "written").write_bytes(ids.tobytes() + starts.tobytes())
        written = Written(Path(work) / "written", ids.size, starts.size)
        shards = Shards(split, (written,), vocab_size, sha256, shard).write_all(folder, Path(work), 1)
    return SplitRecord(ids.size, 0, len(documents), shards)


def prepare_small(
    folder: Path,
    train: Documents,
    validation: Documents = ((1, 2, 3, 4, 5),),
    *,
    name: str = "small",
    shard: int = 10**6,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """A whole data set, by default of the bytes tokenizer: ids 0..255, a document begins with 256."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer or bytes_tokenizer()
    assert made.end_of_text is not None
    (folder / "tokenizer.json").write_text(made.json)
    np.save(folder / "token_bytes.npy", made.token_bytes())
    splits = {
        split: write_split(
            folder,
            split,
            documents,
            vocab_size=made.vocab_size,
            begin=made.end_of_text,
            sha256=made.sha256,
            shard=shard,
        )
        for split, documents in (("train", train), ("validation", validation))
    }
    record = TokenizerRecord("tokenizer.json", made.sha256, made.vocab_size, made.end_of_text)
    write_index(folder, Index(name, made.vocab_size, splits, record, "token_bytes.npy"))
    return folder


def bytes_of(folder: Path) -> dict[str, str]:
    """The sha256 of each file; an error where there is a folder, as of an unfinished preparation."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def flat(documents: Documents, begin: int = 256) -> list[int]:
    """The stream that documents come to."""
    return [token for document in documents for token in (begin, *document)]


def sequence_ids(seed: int, start: int, count: int, num_sequences: int) -> Int64s:
    """The ids at the positions start..start+count-1."""
    return ids_at(seed, np.arange(start, start + count, dtype=np.int64), num_sequences)


def zstd(content: bytes) -> bytes:
    """One frame."""
    compressed: bytes = pyarrow.compress(content, "zstd", asbytes=True)
    return compressed
