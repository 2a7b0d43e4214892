"""One rank of a host looks at the data; the others take its fingerprint, and compare what needs no reading."""

import os
from os import preadv
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from ranks import Call, run_calls

from paceline.base.errors import UserError
from paceline.config import Config
from paceline.data.mixture import Blend
from paceline.train.meet import require_alike
from paceline.world.runtime import World

VOCAB_SIZE = 100


def tokens(folder: Path, first: int, num_tokens: int = 50) -> Path:
    """llm.c's shards."""
    folder.mkdir()
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, num_tokens
    ids = (np.arange(num_tokens) + first) % VOCAB_SIZE
    for name in ("a_train_0.bin", "a_train_1.bin", "a_val_0.bin"):
        (folder / name).write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    return folder


def compared(world: World, folders: list[Path]) -> tuple[str, int]:
    """Returns the fingerprint that this rank has then, and how often it has read from shards for it."""
    blend = Blend.open([(folders[world.rank], 1.0)], VOCAB_SIZE, checks=world.rank == 0)
    num_read = []
    with patch.object(os, "preadv", lambda *arguments: num_read.append(1) or preadv(*arguments)):
        require_alike(world.group, Config(), blend)
        return blend.fingerprint, len(num_read)


def refused(world: World, folders: list[Path]) -> str:
    with pytest.raises(UserError) as error:
        compared(world, folders)
    return str(error.value)


def test_a_rank_that_does_not_check_takes_the_fingerprint_and_reads_nothing(tmp_path: Path) -> None:
    """With 10,000 shards of another program each rank read 2 GB. Mutations: its own fingerprint; nothing compared."""
    one, longer = tokens(tmp_path / "one", 0), tokens(tmp_path / "longer", 0, 51)
    expected = Blend.open([(one, 1.0)], VOCAB_SIZE).fingerprint
    results = run_calls({"alike": Call(compared, [one, one]), "longer": Call(refused, [one, longer])}, 2)
    assert results["alike"] == [(expected, 0)] * 2
    assert len(set(results["longer"])) == 1
    assert results["longer"][0].count(" on rank ") == 2
    assert Blend.open([(one, 1.0)], VOCAB_SIZE, checks=False).fingerprint == expected
