"""The data of a run, and functions on micro-batches of a language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.base import seeds
from paceline.base.cache import cache_dir
from paceline.config import Config
from paceline.data.cache import ensure_datasets
from paceline.data.config import Report
from paceline.data.dataset import tokenizer_json_of
from paceline.data.loader import Loader, MicroBatch
from paceline.data.mixture import Blend, Sequences
from paceline.data.packing import PackedRows
from paceline.data.plan import cut
from paceline.train.initial import require_same_tokenizer
from paceline.world.cores import usable_cores


@dataclass(frozen=True)
class TrainingData:
    """The training and the validation sequences of a run."""

    blend: Blend
    training: Sequences
    validation: Sequences

    @property
    def cropped_frac(self) -> float | None:
        """The share of training tokens that packing crops, of the data set with the highest; None for windows."""
        return max((part.cropped_frac for part in self.training.sources if isinstance(part, PackedRows)), default=None)


def open_data(config: Config, report: Report, *, checks: bool = True, is_new: bool = True) -> TrainingData:
    """Returns the data; first prepares text, which may take a while. All processes of a host may call it at once, and
    one of them checks the files. is_new: the run begins, so train.init-from is looked at.
    Raises UserError if data is missing, damaged, of another vocabulary, or shorter than one sequence."""
    data = config.data
    folders = ensure_datasets(data, report, usable_cores())
    source = Path(config.train.init_from)
    if is_new and config.train.init_from and source.exists():  # rank 0's host has it
        for (path, _), folder in zip(data.parts, folders, strict=True):
            require_same_tokenizer(source, tokenizer_json_of(folder), path)
    weights = [weight for _, weight in data.parts]
    blend = Blend.open(
        list(zip(folders, weights, strict=True)), config.model.vocab_size, data.document_token, checks=checks
    )
    training = blend.training(data.seq_len, packing=data.packing, mask_documents=data.mask_documents, cache=cache_dir())
    return TrainingData(blend, training, blend.validation(data.seq_len, mask_documents=data.mask_documents))


def dropout_keys(probability: float, micro_batch: MicroBatch, seed: int) -> torch.Tensor | None:
    """Returns (batch,) int64: a dropout key for each sequence, from the run's seed and the sequence's position in the
    run, so that masks do not depend on the rank; None without dropout."""
    if probability == 0.0:
        return None
    return micro_batch.positions + (seeds.key(seed, "dropout") >> 8)  # leaves room for positions: keys stay in 63 bits


def layered(micro_batches: Sequence[MicroBatch], most: int) -> list[tuple[MicroBatch, list[int]]]:
    """Joins consecutive micro-batches to as few batches of at most `most` of them as possible, of nearly equal numbers.
    Returns each with the sizes of its micro-batches, as GPT.forward takes them."""
    groups = [micro_batches[part.start : part.stop] for part in cut(0, len(micro_batches), most)]
    return [(MicroBatch.joined(group), [len(each.tokens) for each in group]) for group in groups]


def dummy_micro_batch(loader: Loader) -> tuple[MicroBatch, list[int]]:
    """Returns one sequence with weight 0: FSDP needs equally many forward passes on all ranks."""
    tokens = torch.zeros(1, loader.seq_len, dtype=torch.int64, device=loader.device)
    return MicroBatch(tokens, tokens, tokens[:, 0], torch.zeros(1, loader.seq_len, dtype=torch.int32)), [1]
