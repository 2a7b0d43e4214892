"""The shard format, held against an independent reading of the bytes, and refused where it is not what it says."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import prepare_small

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset
from paceline.data.shard import SplitWriter
from paceline.data.stream import Shard, TokenStream

END = 0


def write(folder: Path, split: str, documents: list[list[int]], vocab_size: int = 50257, **options: Any) -> Any:
    writer = SplitWriter(folder, split, vocab_size=vocab_size, **options)
    for document in documents:
        writer.append(np.array([END, *document]), np.array([0]))
    return writer.finish(text_bytes=0)


@pytest.mark.parametrize(("vocab_size", "version", "code"), [(50257, 1, "<H"), (65536, 1, "<H"), (65537, 2, "<I")])
def test_the_bytes_are_llm_c_s(tmp_path: Path, vocab_size: int, version: int, code: str) -> None:
    record = write(tmp_path, "train", [[5, vocab_size - 1], [], [9]], vocab_size)
    content = (tmp_path / "train-00000.bin").read_bytes()
    assert struct.unpack_from("<3i", content) == (20240520, version, 6)
    assert content[12:1024] == bytes(1012)
    assert [token for (token,) in struct.iter_unpack(code, content[1024:])] == [END, 5, vocab_size - 1, END, END, 9]
    assert np.load(tmp_path / "train-00000.starts.npy").tolist() == [0, 3, 4]
    assert (record.tokens, record.documents) == (6, 3)


def test_a_writer_continues_after_the_shards_that_are_done(tmp_path: Path) -> None:
    options: Any = {"vocab_size": 300, "shard_tokens": 10}
    first = SplitWriter(tmp_path, "train", **options)
    first.append(np.arange(25), np.array([0]))
    done = list(first.done)
    assert (first.num_tokens, [record.tokens for record in done]) == (25, [10, 10])
    first.abandon()
    assert sorted(path.name for path in tmp_path.glob("*.bin"))[-1] == "train-00002.bin"
    second = SplitWriter(tmp_path, "train", done=done, **options)
    assert (second.num_tokens, len([*tmp_path.iterdir()])) == (20, 4)  # what was not closed is removed
    second.append(np.arange(20, 25), np.array([2]))
    record = second.finish(0)
    stream = TokenStream("train", [Shard.open(tmp_path / shard.file) for shard in record.shards], 300)
    assert stream.read(0, 25).tolist() == list(range(25))
    assert np.load(tmp_path / record.shards[2].starts).tolist() == [2]


def test_a_closed_shard_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    write(tmp_path, "train", [[1, 2]])
    assert set(synced) == {str(path) for path in tmp_path.iterdir()}


def test_the_writer_refuses_an_id_outside_the_vocabulary(tmp_path: Path) -> None:
    for ids in ([100], [-1]):
        writer = SplitWriter(tmp_path, "train", vocab_size=100)
        with pytest.raises(ValueError, match="vocabulary of 100"):
            writer.append(np.array(ids), np.array([], dtype=np.int64))


def test_an_unfinished_shard_is_refused(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", vocab_size=100)
    writer.append(np.array([1, 2, 3]), np.array([], dtype=np.int64))
    writer.abandon()
    with pytest.raises(UserError, match="not what its header says"):
        Shard.open(tmp_path / "train-00000.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("splits"), "damaged"),
        (lambda i: i["splits"]["train"].update(tokens=1), "do not add up"),
        (lambda i: i["splits"]["train"]["shards"][0].update(file="../x.bin"), "not the name of a file in the folder"),
        (lambda i: i["splits"]["train"]["shards"][0].pop("sha256"), "damaged"),
        (lambda i: i.update(format="other"), "not the index of a paceline data set"),
        (lambda i: i.update(version=99), "version 99"),
        (lambda i: i.update(tokenizer=5), "damaged"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = prepare_small(tmp_path, [range(1, 60), [7] * 20], shard=32) / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        Dataset.open(tmp_path)


def test_an_index_that_is_no_json_or_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is .* a prepared data set"):
        Dataset.open(tmp_path)
    (tmp_path / "index.json").write_bytes(b'{"format": "paceline-sh')
    with pytest.raises(UserError, match="damaged"):
        Dataset.open(tmp_path)
