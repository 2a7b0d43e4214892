"""Reading: the right tokens from any shards, only the bytes asked for, and nothing damaged taken for good."""

import errno
import json
import os
import pickle
import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import flat, prepare_small

from paceline.base.errors import UserError
from paceline.base.files import sha256_of
from paceline.data import stream as stream_module
from paceline.data.dataset import Dataset, is_dataset, tokenizer_json_of
from paceline.data.shard import header
from paceline.data.stream import Shard, TokenStream

TRAIN = [list(range(1, 60)), [7] * 20, [], list(range(100, 133))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare_small(tmp_path / "data", TRAIN, shard=32)


def edit_index(folder: Path, change: Callable[[Any], None]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content)
    (folder / "index.json").write_text(json.dumps(content))


def edit_bytes(path: Path, place: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(new)] = new
    path.write_bytes(content)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.data())
def test_any_reads_of_any_shards_of_any_width(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    """Shards of uint16, of uint32, without a header and without tokens, against one plain list."""
    folder = tmp_path_factory.mktemp("shards")
    expected: list[int] = []
    shards = []
    for number, size in enumerate(sizes):
        kind = data.draw(st.sampled_from(["uint16", "uint32", "headerless"]))
        ids = [random.Random(number).randrange(60000) for _ in range(size)]
        path = folder / f"{number}.bin"
        version, code = (2, "I") if kind == "uint32" else (1, "H")
        head = b"" if kind == "headerless" else header(version, size)
        path.write_bytes(head + struct.pack(f"<{size}{code}", *ids))
        shards.append(Shard.without_header(path, 60000) if kind == "headerless" else Shard.open(path))
        expected += ids
    stream = TokenStream("train", shards, 60000)
    assert stream.num_tokens == len(expected)
    asked = data.draw(st.lists(st.tuples(st.integers(0, len(expected)), st.integers(0, 40)), max_size=5))
    asked = [(start, min(count, len(expected) - start)) for start, count in asked]
    found = stream.gather([start for start, _ in asked], [count for _, count in asked])
    assert found.tolist() == [token for start, count in asked for token in expected[start : start + count]]
    assert stream.read(0, len(expected)).tolist() == expected
    assert stream.read(0, 0).dtype == np.int64


def test_reads_stay_inside(folder: Path) -> None:
    stream = Dataset.open(folder).train
    for start, count in ((-1, 2), (stream.num_tokens - 1, 2), (stream.num_tokens + 1, 0)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    assert stream.read(stream.num_tokens, 0).tolist() == []


def test_a_file_is_opened_when_it_is_read_and_the_bytes_read_are_those_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[tuple[str, int]] = []
    real = os.preadv

    def counting(descriptor: int, buffers: Any, position: int) -> int:
        count = real(descriptor, buffers, position)
        got.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, count))
        return count

    opened = len(os.listdir("/proc/self/fd"))
    stream = Dataset.open(folder).train
    assert len(os.listdir("/proc/self/fd")) == opened
    monkeypatch.setattr(os, "preadv", counting)
    assert stream.read(30, 5).tolist() == flat(TRAIN)[30:35]
    assert got == [("train-00000.bin", 4), ("train-00001.bin", 6)]
    assert stream.bytes_read == 10


def test_few_files_are_open_however_many_shards_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_OPEN_FILES", 5)
    documents = [[i % 250] * 9 for i in range(80)]
    stream = Dataset.open(prepare_small(tmp_path / "data", documents, shard=10)).train
    before, most = len(os.listdir("/proc/self/fd")), [0]
    wrong: list[int] = []

    def read(seed: int) -> None:
        for _ in range(300):
            i = random.Random(seed).randrange(80)
            seed += 1
            if stream.read(i * 10, 10).tolist() != [256, *documents[i]]:
                wrong.append(i)
            most[0] = max(most[0], len(os.listdir("/proc/self/fd")))

    threads = [threading.Thread(target=read, args=(i * 1000,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert most[0] - before <= 5 + 4 + 4  # and what each thread is reading, and the folders it lists
    stream.read(0, 800)
    assert len(os.listdir("/proc/self/fd")) - before <= 5


def test_a_closed_data_set_leaves_no_file_open(folder: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    dataset = Dataset.open(folder)
    dataset.train.read(0, 100)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del dataset
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_cut_short_after_it_was_opened_is_an_error_and_not_a_signal(folder: Path) -> None:
    stream = Dataset.open(folder).train
    stream.read(0, 40)
    with (folder / "train-00001.bin").open("r+b") as file:
        file.truncate(1024 + 20)
    assert stream.read(32, 10).tolist() == flat(TRAIN)[32:42]
    with pytest.raises(UserError, match=r"train-00001.bin ends at byte 1044: it became shorter"):
        stream.read(32, 11)
    (folder / "train-00003.bin").unlink()
    with pytest.raises(UserError, match=r"train-00003.bin can not be read at byte 1024: No such file"):
        stream.read(96, 1)


def test_a_disk_that_fails_and_reads_that_give_less_than_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Dataset.open(folder).train
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [memoryview(buffers[0]).cast("B")[:7]], at))
    assert stream.read(0, 90).tolist() == flat(TRAIN)[:90]

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(UserError, match=r"train-00000.bin can not be read at byte 1026: Input/output error"):
        stream.read(1, 3)


def test_pickled_and_forked(folder: Path) -> None:
    stream = Dataset.open(folder).train
    stream.read(0, 50)
    assert pickle.loads(pickle.dumps(stream)).read(30, 9).tolist() == flat(TRAIN)[30:39]
    child = os.fork()
    if child == 0:
        os._exit(0 if stream.read(30, 9).tolist() == flat(TRAIN)[30:39] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert stream.read(30, 9).tolist() == flat(TRAIN)[30:39]


@pytest.mark.parametrize("size", [1000, 1024 + 2 * 31, 1024 + 2 * 33])
def test_a_shard_of_another_size_than_listed_is_refused_at_open(folder: Path, size: int) -> None:
    with (folder / "train-00001.bin").open("r+b") as file:
        file.truncate(size)
    what = "truncated" if size < 1024 + 2 * 32 else "longer than its tokens"
    with pytest.raises(UserError, match=rf"train-00001.bin is {what}: 32 tokens make 1088 bytes, it has {size}"):
        Dataset.open(folder)


def test_hosts_with_other_bytes_under_one_index_have_other_digests(folder: Path) -> None:
    """The fingerprint of prepared data is the index's (mutation: the content digest is, too)."""
    before = Dataset.open(folder)
    expected = before.fingerprint, before.content_digest
    assert (Dataset.open(folder).fingerprint, Dataset.open(folder).content_digest) == expected
    for shard, token in (("train-00000", 1), ("train-00003", 9), ("validation-00000", 3)):
        content = (folder / f"{shard}.bin").read_bytes()
        edit_bytes(folder / f"{shard}.bin", 1024 + 2 * token, b"\x11")
        found = Dataset.open(folder)
        assert found.fingerprint == expected[0]
        assert found.content_digest != expected[1]
        (folder / f"{shard}.bin").write_bytes(content)


def test_a_rank_that_need_not_check_opens_a_shard_when_it_reads_it(folder: Path) -> None:
    """10,000 shards cost it 10,000 opens less (mutation: open all); what it reads is what the others read."""
    (folder / "train-00001.bin").unlink()
    later = Dataset.open(folder, checks=False)
    assert later.train.read(64, 20).tolist() == flat(TRAIN)[64:84]
    with pytest.raises(UserError, match=r"train-00001\.bin can not be read"):
        later.train.read(40, 10)
    with pytest.raises(UserError, match=r"train-00001\.bin can not be read"):
        Dataset.open(folder)


def test_an_id_outside_the_vocabulary_is_refused_with_file_and_offset(folder: Path) -> None:
    dataset = Dataset.open(folder)
    edit_bytes(folder / "train-00001.bin", 1024 + 2 * 10, struct.pack("<H", 300))
    dataset.train.read(0, 42)
    for starts, counts in (([20], [30]), ([0, 100, 40], [5, 3, 3])):
        with pytest.raises(UserError, match=r"train-00001.bin has id 300 at token 10; the vocabulary has 257"):
            dataset.train.gather(starts, counts)
    with pytest.raises(UserError, match=r"train-00001.bin is damaged"):
        dataset.verify()


def test_verify_reads_all_and_says_how_far_it_is(folder: Path) -> None:
    seen: list[int] = []
    dataset = Dataset.open(folder)
    dataset.verify(seen.append)
    assert sum(seen) == dataset.num_bytes == sum(path.stat().st_size for path in folder.glob("*.bin"))


@pytest.mark.parametrize("file", ["train-00002.bin", "validation-00000.bin", "train-00002.starts.npy"])
def test_verify_finds_any_flipped_bit(folder: Path, file: str) -> None:
    size = (folder / file).stat().st_size
    for place in {size - 1, size - 3, 1024 if file.endswith("bin") else 130}:
        content = (folder / file).read_bytes()
        edit_bytes(folder / file, place, bytes([content[place] ^ 1]))
        with pytest.raises(UserError, match=file):
            Dataset.open(folder).verify()
        (folder / file).write_bytes(content)


def test_verify_holds_documents_against_tokens(folder: Path) -> None:
    """A list of beginnings that has its own right checksum, and is of other tokens."""
    path = folder / "train-00001.starts.npy"
    np.save(path, np.load(path) - 1)

    def relist(index: Any) -> None:
        index["splits"]["train"]["shards"][1]["starts_sha256"] = sha256_of(path)

    edit_index(folder, relist)
    with pytest.raises(UserError, match=r"has id 59 at token 27, where a document should begin with 256"):
        Dataset.open(folder).verify()


@given(st.lists(st.lists(st.integers(0, 255), max_size=40), min_size=1, max_size=12), st.integers(1, 50))
@settings(max_examples=8)
def test_documents_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard: int
) -> None:
    folder = prepare_small(tmp_path_factory.mktemp("documents"), documents, shard=shard)
    dataset = Dataset.open(folder)
    found = dataset.documents("train")
    assert found.lengths.tolist() == [1 + len(document) for document in documents]
    for start, length, document in zip(found.starts.tolist(), found.lengths.tolist(), documents, strict=True):
        assert dataset.train.read(start, length).tolist() == [256, *document]
    dataset.verify()


def test_a_damaged_list_of_documents_is_refused(folder: Path) -> None:
    path = folder / "train-00001.starts.npy"
    for bad in (np.array([40]), np.array([-1]), np.array([1, 2]), np.array([1.0])):
        np.save(path, bad)
        with pytest.raises(UserError, match=r"train-00001.starts.npy is damaged"):
            Dataset.open(folder).documents("train")
    for bad_bytes in (b"\x93NUMPY", path.read_bytes().replace(b"}", b" ", 1)):  # the second: a header without its end
        path.write_bytes(bad_bytes)
        with pytest.raises(UserError, match=r"train-00001.starts.npy can not be read"):
            Dataset.open(folder).documents("train")


class Payload:
    """A pickle that makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_list_of_documents_that_is_a_pickle_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """Finds: numpy's files of objects, which are pickles, read with allow_pickle=True."""
    np.save(folder / "train-00001.starts.npy", np.array([Payload(tmp_path / "marker")], dtype=object))
    with pytest.raises(UserError, match=r"train-00001.starts.npy can not be read"):
        Dataset.open(folder).documents("train")
    assert not (tmp_path / "marker").exists()


def test_the_tokenizer_is_the_one_that_made_the_data(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert dataset.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert dataset.tokenizer().decode(dataset.train.read(61, 3).tolist()) == "\x07\x07\x07"
    assert dataset.end_of_text == 256
    assert dataset.token_bytes is not None
    assert dataset.token_bytes.tolist() == [1] * 256 + [0]
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(UserError, match=r"tokenizer.json has sha256 \w+, index.json lists"):
        Dataset.open(folder).tokenizer()
    with pytest.raises(UserError, match=r"tokenizer.json has sha256"):
        Dataset.open(folder).verify()


def test_a_vocabulary_may_be_padded_and_not_cut(folder: Path) -> None:
    assert Dataset.open(folder, 320).vocab_size == 257
    with pytest.raises(UserError, match=r"vocab-size is 200, smaller than the data's vocabulary \(257 in small\)"):
        Dataset.open(folder, 200)


def test_without_a_tokenizer_what_is_not_known_is_said(folder: Path) -> None:
    edit_index(folder, lambda i: i.update(tokenizer=None, token_bytes=None))
    dataset = Dataset.open(folder)
    assert dataset.tokenizer_json is dataset.end_of_text is dataset.token_bytes is None
    with pytest.raises(UserError, match="without a tokenizer"):
        dataset.tokenizer()


def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    same = prepare_small(tmp_path / "same", TRAIN, name="other name", shard=32)
    changed = prepare_small(tmp_path / "changed", [*TRAIN[:-1], [100]], shard=32)
    fingerprints = [Dataset.open(at).fingerprint for at in (folder, same, changed)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_what_is_a_data_set(folder: Path, tmp_path: Path) -> None:
    assert is_dataset(folder)
    assert Dataset.open(folder).index is not None
    assert not is_dataset(tmp_path)
    assert not is_dataset(tmp_path / "nowhere")
    assert not is_dataset(folder / "index.json")
    strange = tmp_path / ("x" * 300)  # fails as a folder that may not be entered, also for root
    for ask in (is_dataset, Dataset.open):
        with pytest.raises(UserError, match="can not be read: File name too long"):
            ask(strange)
    (folder / ".preparing").mkdir()
    Dataset.open(folder)  # killed right after the index was written
    (tmp_path / "begun" / ".preparing").mkdir(parents=True)
    assert is_dataset(tmp_path / "begun")
    with pytest.raises(UserError, match=r"begun was not prepared to the end: run its `paceline data prepare` again"):
        Dataset.open(tmp_path / "begun", 257)


def test_sequences_are_counted_with_their_last_target(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert [dataset.validation.num_sequences(seq_len) for seq_len in (1, 2, 3, 4, 5)] == [5, 2, 1, 1, 1]
    with pytest.raises(UserError, match=r"validation split has 6 tokens.*data.seq-len 6"):
        dataset.validation.num_sequences(6)


def test_a_tokenizer_that_is_no_text_is_named(folder: Path) -> None:
    """As it is read for --init-from, before the rest is checked."""
    (folder / "tokenizer.json").write_bytes(b"\xff{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged: .*copy it again"):
        tokenizer_json_of(folder)
