"""A data set's sequences as torch's loaders and `paceline.share` take them: a length, and an item for each number."""

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from paceline.data.stream import Shard, TokenStream


def test_windows_are_a_map_style_data_set(tmp_path: Path) -> None:
    tokens = np.arange(95, dtype=np.uint16)
    (tmp_path / "train.bin").write_bytes(tokens.tobytes())
    windows = TokenStream("train", [Shard.without_header(tmp_path / "train.bin", 100)], 100).windows(8)
    assert len(windows) == (95 - 1) // 8
    for i, (x, y) in enumerate(windows):  # type: ignore[arg-type]  # by __getitem__, until IndexError
        assert x.tolist() == list(range(8 * i, 8 * i + 8))
        assert y.tolist() == list(range(8 * i + 1, 8 * i + 9))
    assert i == len(windows) - 1
    x, y = next(iter(DataLoader(windows, batch_size=3, num_workers=1)))  # read in another process
    assert x.shape == y.shape == (3, 8)
    assert (y - x == 1).all()
    with pytest.raises(IndexError, match="sequence 11 of 11"):
        windows[11]
