"""The shard format, held against an independent reading of the bytes, and refused where it is not what it says."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset
from paceline.data.shard import Index, SplitWriter, write_index
from paceline.data.stream import Shard, TokenStream

END = 0


def write(folder: Path, split: str, documents: list[list[int]], vocab_size: int = 50257, **options: Any) -> Any:
    writer = SplitWriter(folder, split, vocab_size=vocab_size, **options)
    for document in documents:
        writer.append(np.array([END, *document]), np.array([0]))
    return writer.finish(text_bytes=0)


def small_dataset(folder: Path, vocab_size: int = 100) -> Path:
    splits = {
        "train": write(folder, "train", [list(range(1, 60)), [7] * 20], vocab_size, shard_tokens=32),
        "validation": write(folder, "validation", [[1, 2, 3, 4, 5]], vocab_size),
    }
    write_index(folder, Index("small", vocab_size, splits))
    return folder


@pytest.mark.parametrize(("vocab_size", "version", "code"), [(50257, 1, "<H"), (65536, 1, "<H"), (65537, 2, "<I")])
def test_the_bytes_are_llm_c_s(tmp_path: Path, vocab_size: int, version: int, code: str) -> None:
    record = write(tmp_path, "train", [[5, vocab_size - 1], [], [9]], vocab_size)
    content = (tmp_path / "train-00000.bin").read_bytes()
    assert struct.unpack_from("<3i", content) == (20240520, version, 6)
    assert content[12:1024] == bytes(1012)
    assert [token for (token,) in struct.iter_unpack(code, content[1024:])] == [END, 5, vocab_size - 1, END, END, 9]
    assert np.load(tmp_path / "train-00000.starts.npy").tolist() == [0, 3, 4]
    assert (record.tokens, record.documents) == (6, 3)


@given(st.lists(st.lists(st.integers(1, 299), max_size=25), min_size=1, max_size=12), st.integers(1, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_round_trip_at_any_shard_size_and_any_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    record = write(folder, "train", documents, 300, shard_tokens=shard_tokens)
    expected = [token for document in documents for token in (END, *document)]
    files = [np.fromfile(folder / shard.file, dtype="<u2", offset=1024) for shard in record.shards]
    assert np.concatenate(files).tolist() == expected
    assert all(len(file) == shard_tokens for file in files[:-1])
    starts = [np.load(folder / shard.starts) + i * shard_tokens for i, shard in enumerate(record.shards)]
    assert [expected[i] for i in np.concatenate(starts)] == [END] * len(documents)
    stream = TokenStream("train", [Shard.open(folder / shard.file) for shard in record.shards], 300)
    start = data.draw(st.integers(0, len(expected)))
    count = data.draw(st.integers(0, len(expected) - start))
    found = stream.read(start, count)
    assert found.dtype == np.int64
    assert found.tolist() == expected[start : start + count]


documents_of_any_size = st.lists(st.lists(st.integers(1, 299), max_size=25), min_size=1, max_size=12)


@given(documents_of_any_size, st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_writer_goes_on_from_where_it_was_saved_whatever_was_written_since(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int, data: st.DataObject
) -> None:
    options = {"vocab_size": 300, "shard_tokens": shard_tokens, "tokenizer_sha256": "ab" * 32}
    undisturbed, killed = tmp_path_factory.mktemp("undisturbed"), tmp_path_factory.mktemp("killed")
    write(undisturbed, "train", documents, **options)
    saved_after = data.draw(st.integers(0, len(documents)))
    written_after = data.draw(st.integers(saved_after, len(documents)))
    first = SplitWriter(killed, "train", **options)
    for number, document in enumerate(documents[:written_after]):
        if number == saved_after:
            saved = first.save()
        first.append(np.array([END, *document]), np.array([0]))
    if saved_after == written_after:
        saved = first.save()
    elif data.draw(st.booleans()):
        first.finish(0)  # killed after the last shard was closed, before the index
    first.abandon()
    second = SplitWriter(killed, "train", saved=json.loads(json.dumps(saved)), **options)
    assert second.num_tokens == sum(len(document) + 1 for document in documents[:saved_after])
    for document in documents[saved_after:]:
        second.append(np.array([END, *document]), np.array([0]))
    second.finish(0)
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (undisturbed, killed)]
    assert contents[0] == contents[1]


def test_what_is_saved_is_on_the_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    writer = SplitWriter(tmp_path, "train", vocab_size=100)
    writer.append(np.arange(50), np.array([0]))
    writer.save()
    assert set(synced) == {str(tmp_path / "train-00000.bin"), str(tmp_path / "train-00000.starts"), str(tmp_path)}
    assert synced[-1] == str(tmp_path)
    writer.abandon()


def test_a_file_that_was_cut_can_not_be_gone_on_with(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", vocab_size=100)
    writer.append(np.arange(50), np.array([0]))
    saved = writer.save()
    writer.abandon()
    path = tmp_path / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"train-00000.bin was cut"):
        SplitWriter(tmp_path, "train", vocab_size=100, saved=saved)
    path.unlink()
    with pytest.raises(UserError, match=r"train-00000.bin can not be gone on with"):
        SplitWriter(tmp_path, "train", vocab_size=100, saved=saved)


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
    path = small_dataset(tmp_path) / "index.json"
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
