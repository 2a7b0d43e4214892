"""The run folder: one writer, records that are whole lines, nothing left behind by a refusal."""

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.base import jsonl
from paceline.base.errors import UserError
from paceline.record.config import LogConfig
from paceline.record.folder import (
    RunFolder,
    check_new,
    check_writable,
    create,
    find,
    find_own,
    has_begun,
    is_own,
    last_event,
    script_of,
)
from paceline.record.read import step_of

HOLDER = """
import sys, time
from pathlib import Path
from typing import Any
from paceline.record.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.lock()
print("held", flush=True)
time.sleep(60)
"""


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tree(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def test_a_second_writer_is_refused_with_host_and_pid_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"another process .*{os.uname().nodename}.*pid {holder.pid}"):
            folder.lock()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        folder.lock()  # the kernel let go of it
        folder.close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: filelock takes another kind of lock there, for which the empty file of an earlier run is locked for ever;
    the kernel does not release that kind when a process is killed."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = create(tmp_path / "run")
    for _ in range(2):  # the second time `lock` is there
        with pytest.raises(UserError, match=r"cannot be locked .*Function not implemented"):
            folder.lock()
        assert (folder.path / "lock").stat().st_size == 0


def test_a_closed_folder_can_be_locked_again(tmp_path: Path) -> None:
    first, second = create(tmp_path), RunFolder(tmp_path)
    first.lock()
    with pytest.raises(UserError, match=f"pid {os.getpid()}"):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_each_row_is_a_whole_line_on_disk_at_once(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "loss": 0.5})
        assert rows(folder.metrics)[-1] == {"step": step, "loss": 0.5}
    folder.append_event("start", world_size=2)
    assert rows(folder.events)[0].items() >= {"event": "start", "world_size": 2}.items()
    assert "time" in rows(folder.events)[0]
    folder.close()


@pytest.mark.parametrize("cut", [0, 1, 9, 30])
def test_forgetting_keeps_the_rows_up_to_the_step_and_drops_a_cut_last_line(tmp_path: Path, cut: int) -> None:
    folder = create(tmp_path)
    for step in range(1, 7):
        folder.append_metrics({"step": step, "loss": 1 / 3, "rank_step_ms": [1.0]})
        if step == 4:
            folder.append_metrics({"step": 4, "val_loss": 2.0})  # an evaluation's row
    folder.close()
    if cut:
        with folder.metrics.open("a") as file:
            file.write(json.dumps({"step": 2, "loss": 1 / 3, "more": "x" * 20})[:cut])
    folder.forget_after(4)
    assert [row["step"] for row in rows(folder.metrics)] == [1, 2, 3, 4, 4]
    assert rows(folder.metrics)[0]["loss"] == 1 / 3
    RunFolder(tmp_path).append_metrics({"step": 5})
    assert rows(folder.metrics)[-1] == {"step": 5}
    assert tree(tmp_path) == ["checkpoints", "metrics.jsonl", "ranks"]


@pytest.mark.parametrize("width", [10, 5 << 20])
def test_forgetting_reads_the_end_of_a_long_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Finds: parsing all rows, 440 s and 42 GB for 100,000 steps of 1,024 ranks. A row may be longer than a read."""
    folder, parsed, parse = create(tmp_path), list[int](), jsonl._row
    with folder.metrics.open("w") as file:
        for step in range(1, 5 if width > 10 else 50_000):
            file.write(f'{{"step": {step}, "more": "{"x" * width}"}}\n')
        file.write('{"step": ')
    here = threading.get_ident()  # a page that another test served may still be read by its thread

    def count(line: Any) -> Any:
        if threading.get_ident() == here:
            parsed.append(len(line))
        return parse(line)

    monkeypatch.setattr(jsonl, "_row", count)
    assert folder.forget_after(step - 2) == step
    assert len(parsed) == 3
    assert jsonl.last_rows(folder.metrics, width + 100)[-1]["step"] == step - 2
    assert folder.metrics.read_bytes().endswith(b'x"}\n')


def test_rows_that_are_set_aside_stay_in_files_of_their_own(tmp_path: Path) -> None:
    folder = create(tmp_path)
    for first, resumed_at in ((1, 2), (3, 2), (3, 1)):
        for step in range(first, 5):
            folder.append_metrics({"step": step})
        folder.forget_after(resumed_at, keep=True)
    folder.forget_after(1, keep=True)  # none is later
    aside = {path.name: [row["step"] for row in rows(path)] for path in tmp_path.glob("metrics.superseded-*")}
    assert aside == {
        "metrics.superseded-2.jsonl": [3, 4],
        "metrics.superseded-2-2.jsonl": [3, 4],
        "metrics.superseded-1.jsonl": [2, 3, 4],
    }


def test_forgetting_where_nothing_was_written_is_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path).forget_after(3)
    assert tree(tmp_path) == []


def test_rows_written_after_forgetting_are_in_the_file(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.append_metrics({"step": 1})
    folder.append_metrics({"step": 2})
    folder.forget_after(1)
    folder.append_metrics({"step": 2, "again": True})
    folder.close()
    assert rows(folder.metrics) == [{"step": 1}, {"step": 2, "again": True}]


@pytest.mark.parametrize("cut", ['{"time": "2026-01-01T00', "x" * 200_000, ""])
def test_a_line_that_a_crash_cut_short_is_taken_off_before_the_next(tmp_path: Path, cut: str) -> None:
    folder = create(tmp_path)
    folder.append_event("start")
    folder.close()
    with folder.events.open("a") as file:
        file.write(cut)
    again = RunFolder(tmp_path)
    again.append_event("resume", step=3)
    again.close()
    assert [row["event"] for row in rows(folder.events)] == ["start", "resume"]


def test_rows_wait_for_a_full_disk_and_none_is_lost_or_torn(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        said: list[str] = []
        folder = RunFolder(disk, on_trouble=said.append)
        folder.append_event("start")
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * (40 << 10))
        for step in range(1, 201):  # 37 kB: the disk is full in the middle of a row
            folder.append_metrics({"step": step, "more": "y" * 160})
        assert len(said) == 1, "once, however many rows there are"
        assert "metrics.jsonl cannot be written (No space left on device); training continues" in said[0]
        assert not folder.metrics.read_text().endswith("\n"), "as a torn row looks"
        ballast.unlink()
        folder.append_metrics({"step": 201})
        assert len(said) == 2
        assert "can be written again, and has all rows" in said[1]
        folder.close()
        assert [row["step"] for row in rows(folder.metrics)] == list(range(1, 202))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_records_that_were_removed_are_begun_anew_and_without_a_folder_their_rows_wait(tmp_path: Path) -> None:
    said: list[str] = []
    folder = create(tmp_path / "run")
    folder.on_trouble = said.append
    folder.append_metrics({"step": 1})
    folder.metrics.unlink()
    folder.append_metrics({"step": 2})
    assert rows(folder.metrics) == [{"step": 2}]
    folder.path.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    folder.append_metrics({"step": 3})
    assert "metrics.jsonl cannot be written (No such file or directory); training continues, its rows wait" in said[0]
    folder.path.mkdir()
    folder.close()
    assert rows(folder.metrics) == [{"step": 3}]


def test_rows_that_a_long_failure_of_the_disk_cost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.record.folder._MOST_UNWRITTEN_BYTES", 20)
    said: list[str] = []
    folder = RunFolder(tmp_path / "absent", on_trouble=said.append)
    for step in range(1, 6):
        folder.append_metrics({"step": step})
    folder.path.mkdir()
    folder.append_metrics({"step": 6})
    folder.append_metrics({"step": 7})
    folder.close()
    assert [row["step"] for row in rows(folder.metrics)] == [1, 2, 7]
    assert said[1] == f"{folder.metrics} can be written again, and lacks 4 rows"


# ---- whose it is ----


def test_a_folder_is_the_jobs_that_wrote_it_last(tmp_path: Path) -> None:
    assert not is_own(tmp_path, "a")
    for number, job in enumerate(("a", "b", None)):
        folder = create(tmp_path / f"run-{number}")
        folder.lock("somebody")
        folder.close()
        folder.lock(job)
        folder.close()
        assert [other for other in ("a", "b", "somebody", None) if is_own(folder.path, other)] == [job] * (
            job is not None
        )
    assert find_own(tmp_path, "b") == tmp_path / "run-1"
    assert find_own(tmp_path, "c") is None
    assert find_own(tmp_path, None) is None
    assert find_own(tmp_path / "absent", "b") is None


def test_of_several_folders_of_a_job_the_newest_is_found(tmp_path: Path) -> None:
    """Finds: a file of another program beside them, which has this name, was a UnicodeDecodeError."""
    for name, seconds in (("x", 5), ("z", 9), ("y", 7)):
        folder = create(tmp_path / name)
        folder.lock("job")
        folder.close()
        os.utime(folder.path / "job", (seconds, seconds))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "job").write_bytes(b"\xff")
    assert find_own(tmp_path, "job") == tmp_path / "z"


def test_the_last_event_is_the_last_whole_one(tmp_path: Path) -> None:
    assert last_event(tmp_path) == {}
    folder = create(tmp_path)
    folder.append_event("start", more="x" * 100_000)
    folder.append_event("end", reason="signal")
    folder.close()
    with folder.events.open("a") as file:
        file.write('{"time": "2026')
    assert last_event(tmp_path)["reason"] == "signal"


# ---- before a run ----


def test_checking_a_new_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_new(tmp_path / "a" / "b" / "c")
    check_new(tmp_path)
    check_writable(tmp_path / "x")
    assert tree(tmp_path) == []


def test_a_folder_whose_run_died_at_its_birth_is_new(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.lock("job")
    check_new(folder.path)
    folder.close()
    assert tree(folder.path) == ["checkpoints", "job", "lock", "ranks"], "its holder is named only while it holds it"
    check_new(folder.path)
    (folder.path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"something else \(notes.txt\)"):
        check_new(folder.path)


def test_a_folder_whose_run_was_killed_before_it_made_its_first_step_again_is_new(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.lock("job")
    folder.write_setup("[train]\n", None)
    folder.append_metrics({"step": 1})
    assert has_begun(folder.path)
    folder.forget_after(0)  # nothing was saved: another attempt begins with step 1
    check_new(folder.path)
    folder.append_metrics({"step": 1})
    folder.config.unlink()
    with pytest.raises(UserError, match=r"something else \(metrics.jsonl\)"):
        check_new(folder.path)
    folder.close()


@pytest.mark.parametrize("content", ["config.toml", "checkpoints/step-00000001"])
def test_a_folder_that_holds_a_run_is_refused_with_how_to_go_on(tmp_path: Path, content: str) -> None:
    (tmp_path / content).mkdir(parents=True)
    with pytest.raises(UserError, match=f"holds a run already.*paceline resume {tmp_path}"):
        check_new(tmp_path)


def test_a_file_in_the_place_of_the_folder_or_above_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="--out"):
            check_new(path)
    assert tree(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written_is_refused_also_for_root(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a read-only disk")
    try:
        for path in (disk, disk / "run"):
            with pytest.raises(UserError, match=f"cannot write to {disk}.*[Rr]ead-only"):
                check_new(path)
        with pytest.raises(UserError, match=f"cannot write to {disk}: .*make it writable, or resume a copy"):
            check_writable(disk, is_begun=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_with_no_room_for_a_checkpoint_is_refused(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        assert shutil.disk_usage(disk).free < 3 << 20
        with pytest.raises(UserError, match=r"MiB are free in .* at least 50 MiB.* 12 bytes a parameter"):
            check_new(disk / "run")
        assert tree(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_new_run_folder_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    (tmp_path / "empty").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "notes.txt").touch()
    try:
        folder = create(tmp_path / "deep" / "run")
        folder.append_event("start")
        folder.append_metrics({"step": 1})
        folder.forget_after(1)
        folder.write_setup("[train]\n", "{}")
        folder.lock("job")
        folder.close()
        modes = {name: stat.S_IMODE(create(tmp_path / name).path.stat().st_mode) for name in ("empty", "shared")}
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir() if path.is_file()} == {0o600}
    assert modes == {"empty": 0o700, "shared": 0o755}, "what people keep there stays as they want it"
    records = ["config.toml", "events.jsonl", "job", "lock", "metrics.jsonl", "tokenizer.json"]
    assert tree(folder.path) == sorted([*records, "checkpoints", "ranks"])
    assert folder.rank_log(3).name == "rank-00003.log"


def test_only_a_run_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find(tmp_path / "absent")
    with pytest.raises(UserError, match=r"holds no config\.toml"):
        find(tmp_path)
    (tmp_path / "config.toml").write_text("")
    assert find(tmp_path).path == tmp_path


def test_the_shown_path_is_what_a_person_would_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder(tmp_path / "runs" / "a").shown == "runs/a"
    assert RunFolder(Path("runs/a")).shown == "runs/a"
    assert RunFolder(Path("/elsewhere/a")).shown == "/elsewhere/a"


def test_a_log_that_never_writes_is_refused() -> None:
    LogConfig().check()
    with pytest.raises(UserError, match=r"log\.every is 0"):
        LogConfig(every=0).check()


@pytest.mark.parametrize("step", [-1, 10**400, 1.5, "3", None])
def test_a_step_that_no_run_can_have_come_to_is_none(step: object) -> None:
    """Finds: a damaged event that ended a tracker for good, by a step below 0 or of 400 digits."""
    assert step_of({"step": step}) == 0
    assert step_of({"step": 3}) == 3


def test_a_config_that_no_reader_ends_is_of_no_script(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("run = " + "[" * 10_000)
    assert script_of(tmp_path) is None
