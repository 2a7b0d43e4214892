"""The key of a sequence's dropout: of the run's seed and of the sequence's position in the run, and of nothing else."""

import torch

from paceline.data.loader import MicroBatch
from paceline.train.data import dropout_keys


def keys(seed: int, *positions: int) -> list[int]:
    tokens = torch.zeros(len(positions), 4, dtype=torch.int64)
    found = dropout_keys(0.1, MicroBatch(tokens, tokens, torch.tensor(positions), None), seed)
    assert found is not None
    return found.tolist()


def test_a_sequence_has_the_same_key_in_every_micro_batch() -> None:
    assert keys(1, 5, 6, 7) == keys(1, 5) + keys(1, 6, 7)


def test_other_seeds_and_positions_give_other_keys() -> None:
    found = [key for seed in range(50) for key in keys(seed, *range(50), (1 << 40) - 1)]
    assert len(set(found)) == len(found)
    assert all(0 <= key < 1 << 63 for key in found)


def test_without_dropout_there_is_none() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert dropout_keys(0.0, MicroBatch(tokens, tokens, torch.tensor([1]), None), 1) is None
