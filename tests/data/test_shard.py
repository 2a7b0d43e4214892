"""The shard format, held against an independent reading of the bytes, and refused where it is not what it says."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import prepare_small, write_split

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset
from paceline.data.shard import Shards, SplitRecord, Written
from paceline.data.stream import Shard, TokenStream

END = 0


def write(folder: Path, split: str, documents: list[list[int]], vocab_size: int = 50257) -> SplitRecord:
    return write_split(folder, split, documents, vocab_size=vocab_size, begin=END)


@pytest.mark.parametrize(("vocab_size", "version", "code"), [(50257, 1, "<H"), (65536, 1, "<H"), (65537, 2, "<I")])
def test_the_bytes_are_llm_c_s(tmp_path: Path, vocab_size: int, version: int, code: str) -> None:
    record = write(tmp_path, "train", [[5, vocab_size - 1], [], [9]], vocab_size)
    content = (tmp_path / "train-00000.bin").read_bytes()
    assert struct.unpack_from("<3i", content) == (20240520, version, 6)
    assert content[12:1024] == bytes(1012)
    assert [token for (token,) in struct.iter_unpack(code, content[1024:])] == [END, 5, vocab_size - 1, END, END, 9]
    assert np.load(tmp_path / "train-00000.starts.npy").tolist() == [0, 3, 4]
    assert (record.tokens, record.documents) == (6, 3)


def test_shards_do_not_depend_on_how_the_tokens_were_cut_into_parts(tmp_path: Path) -> None:
    """A document may go on in the next shard, and in the next part (mutation: a part's places are not shifted)."""
    ids, starts = np.arange(25, dtype="<u2"), [0, 7, 10, 22]
    made = []
    for cuts in ([25], [3, 4, 11, 25], [10, 10, 20, 25]):
        folder, before, parts = tmp_path / f"{cuts}", 0, []
        (folder / "work").mkdir(parents=True)
        for cut in cuts:
            here = np.array([start - before for start in starts if before <= start < cut], dtype="<i8")
            path = folder / "work" / f"part{len(parts)}"
            path.write_bytes(ids[before:cut].tobytes() + here.tobytes())
            parts.append(Written(path, cut - before, here.size))
            before = cut
        records = Shards("train", tuple(parts), 300, shard_tokens=10).write_all(folder, folder / "work", 2)
        made.append({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
        stream = TokenStream("train", [Shard.open(folder / shard.file) for shard in records], 300)
        assert stream.read(0, 25).tolist() == list(range(25))
        assert [np.load(folder / shard.starts).tolist() for shard in records] == [[0, 7], [0], [2]]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("kept_bytes", [60, 45])
def test_a_part_s_file_that_is_too_short_makes_no_shard(tmp_path: Path, kept_bytes: int) -> None:
    """25 ids and the places of two documents; numpy reads what is there."""
    path = tmp_path / "part"
    path.write_bytes((np.arange(25, dtype="<u2").tobytes() + np.array([0, 7], dtype="<i8").tobytes())[:kept_bytes])
    with pytest.raises(UserError, match="part is shorter than its record says"):
        Shards("train", (Written(path, 25, 2),), 300).write_all(tmp_path, tmp_path, 1)


def test_a_closed_shard_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    write(tmp_path, "train", [[1, 2]])
    names = {Path(path).name.removeprefix(".").removesuffix(".new") for path in synced}
    assert names >= {path.name for path in tmp_path.iterdir()} | {tmp_path.name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("splits"), "damaged"),
        (lambda i: i["splits"]["train"].update(tokens=1), "do not add up"),
        (lambda i: i["splits"]["train"]["shards"][0].update(file="../x.bin"), "not the name of a file in the folder"),
        (lambda i: i["splits"]["train"]["shards"][0].pop("sha256"), "damaged"),
        (lambda i: i.update(format="other"), "not the index of a paceline dataset"),
        (lambda i: i.update(version=99), "version 99"),
        (lambda i: i.update(tokenizer=5), "damaged"),
        (lambda i: i.update(origin=[]), "damaged"),
        (lambda i: i["origin"].update(recipe="x"), "damaged"),
        (lambda i: i["splits"]["train"]["shards"][0].update(file="\ud800"), "not the name of a file in the folder"),
        (lambda i: i.update(token_bytes="a\0b"), "not the name of a file in the folder"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    """Finds: an `origin` that is no object, and a name that no file can have, were an AttributeError and others."""
    path = prepare_small(tmp_path, [range(1, 60), [7] * 20], shard=32) / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        Dataset.open(tmp_path)


def test_an_index_that_is_no_json_or_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is .* a prepared dataset"):
        Dataset.open(tmp_path)
    (tmp_path / "index.json").write_bytes(b'{"format": "paceline-sh')
    with pytest.raises(UserError, match="damaged"):
        Dataset.open(tmp_path)
