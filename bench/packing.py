"""T=2048, batch 8, documents as long as FineWeb's: best-fit rows a second and what they crop, against nanochat's.

nanochat's own loader is imported from a checkout (`--checkout`; its modules need `requests`). Its tokenizer is replaced
by one that hands out the documents' ids, and its files by lists in memory, so what is timed is packing alone. paceline
has the same documents in a shard and is timed with everything a run does: packing them anew, saving that, then reading
all rows of an epoch in their random order. Both end with int64 tensors (batch, T) of inputs and of targets, and run in
turn, so that a machine whose speed drifts is fair to both.

Cropped are the tokens that are in no row. nanochat is given the documents twice, and the second time counts: its buffer
of 1,000 must fill first, and does so with the longest documents, which it takes last. What cannot be avoided is what
documents longer than a row lose.
"""

import argparse
import importlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from side import show, show_header

from paceline.data.blend import Blend
from paceline.data.loader import Loader
from paceline.data.packing import pack
from paceline.data.plan import BatchPlan
from paceline.data.shard import Index, SplitWriter, TokenizerRecord, write_index
from paceline.data.tokenizer import bytes_tokenizer

BATCH, SEQ_LEN, ENCODED_AT_ONCE = 8, 2048, 128
Document = npt.NDArray[np.int64]


def web_documents(count: int) -> list[Document]:
    """Log-normal lengths of 1,000 tokens on the mean and 550 on the median; ids of bytes after the beginning's 256."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(1, generator.lognormal(np.log(1000) - 1.1**2 / 2, 1.1, count)).astype(np.int64)
    return [np.concatenate([[256], generator.integers(0, 256, length - 1)]) for length in lengths]


class Ids:
    """nanochat's tokenizer, of documents that are lists of ids already."""

    def get_bos_token_id(self) -> int:
        return 256

    def encode(self, documents: list[list[int]], prepend: int, num_threads: int) -> list[list[int]]:
        return documents


class Feed:
    """nanochat's documents, over and over; `given` counts them."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents, self.given = documents, 0

    def __call__(self, *_: Any) -> Iterator[tuple[list[list[int]], tuple[int, int, int]]]:
        for start in itertools.cycle(range(0, len(self.documents), ENCODED_AT_ONCE)):
            batch = self.documents[start : start + ENCODED_AT_ONCE]
            self.given += len(batch)
            yield batch, (0, 0, 1)


def nanochat_side(dataloader: Any, documents: list[list[int]]) -> tuple[float, float]:
    """Returns tokens/s and the share in no row, of the second time that it is given all documents."""
    feed = Feed(documents)
    dataloader._document_batches = feed
    make = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit
    batches = make(Ids(), BATCH, SEQ_LEN, "train", tokenizer_batch_size=ENCODED_AT_ONCE, device="cpu")
    while feed.given < len(documents):
        next(batches)
    count, began = 0, time.perf_counter()
    while feed.given < 2 * len(documents):
        next(batches)
        count += 1
    seconds = time.perf_counter() - began
    num_tokens = sum(len(document) for document in documents)
    return count * BATCH * SEQ_LEN / seconds, 1 - count * BATCH * (SEQ_LEN + 1) / num_tokens


def write_dataset(folder: Path, documents: list[Document]) -> Blend:
    """Returns the documents as a data set; a validation split is asked for, and is the first of them."""
    made = bytes_tokenizer()
    (folder / "tokenizer.json").write_text(made.json)
    splits = {}
    for split, those in (("train", documents), ("validation", documents[:9])):
        writer = SplitWriter(folder, split, vocab_size=made.vocab_size, tokenizer_sha256=made.sha256)
        for document in those:
            writer.append(document, np.zeros(1, dtype=np.int64))
        splits[split] = writer.finish(text_bytes=0)
    record = TokenizerRecord("tokenizer.json", made.sha256, made.vocab_size, 256)
    write_index(folder, Index("web", made.vocab_size, splits, record))
    return Blend.open([(folder, 1.0)])


def paceline_side(blend: Blend) -> tuple[float, float]:
    """Returns tokens/s and the share cropped, over a whole epoch with a packing of its own."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        sequences = blend.training(SEQ_LEN, packing="bestfit", cache=Path(cache))
        loader = Loader(sequences, BatchPlan(BATCH, BATCH, 1), 0, 1337)
        count = sequences.parts[0].num_sequences // BATCH
        for step in range(count):
            loader.micro_batches(step)
        seconds = time.perf_counter() - began
        return count * BATCH * SEQ_LEN / seconds, sequences.parts[0].cropped_frac


def import_dataloader(checkout: Path, scratch: Path) -> Any:
    os.environ["NANOCHAT_BASE_DIR"] = str(scratch)  # its modules make this folder when they are imported
    sys.path.insert(0, str(checkout))
    return importlib.import_module("nanochat.dataloader")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of karpathy/nanochat")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=50_000)
    options = parser.parse_args()
    documents = web_documents(options.documents)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    lists = [document.tolist() for document in documents]  # its ids are small: Python has one object of each
    sides: dict[str, list[tuple[float, float]]] = {"nanochat": [], "paceline": []}
    packs: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        dataloader = import_dataloader(options.checkout, Path(scratch) / "nanochat")
        blend = write_dataset(Path(scratch), documents)
        for _ in range(options.rounds):
            sides["nanochat"].append(nanochat_side(dataloader, lists))
            sides["paceline"].append(paceline_side(blend))
            began = time.perf_counter()
            pack(lengths, SEQ_LEN + 1)
            packs.append(time.perf_counter() - began)
    report(sides, packs, lengths)


def report(sides: dict[str, list[tuple[float, float]]], packs: list[float], lengths: npt.NDArray[np.int64]) -> None:
    show_header()
    for name, found in sides.items():
        show(f"{name}, documents to batches", [rate / 1e6 for rate, _ in found], "million tokens/s")
        show("", [100 * cropped for _, cropped in found], "% of tokens cropped")
    unavoidable = np.maximum(0, lengths - SEQ_LEN - 1).sum() / lengths.sum()
    print(f"{'of these cannot be avoided':<60} {'':10} {100 * unavoidable:10.2f} {'':10}  % of tokens")
    rates = [len(lengths) / seconds / 1e6 for seconds in packs]
    show("paceline, packing without reading", rates, "million documents/s")
    rates = [statistics.median(rate for rate, _ in found) for found in sides.values()]
    print(f"paceline gives {rates[1] / rates[0]:.1f} times nanochat's tokens/s")


if __name__ == "__main__":
    main()
