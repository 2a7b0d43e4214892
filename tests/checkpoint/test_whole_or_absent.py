"""A checkpoint is complete or absent: damage is found, older ones are fallen back on and it is said, no code runs."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from paceline.base.errors import RunError, UserError
from paceline.checkpoint import load
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import MANIFEST, OPTIMIZER, WEIGHTS, Damaged, folder_name, list_steps, read
from paceline.checkpoint.save import save, set_aside
from paceline.world.runtime import World

FILES = (WEIGHTS, OPTIMIZER, MANIFEST)


def weights(step: int) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.full((3, 4), float(step)),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "s": torch.tensor(2.0),
    }


def keep(folder: Path, step: int, keep: int = 9) -> Path:
    facts = {"progress": {"step": step, "tokens": 1234567}, "note": "Übergröße"}
    return save(folder, step, weights(step), {"a.weight/momentum": torch.ones(3, 4) * step}, facts, keep)


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_what_was_saved_is_what_is_read(tmp_path: Path) -> None:
    folder = keep(tmp_path / "checkpoints", 500)
    assert folder.name == "step-00000500"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    found, manifest, problems = load.find(tmp_path / "checkpoints")
    assert (found, problems) == (folder, [])
    assert (manifest["step"], manifest["progress"], manifest["note"]) == (
        500,
        {"step": 500, "tokens": 1234567},
        "Übergröße",
    )
    tensors = load.read_tensors(found, WEIGHTS)
    assert set(tensors) == set(weights(500))
    for name, tensor in weights(500).items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000500\n"


def test_tensors_that_are_transposed_or_views_are_kept_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    folder = save(tmp_path, 1, {"t": base.t(), "part": base[1:, ::2]}, {}, {}, 2)
    tensors = load.read_tensors(folder, WEIGHTS)
    assert torch.equal(tensors["t"], base.t())
    assert torch.equal(tensors["part"], base[1:, ::2])


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
def test_every_flipped_byte_of_the_tensors_is_found(tmp_path: Path, name: str) -> None:
    folder = keep(tmp_path, 7)
    for position in range((folder / name).stat().st_size):
        flip(folder / name, position, position % 8)
        with pytest.raises(Damaged, match=name):
            read(folder)
        flip(folder / name, position, position % 8)
    read(folder)


def test_every_flipped_byte_of_the_manifest_is_found_or_changes_nothing(tmp_path: Path) -> None:
    folder = keep(tmp_path, 7)
    whole = read(folder)
    for position in range((folder / MANIFEST).stat().st_size):
        for bit in (0, 3, 7):
            flip(folder / MANIFEST, position, bit)
            with contextlib.suppress(Damaged):
                assert read(folder) == whole, f"a changed manifest was taken, byte {position}"
            flip(folder / MANIFEST, position, bit)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_and_addition_and_a_missing_file_are_found(tmp_path: Path, name: str) -> None:
    folder = keep(tmp_path, 7)
    whole = (folder / name).read_bytes()
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(Damaged):
            read(folder)
    (folder / name).write_bytes(whole + b"x")
    with pytest.raises(Damaged):
        read(folder)
    (folder / name).unlink()
    with pytest.raises(Damaged, match=name):
        read(folder)


@pytest.mark.parametrize(
    "text", ["[]", "null", '"x"', "{}", '{"format": 2}', '{"format": 1, "files": {}, "step": "x"}']
)
def test_a_manifest_of_another_form_is_damage_not_a_traceback(tmp_path: Path, text: str) -> None:
    folder = keep(tmp_path, 7)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(Damaged):
        read(folder)


@pytest.mark.parametrize("files", ["[]", "3", f'{{"{WEIGHTS}": 3}}'])
def test_a_manifest_whose_files_are_of_another_form_is_damage(tmp_path: Path, files: str) -> None:
    folder = keep(tmp_path, 7)
    (folder / MANIFEST).write_text(f'{{"format": 1, "step": 7, "files": {files}}}')
    with pytest.raises(Damaged):
        read(folder)


def test_a_checkpoint_under_another_steps_name_is_damage(tmp_path: Path) -> None:
    keep(tmp_path, 7).rename(tmp_path / folder_name(9))
    with pytest.raises(Damaged):
        read(tmp_path / folder_name(9))


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_is_passed_over_for_the_older_one_and_said(tmp_path: Path, name: str) -> None:
    keep(tmp_path, 10)
    newest = keep(tmp_path, 20)
    (newest / name).write_bytes((newest / name).read_bytes()[:-1])
    folder, manifest, problems = load.find(tmp_path)
    assert folder.name == "step-00000010"
    assert manifest["step"] == 10
    assert len(problems) == 1
    assert "step-00000020" in problems[0]
    assert name in problems[0]


def test_where_none_is_whole_the_run_stops_with_the_list(tmp_path: Path) -> None:
    for step in (10, 20):
        (keep(tmp_path, step) / WEIGHTS).unlink()
    with pytest.raises(RunError, match=r"(?s)no checkpoint .* is whole.*step-00000020.*step-00000010"):
        load.find(tmp_path)


def test_where_there_is_none_the_user_is_told(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="holds no checkpoint yet"):
            load.find(folder)


def test_a_named_step_is_read_or_refused_never_replaced(tmp_path: Path) -> None:
    keep(tmp_path, 10)
    keep(tmp_path, 20)
    assert load.find(tmp_path, 10)[1]["step"] == 10
    with pytest.raises(UserError, match=r"no checkpoint of step 15.*\[10, 20\]"):
        load.find(tmp_path, 15)
    (tmp_path / folder_name(10) / WEIGHTS).unlink()
    with pytest.raises(RunError, match="step-00000010"):
        load.find(tmp_path, 10)


STRAYS = (
    "step-00000010.bak",
    ".step-00000030.unfinished",
    "step-99",
    "step-00000x40",
    "xstep-00000040",
    "step--0000001",
)


def test_stray_folders_are_no_checkpoints(tmp_path: Path) -> None:
    whole = keep(tmp_path, 10)
    for stray in STRAYS:
        shutil.copytree(whole, tmp_path / stray)
    (tmp_path / "step-00000050").write_text("a file")
    assert list_steps(tmp_path) == [10]
    assert load.find(tmp_path)[0] == whole


def test_a_name_with_more_zeros_than_ours_is_a_stray(tmp_path: Path) -> None:
    shutil.copytree(keep(tmp_path, 10), tmp_path / "step-000000099")
    assert list_steps(tmp_path) == [10]


def test_the_next_save_sweeps_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    for stray in STRAYS:
        (tmp_path / stray).mkdir(parents=True)
        (tmp_path / stray / "x").write_text("debris")
    keep(tmp_path, 40)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {*STRAYS, "step-00000040", "latest"} - {".step-00000030.unfinished"}


@pytest.mark.parametrize("number", [2, 3])
def test_as_many_as_asked_are_kept_the_newest(tmp_path: Path, number: int) -> None:
    for step in range(10, 70, 10):
        keep(tmp_path, step, keep=number)
        assert list_steps(tmp_path) == list(range(10, step + 1, 10))[-number:]
    assert (tmp_path / "latest").read_text() == "step-00000060\n"


def test_damaged_ones_do_not_push_whole_ones_out(tmp_path: Path) -> None:
    keep(tmp_path, 10, keep=2)
    (keep(tmp_path, 20, keep=2) / WEIGHTS).unlink()
    keep(tmp_path, 30, keep=2)
    assert {10, 30} <= set(list_steps(tmp_path))


def test_a_run_that_goes_on_from_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    """`resume --step 10` of a run that had gone on to 30, which then saves at 15, and at 20 with other weights."""
    for step in (10, 20, 30):
        keep(tmp_path, step, keep=3)
    assert set_aside(tmp_path, 10) == ["step-00000020", "step-00000030"]
    assert list_steps(tmp_path) == [10]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    assert (tmp_path / "superseded-step-00000030" / WEIGHTS).exists()
    keep(tmp_path, 15, keep=2)
    assert list_steps(tmp_path) == [10, 15]
    folder = save(tmp_path, 20, {"a.weight": torch.zeros(2)}, {}, {}, 2)
    assert torch.equal(load.read_tensors(folder, WEIGHTS)["a.weight"], torch.zeros(2))
    assert list_steps(tmp_path) == [15, 20]
    assert set_aside(tmp_path, 20) == []


def test_saving_the_same_state_again_or_over_a_damaged_one_leaves_a_whole_one(tmp_path: Path) -> None:
    first = keep(tmp_path, 20)
    assert keep(tmp_path, 20) == first
    (first / WEIGHTS).unlink()
    assert keep(tmp_path, 20) == first
    assert read(first)["step"] == 20


def test_settings_that_would_lose_checkpoints_are_refused() -> None:
    CheckpointConfig().check()
    for bad in (CheckpointConfig(every=-1), CheckpointConfig(keep=1)):
        with pytest.raises(UserError, match=r"checkpoint\.(every|keep) is"):
            bad.check()


# ---- full disk ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("num_floats", [400_000, 200_000, 120_000])
def test_a_full_disk_is_an_oserror_and_the_old_checkpoints_stay_whole(small_disk: Path, num_floats: int) -> None:
    """Full in the weights, in the optimizer's state, or at the last file."""
    keep(small_disk, 10)
    big = {"a": torch.zeros(num_floats)}
    with pytest.raises(OSError):
        save(small_disk, 20, big, {"a/m": torch.zeros(150_000)}, {}, 2)
    folder, _, problems = load.find(small_disk)
    assert (folder.name, problems) == ("step-00000010", [])
    assert (small_disk / "latest").read_text() == "step-00000010\n"
    keep(small_disk, 30)  # sweeps the unfinished one, so there is room again
    assert load.find(small_disk)[0].name == "step-00000030"
    assert not list(small_disk.glob(".*unfinished"))


# ---- kill -9 ----

SAVER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from paceline.checkpoint import load
from paceline.checkpoint.manifest import read
from paceline.checkpoint.save import save
torch.set_num_threads(1)
folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)

def tensors(step):
    return {f"t{i}": torch.full((2000,), float(step)) for i in range(4)}

def work(first, pipe):
    step = first
    while True:
        save(folder, step, tensors(step), tensors(-step), {}, keep=2)
        os.write(pipe, step.to_bytes(4, "little"))
        step += 1

known, checks = 0, []
for _ in range(rounds):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        work(known + 1, writer)
    os.close(writer)
    time.sleep(random.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = b""
    while piece := os.read(reader, 65536):
        said += piece
    os.close(reader)
    acknowledged = int.from_bytes(said[-4:], "little") if said else known
    if not acknowledged and not folder.exists() or not list(folder.glob("step-*")):
        continue
    path, manifest, problems = load.find(folder)
    step = manifest["step"]
    weights = load.read_tensors(path, "weights.safetensors")
    latest = (folder / "latest").read_text().strip() if (folder / "latest").exists() else None
    checks.append({
        "acknowledged": acknowledged, "step": step, "problems": problems,
        "right": all(bool((t == step).all()) for t in weights.values()),
        "latest_step": read(folder / latest)["step"] if latest else None,
    })
    known = step
print(json.dumps(checks))
"""


def test_after_kill_9_at_any_moment_the_newest_complete_one_loads_and_latest_is_valid(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVER, str(tmp_path / "c"), "40", "0"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    checks = json.loads(said.stdout)
    assert len(checks) > 20
    for check in checks:
        assert check["problems"] == []
        assert check["right"]
        assert check["acknowledged"] <= check["step"] <= check["acknowledged"] + 1
        # `latest` is written after the rename: kills just between leave it behind, at a whole one all the same.
        assert check["latest_step"] is None or check["latest_step"] <= check["step"]


# ---- no code ----


class Payload:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


READER = """
import os, sys
opened = []
def hook(event, args):
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        opened.append(os.fsdecode(args[0]))
    if event == "pickle.find_class":
        opened.append("PICKLE")
from pathlib import Path
from paceline.checkpoint import load
sys.addaudithook(hook)
path, manifest, problems = load.find(Path(sys.argv[1]))
load.read_tensors(path, "weights.safetensors"), load.read_tensors(path, "optimizer.safetensors")
print("\\n".join(name for name in opened if sys.argv[1] in name or name == "PICKLE"))
"""


def test_nothing_but_json_and_safetensors_is_opened_and_no_pickle_loaded(tmp_path: Path) -> None:
    checkpoints, witness = tmp_path / "checkpoints", tmp_path / "witness"
    folder = keep(checkpoints, 10)
    for name in ("weights.pt", "optimizer.pkl", ".metadata", "data.pickle"):
        (folder / name).write_bytes(pickle.dumps(Payload(witness)))
        (checkpoints / name).write_bytes(pickle.dumps(Payload(witness)))
    said = subprocess.run([sys.executable, "-c", READER, str(checkpoints)], capture_output=True, text=True, check=True)
    opened = said.stdout.split()
    assert opened
    assert all(name.endswith((".json", ".safetensors")) for name in opened)
    assert not witness.exists()


def test_a_pickle_in_the_place_of_the_weights_is_not_run_even_with_a_matching_manifest(tmp_path: Path) -> None:
    folder, witness = keep(tmp_path, 10), tmp_path / "witness"
    (folder / WEIGHTS).write_bytes(pickle.dumps(Payload(witness)))
    with pytest.raises(Exception):  # noqa: B017  (whichever way it is refused)
        load.read_tensors(folder, WEIGHTS)
    assert not witness.exists()


# ---- several ranks ----


def receives(world: World, folder: str) -> Any:
    """Only rank 0 may look at the disk: the others are given a folder that is not there."""
    mine = Path(folder) if world.is_main else Path("/nonexistent")
    path, manifest, problems = load.agree(world.group, mine, None)
    tensors = load.receive(world.group, path if world.is_main else mine, WEIGHTS, world.device)
    refused = None
    try:
        load.agree(world.group, mine, 11)
    except UserError as error:
        refused = (str(error), error.reach)
    return manifest["step"], problems, tensors, refused


def test_rank_0_reads_and_all_ranks_receive_or_refuse_together(tmp_path: Path) -> None:
    keep(tmp_path, 10)
    (keep(tmp_path, 20) / OPTIMIZER).unlink()
    for step, problems, tensors, refused in run_ranks(receives, 2, str(tmp_path)):
        assert step == 10
        assert len(problems) == 1
        assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
            name: (t.dtype, t.tolist()) for name, t in weights(10).items()
        }
        assert "no checkpoint of step 11" in refused[0]
        assert refused[1] == "world"
