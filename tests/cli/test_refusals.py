"""The law: what cannot work is refused with status 2 and one clear message, soon, and nothing is left behind."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from in_process import here
from program import Ended, run
from whole_runs import SHARDS

from paceline.cli.former import FORMER
from paceline.cli.main import main
from paceline.config import Config, load_preset, to_toml
from paceline.train.request import Request
from paceline.world.cores import usable_cores

TRAIN = ("train", "--preset", "tiny")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder to start commands in."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def tree(folder: Path) -> dict[str, tuple[int, float]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime if path.is_file() else 0)
        for path in folder.rglob("*")
    }


def refused(place: Path, *arguments: str, env: dict[str, str] | None = None, says: tuple[str, ...]) -> Ended:
    """Runs the command in `place`, in a process of its own where `env` is given, and returns how it was refused, having
    checked all that the law says."""
    temporary, cache = place.parent / "tmp", place.parent / "cache"
    temporary.mkdir(exist_ok=True)
    before = tree(place)
    places = {"TMPDIR": str(temporary), "PACELINE_CACHE": str(cache)}
    if env is None:
        with patch.dict(os.environ, places), patch("tempfile.tempdir", None):
            ended = here(*arguments, cwd=place).require(2)
    else:
        ended = run(*arguments, env={**places, **env}, cwd=place).require(2)
    assert_one_message(ended)
    for text in says:
        assert text in ended.err, f"{text!r} is not in:\n{ended.err}"
    assert tree(place) == before, "something was left behind"
    assert not list(temporary.iterdir()), "something was left in the temporary folder"
    assert not cache.exists(), "the corpus was prepared before the refusal"
    return ended


def assert_one_message(ended: Ended) -> None:
    """One line on stderr, and nothing else anywhere."""
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_what_earlier_versions_had_is_refused_with_what_to_do_instead(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "config.toml").write_text(to_toml(load_preset("tiny", Config())))
    for name, instead in FORMER.items():
        *verb, word = name.split()
        run_folder = ["run"] if verb == ["resume"] else []
        refused(place, *verb, *run_folder, word, "x", says=(word, "of earlier versions", instead))


def test_a_refusal_that_cannot_be_printed_is_still_one() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run((sys.executable, "-m", "paceline", "frain"), stderr=full, check=False).returncode == 2


@pytest.mark.parametrize("arguments", [("--version",), ("train", "--help"), ("data", "info", "trained")], ids=" ".join)
def test_what_was_asked_for_and_cannot_be_printed_is_one_message(arguments: tuple[str, ...]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = (sys.executable, "-m", "paceline", *arguments)
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, cwd=SHARDS)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "No space left on device" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*TRAIN, "--model.n-layers", "3"), ("--model.n-layers", "did you mean '--model.n-layer'?")),
        ((*TRAIN, "--model.n_embed", "64"), ("did you mean '--model.n-embd'?",)),
        ((*TRAIN, "--train.steps", "many"), ("--train.steps", "many")),
        ((*TRAIN, "--optim.name", "adam"), ("--optim.name", "adamw", "muon")),
        ((*TRAIN, "--data.packing", "fit"), ("--data.packing", "bestfit")),
        ((*TRAIN, "--train.steps"), ("--train.steps",)),
        ((*TRAIN, "stray"), ("stray",)),
        (("train", "--preset", "tinny"), ("'tinny'", "did you mean 'tiny'?", "demo")),
        (("trian",), ("'trian'", "did you mean 'train'?")),
        ((*TRAIN, "--config", "missing.toml"), ("missing.toml", "No such file")),
        ((*TRAIN, "--train.global-batch-size", "-4"), ("train.global-batch-size is -4",)),
        ((*TRAIN, "--train.device-batch-size", "-1"), ("train.device-batch-size is -1",)),
        ((*TRAIN, "--parallel.shares", "fast"), ("parallel.shares is 'fast'", "auto", "24,8")),
        ((*TRAIN, "--parallel.shares", "0,0"), ("parallel.shares is '0,0'",)),
        ((*TRAIN, "--parallel.shares", "9,4"), ("sum to 13", "--train.global-batch-size 13")),
        ((*TRAIN, "--parallel.shares", "auto", "--parallel.strategy", "fsdp"), ("shares auto needs", "strategy zero")),
        ((*TRAIN, "--parallel.shares", "9,3"), ("for 2 ranks, and 1 train", "auto")),
        (
            (*TRAIN, "--train.device-batch-size", "24"),
            ("train.device-batch-size is 24", "train.global-batch-size 12"),
        ),
        (("train", "--data.seq-len", "64"), ("exactly one", "--train.steps", "--train.time-budget")),
        ((*TRAIN, "--train.steps", "5", "--train.tokens", "5000"), ("--train.steps and --train.tokens", "exactly one")),
        # A12: also where one of them says what the preset says
        ((*TRAIN, "--train.tokens=5000", "--train.steps", "40"), ("--train.steps and --train.tokens", "exactly one")),
        (
            (*TRAIN, "--train.global-batch-size", "12", "--train.global-batch-tokens", "100"),
            ("--train.global-batch-size and --train.global-batch-tokens", "exactly one"),
        ),
        ((*TRAIN, "--model.n-positions", "32"), ("data.seq-len is 64", "model.n-positions 32")),
        ((*TRAIN, "--model.dropout", "1.5"), ("model.dropout is 1.5",)),
        ((*TRAIN, "--optim.lr", "nan"), ("optim.lr is nan",)),
        (
            (*TRAIN, "--optim.lr", "0.1", "--optim.weight-decay", "10"),
            ("0.1 times weight decay 10", "lower --optim.weight-decay\n"),
        ),
        ((*TRAIN, "--optim.lr", "1e9"), ("1e+09 times weight decay 0.1", "lower --optim.lr (1e-4")),
        (
            (*TRAIN, "--optim.embedding-lr-ratio", "1e5"),
            ("times embedding-lr-ratio 100000 times weight decay 0.1", "lower --optim.embedding-lr-ratio\n"),
        ),
        ((*TRAIN, "--data.path", "missing"), ("data.path missing does not exist",)),
        ((*TRAIN, "--data.path", "a\udcff"), ("data.path is 'a\\udcff', which is not UTF-8",)),
        ((*TRAIN, "--data.mix", "a\udcff=1"), ("data.mix is ('a\\udcff=1',), which is not UTF-8",)),
        ((*TRAIN, "--parallel.interface", "nope0"), ("parallel.interface is 'nope0'", "it has:", "lo")),
        ((*TRAIN, "--nproc", "2", "--parallel.interface", "nope0"), ("parallel.interface is 'nope0'",)),
        ((*TRAIN, "--parallel.backend", "nccl", "--parallel.device", "cpu"), ("parallel.backend nccl",)),
        ((*TRAIN, "--parallel.wire", "bf16", "--parallel.strategy", "ddp"), ("wire bf16", "--parallel.strategy zero")),
        ((*TRAIN, "--parallel.port", "70000"), ("parallel.port is 70000",)),
        ((*TRAIN, "--nproc", "0"), ("--nproc is '0'",)),
        ((*TRAIN, "--nproc", "x"), ("--nproc is 'x'",)),
        ((*TRAIN, "--nproc", "²"), ("--nproc is '²'",)),
        (("plan", "--vary", "a'b"), ("a'b (No closing quotation)",)),
        (("bench", "link", "--preset", "demo", "--train.steps", "5"), ("bench link measures between ranks",)),
        (("export", "run", "--out", "x", "--step", "-5"), ("--step is -5; it must be at least -1",)),
        (("plan", "--calibrate", "--json", "--explain"), ("--json, --explain show a plan",)),
        (("doctor", "--node-rank", "1"), ("--node-rank needs a list of hosts",)),
        (
            ("doctor", "--hosts", "127.0.0.1:2,127.0.0.2:auto", "--node-rank", "1"),
            ("has 127.0.0.2:auto, and the doctor needs numbers", "on this host (127.0.0.2); write 127.0.0.2:"),
        ),
        (("doctor", "--nproc", "100000"), ("--nproc is 100000", "from 1 to 1024")),
        (("train", "--"), ("no option --", "--help all")),  # neither options nor a script
        (("train", "--config", "--preset", "tiny"), ("--config is given without a value",)),
        (("train", "--out", "run", "--", "x" * 300), ("is no file in",)),  # as where its folder may not be entered
        ((*TRAIN, "--resume", "auto", "--out", "x" * 300), ("cannot use xxx", "File name too long")),
        ((*TRAIN, "--nproc", "-2"), ("-2",)),
        (("resume", "nowhere"), ("nowhere does not exist",)),
        (("resume",), ("run folder",)),
        (("sample",), ("paceline sample RUN",)),
        (("sample", "nowhere"), ("nowhere does not exist",)),
        ((*TRAIN, "--out", "/proc/paceline/run"), ("cannot write to /proc",)),
        ((*TRAIN, "--out", "x" * 300), ("cannot use xxx", "File name too long")),
        (("resume", "x" * 300), ("cannot use xxx", "File name too long")),
        ((*TRAIN, "--data.path", "x" * 300), ("can not be read: File name too long",)),
        (("import", "x" * 300, "--out", "new"), ("File name too long; give a shorter one",)),
    ],
    ids=lambda value: " ".join(value).replace("/", ":")[-60:] if isinstance(value, tuple) else None,
)
def test_is_refused(place: Path, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    refused(place, *arguments, says=says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nn_layers = 3\n", ("mine.toml", "n_layers", "did you mean 'n_layer'?")),
        ("[modle]\nn_layer = 3\n", ("mine.toml", "[modle]", "did you mean 'model'?")),
        ('[train]\nsteps = "ten"\n', ("mine.toml", "train.steps", "'ten'", "int")),
        ('[model]\narch = "lama"\n', ("mine.toml", "model.arch", "did you mean 'llama'?")),
        ("[train\n", ("mine.toml", "not TOML")),
    ],
    ids=["field", "section", "type", "choice", "syntax"],
)
def test_a_config_file_is_refused(place: Path, text: str, says: tuple[str, ...]) -> None:
    (place / "mine.toml").write_text(text)
    refused(place, *TRAIN, "--config", "mine.toml", says=says)


def test_an_empty_data_folder_is_refused(place: Path) -> None:
    (place / "empty").mkdir()
    refused(place, *TRAIN, "--data.path", "empty", says=("data.path empty holds no text files",))


def test_a_data_folder_without_text_is_refused(place: Path) -> None:
    (place / "binary").mkdir()
    for number in range(3):
        (place / "binary" / f"{number}.bin").write_bytes(bytes(range(256)) * 10)
    refused(place, *TRAIN, "--data.path", "binary", says=("data.path binary holds no UTF-8 text", "3 files"))


def test_an_output_folder_below_a_file_is_refused(place: Path) -> None:
    (place / "file").write_text("mine")
    refused(place, *TRAIN, "--out", "file/run", says=("cannot write to", "file", "Not a directory"))


def test_an_output_folder_that_is_a_file_is_refused(place: Path) -> None:
    (place / "file").write_text("mine")
    refused(place, *TRAIN, "--out", "file", says=("--out is file, which is a file",))


@pytest.mark.parametrize("out", [".", "../place"])
def test_an_output_folder_with_other_files_is_refused(place: Path, out: str) -> None:
    for name in ("a.py", "b.py", "c", "d"):
        (place / name).write_text("mine")
    refused(
        place, *TRAIN, "--out", out, says=(f"--out is {out}, which holds", "(a.py, b.py, c and 1 more)", "is empty")
    )


@pytest.mark.parametrize("out", ["link", "link/run"])
def test_an_output_folder_behind_a_dangling_link_is_refused(place: Path, out: str) -> None:
    (place / "link").symlink_to("gone")
    refused(place, *TRAIN, "--out", out, says=(f"--out is {out}", "is a link to gone, which does not exist"))


@pytest.fixture
def read_only_mount(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_an_output_folder_on_a_read_only_mount_is_refused(place: Path, read_only_mount: Path, nproc: str) -> None:
    out = read_only_mount / "run"
    refused(place, *TRAIN, "--nproc", nproc, "--out", str(out), says=(f"--out {out}", "Read-only file system"))


def test_an_output_folder_that_holds_another_run_is_refused(place: Path) -> None:
    (place / "my run" / "checkpoints").mkdir(parents=True)
    (place / "my run" / "config.toml").write_text(to_toml(tiny()))
    says = ("--out is my run, which holds a run already", "`paceline resume 'my run'`")
    refused(place, *TRAIN, "--out", "my run", says=says)


@pytest.mark.parametrize("by_hand", [False, True], ids=["nproc", "environment"])
def test_a_used_port_is_refused(place: Path, by_hand: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        says = ("cannot listen on", f":{port}: Address already in use; choose another port")
        if by_hand:
            refused(place, *TRAIN, env=world(MASTER_PORT=str(port)), says=says)
        else:
            refused(place, *TRAIN, "--nproc", "2", "--parallel.port", str(port), says=says)


@pytest.mark.parametrize("nproc", ["1", "2"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(place: Path, nproc: str) -> None:
    says = ("parallel.device is cuda", "no GPU on this machine")
    ended = refused(place, *TRAIN, "--nproc", nproc, "--parallel.device", "cuda", says=says)
    assert ended.err.count("parallel.device is cuda") == 1


def world(**changes: str) -> dict[str, str]:
    """The environment of rank 0 of 2, as a cluster's scripts set it."""
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", **changes}


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "0"}, ("only a part of a rank", "RANK set", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("only a part of a rank", "MASTER_ADDR, MASTER_PORT missing")),
        (world(RANK="2", LOCAL_RANK="0"), ("RANK is 2 and WORLD_SIZE is 2",)),
        (world(WORLD_SIZE="two"), ("WORLD_SIZE is 'two'",)),
        (world(MASTER_PORT="http"), ("MASTER_PORT is 'http'",)),
    ],
    ids=["only-rank", "no-address", "rank-beyond", "world-size", "port"],
)
def test_an_environment_that_is_no_world_is_refused(place: Path, env: dict[str, str], says: tuple[str, ...]) -> None:
    refused(place, *TRAIN, env=env, says=says)


def test_nproc_inside_a_world_is_refused(place: Path) -> None:
    refused(place, *TRAIN, "--nproc", "2", env=world(), says=("--nproc 2 inside a world",))


@pytest.mark.parametrize("verb", [TRAIN, ("verify",)], ids=["train", "verify"])
def test_more_ranks_than_memory_holds_are_refused(place: Path, verb: tuple[str, ...]) -> None:
    too_many = psutil.virtual_memory().available // (150 << 20)  # a rank of `tiny` takes 200 MiB of its own
    if too_many > 1024:
        pytest.skip("this machine has memory for more ranks than --nproc takes")
    ended = refused(place, *verb, "--nproc", str(too_many), says=(f"--nproc is {too_many}", "200.0 MiB", "free"))
    assert f"({usable_cores()}) or GPUs" in ended.err


def test_a_path_that_is_not_utf_8_is_shown_with_escapes(place: Path) -> None:
    refused(place, "resume", "caf\udce9", says=("caf\\udce9 does not exist",))


@pytest.mark.long
def test_more_ranks_than_cores_are_warned_of(place: Path) -> None:
    too_many = usable_cores() + 1
    if too_many > 8:
        pytest.skip("this machine has many cores, and a rank takes two seconds of one to start")
    refused(
        place, *TRAIN, "--nproc", str(too_many), "--parallel.expect-ranks", str(too_many + 1), says=("expect-ranks",)
    )
    one_step = ("--train.stop-at-step", "1", "--train.sample-tokens", "0")
    ended = run(*TRAIN, "--nproc", str(too_many), *one_step, cwd=place).require(75)
    says = f"warning: {too_many} ranks start here, and there are {usable_cores()} cores: they share cores"
    (warning,) = ended.err.splitlines()
    assert warning.startswith(says)


@pytest.mark.parametrize("verb", ["sample", "train"])
def test_only_a_verb_whose_ranks_wait_for_each_other_tells_other_hosts_of_its_refusal(
    place: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Finds: a mistake that somebody makes in a pod by hand is the refusal of the job that trains in it."""
    told: list[str] = []
    monkeypatch.setattr("paceline.world.rendezvous.tell_others", lambda error: told.append(str(error)))
    pod = {"PET_MASTER_ADDR": "a", "PET_NNODES": "2", "PET_NODE_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    assert "no option --nonesuch" in here(verb, "--nonesuch", cwd=place).require(2).err
    assert len(told) == (verb == "train")


def test_ranks_of_a_command_without_a_folder_get_a_new_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not left behind if they refuse it."""

    def start_ranks(request: Request, *arguments: Any) -> int:
        assert request.out is not None
        assert list((place / "runs").iterdir()) == [place / request.out]
        assert arguments[-1][-2:] == ("--out", str(request.out))
        return 7

    monkeypatch.setattr("paceline.cli.start._start_ranks", start_ranks)
    assert here(*TRAIN, "--nproc", "2", cwd=place).status == 7
    assert not list((place / "runs").iterdir())


def test_a_warning_that_nobody_can_read_does_not_end_the_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("paceline.cli.start.usable_cores", lambda: 1)
    monkeypatch.setattr("paceline.cli.start._start_ranks", lambda *arguments: 7)
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    try:
        os.dup2(writer, 2)
        assert main([*TRAIN, "--nproc", "2", "--out", "run"]) == 7
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)


def tiny() -> Config:
    return load_preset("tiny", Config())


@pytest.fixture
def bare_run(place: Path) -> Path:
    """A run folder before its first checkpoint."""
    (place / "run" / "checkpoints").mkdir(parents=True)
    (place / "run" / "config.toml").write_text(to_toml(tiny()))
    (place / "run" / "tokenizer.json").touch()
    return place / "run"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("resume", "run", "--model.n-layer", "3"), ("--model.n-layer 3", "another run", "2")),
        (("resume", "run", "--train.seed", "3"), ("--train.seed 3", "another run", "1337")),
        (("resume", "run", "--model.n-layers", "3"), ("did you mean '--model.n-layer'?",)),
        (("resume", "--nproc", "2", "run"), ("the run folder comes first",)),
        (("sample", "run"), ("no checkpoint yet",)),
        (("sample", "run", "--tokens", "-1"), ("--tokens is -1",)),
        (("sample", "run", "--temperature", "1e-42"), ("--temperature is 1e-42; give at least 1e-6, or 0",)),
        (("sample", "run", "--seed", "9" * 20), ("it must be less than 2^63",)),
        (("sample", "run", "--step", "-5"), ("--step is -5",)),
        (("resume", "run", "--step", "-5"), ("--step is -5",)),
        (("track", "run", "--to", "tensorboard", "--give-up-after-s", "nan"), ("--give-up-after-s is nan",)),
        (("sample", "run", "--temprature", "1"), ("did you mean '--temperature'?",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.usefixtures("bare_run")
def test_of_a_run_without_a_checkpoint_is_refused(
    place: Path, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    refused(place, *arguments, says=says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--step", "99"), ("has no checkpoint of step 99; it has [10, 20]",)),
        (("--nproc", "2", "--step", "15"), ("has no checkpoint of step 15",)),
        (("--train.steps", "19"), ("--train.steps is 19, and run continues from step 20", "at least 20")),
        (("--train.stop-at-step", "20"), ("--train.stop-at-step is 20", "at least 21")),
        (("--step", "10", "--train.stop-at-step", "9"), ("run continues from step 10", "at least 11")),
        (("--train.profile", "3"), ("--train.profile is 3",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_a_checkpoint_has_passed_is_refused_before_anything_starts(
    bare_run: Path, place: Path, flags: tuple[str, ...], says: tuple[str, ...]
) -> None:
    for step in (10, 20):
        folder = bare_run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").write_text('{"files": {}}')  # looked at before torch is imported: no bytes are read
    refused(place, "resume", "run", *flags, says=says)


def test_a_run_folder_that_is_not_as_it_was_made_is_refused(bare_run: Path, place: Path) -> None:
    (bare_run / "ranks").write_text("")
    refused(place, "resume", "run", says=("run/ranks is a file",))
    for text, says in (("\n", "run/config.toml is empty"), ("[model]\n", "says nothing of how long the run is")):
        (bare_run / "config.toml").write_text(text)
        refused(place, "resume", "run", says=(says, "manifest.json has the config"))
    (bare_run / "config.toml").write_bytes(b"\xff\xfe")
    for command in (("resume", "run"), ("sample", "run"), ("export", "run", "--out", "x")):
        refused(place, *command, says=("cannot read", "run/config.toml", "manifest.json has the config"))
    refused(place, *TRAIN, "--init-from", "run", says=("cannot read", "manifest.json has the config"))


def test_a_command_of_a_script_that_cannot_be_executed_is_refused(place: Path) -> None:
    """Finds: a command whose quotation has no end, and a directory that is a list, in an edited config.toml, were
    a ValueError and a TypeError."""
    (place / "run").mkdir(mode=0o700)
    for text, says in (
        ('command = "python \'a"', "not valid shell syntax: python 'a ("),
        ('command = "python a"\ndirectory = ["b"]', "cannot execute python a: ['b']: No such file"),
    ):
        (place / "run/config.toml").write_text(f"[run]\n{text}\n")
        (place / "run/config.toml").chmod(0o600)
        refused(place, "resume", "run", "--run", says=(says,))


def test_a_folder_that_is_no_run_is_refused(place: Path) -> None:
    (place / "notes").mkdir()
    refused(place, "resume", "notes", says=("notes holds no config.toml", "not a run folder"))


def test_a_refused_command_touches_no_other_port_or_file(place: Path) -> None:
    """The refusal of one field wins over all that would come later: nothing is opened for a config that is wrong."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        refused(
            place,
            *(*TRAIN, "--nproc", "2", "--parallel.port", port, "--train.steps", "-1", "--out", os.devnull),
            says=("train.steps is -1",),
        )
