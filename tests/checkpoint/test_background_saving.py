"""Saving beside training: what is saved is the moment of `begin`, nothing waits but for the copy, and a writer that
fails, hangs or dies at any moment leaves the checkpoints that there were."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import ended, keep

from paceline.base import faults
from paceline.base.ownership import Slice
from paceline.checkpoint import load, publish
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.save import Saver
from paceline.checkpoint.steps import folder_name, list_steps

NO_FACTS: dict[str, Any] = {}
SHAPES = {"t": (1000,)}


@pytest.fixture(autouse=True)
def _no_fault_stays() -> Iterator[None]:
    yield
    faults.install(0, 1, 0, "")


def begin(saver: Saver, step: int, tensor: torch.Tensor) -> None:
    saver.begin(step, {"weights": {Slice("t", 0, 1000): tensor}}, SHAPES, NO_FACTS)


def test_what_is_saved_is_the_moment_of_begin_and_only_the_copy_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy takes half a second; the disk waits until the test lets it write."""
    writes = threading.Event()

    def strike(phase: str, step: int) -> None:
        if phase == "save.copy":
            time.sleep(0.5)
        if phase == "save.write":
            assert writes.wait(60)

    monkeypatch.setattr(faults, "strike", strike)
    saver = Saver(tmp_path, CheckpointConfig(), 0, 1, token="t")
    tensor = torch.ones(1000)
    assert saver.wait_copied() == 0.0
    assert saver.take_outcome() is None
    for step in (1, 2):
        writes.clear()
        began = time.perf_counter()
        begin(saver, step, tensor.fill_(step))
        held_up = time.perf_counter() - began
        assert held_up + saver.wait_copied() >= 0.5
        tensor.fill_(-1)
        assert saver.is_busy
        assert saver.take_outcome() is None
        with pytest.raises(RuntimeError, match="while another was under way"):
            begin(saver, 9, tensor)
        writes.set()
        outcome = ended(saver)
        assert (outcome.step, outcome.problem) == (step, None)
        assert outcome.seconds >= 0.5
        assert saver.take_outcome() is None
        assert torch.equal(load.read_weights(tmp_path)[0]["t"], torch.full((1000,), float(step)))


def test_a_rank_that_writes_nothing_has_nothing_to_wait_for(tmp_path: Path) -> None:
    saver = Saver(tmp_path, CheckpointConfig(), None, 1, token="t")
    begin(saver, 1, torch.ones(1000))
    assert not saver.is_busy
    assert saver.wait_copied() == 0.0
    saver.finish()
    saver.abandon()
    assert saver.take_outcome() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", faults.SAVE_PHASES)
@pytest.mark.parametrize("kind", ["full", "raise"])
def test_a_failure_at_any_phase_is_an_outcome_and_the_next_save_works(tmp_path: Path, phase: str, kind: str) -> None:
    for step in (1, 2):
        keep(tmp_path, step)
    faults.install(0, 1, 0, f"rank=0 step=3 phase={phase} kind={kind}")
    saver = Saver(tmp_path, CheckpointConfig(keep=2), 0, 1, token="t")
    begin(saver, 3, torch.ones(1000))
    problem = ended(saver).problem
    assert problem is not None
    assert ("No space left on device" if kind == "full" else f"{phase} of step 3") in problem
    late = phase == "save.prune"  # then it is there
    assert load.find(tmp_path)[0].name == folder_name(3 if late else 2)
    assert not list(tmp_path.glob(".*unfinished"))
    begin(saver, 4, torch.ones(1000))
    assert ended(saver).problem is None
    assert list_steps(tmp_path) == ([3, 4] if late else [2, 4])
    assert not list(tmp_path.glob(".*"))


def test_what_another_writer_could_not_do_is_said_with_its_number_and_there_is_no_checkpoint(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    savers = [Saver(tmp_path, CheckpointConfig(), writer, 2, token="t") for writer in (0, 1)]
    for step, length in ((2, 499), (3, 500)):
        for saver, start, stop, size in ((savers[0], 0, 500, 500), (savers[1], 500, 1000, length)):
            saver.begin(step, {"weights": {Slice("t", start, stop): torch.ones(size)}}, SHAPES, NO_FACTS)
        problems = [ended(saver).problem for saver in savers]
        if step == 2:
            assert problems[0] is not None
            assert problems[0].startswith("writer 1: ")
            assert problems[0].endswith(str(problems[1]))
            assert sorted(path.name for path in tmp_path.iterdir()) == ["index.jsonl", "latest", folder_name(1)]
    assert problems == [None, None]
    assert list_steps(tmp_path) == [1, 3]


def test_a_folder_that_is_renamed_when_its_last_record_appears_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: a writer that used the folder after its record. The first writer was faster once, in CI."""
    folder, complete = tmp_path / "unfinished", tmp_path / "complete"
    folder.mkdir()
    replace = publish.replace

    def replace_and_publish(path: Path, data: bytes, mode: int) -> None:
        replace(path, data, mode)
        folder.rename(complete)

    monkeypatch.setattr(publish, "replace", replace_and_publish)
    publish.put_record(folder, 1, {"files": {}, "slices": {}})
    assert [path.name for path in complete.iterdir()] == ["writer-00001.json"]


def test_a_save_that_waits_for_a_dead_writer_ends_when_it_is_abandoned(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    earlier = publish.unfinished_folder(tmp_path, 2, "earlier-1")  # of a life in which writer 1 had come further
    earlier.mkdir()
    publish.put_record(earlier, 1, {"files": {}, "tensors": {}})
    saver = Saver(tmp_path, CheckpointConfig(), 0, 2, token="t")
    saver.begin(2, {"weights": {Slice("t", 0, 1000): torch.ones(1000)}}, SHAPES, NO_FACTS)
    time.sleep(0.3)
    assert saver.is_busy
    saver.abandon()
    assert "the run ended" in str(ended(saver).problem)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.jsonl", "latest", folder_name(1)]


def test_where_the_run_folder_is_gone_there_is_no_checkpoint_and_no_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    savers = [Saver(folder / "checkpoints", CheckpointConfig(), writer, 2, token="t") for writer in (0, 1)]
    for saver, start in zip(savers, (0, 500), strict=True):
        saver.begin(2, {"weights": {Slice("t", start, start + 500): torch.ones(500)}}, SHAPES, NO_FACTS)
    assert [ended(saver).problem for saver in savers] == [f"{folder}: the run folder is gone"] * 2
    assert not folder.exists()
    folder.mkdir()
    begin(Saver(folder / "checkpoints", CheckpointConfig(), 0, 1, token="t"), 3, torch.ones(1000))


def test_a_writer_that_shows_no_life_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_PATIENCE_S", 0.2)
    saver = Saver(tmp_path, CheckpointConfig(), 0, 2, token="t")
    begin(saver, 2, torch.ones(1000))
    assert "nothing more has come from writer 1" in str(ended(saver).problem)


def test_who_reads_beside_a_run_gets_one_checkpoint_whole_however_fast_they_go(tmp_path: Path) -> None:
    done = threading.Event()

    def go_on() -> None:
        for step in range(2, 9):
            keep(tmp_path, step, keep=2)
        done.set()

    keep(tmp_path, 1)
    writer = threading.Thread(target=go_on)
    writer.start()
    read = []
    while not done.is_set():
        found, problems = load.read_weights(tmp_path)
        assert problems == []
        assert len(found["a.weight"].unique()) == 1
        read.append(int(found["a.weight"][0, 0]))
    writer.join()
    assert read == sorted(read)
    assert len(set(read)) > 2


# ---- kill -9 ----

# Two writers, each a process: forked, so that torch is imported once. Prints what was found after each death.
WRITERS = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from saving import shares
from paceline.base import faults
from paceline.checkpoint import load
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.save import Saver
from paceline.checkpoint.steps import list_steps
torch.set_num_threads(1)
root = Path(sys.argv[1])

def tensors(step):
    return {f"t{i}": torch.full((20, 100), float(step)) for i in range(4)}

def life(folder, writer, steps, number, fault):
    faults.install(writer, 2, 0, fault)
    saver = Saver(folder, CheckpointConfig(keep=2), writer, 2, token=f"life{number}")
    for step in steps:
        whole = tensors(step)
        state = {f"{name}/exp_avg": -tensor for name, tensor in whole.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        mine = {"weights": shares(whole, 2)[writer], "optimizer": shares(state, 2)[writer]}
        saver.begin(step, mine, shapes, {"step_again": step})
        saver.finish()
        if saver.take_outcome().problem:
            os._exit(1)
        while writer and max(list_steps(folder), default=0) < step:
            time.sleep(0.002)
    os._exit(0)

def live(folder, steps, number, fault=""):
    pids = []
    for writer in (0, 1):
        pid = os.fork()
        if not pid:
            life(folder, writer, steps, number, fault)
        pids.append(pid)
    statuses = {}
    while len(statuses) < 2:
        pid, status = os.wait()
        statuses[pid] = status
        if status:  # as a rank does whose peer has died
            for other in set(pids) - statuses.keys():
                time.sleep(0.05)
                os.kill(other, signal.SIGKILL)
                os.wait()
            return [pids.index(pid), status]
    return None

def look(folder):
    path, manifest, problems = load.find(folder)
    weights, _ = load.read_weights(folder)
    latest = (folder / "latest").read_text().strip()
    return {
        "step": manifest["step"], "problems": problems, "latest": latest, "steps": list_steps(folder),
        "right": all(bool((tensor == manifest["step"]).all()) for tensor in weights.values()),
        "debris": sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(".")),
    }

found = []
for writer in (0, 1):
    for phase in faults.SAVE_PHASES if not writer else faults.SAVE_PHASES[:4]:
        folder = root / f"{phase}-{writer}"
        live(folder, (10, 20), 0)
        died = live(folder, (30,), 1, f"rank={writer} step=30 phase={phase} kind=kill")
        after = look(folder)
        full = live(folder, (40,), 2, f"rank={writer} step=40 phase=save.write kind=full")
        again = live(folder, (50,), 3)
        found.append({"phase": phase, "writer": writer, "died": died, "after": after, "full": full, "again": again,
                      "then": look(folder)})
print(json.dumps(found))
"""


@pytest.mark.long
def test_after_kill_9_of_a_writer_at_any_phase_the_one_before_is_used_and_the_next_save_works(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITERS, str(tmp_path)]
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, env=here)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert len(found) == 11
    for case in found:
        name = f"{case['phase']} of writer {case['writer']}"
        assert case["died"] == [case["writer"], 9], name
        after = case["after"]
        assert after["step"] == (30 if case["phase"] == "save.prune" else 20), name
        assert after["latest"] == folder_name(after["step"]), name
        assert after["debris"], name
        assert case["full"][1] == 256, name
        assert case["again"] is None, name
        then = case["then"]
        assert then["step"] == 50, name
        assert then["steps"] == [after["step"], 50], name
        assert then["debris"] == [], name
        for state in (after, then):
            assert state["right"], name
            assert state["problems"] == [], name
