"""Tokens into the shards of both splits, and where that work is: what a killed preparation goes on from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.dedup import Seen, digest_of_pieces
from paceline.data.shard import SPLITS, UNWRITTEN, SplitRecord, SplitWriter
from paceline.data.workers import Encoded

Bools = npt.NDArray[np.bool_]


@dataclass
class Counts:
    """What was met on the way, for people."""

    train_bytes: int = 0
    validation_bytes: int = 0
    duplicates: int = 0
    empty: int = 0  # documents without text
    replaced: int = 0  # places that were not UTF-8


class Builder:
    """Takes encoded blocks in order and writes them; `save` and a new Builder with what it said go on from there."""

    def __init__(
        self,
        folder: Path,
        work: Path,
        *,
        vocab_size: int,
        tokenizer_sha256: str,
        shard_tokens: int,
        dedup: bool,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """`folder` gets the shards; `work` holds what is needed only until all is done."""
        # A preparation killed before it saved anything may have left shards: a writer removes what it was not told of.
        saved = saved or {"splits": dict.fromkeys(SPLITS, UNWRITTEN), "counts": {}, "side": 0, "seen": 0}

        def writer(split: str, state: Mapping[str, Any]) -> SplitWriter:
            return SplitWriter(
                folder,
                split,
                vocab_size=vocab_size,
                tokenizer_sha256=tokenizer_sha256,
                shard_tokens=shard_tokens,
                saved=state,
            )

        self._make_writer = writer
        self._writers = {split: writer(split, saved["splits"][split]) for split in SPLITS}
        self.counts = Counts(**saved["counts"])
        self._side: int = saved["side"]  # of the last document, which may go on
        self._seen = Seen(work / "seen.bin", saved["seen"]) if dedup else None
        self._open: list[bytes] = []  # digests of the pieces of a document whose end is not known
        self._before_open: tuple[dict[str, Any], dict[str, int]] | None = None

    @property
    def num_tokens(self) -> int:
        """Of both splits so far."""
        return sum(writer.num_tokens for writer in self._writers.values())

    @property
    def can_save(self) -> bool:
        """Not in the middle of a document that may turn out to be a duplicate."""
        return self._before_open is None

    def save(self) -> dict[str, Any]:
        """Returns where the work is; everything it counts on is on the disk by then."""
        return {
            "splits": {split: writer.save() for split, writer in self._writers.items()},
            "counts": asdict(self.counts),
            "side": self._side,
            "seen": self._seen.save() if self._seen else 0,
        }

    def take(self, encoded: Encoded) -> None:
        """Writes a block's documents, each to its split, in order."""
        self.counts.empty += encoded.num_empty
        self.counts.replaced += encoded.num_replaced
        if not encoded.begins.size:
            return
        if self._seen is None:
            self._write(encoded)
            return
        kept = self._drop_duplicates(encoded, self._seen)
        if encoded.ends[-1] or not encoded.begins.any():
            self._write(encoded, kept)
            return
        cut = int(np.flatnonzero(encoded.begins)[-1])  # of a document that the block does not end
        self._write(encoded.part(0, cut), kept[:cut])
        self._before_open = {split: writer.save() for split, writer in self._writers.items()}, asdict(self.counts)
        self._write(encoded.part(cut, encoded.ends.size))

    def finish(self) -> dict[str, SplitRecord]:
        """Closes the shards and returns what the index is to say of each split."""
        sizes = {"train": self.counts.train_bytes, "validation": self.counts.validation_bytes}
        return {split: writer.finish(sizes[split]) for split, writer in self._writers.items()}

    def close(self) -> None:
        """Lets go of all files; what was not saved is as if it had not been."""
        for writer in self._writers.values():
            writer.abandon()
        if self._seen is not None:
            self._seen.close()

    def _drop_duplicates(self, encoded: Encoded, seen: Seen) -> Bools:
        """Returns which parts to keep, and takes back what earlier blocks had of a document seen before."""
        kept = np.ones(encoded.begins.size, dtype=np.bool_)
        first = 0
        for i, (begins, ends) in enumerate(zip(encoded.begins.tolist(), encoded.ends.tolist(), strict=True)):
            if begins:
                first, self._open, self._before_open = i, [], None
            self._open.append(encoded.digests[i])
            if not ends:
                continue
            if not seen.add(self._open[0] if len(self._open) == 1 else digest_of_pieces(self._open)):
                self.counts.duplicates += 1
                kept[first : i + 1] = False
                self._take_back()
            self._open, self._before_open = [], None
        return kept

    def _take_back(self) -> None:
        if self._before_open is None:
            return  # the document began in this block: nothing of it is written
        states, counts = self._before_open
        for split, state in states.items():
            self._writers[split].abandon()
            self._writers[split] = self._make_writer(split, state)
        self.counts.train_bytes, self.counts.validation_bytes = counts["train_bytes"], counts["validation_bytes"]

    def _write(self, encoded: Encoded, kept: Bools | None = None) -> None:
        sides = encoded.sides
        if not sides.size:
            return
        if sides.min() < 0:  # a part that goes on with a document is on the document's side
            last = np.maximum.accumulate(np.where(sides >= 0, np.arange(sides.size), -1))
            sides = np.where(last >= 0, sides[last], self._side)
        self._side = int(sides[-1])
        for number, split in enumerate(SPLITS):
            chosen = sides == number if kept is None else (sides == number) & kept
            num_tokens, begins = encoded.num_tokens[chosen], encoded.begins[chosen]
            ids = encoded.ids if chosen.all() else encoded.ids[np.repeat(chosen, encoded.num_tokens)]
            self._writers[split].append(ids, (np.cumsum(num_tokens) - num_tokens)[begins])
            size = int(encoded.num_bytes[chosen].sum())
            if split == "train":
                self.counts.train_bytes += size
            else:
                self.counts.validation_bytes += size
