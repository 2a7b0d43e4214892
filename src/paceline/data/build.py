"""Writes encoded blocks into the shards of both splits, and records progress.

A part is the blocks that fill a shard. When its shards are on the disk, `progress.json` is replaced; it has the part's
end in the sources. A restarted preparation resumes there and removes any files of the next part. Parts depend on the
blocks alone, so an interruption does not change the result.
"""

import itertools
import json
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from paceline.base.files import replace as replace_file
from paceline.base.files import sync
from paceline.data.blocks import Block, Place
from paceline.data.shard import SPLITS, ShardRecord, SplitRecord, SplitWriter
from paceline.data.workers import DIGEST_BYTES, Encoded, joined

PROGRESS = "progress.json"
_NUM_PLACES = 5  # of skipped records, to look at


@dataclass
class Counts:
    text_bytes: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    duplicates: int = 0
    empty: int = 0  # documents without text
    replaced: int = 0  # places that were not UTF-8
    skipped: dict[str, int] = field(default_factory=dict)  # records that could not be read, by source
    skipped_places: list[str] = field(default_factory=list)  # of the first few, with the reason


class Builder:
    """Writes encoded blocks, in order, from `place` on."""

    def __init__(
        self, folder: Path, work: Path, *, vocab_size: int, tokenizer_sha256: str, shard_tokens: int, dedup: bool
    ) -> None:
        """folder: gets the shards. work: temporary files, perhaps of an earlier attempt."""
        self._folder, self._work, self._shard_tokens = folder, work, shard_tokens
        state: dict[str, Any] = {"parts": 0, "place": {}, "side": 0, "counts": {}, "shards": {}}
        if (work / PROGRESS).exists():
            state = json.loads((work / PROGRESS).read_bytes())
        self.place, self.counts = Place(**state["place"]), Counts(**state["counts"])
        self._num_parts: int = state["parts"]
        self._side: int = state["side"]  # of the last document, which may continue
        self._writers = [
            SplitWriter(
                folder,
                split,
                vocab_size=vocab_size,
                tokenizer_sha256=tokenizer_sha256,
                shard_tokens=shard_tokens,
                done=[ShardRecord(**record) for record in state["shards"].get(split, [])],
            )
            for split in SPLITS
        ]
        self._seen = _Seen([work / _digests(part) for part in range(self._num_parts)]) if dedup else None

    @property
    def num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self._writers)

    def take(self, block: Block, encoded: Encoded) -> None:
        in_shard = max(writer.in_shard for writer in self._writers)
        is_full = in_shard > 0 and in_shard + encoded.ids.size > self._shard_tokens
        if is_full and not (self._seen and self._seen.is_holding):
            self._finish_part()
        self.counts.empty += encoded.num_empty
        self.counts.replaced += encoded.num_replaced
        for source, why in encoded.skipped:
            self.counts.skipped[source] = self.counts.skipped.get(source, 0) + 1
            self.counts.skipped_places = [*self.counts.skipped_places, why][:_NUM_PLACES]
        if self._seen:
            encoded, num_duplicates = self._seen.new(encoded)
            self.counts.duplicates += num_duplicates
        self._write(encoded)
        self.place = block.next

    def finish(self) -> dict[str, SplitRecord]:
        sizes = zip(self._writers, self.counts.text_bytes, strict=True)
        return {writer.split: writer.finish(size) for writer, size in sizes}

    def close(self) -> None:
        """Closes all files; the unfinished part is lost."""
        for writer in self._writers:
            writer.abandon()

    def _finish_part(self) -> None:
        for writer in self._writers:
            writer.close_shard()
        if self._seen:
            replace_file(self._work / _digests(self._num_parts), b"".join(self._seen.added))
            self._seen.added.clear()
        self._num_parts += 1
        state = {
            "parts": self._num_parts,
            "place": asdict(self.place),
            "side": self._side,
            "counts": asdict(self.counts),
            "shards": {writer.split: [asdict(record) for record in writer.done] for writer in self._writers},
        }
        sync(self._folder)
        replace_file(self._work / PROGRESS, json.dumps(state).encode())
        sync(self._work)

    def _write(self, encoded: Encoded) -> None:
        sides = encoded.sides
        if not sides.size:
            return
        if sides.min() < 0:  # continues the last document, so it stays on its side
            last = np.maximum.accumulate(np.where(sides >= 0, np.arange(sides.size), -1))
            sides = np.where(last >= 0, sides[last], self._side)
        self._side = int(sides[-1])
        for number, writer in enumerate(self._writers):
            chosen = sides == number
            num_tokens, begins = encoded.num_tokens[chosen], encoded.sides[chosen] >= 0
            ids = encoded.ids if chosen.all() else encoded.ids[np.repeat(chosen, encoded.num_tokens)]
            writer.append(ids, (np.cumsum(num_tokens) - num_tokens)[begins])
            self.counts.text_bytes[number] += int(encoded.num_bytes[chosen].sum())


def _digests(part: int) -> str:
    return f"digests-{part:05d}.bin"


class _Seen:
    """Finds duplicate documents; needs about 100 bytes of memory each. A document that continues in the next block is
    held in memory completely, as it may be a duplicate."""

    def __init__(self, files: list[Path]) -> None:
        stored = b"".join(file.read_bytes() for file in files)
        self._digests = {stored[i : i + DIGEST_BYTES] for i in range(0, len(stored), DIGEST_BYTES)}
        self.added: list[bytes] = []
        self._held: list[Encoded] = []

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def new(self, encoded: Encoded) -> tuple[Encoded, int]:
        """Returns the new documents that have ended, and the number of duplicates."""
        if self._held and not encoded.is_complete and not (encoded.sides >= 0).any():
            self._held.append(encoded)  # in the middle of the held document
            return encoded.part(0, 0), 0
        complete = joined([*self._held, encoded])
        begins = np.flatnonzero(complete.sides >= 0).tolist()
        self._held = []
        if not complete.is_complete:
            self._held = [complete.part(begins[-1], complete.sides.size)]
            complete = complete.part(0, begins.pop())
        kept = np.zeros(complete.sides.size, dtype=np.bool_)
        num_duplicates = 0
        for first, last in itertools.pairwise([*begins, kept.size]):
            digest = blake2b(b"".join(complete.digests[first:last]), digest_size=DIGEST_BYTES).digest()
            kept[first:last] = digest not in self._digests
            num_duplicates += digest in self._digests
            if digest not in self._digests:
                self._digests.add(digest)
                self.added.append(digest)
        ids = complete.ids[np.repeat(kept, complete.num_tokens)]
        return Encoded(ids, complete.num_tokens[kept], complete.num_bytes[kept], complete.sides[kept]), num_duplicates
