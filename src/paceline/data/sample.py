"""The tokenizer of a preparation, trained on a sample that reads only what it takes."""

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import replace
from paceline.data.config import Recipe, Report
from paceline.data.documents import Range, can_be_cut, read, whole
from paceline.data.shard import TOKEN_BYTES
from paceline.data.sources import SourceFile, Sources, require_unchanged
from paceline.data.tokenizer import FILE, Tokenizer, resolve

SAMPLE_BYTES = 64 << 20  # of text, enough to learn merges; less is read completely
_READ_TOGETHER_BYTES = 1 << 20


def make_tokenizer(sources: Sources, recipe: Recipe, folder: Path, report: Report) -> Tokenizer:
    """Returns the recipe's tokenizer, and writes its files into the folder. Raises UserError if it cannot be made, or
    has no token that begins a document."""

    def characters() -> Iterator[str]:  # also of the validation split: one that is missing could not be encoded
        for file in sources.files:
            for document in read(whole(file), recipe, []):
                yield from document.slices
        require_unchanged(sources.files)

    def sample() -> Iterator[str]:
        report.say(f"data: training a tokenizer, {recipe.tokenizer.removeprefix('train:')} tokens, on {sources.name}")
        num_characters = 0
        for text in sampled(sources.files, recipe):
            num_characters += len(text)
            yield text
        require_unchanged(sources.files)  # a resume takes this tokenizer, whatever the files are by then
        report.say(f"data: {units.count(num_characters)} characters are read for the tokenizer; it learns its merges")

    texts = characters if recipe.tokenizer == "chars" else sample
    tokenizer = resolve(recipe.tokenizer, texts, recipe.document_token)
    if tokenizer.end_of_text is None:
        raise UserError(f"--tokenizer {recipe.tokenizer} has no token that begins a document; give --document-token")
    replace(folder / FILE, tokenizer.json.encode())
    lengths = io.BytesIO()
    np.save(lengths, tokenizer.token_bytes(), allow_pickle=False)
    replace(folder / TOKEN_BYTES, lengths.getvalue())
    return tokenizer


def sampled(files: Sequence[SourceFile], recipe: Recipe) -> Iterator[str]:
    """Yields text to learn merges from: all of it, or about SAMPLE_BYTES from everywhere in the training files."""
    files = [file for file in files if file.split != "validation"]
    step = max(1, math.ceil(sum(file.num_bytes for file in files) / SAMPLE_BYTES))
    taken = 0
    for part, most in [(whole(file), math.inf) for file in files] if step == 1 else _spread(files, recipe, step):
        read_here = 0
        for document in read(part, recipe, []):
            yield from document.slices
            read_here += sum(map(len, document.slices))
            if read_here >= most or taken + read_here > SAMPLE_BYTES:
                break
        taken += read_here
        if taken > SAMPLE_BYTES:
            return


def _spread(files: Sequence[SourceFile], recipe: Recipe, step: int) -> Iterator[tuple[Range, float]]:
    """Yields every step-th MiB of the files, and how much to read of it. Of a file that cannot be read from the middle,
    its beginning."""
    number = 0
    for file in files:
        if file.format == "parquet" or not can_be_cut(file, recipe):
            yield whole(file), max(_READ_TOGETHER_BYTES, file.num_bytes // step)
            continue
        end = file.start + file.num_bytes
        for start in range(file.start, end, _READ_TOGETHER_BYTES):
            if number % step == 0:
                yield Range(file, start, min(start + _READ_TOGETHER_BYTES, end)), math.inf
            number += 1
