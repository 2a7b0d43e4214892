"""Four scripts of others, ported by the patches of examples/ports: few lines, the same rows, whatever happens to them.

What is smaller here, or would depend on the number of ranks by itself (dropout, batch norm, the clock), is changed in
the original and in the port alike, by `settings`.
"""

import importlib.util
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program import Ended, rows, run, start_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_LINES = 15  # that a port adds or changes
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Port:
    folder: str  # in originals/
    script: str
    run: str  # its run folder
    num_steps: int
    kill_at: int
    arguments: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # text, and what stands there in the test


PORTS = {
    "nanogpt": Port(
        "nanogpt",
        "train.py",
        "out",
        num_steps=12,
        kill_at=7,
        arguments=(
            *("--dataset=toy", "--device=cpu", "--compile=False", "--n_layer=2", "--n_head=2", "--n_embd=32"),
            *("--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=5", "--max_iters=11"),
            *("--eval_interval=4", "--eval_iters=3", "--warmup_iters=2", "--lr_decay_iters=12", "--learning_rate=0.01"),
        ),
    ),
    "mnist": Port(
        "pytorch",
        "mnist/main.py",
        "runs/mnist",
        num_steps=12,
        kill_at=7,
        arguments=("--epochs=3", "--batch-size=25", "--test-batch-size=30", "--lr=0.1"),
        settings=(("nn.Dropout(0.25)", "nn.Dropout(0.0)"), ("nn.Dropout(0.5)", "nn.Dropout(0.0)")),
    ),
    "dcgan": Port(
        "pytorch",
        "dcgan/main.py",
        "out",
        num_steps=10,
        kill_at=7,
        arguments=(
            *("--dataset=mnist", "--dataroot=.", "--outf=out", "--manualSeed=1", "--workers=0"),
            *("--batchSize=20", "--ngf=4", "--ndf=4", "--nz=8", "--niter=2"),
        ),
        settings=(("nn.BatchNorm2d(", "nn.GroupNorm(1, "),),
    ),
    "autoresearch": Port(
        "autoresearch",
        "train.py",
        "runs/autoresearch",
        num_steps=15,
        kill_at=9,
        settings=(
            ("DEPTH = 8 ", "DEPTH = 2 "),
            ("ASPECT_RATIO = 64", "ASPECT_RATIO = 16"),
            ("HEAD_DIM = 128", "HEAD_DIM = 32"),
            ("TOTAL_BATCH_SIZE = 2**19", "TOTAL_BATCH_SIZE = 5 * 4 * 16"),
            ("DEVICE_BATCH_SIZE = 128", "DEVICE_BATCH_SIZE = 4"),
            ("run.save_every(100)", "run.save_every(4)"),
            ("t1 = time.time()", "t1 = t0 + 1.0"),
            ("torch.bfloat16", "torch.float32"),
            (".bfloat16()", ".float()"),
        ),
    ),
}


def patch_of(name: str) -> Path:
    return ROOT / "examples" / "ports" / f"{name}.diff"


def port_to(folder: Path, name: str) -> Path:
    """Copies a port and what belongs to it into a new folder. Returns the script."""
    port = PORTS[name]
    shutil.copytree(HERE / "originals" / port.folder, folder)
    subprocess.run(("git", "apply", str(patch_of(name))), cwd=folder, check=True)
    script = folder / port.script
    text = script.read_text()
    for old, new in port.settings:
        assert old in text, old
        text = text.replace(old, new)
    script.write_text(text)
    if name == "nanogpt":
        (folder / "data" / "toy").mkdir(parents=True)
        for part, size in (("train", 4000), ("val", 400)):
            (np.arange(size) * 7 % 61).astype(np.uint16).tofile(folder / "data" / "toy" / f"{part}.bin")
        (folder / "data" / "toy" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))
    return script


def train(script: Path, name: str, ranks: int, kill_at: int = 0) -> list[Ended]:
    arguments = (str(HERE / "run_port.py"), str(kill_at), str(script), *PORTS[name].arguments)
    return start_ranks([arguments] * ranks, [{}] * ranks, command=(sys.executable,))


def rows_of(script: Path, name: str) -> Rows:
    """What a run recorded, without times."""
    found = rows(script.parent / PORTS[name].run / "metrics.jsonl")
    by_clock = ("_ms", "_per_s", "_s", "mfu", "_bytes")
    return [{key: value for key, value in row.items() if not key.endswith(by_clock)} for row in found]


@pytest.mark.parametrize("name", PORTS)
def test_a_port_changes_few_lines(name: str) -> None:
    lines = patch_of(name).read_text().splitlines()
    assert 0 < sum(line.startswith("+") and not line.startswith("+++") for line in lines) <= MOST_LINES


@pytest.fixture(scope="module", params=PORTS)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, Rows]]:
    """A port's name, and what it recorded on 1, 2 and 3 ranks."""
    name = request.param
    if PORTS[name].folder == "pytorch" and importlib.util.find_spec("sklearn") is None:  # importing changes variables
        pytest.skip("scikit-learn is not installed")
    found: dict[int, Rows] = {}
    for ranks in (1, 2, 3):
        script = port_to(tmp_path_factory.mktemp(name) / f"{ranks}", name)
        for ended in train(script, name, ranks):
            ended.require(0)
        found[ranks] = rows_of(script, name)
    return name, found


@pytest.mark.long
def test_a_port_gives_one_curve_on_any_ranks(undisturbed: tuple[str, dict[int, Rows]]) -> None:
    """Mutation: a GAN's noise depends on the rank."""
    name, found = undisturbed
    one, two, three = ([row["loss"] for row in found[ranks] if "loss" in row] for ranks in (1, 2, 3))
    assert len(one) == PORTS[name].num_steps
    assert one[-1] < one[0]
    assert two == pytest.approx(one, abs=1e-4)
    assert three == pytest.approx(one, abs=1e-4)


@pytest.mark.long
def test_a_port_that_is_killed_and_started_again_has_the_rows_of_one_that_was_not(
    undisturbed: tuple[str, dict[int, Rows]], tmp_path: Path
) -> None:
    """Mutations: a resumed run writes an evaluation twice; a source that draws from an iterator begins it anew."""
    name, found = undisturbed
    for ranks in (1, 2):
        script = port_to(tmp_path / f"{ranks}", name)
        first, *_ = train(script, name, ranks, PORTS[name].kill_at)
        assert first.status == -9
        for ended in train(script, name, ranks):
            ended.require(0)
        assert rows_of(script, name) == found[ranks]
    run("report", str(script.parent / PORTS[name].run), "--out", str(tmp_path / "page.html")).require(0)
