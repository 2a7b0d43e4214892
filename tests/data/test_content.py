"""What is opened is looked at: ids beyond the vocabulary are found, and a rank with other bytes has another digest."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from small_data import prepare_small

from paceline.base.errors import UserError
from paceline.data import content
from paceline.data.blend import Blend
from paceline.data.dataset import Dataset
from paceline.data.shard import HEADER_BYTES
from paceline.data.stream import Shard, TokenStream

DOCUMENTS = [[i % 250] * 99 for i in range(40)]


def put(path: Path, token: int, value: int, first_byte: int = HEADER_BYTES) -> None:
    with path.open("r+b") as file:
        file.seek(first_byte + 2 * token)
        file.write(value.to_bytes(2, "little"))


def headerless(folder: Path, *lengths: int) -> list[TokenStream]:
    """Streams of zeros, one shard each, whose disk space is next to nothing."""
    folder.mkdir(exist_ok=True)
    shards = []
    for number, length in enumerate(lengths):
        path = folder / f"{number:04d}.bin"
        path.touch()
        with path.open("r+b") as file:
            file.truncate(2 * length)
        shards.append(Shard.without_header(path, 100))
    return [TokenStream("train", shards[:-1], 1000), TokenStream("validation", shards[-1:], 1000)]


def test_the_same_shards_elsewhere_have_the_same_digest_and_any_other_token_shows(tmp_path: Path) -> None:
    """The index and with it the fingerprint stay as they are: only the bytes tell."""
    one = prepare_small(tmp_path / "one", DOCUMENTS, shard=1000, name="a")
    expected = Blend.open([(one, 1.0)])
    elsewhere = shutil.copytree(one, tmp_path / "elsewhere")
    assert Blend.open([(elsewhere, 1.0)]).content_digest == expected.content_digest
    for shard, token in (("train-00000", 0), ("train-00001", 999), ("train-00003", 500), ("validation-00000", 3)):
        other = shutil.copytree(one, tmp_path / f"other {shard}")
        put(other / f"{shard}.bin", token, 5)
        found = Blend.open([(other, 1.0)])
        assert found.fingerprint == expected.fingerprint
        assert found.content_digest != expected.content_digest
        assert Blend.open([(one, 0.5), (other, 0.5)]).content_digest not in (
            found.content_digest,
            expected.content_digest,
        )


@pytest.mark.parametrize("num_shards", [2, 40, 300])
def test_of_large_shards_the_beginning_the_end_and_some_between_are_seen(tmp_path: Path, num_shards: int) -> None:
    """Each shard is looked at, whatever their number; 4 MiB in all, or a little more where there are very many."""
    length = 10_000_000
    streams = headerless(tmp_path / "shards", *[length] * num_shards)
    expected = content.digest(streams)
    seen = sum(2 * count for _, _, count in content._sample([shard for s in streams for shard in s.shards]))
    assert 1 << 21 < seen <= 1 << 22
    for number in (0, num_shards // 2, num_shards - 1):
        path = tmp_path / "shards" / f"{number:04d}.bin"
        for token in (0, length - 1):
            put(path, token, 7, first_byte=0)
            assert content.digest(streams) != expected
            put(path, token, 0, first_byte=0)
    assert content.digest(streams) == expected


def test_shards_of_the_same_length_in_another_order_differ(tmp_path: Path) -> None:
    streams = headerless(tmp_path / "shards", 5000, 5000, 10)
    put(tmp_path / "shards/0000.bin", 20, 7, first_byte=0)
    swapped = [TokenStream("train", streams[0].shards[::-1], 1000), streams[1]]
    assert content.digest(streams) != content.digest(swapped)
    assert content.digest(headerless(tmp_path / "none", 0, 0, 5)) != content.digest(headerless(tmp_path / "x", 0, 5))


def test_a_look_is_cheap(tmp_path: Path) -> None:
    """Of a set of 20 GB as of one of 4 MB: measured 30 ms."""
    streams = headerless(tmp_path / "large", *[500_000_000] * 20)
    began = time.process_time()
    content.require_known_ids(streams, 1000)
    content.digest(streams)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("token", [0, 7, 2_500_000, 2_999_999])
def test_an_id_beyond_the_vocabulary_is_found_when_a_small_set_is_opened(tmp_path: Path, token: int) -> None:
    ids = np.full(3_000_000, 999, dtype=np.uint16)
    ids[token] = 1000
    ids.tofile(tmp_path / "train.bin")
    np.zeros(50, dtype=np.uint16).tofile(tmp_path / "val.bin")
    with pytest.raises(UserError, match=rf"train.bin has id 1000 at token {token}; the vocabulary has 1000"):
        Dataset.open(tmp_path, 1000)
    assert Dataset.open(tmp_path, 1001).vocab_size == 1001


def test_of_a_large_set_a_sample_is_looked_at(tmp_path: Path) -> None:
    """GPT-2's ids with another vocabulary, as they would be: everywhere. One alone is found by who reads it."""
    streams = headerless(tmp_path / "large", 70_000_000, 100)
    put(tmp_path / "large/0000.bin", 69_999_999, 1000, first_byte=0)
    with pytest.raises(UserError, match=r"0000.bin has id 1000 at token 69999999; the vocabulary has 1000"):
        content.require_known_ids(streams, 1000)
    put(tmp_path / "large/0000.bin", 69_999_999, 0, first_byte=0)
    put(tmp_path / "large/0000.bin", 300_001, 1000, first_byte=0)
    content.require_known_ids(streams, 1000)
    with pytest.raises(UserError, match=r"0000.bin has id 1000 at token 300001"):
        streams[0].gather([300_000], [5])


def test_a_rank_that_need_not_check_opens_a_shard_when_it_reads_it(tmp_path: Path) -> None:
    """10,000 shards cost it 10,000 opens less (mutation: open all); what it reads is what the others read."""
    folder = prepare_small(tmp_path, DOCUMENTS, shard=1000)
    checked, unchecked = Blend.open([(folder, 1.0)]), Blend.open([(folder, 1.0)], checks=False)
    assert (checked.is_checked, unchecked.is_checked) == (True, False)
    assert unchecked.fingerprint == checked.fingerprint
    expected = checked.first.train.read(0, 4000).tolist()
    assert unchecked.first.train.read(0, 4000).tolist() == expected
    (folder / "train-00001.bin").unlink()
    later = Blend.open([(folder, 1.0)], checks=False)
    assert later.first.train.read(2000, 1000).tolist() == expected[2000:3000]
    with pytest.raises(UserError, match=r"train-00001\.bin can not be read"):
        later.first.train.read(1000, 10)
