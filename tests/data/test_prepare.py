"""Documents become tokens the same way whatever kills the work, whoever does it, and whatever the files are like."""

import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from small_data import bytes_of, zstd

from paceline.base.errors import UserError
from paceline.data import parts as parts_module
from paceline.data.config import Quiet, Recipe, Share
from paceline.data.dataset import Dataset
from paceline.data.prepare import prepare
from paceline.data.shard import Index
from paceline.data.sources import embedded
from paceline.data.split import gather

PART_BYTES = 1 << 16  # so that little text has many parts
CHILD = f"""
import json, os, signal, sys
from pathlib import Path
from paceline.data import parts
from paceline.data.config import Recipe, Share
from paceline.data.prepare import prepare
from paceline.data.config import Quiet
from paceline.data.split import gather
parts.PART_BYTES = {PART_BYTES}

class Report(Quiet):
    def advance(self, *progress, **what):
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    specs, out, recipe, workers, stops, share = json.loads(sys.argv[1])
    print("begins", flush=True)
    recipe = Recipe(**recipe)
    prepare(gather(specs, [], recipe), recipe, Path(out), Report(), num_workers=workers, share=Share(*share))
"""
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "PART_BYTES", PART_BYTES)
        yield


def make(sources: Sequence[Path | str], out: Path, *, workers: int = 1, **recipe: Any) -> Index:
    chosen = Recipe(**{"tokenizer": "bytes", **recipe})
    found = gather([str(source) for source in sources], [], chosen)
    index = prepare(found, chosen, out, Quiet(), num_workers=workers)
    assert index is not None
    return index


def documents(folder: Path) -> dict[str, list[str]]:
    """Each split's documents as text, read independently of the code that trains on them."""
    content = json.loads((folder / "index.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {}
    for split, record in content["splits"].items():
        dtype = "<u2" if content["vocab_size"] <= 65536 else "<u4"
        shards = [np.fromfile(folder / shard["file"], dtype=dtype, offset=1024) for shard in record["shards"]]
        ids = np.concatenate(shards) if shards else np.empty(0, dtype)
        begins = np.flatnonzero(ids == content["tokenizer"]["end_of_text"])
        assert len(begins) == record["documents"]
        found[split] = [tokenizer.decode(part[1:].tolist()) for part in np.split(ids, begins)[1:]]
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of every kind: real sources as text files, JSONL, gzip and Parquet, 600 kB in all."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [Path(file.path).read_text(errors="replace")[:2000] for file in embedded().files[::2]]
    for number, text in enumerate(texts[:30]):
        (folder / f"{number:03d}.txt").write_text(text)
    (folder / "long.txt").write_text("".join(texts[:100]))
    (folder / "a.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts[30:100]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[100:175] + texts[30:40])
    pq.write_table(pa.table({"text": texts[175:]}), folder / "c.parquet", row_group_size=17)
    return folder


def child(
    sources: Path,
    out: Path,
    recipe: dict[str, Any],
    workers: int,
    *,
    stops: bool = False,
    share: Sequence[int] = (),
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Prepares in another process, which says when it begins. `stops`: and stops itself after its first part."""
    arguments = json.dumps([[str(sources)], str(out), recipe, workers, stops, share])
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", CHILD, arguments]
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, **options)


@pytest.mark.long
def test_killed_at_any_moment_it_ends_with_the_bytes_of_an_undisturbed_run(corpus: Path, tmp_path: Path) -> None:
    """(mutation: a part's record is written before its tokens)"""
    recipe = {"tokenizer": "train:1000", "shard_tokens": 30_000}
    began = time.monotonic()
    make([corpus], tmp_path / "undisturbed", **recipe)
    whole_s = time.monotonic() - began
    draw = random.Random(5)
    out, kills = tmp_path / "killed", 0
    while kills < 6:
        with child(corpus, out, recipe, 1 + kills % 2) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it begins
            try:
                assert process.wait(draw.uniform(0.0, 0.35 * whole_s)) == 0
                break  # it was done before the moment came
            except subprocess.TimeoutExpired:
                os.killpg(
                    process.pid, signal.SIGKILL
                ) if kills % 3 else process.kill()  # workers too, or left to notice
                kills += 1
    make([corpus], out, **recipe)
    assert bytes_of(out) == bytes_of(tmp_path / "undisturbed")
    assert kills >= 2
    Dataset.open(out).verify()


def test_what_died_after_its_last_part_is_finished_by_several_workers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have nothing to encode. Mutation: so many processes as parts, which is none."""
    out, sources = tmp_path / "out", [corpus / "a.jsonl"]

    def die(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("paceline.data.prepare._require_both", die)
        with pytest.raises(MemoryError):
            make(sources, out, tokenizer="bytes")
    make(sources, out, workers=2, tokenizer="bytes")
    Dataset.open(out).verify()


def test_any_number_of_workers_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    recipe = {"tokenizer": "train:300", "shard_tokens": 50_000}
    for workers in (1, 2):
        make([corpus / "a.jsonl", corpus / "b.jsonl.gz"], tmp_path / f"{workers}", workers=workers, **recipe)
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


def test_ctrl_c_while_workers_start_is_the_parent_s_alone(corpus: Path, tmp_path: Path) -> None:
    process = child(
        corpus,
        tmp_path / "out",
        {"tokenizer": "bytes"},
        2,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `make test &` ignores it, inherited
    )
    starts = psutil.Process(process.pid)
    while not any("spawn_main" in " ".join(worker.cmdline()) for worker in starts.children()):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.1)  # it imports
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.count(b"Traceback") == 1


def test_documents_of_every_kind_arrive_whole_and_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    records = [f"record {i} ünïcödé \U0001f600\r\nsecond line" for i in range(400)]
    (source / "a.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in records[:100]))
    with gzip.open(source / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": text}, ensure_ascii=False) + "\n" for text in records[100:200])
    (source / "c.jsonl.zst").write_bytes(
        zstd("".join(json.dumps({"body": text}) + "\n" for text in records[200:300]).encode())
    )
    column = pa.array([*records[300:], None, ""])
    pq.write_table(pa.table({"x": range(102), "body": column}), source / "d.parquet", row_group_size=7)
    index = make([source], tmp_path / "out", text_key="body", validation_frac=0.1)
    found = documents(tmp_path / "out")
    assert sorted(found["train"] + found["validation"]) == sorted(records)
    assert 10 <= len(found["validation"]) <= 90
    assert index.origin["empty_documents"] == 2
    shuffled = tmp_path / "shuffled"
    shuffled.mkdir()
    (shuffled / "all.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in sorted(records)))
    make([shuffled], tmp_path / "other", text_key="body", validation_frac=0.1)
    assert sorted(documents(tmp_path / "other")["validation"]) == sorted(found["validation"])  # not by their order


def test_windows_text_latin_1_bytes_empty_files_and_a_document_longer_than_a_shard(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n" * 50)
    (source / "latin.txt").write_bytes(b"plain " * 2000 + "Müller".encode("latin-1"))
    (source / "empty.txt").write_bytes(b"")
    (source / "long.txt").write_text("a line of the long one\n" * 10_000)
    index = make([source], tmp_path / "out", shard_tokens=30_000, validation_frac=0.3)
    found = documents(tmp_path / "out")
    whole = "".join(found["train"] + found["validation"])
    assert "\r" not in whole
    assert whole.count("a line of the long one\n") == 10_000
    assert "M\ufffdller" in whole
    assert "\ufeffone\ntwo" in whole  # only the first byte order mark is one
    assert index.origin["replaced_places"] == 1
    assert len(index.splits["train"].shards) > 5
    Dataset.open(tmp_path / "out").verify()


def test_a_thousand_tiny_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    texts = [f"file {number}" for number in range(1000)]
    for number, text in enumerate(texts):
        (tmp_path / "source" / f"{number}.txt").write_text(text)
    make([tmp_path / "source"], tmp_path / "out")
    found = documents(tmp_path / "out")
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert 20 < len(found["validation"]) < 90


def test_a_separator_makes_documents_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tales.txt"
    path.write_text("<|endoftext|>\n".join(f"tale {i}\n" for i in range(300)))
    make([path], tmp_path / "out", separator="<|endoftext|>\n", validation_frac=0.1)
    found = documents(tmp_path / "out")
    assert sorted(found["train"] + found["validation"]) == sorted(f"tale {i}\n" for i in range(300))
    path.write_bytes(b"\xa7".join(b"tale %d" % i for i in range(300)))  # in Latin-1, and typed so
    make([path], tmp_path / "latin", separator="\udca7", format="text", validation_frac=0.1)
    found = documents(tmp_path / "latin")
    assert sorted(found["train"] + found["validation"]) == sorted(f"tale {i}" for i in range(300))


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        (["a.jsonl"], {"separator": "###"}, ["--separator '###' has no effect here"]),
        (["b.txt"], {"text_key": "text2"}, ["--text-key text2 has no effect here"]),
        (["a.jsonl", "b.txt"], {"separator": "###", "text_key": "text2"}, []),
    ],
)
def test_an_option_that_no_file_uses_is_said(
    tmp_path: Path, names: list[str], options: dict[str, str], says: list[str]
) -> None:
    records = [json.dumps({"text": f"{i}", "text2": f"{i}"}) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    (tmp_path / "b.txt").write_text("a line\n" * 100)
    recipe, lines = Recipe(tokenizer="bytes", **options), list[str]()
    report = Quiet()
    report.say = lines.append  # type: ignore[method-assign]
    sources = gather([str(tmp_path / name) for name in names], [], recipe)
    prepare(sources, recipe, tmp_path / "out", report, num_workers=1)
    found = [line for line in lines if "has no effect" in line]
    assert len(found) == len(says)
    assert all(say in line for say, line in zip(says, found, strict=True))


def test_validation_of_its_own(tmp_path: Path) -> None:
    for name in ("one", "two", "val"):
        (tmp_path / f"{name}.txt").write_text(name * 10)
    recipe = Recipe(tokenizer="bytes")
    sources = gather([str(tmp_path / "one.txt"), str(tmp_path / "two.txt")], [str(tmp_path / "val.txt")], recipe)
    prepare(sources, recipe, tmp_path / "out", Quiet(), num_workers=1)
    assert documents(tmp_path / "out") == {"train": ["one" * 10, "two" * 10], "validation": ["val" * 10]}
    (tmp_path / "link").symlink_to(tmp_path)
    for same in ("one.txt", "link/one.txt"):
        with pytest.raises(UserError, match=r"one\.txt is among the sources and under --validation"):
            gather([str(tmp_path)], [str(tmp_path / same)], recipe)


def test_what_was_prepared_is_kept_and_another_recipe_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    out = tmp_path / "out"
    first = make([tmp_path / "a.txt"], out)
    before = bytes_of(out)
    assert make([tmp_path / "a.txt"], out) == first
    with pytest.raises(UserError, match=r"was prepared with --shard-tokens 100000000, not 50; give another --out"):
        make([tmp_path / "a.txt"], out, shard_tokens=50)
    with pytest.raises(UserError, match="from other sources"):
        make([corpus / "000.txt"], out)
    assert bytes_of(out) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="is not empty and holds no dataset"):
        make([tmp_path / "a.txt"], tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="File name too long; give an --out that can be written"):
        make([tmp_path / "a.txt"], tmp_path / ("x" * 300))


def broken(folder: Path) -> Path:
    """A source whose last record can not be read, behind parts of good ones."""
    lines = [json.dumps({"text": f"{i} " * 500}) for i in range(200)]  # 6 parts
    path = folder / "records.jsonl"
    path.write_text("\n".join([*lines, '{"text": 5}']) + "\n")
    return path


def test_a_preparation_that_was_begun_resumes_only_with_the_same(tmp_path: Path) -> None:
    path, out = broken(tmp_path), tmp_path / "out"
    with pytest.raises(UserError, match=r"records.jsonl line 201"):
        make([path], out)
    assert len(done(out)) > 3
    with pytest.raises(UserError, match=r"was begun with --tokenizer 'bytes', not 'train:300'.*--restart"):
        make([path], out, tokenizer="train:300")
    found = gather([str(path)], [], Recipe(tokenizer="bytes", on_error="skip"))
    prepare(found, Recipe(tokenizer="bytes", on_error="skip"), out, Quiet(), num_workers=1, restart=True)
    assert len(documents(out)["train"]) + len(documents(out)["validation"]) == 200


def done(out: Path) -> dict[str, int]:
    """The records of parts that are there, with the times when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / ".preparing" / "parts").glob("*.json")}


def test_a_resumed_preparation_makes_only_the_parts_that_are_missing(corpus: Path, tmp_path: Path) -> None:
    """(mutation: a record is not looked for)"""
    chosen = Recipe(tokenizer="bytes", shard_tokens=160_000)
    sources, out = gather([str(corpus)], [], chosen), tmp_path / "out"
    kept = dict[str, int]()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(sources, chosen, out, Ends(KeyboardInterrupt, after_parts=2), num_workers=1)
        assert kept.items() <= done(out).items()
        kept = done(out)
    assert len(kept) == 4
    make([corpus], out, shard_tokens=160_000)
    make([corpus], tmp_path / "undisturbed", shard_tokens=160_000)
    assert bytes_of(out) == bytes_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("content", [b"", b'{"tokens": [1, 2], "do', b"[]"])
def test_a_part_with_a_damaged_record_is_made_again(corpus: Path, tmp_path: Path, content: bytes) -> None:
    """Finds: a JSONDecodeError at each resume."""
    chosen = Recipe(tokenizer="bytes", shard_tokens=160_000)
    sources, out = gather([str(corpus)], [], chosen), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(sources, chosen, out, Ends(KeyboardInterrupt, after_parts=2), num_workers=1)
    (out / ".preparing" / "parts" / min(done(out))).write_bytes(content)
    make([corpus], out, shard_tokens=160_000)
    make([corpus], tmp_path / "undisturbed", shard_tokens=160_000)
    assert bytes_of(out) == bytes_of(tmp_path / "undisturbed")


def test_a_full_disk_is_said_and_the_same_command_resumes(corpus: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    out, recipe = tmp_path / "out", {"shard_tokens": 10_000_000}
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # a write beyond it fails as on a full disk
    try:
        with pytest.raises(UserError, match=r"File too large|disk"):
            make([corpus / "long.txt"], out, **recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (out / "index.json").exists()
    make([corpus / "long.txt"], out, **recipe)
    make([corpus / "long.txt"], tmp_path / "other", **recipe)
    assert bytes_of(out) == bytes_of(tmp_path / "other")


class Ends(Quiet):
    """Ends the preparation where it says something, or after so many parts."""

    def __init__(self, how: type[BaseException], *, when_said: str = "", after_parts: int = 10**9) -> None:
        self._how, self._when_said, self._parts_left = how, when_said, after_parts

    def say(self, text: str) -> None:
        if self._when_said and self._when_said in text:
            raise self._how

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        self._parts_left -= 1
        if not self._parts_left:
            raise self._how


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Index]:
    """Prepares what is piped in, with a tokenizer that is trained on it, or for validation beside a file."""

    def prepare_piped(
        content: bytes, out: Path, report: Quiet | None = None, *, beside: Path | None = None, **options: Any
    ) -> Index:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
        recipe = Recipe(tokenizer="train:300", validation_frac=0.2, shard_tokens=10_000)
        sources = gather([str(beside)], ["-"], recipe) if beside else gather(["-"], [], recipe)
        return prepare(sources, recipe, out, report or Quiet(), num_workers=1, **options)

    return prepare_piped


def lines_of(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_standard_input_on_resume_is_the_same(piped: Callable[..., Index], tmp_path: Path) -> None:
    """It was kept on the disk; what is piped in later is compared with that."""
    texts = [f"document {i} " * 200 for i in range(80)]
    content, last = lines_of(texts), lines_of([*texts[:-1], texts[-1][:-1] + "!"])
    assert len(last) == len(content) > 2 * PART_BYTES
    with pytest.raises(KeyboardInterrupt):
        piped(content, tmp_path / "out", Ends(KeyboardInterrupt, after_parts=2))
    shutil.copytree(tmp_path / "out", tmp_path / "begun")
    for other in (lines_of(["x"]) + content, last, content[:-20], content + b"\n", b"{}"):
        with pytest.raises(UserError, match=r"standard input is not .* read before.*--restart"):
            piped(other, tmp_path / "out")
    piped(content, tmp_path / "out")
    piped(content, tmp_path / "undisturbed")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "undisturbed")
    piped(last, tmp_path / "begun", restart=True)
    found = documents(tmp_path / "begun")
    assert sorted(found["train"] + found["validation"]) == sorted([*texts[:-1], texts[-1][:-1] + "!"])


def test_a_complete_dataset_is_not_that_of_another_standard_input(piped: Callable[..., Index], tmp_path: Path) -> None:
    """Any was taken for the first, as a pipe has no name and no size."""
    content, other = (lines_of([f"{what} {i}" for i in range(200)]) for what in ("tale", "song"))
    made = piped(content, tmp_path / "out")
    assert made.origin["standard_input"] == hashlib.sha256(content).hexdigest()
    assert piped(content, tmp_path / "out") == made
    with pytest.raises(UserError, match="was made of another standard input; give another --out"):
        piped(other, tmp_path / "out")


def test_standard_input_for_validation_on_resume_is_the_same(piped: Callable[..., Index], tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a line of text\n" * 1000)
    out, beside, texts = tmp_path / "out", tmp_path / "train.txt", [f"document {i} " * 200 for i in range(80)]
    with pytest.raises(KeyboardInterrupt):
        piped(lines_of(texts), out, Ends(KeyboardInterrupt, after_parts=2), beside=beside)
    with pytest.raises(UserError, match=r"standard input is not .* read before.*--restart"):
        piped(lines_of(["x", *texts[1:]]), out, beside=beside)
    piped(lines_of(texts), out, beside=beside)
    assert documents(out)["validation"] == texts


def test_standard_input_of_which_nothing_was_saved_may_be_another(piped: Callable[..., Index], tmp_path: Path) -> None:
    """Ended before there was a tokenizer, and after: it is of the first stream, and would not do for the second."""
    first, second = (lines_of([f"{what} {i}" for i in range(200)]) for what in ("tale", "song"))
    piped(second, tmp_path / "undisturbed")
    for number, end in enumerate((Ends(SystemExit, when_said="training"), Ends(SystemExit, after_parts=1))):
        out = tmp_path / f"{number}"
        with pytest.raises(SystemExit):
            piped(first, out, end)
        assert (out / ".preparing/input").read_bytes() == first
        assert (out / ".preparing/begun.json").exists() == (number == 1)
        for record in (out / ".preparing/parts").glob("*.json"):
            record.unlink()
        piped(second, out)
        assert bytes_of(out) == bytes_of(tmp_path / "undisturbed")


def test_too_few_documents_for_two_splits(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "one"}\n')
    for content in ('{"text": "one"}\n', '{"text": "one"}\n' * 3):
        path.write_text(content)
        with pytest.raises(UserError, match=r"one document, or several that begin alike.*--validation SRC"):
            make([path], tmp_path / "out", tokenizer="train:300")
        assert not list((tmp_path / "out").glob("[!.]*"))  # before anything was made of it
    path.write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"there is no text in the sources \(1 documents are empty\)"):
        make([path], tmp_path / "other")


@pytest.mark.parametrize("frac", [0.01, 0.5, 0.99])
def test_few_documents_give_both_splits_and_the_hash_decides_where_it_gives_both(tmp_path: Path, frac: float) -> None:
    """The rule computed here by itself: what it gave before where no split was empty, else the nearest document."""
    rng, empty = random.Random(1), 0
    for number, count in enumerate([2, 5, 51, 100]):
        texts = [f"document {rng.random()}" + " and more" * 120 for _ in range(count)]
        keys = {
            text: int.from_bytes(hashlib.blake2b(text[:1024].encode(), digest_size=8).digest(), "little")
            for text in texts
        }
        expected = {text for text in texts if keys[text] < frac * 2.0**64}
        empty += not 0 < len(expected) < count
        expected = expected or {min(texts, key=keys.__getitem__)}
        expected = expected if len(expected) < count else expected - {max(texts, key=keys.__getitem__)}
        path = tmp_path / f"{number}.jsonl"
        for attempt, order in enumerate((texts, sorted(texts))):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in order))
            out = tmp_path / f"{number}-{attempt}"
            make([path], out, validation_frac=frac)
            assert set(documents(out)["validation"]) == expected
            assert set(documents(out)["train"]) == set(texts) - expected
    assert empty >= (0 if frac == 0.5 else 3)


def test_documents_beside_files_that_are_split_by_name_follow_the_hash(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n')
    make([tmp_path], tmp_path / "out")
    found = documents(tmp_path / "out")
    assert found["train"][-1] == "one"
    assert found["validation"] == ["a line\n" * 9]


def test_shards_of_a_killed_attempt_that_saved_nothing_do_not_stay(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".preparing").mkdir(parents=True)
    for name in ("train-00000.bin", "train-00007.bin", "validation-00001.starts.npy"):
        (tmp_path / "out" / name).write_bytes(b"left")
    make([corpus / "long.txt"], tmp_path / "out")
    make([corpus / "long.txt"], tmp_path / "other")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "other")


def test_shares_of_several_hosts_give_the_bytes_of_one(corpus: Path, tmp_path: Path) -> None:
    """The last makes the shards; a host that finishes makes no part (mutation: a share takes all parts; or shards are
    made of the parts that are there)."""
    recipe = Recipe(tokenizer="train:300", shard_tokens=50_000)
    sources = gather([str(corpus / "long.txt"), str(corpus / "a.jsonl")], [], recipe)
    out = tmp_path / "out"
    shares = [Share(3, 3), Share(only_finishes=True), Share(1, 3), Share(1, 3), Share(2, 3)]
    made = [prepare(sources, recipe, out, Quiet(), num_workers=1, share=share) for share in shares]
    assert [index is not None for index in made] == [False, False, False, False, True]
    prepare(sources, recipe, tmp_path / "other", Quiet(), num_workers=1)
    assert bytes_of(out) == bytes_of(tmp_path / "other")


def test_a_share_that_waits_for_the_shards_is_done_when_another_has_made_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for a lock in a folder that the other share removed."""
    recipe, out = Recipe(tokenizer="bytes"), tmp_path / "out"
    sources = gather([str(corpus / "a.jsonl")], [], recipe)
    whole = prepare(sources, recipe, tmp_path / "whole", Quiet(), num_workers=1)

    def die(*_: Any) -> None:
        raise MemoryError

    prepare(sources, recipe, out, Quiet(), num_workers=1, share=Share(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr("paceline.data.prepare._require_both", die)
        with pytest.raises(MemoryError):
            prepare(sources, recipe, out, Quiet(), num_workers=1, share=Share(2, 2))
    encodes, report = threading.Event(), Quiet()
    report.say = lambda _: encodes.set()  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        with filelock.FileLock(out / ".preparing" / "lock-end"):
            waits = threads.submit(prepare, sources, recipe, out, report, num_workers=1, share=Share(2, 2))
            assert encodes.wait(60)
            time.sleep(0.3)  # it has nothing to encode, and waits
            for path in (tmp_path / "whole").iterdir():
                path.rename(out / path.name)
            (out / ".preparing").rename(tmp_path / "removed")  # in one step: beside rmtree it may make the lock anew
        assert waits.result(60) == whole


@pytest.mark.parametrize(
    ("running", "share", "restart"),
    [((), Share(2, 2), False), ((2, 2), Share(), False), ((1, 3), Share(1, 2), False), ((1, 2), Share(), True)],
)
def test_processes_that_divide_the_parts_otherwise_are_refused(
    corpus: Path, tmp_path: Path, running: tuple[int, ...], share: Share, restart: bool
) -> None:
    """They would write the same files (mutation: each looks at its own lock only)."""
    out, recipe = tmp_path / "out", Recipe(tokenizer="bytes")
    sources = gather([str(corpus)], [], recipe)
    with child(corpus, out, {"tokenizer": "bytes"}, 1, stops=True, share=running) as first:
        try:
            assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])
            with pytest.raises(UserError, match="divides the parts otherwise"):
                prepare(sources, recipe, out, Quiet(), num_workers=1, share=share, restart=restart)
        finally:
            first.kill()
    assert done(out)
    assert prepare(sources, recipe, out, Quiet(), num_workers=1) is not None  # what they left is no lock


def test_two_processes_do_not_write_one_folder(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with child(corpus, out, {"tokenizer": "bytes"}, 1, stops=True) as first:
        try:
            assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])
            with pytest.raises(UserError, match="another process is preparing"):
                make([corpus], out)
        finally:
            first.kill()


def broken_sources(folder: Path) -> list[Path]:
    """Sources with 240 good records in all, of which each but the first has something that cannot be read."""
    texts = [f"document {i} of trains and rails" for i in range(300)]
    lines = [json.dumps({"text": text}) for text in texts]
    names = ("good.jsonl", "lines.jsonl", "cut.jsonl.gz", "page.parquet", "utf16.jsonl", "column.parquet", "last.jsonl")
    good, broken, cut, page, utf16, column, last = (folder / name for name in names)
    good.write_text("\n".join(lines[:100]))
    broken.write_text(
        "\n".join([*lines[100:150], lines[150][:-5], "[1]", '{"txt": "a"}', '{"text": 1}', *lines[151:200]])
    )
    cut.write_bytes(gzip.compress("\n".join(lines[200:201] * 9).encode())[:-9])
    page.write_text("<html>404</html>")
    utf16.write_text(lines[0], encoding="utf-16")
    pq.write_table(pa.table({"other": ["a"]}), column)
    last.write_text("\n".join(lines[259:300]))
    return [good, broken, cut, page, utf16, column, last]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_can_not_be_read_is_skipped_and_counted_by_source(tmp_path: Path, workers: int) -> None:
    """One broken line of a terabyte ended the preparation for good (mutation: raise as with --on-error stop)."""
    sources = broken_sources(tmp_path)
    index = make(sources, tmp_path / "out", workers=workers, on_error="skip", validation_frac=0.1)
    assert index.origin["skipped_records"] == {str(sources[1]): 4, **{str(sources[i]): 1 for i in (2, 3, 5)}}
    places = index.origin["skipped_places"]
    assert len(places) == 5
    listed = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert len(listed) == 7
    assert [each["why"] for each in listed[:5]] == places
    assert any(place.startswith(f"{sources[1]} line 51 is not JSON") for place in places)
    assert index.origin["skipped_files"] == 1, "the file that is UTF-16"
    found = {text for texts in documents(tmp_path / "out").values() for text in texts}
    assert {f"document {i} of trains and rails" for i in (*range(150), *range(151, 200), *range(259, 300))} <= found
    assert "recipe" in index.origin
    assert "on_error" not in index.origin["recipe"], "a resume may change it"


def test_a_preparation_that_stopped_at_a_broken_record_resumes_with_skip(tmp_path: Path) -> None:
    """And is as if it had skipped from the beginning; a system's error is no broken record."""
    sources = broken_sources(tmp_path)[:2]
    with pytest.raises(UserError, match="line 51 is not JSON"):
        make(sources, tmp_path / "out", shard_tokens=500)
    resumed = make(sources, tmp_path / "out", shard_tokens=500, on_error="skip")
    assert resumed == make(sources, tmp_path / "whole", shard_tokens=500, on_error="skip")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_a_source_that_is_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    """Of a file with other row groups, later parts are other rows: some would be lost without a word."""
    texts = [f"row {i} " * 20 for i in range(4000)]
    path, other = tmp_path / "x.parquet", tmp_path / "other.parquet"
    plain = {"use_dictionary": False, "compression": "NONE"}
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, **plain)
    pq.write_table(pa.table({"text": texts}), other, row_group_size=4000, **plain)

    class Meddler(Quiet):
        def advance(self, *progress: Any, **what: Any) -> None:
            if other.exists():
                os.replace(other, path)

    recipe = Recipe(tokenizer="bytes", on_error="skip")
    sources = gather([str(path)], [], recipe)
    with pytest.raises(UserError, match=r"x\.parquet changed while it was read; start again"):
        prepare(sources, recipe, tmp_path / "out", Meddler(), num_workers=1)
    assert not other.exists()
    make([path], tmp_path / "out", on_error="skip")
    found = documents(tmp_path / "out")
    assert sorted(found["train"] + found["validation"]) == sorted(texts)


def test_mending_one_source_does_not_lose_the_work_on_the_others(tmp_path: Path) -> None:
    """The first file's parts are complete when a record of the second is found to be broken, and mended; a third file
    is new (mutation: a part's name depends on its number)."""
    good, broken, *_, last = broken_sources(tmp_path)
    good.write_text("\n".join([good.read_text()] * 40))
    with pytest.raises(UserError, match="line 51 is not JSON"):
        make([good, broken], tmp_path / "out", shard_tokens=10_000, validation_frac=0.3)
    kept = done(tmp_path / "out")
    assert len(kept) == -(-good.stat().st_size // PART_BYTES) > 2
    broken.write_text(json.dumps({"text": "mended"}))
    chosen = Recipe(tokenizer="bytes", shard_tokens=10_000, validation_frac=0.3)
    sources = gather([str(path) for path in (last, good, broken)], [], chosen)
    with pytest.raises(KeyboardInterrupt):
        prepare(sources, chosen, tmp_path / "out", Ends(KeyboardInterrupt, after_parts=1), num_workers=1)
    assert kept.items() < done(tmp_path / "out").items()
    make([last, good, broken], tmp_path / "out", shard_tokens=10_000, validation_frac=0.3)
    make([last, good, broken], tmp_path / "whole", shard_tokens=10_000, validation_frac=0.3)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
