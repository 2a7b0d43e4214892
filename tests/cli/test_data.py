"""The law: what `data prepare` and `data info` make and say is what an independent count of the sources gives, and a
run on it, whatever the packing, is the same run at any world size and after any stop."""

import json
import os
import pickle
import pty
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyte
import pytest
from in_process import here
from program import digest, losses, run

TRAIN = ("train", "--preset", "tiny", "--train.sample-tokens", "0", "--train.eval-sequences", "8")
TRAIN = (*TRAIN, "--model.n-embd", "32", "--train.device-batch-size", "12")
FRAC = ("--validation-frac", "0.2")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start commands in, with a cache of its own."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return folder


def texts(count: int = 300) -> list[str]:
    return [f"Document {i} sagt naïvely: " + "blah blah. " * (i * 7 % 23) for i in range(count)]


def write_records(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def prepared(place: Path, name: str, documents: list[str], tokenizer: str = "bytes") -> Path:
    write_records(place / f"{name}.jsonl", documents)
    options = ("--tokenizer", tokenizer, *FRAC, "--shard-tokens", "20000")
    here("data", "prepare", f"{name}.jsonl", "--out", name, *options, cwd=place).require(0)
    return place / name


def info(folder: Path, *more: str) -> dict[str, Any]:
    said = here("data", "info", folder.name, "--json", *more, cwd=folder.parent).require(0)
    found: dict[str, Any] = json.loads(said.out)
    return found


def tokens_of(folder: Path, split: str) -> list[int]:
    """By the format's description alone."""
    found: list[int] = []
    for path in sorted(folder.glob(f"{split}-*.bin")):
        content = path.read_bytes()
        magic, version, count = struct.unpack("<3i", content[:12])
        assert (magic, version) == (20240520, 1)
        found += struct.unpack(f"<{count}H", content[1024:])
    return found


def documents_of(folder: Path) -> set[str]:
    """The texts of a data set of bytes: 256 begins each."""
    found: list[list[int]] = []
    for token in tokens_of(folder, "train") + tokens_of(folder, "validation"):
        if token == 256:
            found.append([])
        else:
            found[-1].append(token)
    return {bytes(document).decode() for document in found}


def from_stdin(place: Path, content: bytes, *arguments: str) -> str:
    ended = here("data", "prepare", "-", *arguments, cwd=place, stdin=content).require(0)
    assert ended.err == ""
    return ended.out


def test_standard_input_text(place: Path) -> None:
    content = "<|endoftext|>".join(texts()).encode()
    options = ("--separator", "<|endoftext|>", *FRAC)
    from_stdin(place, content, "--out", "x", "--tokenizer", "bytes", *options)
    assert documents_of(place / "x") == set(texts())
    said = from_stdin(place, content, "--out", "y", "--tokenizer", "train:300", *options)
    assert "keeping standard input on the disk" in said
    found = info(place / "y", "--verify")
    assert sum(split["text_bytes"] for split in found["splits"].values()) == len("".join(texts()).encode())


def test_standard_input_records_are_as_the_file_gives_them(place: Path) -> None:
    file = prepared(place, "file", texts(), "train:300")
    content = (place / "file.jsonl").read_bytes()
    options = ("--tokenizer", "train:300", *FRAC, "--shard-tokens", "20000")
    from_stdin(place, content, "--out", "piped", *options)
    names = {path.name for path in file.iterdir()} - {"index.json"}
    for name in names:
        assert (file / name).read_bytes() == (place / "piped" / name).read_bytes(), name


def test_what_info_says_is_what_is_there(place: Path) -> None:
    documents = [*texts(), "", texts()[3]]
    folder = prepared(place, "data", documents)
    found = info(folder, "--verify")
    assert found["verified"] is True
    assert found["vocab_size"] == 257
    assert found["document_token"] == "<|endoftext|>"
    assert found["origin"]["empty_documents"] == 1
    kept = [text for text in documents if text]
    for split in ("train", "validation"):
        ids, said = np.array(tokens_of(folder, split)), found["splits"][split]
        lengths = np.diff(np.append(np.flatnonzero(ids == 256), ids.size))
        assert said["tokens"] == ids.size
        assert said["documents"] == lengths.size
        assert said["shards"] == len(list(folder.glob(f"{split}-*.bin"))) == -(-ids.size // 20000)
        assert said["document_tokens"]["longest"] == lengths.max()
        assert said["document_tokens"]["median"] == int(np.median(lengths))
        assert said["text_bytes"] == ids.size - lengths.size
    assert sum(said["documents"] for said in found["splits"].values()) == len(kept)
    shown = here("data", "info", str(folder), "--verify", cwd=place).require(0)
    assert "every byte was read" in shown.out
    assert "documents have no text" in shown.out
    assert shown.err == ""


def test_progress_without_a_terminal_is_plain_lines(place: Path) -> None:
    write_records(place / "data.jsonl", texts())
    ended = here("data", "prepare", "data.jsonl", "--out", "x", "--tokenizer", "bytes", *FRAC, cwd=place).require(0)
    assert "\x1b" not in ended.out
    assert "\r" not in ended.out
    assert "tokens" in ended.out.splitlines()[0]
    assert "paceline train --data.path x" in ended.out
    assert ended.err == ""


def test_files_left_out_are_said_before_the_work_and_in_info(place: Path) -> None:
    folder = place / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text("a line of text\n" * 100)
        (folder / f"latin{number}.txt").write_bytes("Müller\n".encode("latin-1") * 100)
    ended = here("data", "prepare", "texts", "--out", "x", "--tokenizer", "bytes", cwd=place).require(0)
    said = " ".join(ended.out.split())
    assert said.startswith("data: warning: 4 of 8 files, 2.7 KiB of 8.6 KiB, are left out (latin0.txt, latin1.txt,")
    assert "4 files are neither text nor a known format and were left out (2.7 KiB)" in said
    ended = here(*TRAIN, "--data.path", "texts", "--data.seq-len", "16", "--train.steps", "1", cwd=place).require(0)
    assert "warning: 4 of 8 files, 2.7 KiB of 8.6 KiB, are left out" in " ".join(ended.out.split())


def test_a_part_for_validation_that_decides_nothing_is_said(place: Path) -> None:
    (place / "book.txt").write_text("a line of text\n" * 100)
    write_records(place / "few.jsonl", texts(51))
    bytes_ = ("--tokenizer", "bytes")
    ended = here("data", "prepare", "book.txt", "--out", "x", *bytes_, "--validation-frac", "0.3", cwd=place).require(0)
    assert (
        "data: --validation-frac 0.3 has no effect here: text files are split by their names or at their" in ended.out
    )
    held = ("--validation", "few.jsonl", "--validation-frac", "0")
    here("data", "prepare", "book.txt", "--out", "y", *bytes_, *held, cwd=place).require(0)
    assert info(place / "y")["splits"]["validation"]["documents"] == 51
    ended = here("data", "prepare", "few.jsonl", "--out", "z", *bytes_, cwd=place).require(0)
    assert "no effect" not in ended.out
    found = info(place / "z")["splits"]
    assert (found["train"]["documents"], found["validation"]["documents"]) == (50, 1)


def test_prepared_twice_changes_nothing(place: Path) -> None:
    folder = prepared(place, "data", texts())
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    prepared(place, "data", texts())
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


@pytest.mark.long
def test_interrupted_and_killed_and_started_again(place: Path) -> None:
    """Ctrl-C and kill -9 keep the complete parts; the bytes are those of an undisturbed run."""
    content = "".join(json.dumps({"text": f"Document {i}: " + "words, " * 500}) + "\n" for i in range(20000)).encode()
    (place / "input").write_bytes(content)
    options = ("--tokenizer", "bytes", "--workers", "1", "--shard-tokens", "5000000", *FRAC)

    @contextmanager
    def preparing(parts: int) -> Iterator["subprocess.Popen[bytes]"]:
        """A preparation that has made so many parts."""
        command = [sys.executable, "-m", "paceline", "data", "prepare", "-", "--out", "x", *options]
        with (
            (place / "input").open("rb") as stdin,
            subprocess.Popen(
                command,
                cwd=place,
                stdin=stdin,
                stdout=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `make test &` ignores it, inherited
            ) as process,
        ):
            while len(list((place / "x/.preparing/parts").glob("*.json"))) < parts:
                assert process.poll() is None
                time.sleep(0.005)
            yield process

    with preparing(parts=1) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75
        assert process.stdout is not None
        assert b"the same command" in process.stdout.read()
    with preparing(parts=3) as process:
        process.kill()
    assert not (place / "x/index.json").exists()
    assert "resuming x" in from_stdin(place, content, "--out", "x", *options)
    from_stdin(place, content, "--out", "y", *options)
    names = {path.name for path in (place / "x").iterdir()}
    assert names == {path.name for path in (place / "y").iterdir()}
    assert len([name for name in names if name.endswith(".bin")]) > 10
    for name in names:
        assert (place / "x" / name).read_bytes() == (place / "y" / name).read_bytes(), name


def test_on_a_terminal_nothing_of_the_progress_stays(place: Path) -> None:
    write_records(place / "data.jsonl", texts())
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "paceline", "data", "prepare", "data.jsonl", "--out", "x", "--tokenizer", "bytes"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen([*command, *FRAC], cwd=place, env=environment, stdout=inner) as process:
        os.close(inner)
        said = b""
        try:
            while more := os.read(terminal, 1 << 16):
                said += more
        except OSError:  # Linux: the other side is closed
            os.close(terminal)
    assert process.returncode == 0
    assert "\u2501" in said.decode()  # there was a bar
    screen = pyte.Screen(120, 40)
    pyte.ByteStream(screen).feed(said)
    assert screen.display[0].split() == ["dataset", "data.jsonl", "in", "x"]
    assert "\u2501" not in "".join(screen.display)


def test_nanogpt_s_characters_are_trained_on_and_sampled(place: Path) -> None:
    text = "To be, or not to be: that is the question.\n" * 300
    letters = sorted(set(text))
    ids = np.array([letters.index(character) for character in text], dtype=np.uint16)
    folder = place / "chars"
    folder.mkdir()
    ids[:12000].tofile(folder / "train.bin")
    ids[12000:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = info(folder, "--verify")
    assert found["vocab_size"] == len(letters)
    assert found["splits"]["train"]["tokens"] == 12000
    assert found["splits"]["train"]["documents"] is None
    here(*TRAIN, "--data.path", "chars", "--train.steps", "2", "--out", "run", cwd=place).require(0)
    ended = here("sample", "run", "--prompt", "To be", "--tokens", "40", cwd=place).require(0)
    assert ended.out.startswith("To be")
    assert set(ended.out) <= set(letters)
    assert len(ended.out.strip("\n")) > 20


def llm_c(path: Path, ids: np.ndarray) -> None:
    path.write_bytes(struct.pack("<256i", 20240520, 1, ids.size, *[0] * 253) + ids.astype("<u2").tobytes())


def test_llm_c_s_shards_are_trained_on(place: Path) -> None:
    folder = place / "web"
    folder.mkdir()
    for number in range(2):
        llm_c(folder / f"web_train_{number:06d}.bin", np.arange(9000) * 7 % 700)
    llm_c(folder / "web_val_000000.bin", np.arange(2000) % 700)
    found = info(folder, "--vocab-size", "700", "--verify")
    assert found["splits"]["train"] | {"tokens": 18000, "shards": 2} == found["splits"]["train"]
    assert found["tokenizer_sha256"] is None
    command = (*TRAIN, "--data.path", "web", "--model.vocab-size", "700", "--train.steps", "2", "--out", "run")
    here(*command, cwd=place).require(0)
    assert len(losses(place / "run")) == 2


@pytest.fixture(scope="module")
def two_data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    prepared(root, "web", texts())
    prepared(root, "code", [f"def f{i}(x):\n    return x * {i}\n" * (i % 11 + 1) for i in range(300)])
    return root


MIX = ("--data.mix", "web=0.7", "code=0.3", "--data.packing", "bestfit", "--data.mask-documents")


@pytest.mark.long
def test_a_mixture_packed_and_masked_is_one_run(place: Path, two_data_sets: Path) -> None:
    """At 1 and 2 ranks the same losses; stopped and gone on with, the same weights.

    A resume on other data is refused in between and leaves the run as it was, its config and its tokenizer too: the
    plain resume that follows is the right one."""
    command = (*TRAIN, *MIX, "--train.steps", "8")
    for ranks in ("1", "2"):
        run(*command, "--nproc", ranks, "--out", str(place / ranks), cwd=two_data_sets).require(0)
    np.testing.assert_allclose(losses(place / "1"), losses(place / "2"), rtol=1e-5)
    stopped = place / "stopped"
    run(*command, "--train.stop-at-step", "3", "--out", str(stopped), cwd=two_data_sets).require(75)
    before = {name: (stopped / name).read_bytes() for name in ("config.toml", "tokenizer.json", "metrics.jsonl")}
    ended = run("resume", str(stopped), "--data.mix", "web=0.6", "code=0.4", cwd=two_data_sets).require(2)
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert "other data" in ended.err
    assert before == {name: (stopped / name).read_bytes() for name in before}
    run("resume", str(stopped), cwd=two_data_sets).require(0)
    assert losses(stopped) == losses(place / "1")
    assert digest(stopped) == digest(place / "1")
