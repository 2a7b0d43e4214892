"""The shard format, held against an independent reading of the bytes, and refused where it is not what it says."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset, TokenStream, num_sequences
from paceline.data.shard import Index, Shard, SplitWriter, write_index

END = 0


def write(folder: Path, split: str, documents: list[list[int]], vocab_size: int = 50257, **options: Any) -> Any:
    writer = SplitWriter(folder, split, vocab_size=vocab_size, end_of_text=END, **options)
    for document in documents:
        writer.start_document()
        writer.write(document)
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


def test_the_writer_refuses_an_id_outside_the_vocabulary(tmp_path: Path) -> None:
    for ids in ([100], [-1]):
        writer = SplitWriter(tmp_path, "train", vocab_size=100, end_of_text=0)
        with pytest.raises(ValueError, match="vocabulary of 100"):
            writer.write(ids)
    with pytest.raises(UserError, match="shard of 0 tokens"):
        SplitWriter(tmp_path, "train", vocab_size=100, end_of_text=0, shard_tokens=0)


def test_an_unfinished_shard_is_refused(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", vocab_size=100, end_of_text=0)
    writer.write([1, 2, 3])
    writer.abandon()
    with pytest.raises(UserError, match="not what its header says"):
        Shard.open(tmp_path / "train-00000.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], r"truncated: 32 tokens make 1088 bytes, it has 1087"),
        (lambda b: b[:100], r"truncated: 100 bytes"),
        (lambda b: b[:0], r"truncated: 0 bytes"),
        (lambda b: b + b"x", r"not what its header says"),
        (lambda b: struct.pack("<i", 20240801) + b[4:], r"not a token shard: it begins with 20240801"),
        (lambda b: b[:4] + struct.pack("<i", 7) + b[8:], r"version 7"),
        (lambda b: b[:8] + struct.pack("<i", -5) + b[12:], r"not what its header says"),
        (None, r"can not be read: No such file"),
    ],
)
def test_a_damaged_shard_is_refused_at_open(tmp_path: Path, damage: Any, message: str) -> None:
    path = small_dataset(tmp_path) / "train-00001.bin"
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with pytest.raises(UserError, match=message) as caught:
        Dataset.open(tmp_path)
    assert "train-00001.bin" in str(caught.value)


def test_an_id_outside_the_vocabulary_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    path = small_dataset(tmp_path) / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[1024 + 2 * 10 : 1024 + 2 * 11] = struct.pack("<H", 100)
    path.write_bytes(content)
    dataset = Dataset.open(tmp_path)
    dataset.train.read(0, 42)
    with pytest.raises(UserError, match=r"train-00001.bin has id 100 at token 10; the vocabulary has 100"):
        dataset.train.read(20, 30)
    with pytest.raises(UserError, match=r"train-00001.bin is damaged"):
        dataset.verify()


def test_a_shard_is_opened_when_it_is_read_and_reads_stay_inside(tmp_path: Path) -> None:
    stream = Dataset.open(small_dataset(tmp_path)).train
    stream.read(32, 5)
    assert ["tokens" in vars(shard) for shard in stream.shards] == [False, True, False]
    for start, count in ((-1, 2), (80, 2), (81, 1), (0, -1)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    assert stream.read(81, 0).tolist() == []


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


def test_a_shard_of_another_data_set_is_refused(tmp_path: Path) -> None:
    small_dataset(tmp_path)
    write(tmp_path, "train", [[1, 2]], 100)
    with pytest.raises(UserError, match=r"has 3 tokens where index.json lists 32"):
        Dataset.open(tmp_path)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        small_dataset(folder)
    write_index(folders[1], Index("other name", 100, Dataset.open(folders[1]).index.splits))
    splits = dict(Dataset.open(folders[2]).index.splits)
    splits["validation"] = write(folders[2], "validation", [[1, 2, 3, 4, 6]], 100)
    write_index(folders[2], Index("small", 100, splits))
    a, b, c = (Dataset.open(folder) for folder in folders)
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert a.token_bytes is None
    with pytest.raises(UserError, match="without a tokenizer"):
        a.tokenizer()


def test_sequences_are_counted_with_their_last_target(tmp_path: Path) -> None:
    assert [num_sequences(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    dataset = Dataset.open(small_dataset(tmp_path))
    assert dataset.validation.num_sequences(5) == 1
    with pytest.raises(UserError, match=r"validation split has 6 tokens.*data.seq-len 6"):
        dataset.validation.num_sequences(6)
