"""A checkpoint is complete or absent: damage is found, older ones are fallen back on and it is said, no code runs."""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranks import run_ranks
from saving import MANIFEST, OPTIMIZER, WEIGHTS, keep, put, read, reseal, save_by, weights
from whole_runs import former_manifest

from paceline.base.errors import RunError, UserError
from paceline.base.ownership import Slice
from paceline.checkpoint import load
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.retention import set_aside, take_back
from paceline.checkpoint.steps import folder_name, list_steps, newest_whole
from paceline.checkpoint.writers import save_complete
from paceline.world.group import LocalGroup

FILES = (WEIGHTS, OPTIMIZER, MANIFEST)


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
    tensors, problems = load.read_weights(tmp_path / "checkpoints")
    assert problems == []
    by_others = safetensors.torch.load_file(found / WEIGHTS)  # what one writer wrote, any reader of the format reads
    assert set(tensors) == set(by_others) == set(weights(500))
    for name, tensor in weights(500).items():
        assert tensors[name].dtype == by_others[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
        assert torch.equal(by_others[name], tensor)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000500\n"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_import_saves_whole_tensors_beside_what_is_there(tmp_path: Path) -> None:
    keep(tmp_path, 10)
    base = torch.arange(12.0).view(3, 4)
    folder = save_complete(tmp_path, 0, {"t": base.t(), "part": base[1:, ::2]}, {"t/momentum": base.t()}, {"note": "x"})
    assert list_steps(tmp_path) == [0, 10]
    assert read(folder)["note"] == "x"
    tensors, _ = load.read_weights(tmp_path, 0)
    assert torch.equal(tensors["t"], base.t())
    assert torch.equal(tensors["part"], base[1:, ::2])
    with pytest.raises(OSError, match=r"other\.bias/momentum belongs to no parameter"):
        save_complete(tmp_path, 1, {"t": base}, {"other.bias/momentum": base}, {})
    assert list_steps(tmp_path) == [0, 10]


def test_every_flipped_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    folder = keep(tmp_path, 7, scale=1e-05)
    for position in range((folder / MANIFEST).stat().st_size):
        flip(folder / MANIFEST, position, position % 8)
        with pytest.raises(Damaged):
            read(folder)
        flip(folder / MANIFEST, position, position % 8)
    read(folder)


def test_120_flipped_bits_of_120_are_found(tmp_path: Path) -> None:
    """Anywhere in a checkpoint of three writers, where torch.load took 120 of 120 (docs/design/0004-checkpoints.md)."""
    tensors = {f"layers.{i}.weight": torch.randn(64, 33) for i in range(5)}
    state = {f"{name}/{moment}": tensor for name, tensor in tensors.items() for moment in ("exp_avg", "exp_avg_sq")}
    outcomes = save_by(3, tmp_path, 7, tensors, state, {"progress": {"step": 7}}, CheckpointConfig())
    assert [outcome.problem for outcome in outcomes] == [None] * 3
    folder, draw, found = tmp_path / folder_name(7), random.Random(0), 0
    files = sorted(folder.iterdir())
    assert len(files) == 7
    for _ in range(120):
        path = draw.choices(files, [file.stat().st_size for file in files])[0]
        position, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(path, position, bit)
        with contextlib.suppress(RunError):
            load.find(tmp_path)
            continue
        found += 1
        flip(path, position, bit)
    assert found == 120
    assert load.find(tmp_path)[2] == []


def test_files_of_two_checkpoints_or_writers_that_changed_places_are_found(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(40.0)}
    for step in (1, 2):
        save_by(2, tmp_path, step, {"a": tensors["a"] * step}, {}, {}, CheckpointConfig())
    first, second = (tmp_path / folder_name(step) for step in (1, 2))
    names = [f"weights-0000{writer}-of-00002.safetensors" for writer in (0, 1)]
    os.rename(first / names[0], tmp_path / "x")
    shutil.copy(second / names[0], first / names[0])
    with pytest.raises(Damaged, match=names[0]):
        read(first)
    (first / names[0]).unlink()
    os.rename(tmp_path / "x", first / names[0])
    read(first)
    os.rename(second / names[0], second / "x")
    os.rename(second / names[1], second / names[0])
    os.rename(second / "x", second / names[1])
    with pytest.raises(Damaged, match=names[0]):
        read(second)


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
    "text", ["[]", "null", '"x"', "{}", '{"format": 2}', '{"format": 2, "files": {}, "step": "x"}']
)
def test_a_manifest_of_another_form_is_damage_not_a_traceback(tmp_path: Path, text: str) -> None:
    folder = keep(tmp_path, 7)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(Damaged):
        read(folder)


@pytest.mark.parametrize(
    "files",
    [
        [],
        3,
        {WEIGHTS: 3},
        {WEIGHTS: {"bytes": -1, "sha256": ""}},
        {"../weights-00000-of-00001.safetensors": {"bytes": 1, "sha256": ""}},
        {"/etc/passwd": {"bytes": 1, "sha256": ""}},
        {},  # whose tensors are nowhere
    ],
)
def test_a_manifest_that_was_made_up_is_damage_not_a_traceback(tmp_path: Path, files: Any) -> None:
    folder = keep(tmp_path, 7)
    reseal(folder, files=files)
    with pytest.raises(Damaged, match=MANIFEST):
        read(folder)


@pytest.mark.parametrize(
    "parts", [[], [[0, 1, 11]], [[0, 1, "12"]], [[0, 1, -12]], [[0, 12]], [[0, 2, 6]], [[0, 1, 0], [0, 1, 12]], 3]
)
def test_parts_that_were_made_up_are_damage(tmp_path: Path, parts: Any) -> None:
    """Too few elements, no numbers, or a writer without a file. Finds: a part without elements, a ZeroDivisionError."""
    folder = keep(tmp_path, 7)
    content = json.loads((folder / MANIFEST).read_text())
    content["tensors"]["weights"]["a.weight"]["parts"] = parts
    reseal(folder, tensors=content["tensors"])
    with pytest.raises(Damaged, match=MANIFEST):
        read(folder)


def test_another_format_is_said(tmp_path: Path) -> None:
    folder = keep(tmp_path, 7)
    for number in (1, 5):
        reseal(folder, format=number)
        with pytest.raises(Damaged, match=f"format {number}, this paceline reads 2, 3 and 4"):
            read(folder)


def test_a_former_manifest_which_lists_every_slice_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(40.0), "b": torch.arange(7.0)}
    save_by(3, tmp_path, 1, tensors, {"a/m": -tensors["a"]}, {}, CheckpointConfig())
    folder = tmp_path / folder_name(1)
    parts = read(folder)["tensors"]
    reseal(folder, **former_manifest(folder))
    assert read(folder)["tensors"] == parts
    assert all(torch.equal(read_back, tensors[name]) for name, read_back in load.read_weights(tmp_path)[0].items())


def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path: Path) -> None:
    folder = keep(tmp_path, 7)
    elsewhere = tmp_path / "elsewhere"
    for name in FILES:
        os.rename(folder / name, elsewhere)
        (folder / name).symlink_to(elsewhere)
        with pytest.raises(Damaged, match=name):
            read(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(Damaged, match=name):
            read(folder)
        (folder / name).unlink()
        os.rename(elsewhere, folder / name)
    read(folder)
    os.rename(folder, elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(Damaged, match="symbolic link"):
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
    with pytest.raises(RunError, match=r"(?s)no checkpoint .* is complete.*step-00000020.*step-00000010"):
        load.find(tmp_path)


def agree_alone(folder: Path, step: int | None) -> load.Whole:
    return load.agree(LocalGroup(torch.device("cpu")), folder, step, everyone_sees=True)


@pytest.mark.parametrize("look", [load.find, agree_alone])
def test_where_only_the_one_that_was_asked_for_is_damaged_the_others_are_named(tmp_path: Path, look: Any) -> None:
    for step in (10, 20, 30):
        keep(tmp_path, step)
    (tmp_path / folder_name(20) / WEIGHTS).unlink()
    with pytest.raises(RunError) as caught:
        look(tmp_path, 20)
    assert str(caught.value) == (
        f"the checkpoint of step 20 in {tmp_path} is damaged, nothing was changed: step-00000020: no {WEIGHTS}; "
        "leave --step out for the newest complete one, or give another by --step: there are 10, 30"
    )
    for step in (10, 30):
        shutil.rmtree(tmp_path / folder_name(step))
    with pytest.raises(RunError, match=f"no {WEIGHTS}; there is no other one$"):
        look(tmp_path, 20)


def test_where_there_is_none_the_user_is_told(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(load.NothingSaved, match="holds no checkpoint yet"):
            load.find(folder)


def test_checkpoints_that_have_vanished_are_not_a_run_that_never_saved(tmp_path: Path) -> None:
    shutil.rmtree(keep(tmp_path, 10))
    with pytest.raises(RunError, match="none is there now; nothing was changed"):
        load.find(tmp_path)


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
    "step-000000099",
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


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def noted_rename(source: Path, target: Path) -> None:
        rename(source, target)
        calls.append(f"-> {target.name}")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpoints = tmp_path / "checkpoints"
    keep(checkpoints, 10)
    named = calls.index("-> step-00000010")
    (unfinished,) = (name for name in calls if name.endswith(".unfinished"))
    assert {*FILES, unfinished} <= set(calls[:named])
    assert calls.index(unfinished) > max(map(calls.index, FILES)), "names are synced when all files have theirs"
    assert "checkpoints" in calls[named:], "the new name, too"


def test_the_next_save_sweeps_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    for stray in STRAYS:
        (tmp_path / stray).mkdir(parents=True)
        (tmp_path / stray / "x").write_text("debris")
    keep(tmp_path, 40)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {*STRAYS, "step-00000040", "index.jsonl", "latest"} - {".step-00000030.unfinished"}


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (CheckpointConfig(keep=2), [50, 60]),
        (CheckpointConfig(keep=3), [40, 50, 60]),
        (CheckpointConfig(keep=2, keep_every=20), [20, 40, 50, 60]),
        (CheckpointConfig(keep=2, keep_best=True), [30, 50, 60]),
        (CheckpointConfig(keep=2, keep_every=40, keep_best=True), [30, 40, 50, 60]),
    ],
)
def test_what_was_asked_is_kept_and_no_more(tmp_path: Path, config: CheckpointConfig, left: list[int]) -> None:
    losses = {10: 5.0, 20: None, 30: 3.0, 40: float("nan"), 50: 3.0, 60: 4.0}
    for step, loss in losses.items():
        save_by(1, tmp_path, step, weights(step), {}, {"val_loss": loss}, config)
        assert step in list_steps(tmp_path)
    assert list_steps(tmp_path) == left
    assert (tmp_path / "latest").read_text() == "step-00000060\n"
    best = tmp_path / "best"
    assert (best.read_text() if best.exists() else None) == ("step-00000030\n" if config.keep_best else None)
    assert {entry.name for entry in tmp_path.iterdir()} == {
        *(folder_name(step) for step in left),
        "index.jsonl",
        "latest",
        *(["best"] if config.keep_best else []),
    }
    if config.keep_best:
        set_aside(tmp_path, 40 if 40 in left else 30)
        assert best.read_text() == "step-00000030\n"


def test_best_names_none_where_the_best_is_no_longer_kept(tmp_path: Path) -> None:
    for step, keep_best in ((10, True), (20, False)):
        config = CheckpointConfig(keep_best=keep_best)
        save_by(1, tmp_path, step, weights(step), {}, {"val_loss": 1.0}, config)
        assert (tmp_path / "best").exists() == keep_best


@pytest.mark.parametrize(
    "edited",
    [{"step": "10"}, {"bytes": None}, {"val_loss": "low"}, {"val_loss": [1.0]}, {"due_steps": 3}, {"due_steps": ["x"]}],
    ids=str,
)
def test_a_line_of_the_index_that_somebody_edited_is_made_again(tmp_path: Path, edited: dict[str, Any]) -> None:
    config, index = CheckpointConfig(keep_best=True), tmp_path / "index.jsonl"
    for step, loss in ((10, 1.0), (20, 2.0)):
        save_by(1, tmp_path, step, weights(step), {}, {"val_loss": loss}, config)
    before = index.read_text().splitlines()
    index.write_text("\n".join([json.dumps(json.loads(before[0]) | edited), before[1], ""]))
    save_by(1, tmp_path, 30, weights(30), {}, {"val_loss": 3.0}, config)
    assert index.read_text().splitlines()[:2] == before
    assert (tmp_path / "best").read_text() == "step-00000010\n"


def test_one_that_stands_for_others_is_kept_where_one_of_those_would_be(tmp_path: Path) -> None:
    """Those of 20, 30 and 40 were due while the disk was busy, and made later."""
    config = CheckpointConfig(keep=2, keep_every=20)
    for step, due in {10: [10], 33: [20, 30, 33], 36: [36], 47: [40, 47], 50: [50], 51: [51]}.items():
        save_by(1, tmp_path, step, weights(step), {}, {"due_steps": due}, config)
    assert list_steps(tmp_path) == [33, 47, 50, 51]


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
    put(tmp_path, 20, {"a.weight": torch.zeros(2)}, {}, {}, 2)
    assert torch.equal(load.read_weights(tmp_path, 20)[0]["a.weight"], torch.zeros(2))
    assert list_steps(tmp_path) == [15, 20]
    (tmp_path / "latest").write_text("step-00000015\n")  # as after a kill just before it is written
    assert set_aside(tmp_path, 20) == []
    assert (tmp_path / "latest").read_text() == "step-00000020\n"


def test_a_resume_that_dies_while_it_sets_aside_leaves_latest_on_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        keep(tmp_path, step, keep=3)
    rename = os.rename

    def dies_at_20(source: Path, target: Path) -> None:
        if source.name == folder_name(20):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", dies_at_20)
    with pytest.raises(KeyboardInterrupt):
        set_aside(tmp_path, 10)
    assert list_steps(tmp_path) == [10, 20]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"


def test_an_old_one_that_cannot_be_removed_now_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, while another process has a file in it open."""

    def busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    for step in (10, 20):
        keep(tmp_path, step, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        keep(tmp_path, 30, keep=2)
    assert list_steps(tmp_path) == [20, 30]
    (tmp_path / folder_name(30) / WEIGHTS).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        read(keep(tmp_path, 30, keep=2))
    assert list(tmp_path.glob(".*"))
    keep(tmp_path, 40, keep=2)
    assert not list(tmp_path.glob(".*"))


def test_settings_that_would_lose_checkpoints_are_refused() -> None:
    CheckpointConfig().check()
    for bad in (CheckpointConfig(every=-1), CheckpointConfig(keep=1), CheckpointConfig(keep_every=-1)):
        with pytest.raises(UserError, match=r"checkpoint\.(every|keep|keep-every) is"):
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


@pytest.mark.parametrize("num_floats", [400_000, 200_000, 110_000])
def test_on_a_full_disk_the_old_checkpoints_stay_whole_and_with_room_saving_goes_on(
    small_disk: Path, num_floats: int
) -> None:
    """Full in the weights, in the optimizer's state, or between the writers' files and the manifest."""
    keep(small_disk, 10)
    big, state = {"a": torch.zeros(num_floats)}, {"a/m": torch.zeros(num_floats)}
    outcomes = save_by(2, small_disk, 20, big, state, {"x": "y" * 300_000}, CheckpointConfig())
    assert "No space left on device" in str(outcomes[0].problem)
    folder, _, problems = load.find(small_disk)
    assert (folder.name, problems) == ("step-00000010", [])
    assert (small_disk / "latest").read_text() == "step-00000010\n"
    keep(small_disk, 30)  # sweeps the unfinished one, so there is room again
    assert load.find(small_disk)[0].name == "step-00000030"
    assert not list(small_disk.glob(".*unfinished"))
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert [outcome.problem for outcome in save_by(2, small_disk, 40, big, state, {}, CheckpointConfig())] == [None] * 2
    assert load.find(small_disk)[0].name == "step-00000040"


# ---- no code ----


class Payload:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


def files_opened_by_reading(config: object, env: object, checkpoints: str) -> list[str]:
    """In a process of its own: an audit hook stays until its end."""
    opened: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            opened.append(os.fsdecode(args[0]))
        if event == "pickle.find_class":
            opened.append("PICKLE")

    sys.addaudithook(hook)
    load.find(Path(checkpoints))
    load.read_weights(Path(checkpoints))
    return [name for name in opened if checkpoints in name or name == "PICKLE"]


def test_nothing_but_json_and_safetensors_is_opened_and_no_pickle_loaded(tmp_path: Path) -> None:
    checkpoints, witness = tmp_path / "checkpoints", tmp_path / "witness"
    folder = keep(checkpoints, 10)
    for name in ("weights.pt", "optimizer.pkl", ".metadata", "data.pickle"):
        (folder / name).write_bytes(pickle.dumps(Payload(witness)))
        (checkpoints / name).write_bytes(pickle.dumps(Payload(witness)))
    (opened,) = run_ranks(files_opened_by_reading, 1, str(checkpoints), opened=False)
    assert {Path(name).name for name in opened} == set(FILES)
    assert not witness.exists()


def test_a_pickle_in_the_place_of_the_weights_is_not_run_even_with_a_matching_manifest(tmp_path: Path) -> None:
    folder, witness = keep(tmp_path, 10), tmp_path / "witness"
    payload = pickle.dumps(Payload(witness)).ljust(1000, b"\0")
    for data in (payload, b"\x40" + bytes(7) + payload, b"\xff" * 8 + payload, b""):
        (folder / WEIGHTS).write_bytes(data)
        files = json.loads((folder / MANIFEST).read_text())["files"]
        files[WEIGHTS] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        reseal(folder, files=files)
        assert load.find(tmp_path)[0] == folder
        with pytest.raises(ValueError, match="weights-00000-of-00001"):
            load.read_weights(tmp_path)
    assert not witness.exists()


def test_a_manifest_that_could_not_be_read_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a limit of reading alone. 70B on 1,024 ranks was saved as good, and no resume could read it."""
    keep(tmp_path, 1)
    monkeypatch.setattr(mf, "MOST_BYTES", 500)
    with pytest.raises(OSError, match=r"would have \d+ bytes, and at most 500 can be read"):
        keep(tmp_path, 2)
    assert list_steps(tmp_path) == [1]


def test_a_crash_while_a_checkpoint_replaces_another_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames neither has its name. Finds: a sweep that takes both for debris."""
    folder, rename = keep(tmp_path, 5), os.rename
    content = (folder / MANIFEST).read_bytes()
    (folder / WEIGHTS).unlink()  # damaged, so that the next save replaces it

    def crash_at_the_second(source: Path, target: Path) -> None:
        if target == folder:
            raise OSError("killed")
        rename(source, target)

    monkeypatch.setattr(os, "rename", crash_at_the_second)
    with pytest.raises(OSError, match="killed"):
        keep(tmp_path, 5)
    monkeypatch.undo()
    assert list_steps(tmp_path) == []
    take_back(tmp_path)
    assert (folder / MANIFEST).read_bytes() == content
    keep(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_only_looks_like_a_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    """Before a resume starts. Finds: the highest name, of a copy that was cut short."""
    keep(tmp_path, 1)
    (keep(tmp_path, 2) / MANIFEST).unlink()
    (keep(tmp_path, 3) / WEIGHTS).write_bytes(b"half")
    (tmp_path / folder_name(99)).mkdir()
    assert newest_whole(tmp_path, None) == 1
    assert newest_whole(tmp_path, 99) == 0


def test_reading_weights_verifies_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sample` and `export` hashed the optimizer's state, two thirds of a checkpoint, for nothing."""
    keep(tmp_path, 1)
    verified, verify = list[str](), mf.verify
    monkeypatch.setattr(mf, "verify", lambda folder, name, *rest: verified.append(name) or verify(folder, name, *rest))
    load.read_weights(tmp_path)
    assert verified == [WEIGHTS]
    load.find(tmp_path)
    assert sorted(verified[1:]) == sorted([WEIGHTS, OPTIMIZER])


def test_what_is_used_are_the_bytes_that_were_verified(tmp_path: Path) -> None:
    """And the disk is read once: whatever becomes of the files in between. A file was read a second time, unchecked."""
    tensors, state = weights(7), {"a.weight/momentum": torch.randn(3, 4)}
    save_by(2, tmp_path, 7, tensors, state, {}, CheckpointConfig())
    group, verified = LocalGroup(torch.device("cpu")), dict[str, Any]()
    folder, manifest, _ = load.agree(group, tmp_path, None, True, verified=verified)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    for kind, saved in (("weights", tensors), ("optimizer", state)):
        wanted = {Slice(name, 0, tensor.numel()): tensor.dtype for name, tensor in saved.items()}
        flats = load.receive(group, folder, manifest, kind, wanted, True, verified=verified)
        for item, flat in flats.items():
            assert torch.equal(flat, saved[item.name].reshape(-1))


def test_bytes_that_memory_has_no_room_for_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that resumes what eight have saved has their eightfold. Mutation: all verified bytes are kept."""
    tensors = weights(7)
    save_by(2, tmp_path, 7, tensors, {}, {}, CheckpointConfig())
    monkeypatch.setattr(load, "free_memory", lambda: 16)
    group, verified = LocalGroup(torch.device("cpu")), dict[str, Any]()
    load.agree(group, tmp_path, None, True, verified=verified)
    assert not verified
    found, _ = load.read_weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_parts_of_1024_ranks_are_as_small_as_those_of_8() -> None:
    """The list of slices, each tensor cut by all writers, took 270 MB for 70B parameters on 1,024 ranks."""
    for num_writers in (8, 1024):
        slices = [(8 * writer, 8 * writer + 8, writer) for writer in range(num_writers)]
        assert mf.parts_of("t", (num_writers, 8), slices) == [[0, num_writers, 8]]


def test_a_save_does_not_read_the_manifests_of_all_kept_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 300 kept ones a save took a second for them, with keep-best two. Mutation: the index is not read."""
    for step in range(1, 9):
        keep(tmp_path, step)
    num_read, read_manifest = list[Path](), mf.read_manifest
    monkeypatch.setattr(mf, "read_manifest", lambda folder: num_read.append(folder) or read_manifest(folder))
    keep(tmp_path, 9)
    assert len(num_read) <= 1
