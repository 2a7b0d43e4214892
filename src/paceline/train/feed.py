"""The data of a run: made where it is missing, opened, cut into sequences. Before ranks meet: it may take a while."""

from dataclasses import dataclass

from paceline.config import Config
from paceline.data.blend import Blend
from paceline.data.cache import cache_dir, ensure_datasets
from paceline.data.prepare import Report
from paceline.data.sequences import PackedRows, Sequences
from paceline.world.cores import usable_cores


@dataclass(frozen=True)
class Feed:
    """What a run trains on and what it is evaluated on."""

    blend: Blend
    training: Sequences
    validation: Sequences

    @property
    def cropped_frac(self) -> float | None:
        """The share of training tokens that packing crops, the most of any data set; None for windows."""
        found = [part.cropped_frac for part in self.training.parts if isinstance(part, PackedRows)]
        return max(found, default=None)


def open_feed(config: Config, report: Report) -> Feed:
    """Returns the data, prepared first where it is text; any number of processes of a host may ask at once.

    Raises UserError for data that is missing, damaged, of another vocabulary, or too little for one sequence.
    """
    data = config.data
    folders = ensure_datasets(data, report, usable_cores())
    weights = [weight for _, weight in data.parts]
    blend = Blend.open(list(zip(folders, weights, strict=True)), config.model.vocab_size)
    training = blend.training(data.seq_len, packing=data.packing, mask_documents=data.mask_documents, cache=cache_dir())
    return Feed(blend, training, blend.validation(data.seq_len, mask_documents=data.mask_documents))
