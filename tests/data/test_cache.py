"""Text is prepared once, whoever asks and whatever dies in between, and gives the same bytes everywhere."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from program import Program
from small_data import bytes_of

from paceline.base.errors import UserError
from paceline.data import cache as cache_module
from paceline.data import parts as parts_module
from paceline.data import prepare as prepare_module
from paceline.data.cache import ensure_datasets, inspect_data
from paceline.data.config import DataConfig, Quiet, vocabulary_for
from paceline.data.dataset import Dataset
from paceline.data.find import digest
from paceline.data.sources import Sources, embedded
from paceline.data.split import split_text
from paceline.data.text import plain_text

SCRIPT = """
import sys, time
from paceline.data.config import DataConfig
from paceline.data.cache import ensure_datasets
from paceline.data.config import Quiet
stop_at = sys.argv[2]
class Report(Quiet):
    def say(self, line):
        print(line, flush=True)
        if stop_at and stop_at in line:
            time.sleep(600)
print("got", *ensure_datasets(DataConfig(path=sys.argv[1], tokenizer_vocab=600), Report(), 1), flush=True)
"""


class Heard(Quiet):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def ensure(config: DataConfig, report: Quiet | None = None) -> Path:
    (folder,) = ensure_datasets(config, report or Quiet(), 1)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """About 100 kB of real text in 20 files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for file in embedded().files[10:30]:
        (folder / file.name.replace("/", "-")).write_bytes(Path(file.path).read_bytes()[:6000])
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


@pytest.fixture
def build(tmp_path: Path, text: Path) -> Callable[..., Program]:
    """Starts another process that builds the text, and stands still where it says `stop_at`."""
    script = tmp_path / "build.py"
    script.write_text(SCRIPT)
    return lambda stop_at="", **env: Program(str(text), stop_at, command=(sys.executable, str(script)), env=env)


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir() and not path.name.startswith("."))


@pytest.mark.long
def test_the_embedded_corpus_end_to_end(cache: Path) -> None:
    heard = Heard()
    folder = ensure(DataConfig(), heard)
    assert folder.parent == cache
    dataset = Dataset.open(folder)
    assert dataset.index is not None
    dataset.verify()
    tokenizer, token_bytes = dataset.tokenizer(), dataset.token_bytes
    assert dataset.vocab_size == tokenizer.vocab_size == 4096
    assert token_bytes is not None
    files = split_text(embedded().files)
    for stream in (dataset.train, dataset.validation):
        record, ids = dataset.index.splits[stream.split], stream.read(0, stream.num_tokens)
        mine = [file for file in files if file.split == stream.split]
        assert int((ids == tokenizer.end_of_text).sum()) == record.documents == len(mine)
        assert int(token_bytes[ids].sum()) == record.text_bytes
        assert record.text_bytes / record.tokens > 3.4
        expected = "".join(plain_text(Path(file.path).read_bytes())[0].removeprefix("\ufeff") for file in mine)
        assert tokenizer.decode(ids.tolist()) == expected
    said_before = len(heard.lines)
    assert ensure(DataConfig(), heard) == folder
    assert len(heard.lines) == said_before  # the second time nothing is made


def test_the_vocabulary_grows_with_the_text(text: Path, cache: Path) -> None:
    """Finds: 4,096 tokens for 150 kB, most of which are met too seldom to be learnt."""
    sizes = (0, 150_000, 400_000, 600_000, 1_115_394, 1 << 40)
    assert [vocabulary_for(size) for size in sizes] == [512, 512, 1024, 2048, 4096, 4096]
    by_size = ensure(DataConfig(path=str(text), tokenizer_vocab=-1))
    assert by_size == ensure(DataConfig(path=str(text), tokenizer_vocab=512))
    assert Dataset.open(by_size).vocab_size == 512


def test_what_is_known_is_not_hashed_again(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(path=str(text), tokenizer_vocab=300)
    first = ensure(config)
    monkeypatch.setattr(cache_module, "digest", None)
    assert ensure(config) == first
    next(text.iterdir()).touch()
    with pytest.raises(TypeError):
        ensure(config)  # a file that was written to is looked at again


def test_a_known_name_that_a_crash_cut_short_is_made_again(text: Path, cache: Path) -> None:
    config = DataConfig(path=str(text), tokenizer_vocab=300)
    first = ensure(config)
    (known,) = (path for path in (cache / ".known").iterdir() if path.suffix != ".lock")
    for found in ("", first.name[:-1]):  # the first would be the cache itself
        known.write_text(found)
        assert ensure(config) == first
        assert known.read_text() == first.name
    assert folders(cache) == [first.name]


def test_the_same_bytes_with_another_hash_seed_and_thread_count(
    build: Callable[..., Program], text: Path, cache: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with build(PACELINE_CACHE=str(elsewhere), PYTHONHASHSEED="5", RAYON_NUM_THREADS="5") as program:
        made = ensure(DataConfig(path=str(text), tokenizer_vocab=600))
        program.wait().require(0)
    assert folders(elsewhere) == [made.name]
    assert bytes_of(elsewhere / made.name) == bytes_of(made)


def test_three_processes_at_once_build_once(build: Callable[..., Program], text: Path, cache: Path) -> None:
    with build() as one, build() as other:
        heard = Heard()
        made = ensure(DataConfig(path=str(text), tokenizer_vocab=600), heard)
        outputs = [program.wait().require(0).out for program in (one, other)]
    outputs.append("\n".join(heard.lines) + f"\ngot {made}\n")
    assert sum("training" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("moment", ["training", "train tokens"])
def test_a_killed_builder_s_work_is_gone_on_with(
    build: Callable[..., Program], text: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with build(moment) as builder:
        builder.wait_for(lambda: moment in builder._said())
        with build() as other:  # it waits for the first one until that dies, unless all is there already
            other.wait_for(lambda: moment == "train tokens" or "waiting" in other._said())
            builder.kill_all([builder.pid])
            other.wait().require(0)
    (name,) = folders(cache)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "other"))
    undisturbed = ensure(DataConfig(path=str(text), tokenizer_vocab=600))
    assert bytes_of(cache / name) == bytes_of(undisturbed)


def test_a_file_of_both_splits_is_one_file(tmp_path: Path, cache: Path) -> None:
    heard = Heard()
    (tmp_path / "mine.txt").write_text("some text\n" * 100)
    ensure(DataConfig(path=str(tmp_path / "mine.txt"), tokenizer_vocab=300), heard)
    assert heard.lines[0] == "data: preparing mine.txt, 1 file, 1000 B"


def test_what_nobody_finished_for_a_week_is_swept_but_not_what_lives(
    build: Callable[..., Program], text: Path, cache: Path
) -> None:
    with build("training") as builder:
        builder.wait_for(lambda: "training" in builder._said())
        (living,) = folders(cache)
        week_ago = time.time() - 8 * 24 * 3600
        for name in (living, "dead", "young"):
            (cache / name).mkdir(exist_ok=True)
            (cache / f".{name}.lock").touch()
            if name != "young":
                os.utime(cache / name, (week_ago, week_ago))
        (text.parent / "one.txt").write_text("other text\n" * 100)
        ensure(DataConfig(path=str(text.parent / "one.txt"), tokenizer_vocab=300))
        assert {living, "young"} <= set(folders(cache))
        assert "dead" not in folders(cache)


def test_what_another_user_left_unfinished_stops_nobody(tmp_path: Path, cache: Path) -> None:
    (cache / "theirs").mkdir(parents=True)
    (cache / ".theirs.lock").mkdir()  # can not be opened, as another user's lock in a shared cache
    os.utime(cache / "theirs", (0, 0))
    (tmp_path / "one.txt").write_text("other text\n" * 100)
    made = ensure(DataConfig(path=str(tmp_path / "one.txt"), tokenizer_vocab=300))
    assert folders(cache) == sorted([made.name, "theirs"])


def test_what_is_found_in_another_way_has_its_own_split(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files by a pattern have other names, and names decide the split (mutation: paths alone are known)."""
    whole, some = str(text), f"{text.parent}/tex*/*"
    made = [ensure(DataConfig(path=path, tokenizer_vocab=300)) for path in (whole, some)]
    monkeypatch.setenv("PACELINE_CACHE", f"{cache}-alone")
    alone = ensure(DataConfig(path=some, tokenizer_vocab=300))
    assert bytes_of(made[1]) == bytes_of(alone)


def test_a_file_that_can_not_be_read_leaves_the_work_on_the_others(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's error comes without its cause (mutation: the cause alone is looked at)."""
    monkeypatch.setattr(cache_module, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(parts_module, "PART_BYTES", 1 << 14)
    last = max(text.iterdir())

    class Meddler(Quiet):
        def say(self, line: str) -> None:
            if "characters are read" in line:
                last.unlink()

    with pytest.raises(UserError, match="can not be read: No such file"):
        ensure_datasets(DataConfig(path=str(text), tokenizer_vocab=300), Meddler(), 2)
    (name,) = folders(cache)
    assert list((cache / name / ".preparing" / "parts").glob("*.json"))


def test_changed_text_or_vocabulary_gives_another_data_set(text: Path, cache: Path) -> None:
    config = DataConfig(path=str(text), tokenizer_vocab=300)
    first = ensure(config)
    assert ensure(config) == first
    (text / "more.txt").write_text("more")
    second = ensure(config)
    third = ensure(DataConfig(path=str(text), tokenizer_vocab=301))
    assert len({first, second, third}) == 3
    assert ensure(DataConfig(path=str(first))) == first  # a prepared folder is used where it is


@pytest.mark.parametrize(("kept", "message"), [(1.0, "changed while it was read"), (0.5, "became shorter")])
def test_text_that_changes_under_the_builder_is_refused(text: Path, cache: Path, kept: float, message: str) -> None:
    class Meddler(Quiet):
        def say(self, line: str) -> None:
            path = max(text.iterdir(), key=lambda file: file.stat().st_size)
            size = path.stat().st_size
            path.write_text(("other " * size)[: int(size * kept)])

    with pytest.raises(UserError, match=message):
        ensure(DataConfig(path=str(text), tokenizer_vocab=300), Meddler())
    assert folders(cache) == []


@pytest.mark.parametrize("moment", ["training a tokenizer", "learns its merges"])
def test_text_that_was_other_text_for_a_while_is_encoded_as_it_is(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As by `git checkout other`, Ctrl-C and `git checkout main`: the folder's name is that of the first text. Neither
    a part nor the tokenizer is of the other one (mutations: keep either)."""
    monkeypatch.setattr(parts_module, "PART_BYTES", 1 << 14)
    first = {path: path.read_bytes() for path in text.iterdir()}

    class Meddler(Quiet):
        def say(self, line: str) -> None:
            if moment in line:
                for path, content in first.items():
                    path.write_bytes(content.swapcase())

        def advance(self, *progress: object) -> None:
            raise KeyboardInterrupt

    def no_part(*_: object) -> None:
        raise KeyboardInterrupt

    config = DataConfig(path=str(text), tokenizer_vocab=300)
    with monkeypatch.context() as patch:
        if moment == "training a tokenizer":
            patch.setattr(prepare_module, "encode_all", no_part)
        with pytest.raises((KeyboardInterrupt, UserError)):
            ensure(config, Meddler())
    for path, content in first.items():
        path.write_bytes(content)
    made = ensure(config)
    monkeypatch.setenv("PACELINE_CACHE", f"{cache}-alone")
    assert bytes_of(made) == bytes_of(ensure(config))


def test_a_folder_whose_index_was_deleted_is_built_again(text: Path, cache: Path) -> None:
    config = DataConfig(path=str(text), tokenizer_vocab=300)
    folder = ensure(config)
    expected = bytes_of(folder)
    (folder / "index.json").unlink()
    assert ensure(config) == folder
    assert bytes_of(folder) == expected


def test_a_cache_that_can_not_be_written_is_named(text: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cache .*/cache can not be written.*PACELINE_CACHE"):
        ensure(DataConfig(path=str(text), tokenizer_vocab=300))


@pytest.mark.parametrize(
    "content",
    [b"a line of text\n" * 50, b"\xef\xbb\xbfa line\r\n" * 50, b"no end " * 50, b"ok " * 5000 + b"M\xfcller\n" * 9],
)
def test_one_file_of_any_kind(tmp_path: Path, cache: Path, content: bytes) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(content)
    heard = Heard()
    dataset = Dataset.open(ensure(DataConfig(path=str(path), tokenizer_vocab=300), heard))
    tokens = [stream.read(0, stream.num_tokens).tolist() for stream in (dataset.train, dataset.validation)]
    text = "".join(dataset.tokenizer().decode(ids) for ids in tokens)
    assert text == content.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    assert any("not UTF-8" in line for line in heard.lines) == ("\ufffd" in text)


def test_too_little_text_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(UserError, match="into the validation split and none into train"):
        ensure(DataConfig(path=str(tmp_path / "one.txt")))
    assert folders(cache) == []


def test_inspect_data_refuses_early_and_writes_nothing(text: Path, cache: Path) -> None:
    inspect_data(DataConfig(), 0)
    inspect_data(DataConfig(path=str(text)), 0)
    for path in ("/nowhere", str(cache.parent / "empty")):
        (cache.parent / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=path):
            inspect_data(DataConfig(path=path), 0)
        with pytest.raises(UserError, match=path):
            inspect_data(DataConfig(mix=(f"{text}=1", f"{path}=0.5")), 0)
    assert not cache.exists()


def test_records_are_not_trained_on_as_text(text: Path, cache: Path) -> None:
    (text / "more.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"more.jsonl.*paceline data prepare"):
        ensure(DataConfig(path=str(text)))


def test_standard_input_is_no_text_to_train_on(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("a line of text\n" * 50)
    with (tmp_path / "one.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        with pytest.raises(UserError, match=r"data.path - .*not a plain text file.*paceline data prepare - --out DIR"):
            ensure(DataConfig(path="-"))


def test_one_process_of_a_host_hashes_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what it finds (mutation: hash without a lock)."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a line of text\n" * 1000)
    sources, calls = cache_module._text_sources(str(tmp_path / "text")), list[int]()

    def slow_digest(of: Sources) -> str:
        calls.append(1)
        time.sleep(0.2)
        return digest(of)

    monkeypatch.setattr(cache_module, "digest", slow_digest)
    with ThreadPoolExecutor(3) as threads:
        names = set(threads.map(lambda _: cache_module._name(sources, 300, tmp_path / "cache"), range(3)))
    assert (len(names), len(calls)) == (1, 1)
