"""Preparing happens once, whoever asks and whatever dies in between, and gives the same bytes everywhere."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.base.errors import UserError
from paceline.data import corpora, prepare
from paceline.data.config import DataConfig
from paceline.data.dataset import Dataset
from paceline.data.prepare import build, cache_dir, ensure_dataset, inspect_path

CHILD = """
import sys, time
from paceline.data.config import DataConfig
from paceline.data.prepare import ensure_dataset
stop_at = sys.argv[2]
def say(line):
    print(line, flush=True)
    if stop_at and stop_at in line:
        time.sleep(600)
print("got", ensure_dataset(DataConfig(path=sys.argv[1], tokenizer_vocab=600), say), flush=True)
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """About 600 kB of real text in 20 files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, path in corpora.embedded().files[10:30]:
        (folder / name.replace("/", "-")).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


def child(text: Path, stop_at: str = "", **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(text), stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def silent(line: str) -> None:
    pass


def test_the_embedded_corpus_end_to_end(cache: Path) -> None:
    said: list[str] = []
    began = time.perf_counter()
    folder = ensure_dataset(DataConfig(), said.append)
    assert time.perf_counter() - began < 60  # 4.5 s on two free cores
    assert folder.parent == cache
    dataset = Dataset.open(folder)
    dataset.verify()
    tokenizer, token_bytes = dataset.tokenizer(), dataset.token_bytes
    assert dataset.vocab_size == tokenizer.vocab_size == 4096
    assert token_bytes is not None
    sides = corpora.split(corpora.embedded())
    for stream, documents in ((dataset.train, sides.train), (dataset.validation, sides.validation)):
        record, ids = dataset.index.splits[stream.split], stream.read(0, stream.num_tokens)
        assert int((ids == tokenizer.end_of_text).sum()) == record.documents == len(documents)
        assert int(token_bytes[ids].sum()) == record.text_bytes
        assert record.text_bytes / record.tokens > 3.4
    validation = dataset.validation.read(0, dataset.validation.num_tokens)
    expected = "".join(piece for document in sides.validation for piece in corpora.pieces(document))
    assert tokenizer.decode(validation.tolist()) == expected
    said_before = len(said)
    assert ensure_dataset(DataConfig(), said.append) == folder
    assert len(said) == said_before  # the second time nothing is made


def test_the_same_bytes_with_other_hash_seeds_and_thread_counts(text: Path, tmp_path: Path) -> None:
    found = []
    for number, threads in enumerate(("1", "2", "5")):
        environment = {"PYTHONHASHSEED": f"{number + 1}", "RAYON_NUM_THREADS": threads}
        process = child(text, PACELINE_CACHE=str(tmp_path / threads), **environment)
        assert process.wait(60) == 0
        (name,) = folders(tmp_path / threads)
        found.append((name, bytes_of(tmp_path / threads / name)))
    assert found[0] == found[1] == found[2]


def test_three_processes_at_once_build_once(text: Path, cache: Path) -> None:
    processes = [child(text) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("training" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("moment", ["training", "train tokens"])
def test_kill_9_while_building_leaves_nothing_that_counts(text: Path, cache: Path, tmp_path: Path, moment: str) -> None:
    builder = child(text, stop_at=moment)
    assert builder.stdout is not None
    while moment not in builder.stdout.readline():
        pass
    waiting = child(text)  # a second one, that waits for the first and takes over when it dies
    assert waiting.stdout is not None
    assert "waiting" in waiting.stdout.readline()
    assert [name.startswith(".building-") for name in folders(cache)] == [True]
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    (name,) = folders(cache)
    assert child(text, PACELINE_CACHE=str(tmp_path / "other")).wait(60) == 0
    assert bytes_of(cache / name) == bytes_of(tmp_path / "other" / name)


def test_the_next_builder_sweeps_what_killed_ones_left_but_not_what_lives(text: Path, cache: Path) -> None:
    builder = child(text, stop_at="training")
    assert builder.stdout is not None
    builder.stdout.readline()
    (living,) = folders(cache)
    (cache / ".building-dead").mkdir()
    try:
        (text.parent / "one.txt").write_text("other text\n" * 100)
        ensure_dataset(DataConfig(path=str(text.parent / "one.txt"), tokenizer_vocab=300), silent)
        assert living in folders(cache)
        assert ".building-dead" not in folders(cache)
    finally:
        builder.kill()
        builder.communicate()


def test_changed_text_or_vocabulary_gives_another_data_set(text: Path, cache: Path) -> None:
    config = DataConfig(path=str(text), tokenizer_vocab=300)
    first = ensure_dataset(config, silent)
    assert ensure_dataset(config, silent) == first
    (text / "more.txt").write_text("more")
    second = ensure_dataset(config, silent)
    third = ensure_dataset(DataConfig(path=str(text), tokenizer_vocab=301), silent)
    assert len({first, second, third}) == 3
    assert ensure_dataset(DataConfig(path=str(first)), silent) == first  # a prepared folder is used where it is


@pytest.mark.parametrize(("kept", "message"), [(1.0, "changed while it was read"), (0.5, "became shorter")])
def test_text_that_changes_under_the_builder_is_refused(text: Path, cache: Path, kept: float, message: str) -> None:
    def meddle(line: str) -> None:
        path = max(text.iterdir(), key=lambda file: file.stat().st_size)
        path.write_text("#" * int(path.stat().st_size * kept))

    with pytest.raises(UserError, match=message):
        ensure_dataset(DataConfig(path=str(text), tokenizer_vocab=300), meddle)
    assert folders(cache) == []


def test_a_folder_whose_index_was_deleted_is_built_again(text: Path, cache: Path) -> None:
    config = DataConfig(path=str(text), tokenizer_vocab=300)
    folder = ensure_dataset(config, silent)
    expected = bytes_of(folder)
    (folder / "index.json").unlink()
    assert ensure_dataset(config, silent) == folder
    assert bytes_of(folder) == expected


def test_a_cache_that_can_not_be_written_is_named(text: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cache .*/cache can not be written.*PACELINE_CACHE"):
        ensure_dataset(DataConfig(path=str(text), tokenizer_vocab=300), silent)


def test_a_full_disk_is_named_and_leaves_nothing(text: Path, cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a write beyond it fails as on a full disk
    try:
        with pytest.raises(UserError, match="can not be written"):
            ensure_dataset(DataConfig(path=str(text), tokenizer_vocab=300), silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folders(cache) == []


def test_shards_of_any_size_hold_the_same_tokens(text: Path, tmp_path: Path) -> None:
    corpus = corpora.from_path(text)
    streams = []
    for shard_tokens in (100_000_000, 10_007):
        folder = tmp_path / f"{shard_tokens}"
        folder.mkdir()
        build(corpus, folder, 300, silent, shard_tokens=shard_tokens)
        streams.append(Dataset.open(folder).train)
    one, many = streams
    assert (len(one.shards), len(many.shards) > 5) == (1, True)
    assert (one.read(0, one.num_tokens) == many.read(0, many.num_tokens)).all()


@pytest.mark.parametrize(
    "content",
    [b"a line of text\n" * 50, b"\xef\xbb\xbfa line\r\n" * 50, b"no end " * 50, b"ok " * 5000 + b"M\xfcller\n" * 9],
)
def test_one_file_of_any_kind(tmp_path: Path, cache: Path, content: bytes) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(content)
    said: list[str] = []
    dataset = Dataset.open(ensure_dataset(DataConfig(path=str(path), tokenizer_vocab=300), said.append))
    tokens = [stream.read(0, stream.num_tokens).tolist() for stream in (dataset.train, dataset.validation)]
    text = "".join(dataset.tokenizer().decode(ids) for ids in tokens)
    assert text == content.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    assert any("not UTF-8" in line for line in said) == ("\ufffd" in text)


def test_too_little_text_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(UserError, match="too little text"):
        ensure_dataset(DataConfig(path=str(tmp_path / "one.txt")), silent)
    assert folders(cache) == []


def test_inspect_path_refuses_early_and_writes_nothing(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "train", None)
    inspect_path(DataConfig())
    inspect_path(DataConfig(path=str(text)))
    for path in ("/nowhere", str(cache.parent / "empty")):
        (cache.parent / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=path):
            inspect_path(DataConfig(path=path))
    assert not cache.exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/rider")
    assert cache_dir() == Path("/home/rider/.cache/paceline")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert cache_dir() == Path("/home/rider/own")
