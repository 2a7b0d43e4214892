"""A host gets the newest checkpoint of another one, as bytes: complete, or not at all."""

import fcntl
import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from paceline.checkpoint import load
from paceline.checkpoint.writers import save_complete
from paceline.launch import copies, nodes
from paceline.launch.agent import State
from paceline.launch.options import NamedHost
from paceline.launch.signals import StopSignals
from paceline.launch.ssh import Connection, Ssh


def saved(run: Path, step: int) -> Path:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')
    return save_complete(run / "checkpoints", step, {"w": torch.arange(10.0) + step}, {}, {})


def sent(run: Path, step: int) -> bytes:
    stream = io.BytesIO()
    copies.send(run, step, stream)
    return stream.getvalue()


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_a_copy_is_the_checkpoint_and_follows_what_the_sender_keeps(tmp_path: Path) -> None:
    """And what this host has saved itself stays. Mutation: copies that the sender has removed stay for ever."""
    source, target = tmp_path / "a", tmp_path / "b"
    saved(target, 5)
    for step in (10, 20):
        folder = saved(source, step)
        copies.receive(target, step, io.BytesIO(sent(source, step)))
        assert load.find(target / "checkpoints", step)[1] == load.find(source / "checkpoints", step)[1]
        assert (target / "checkpoints" / "latest").read_text() == f"{folder.name}\n"
        assert json.loads((target / "metrics.jsonl").read_text())["step"] == step
    for path in (source / "checkpoints" / "step-00000010").iterdir():
        path.unlink()
    (source / "checkpoints" / "step-00000010").rmdir()
    saved(source, 30)
    (source / "checkpoints" / "best").write_text("step-00000020\n")
    copies.receive(target, 30, io.BytesIO(sent(source, 30)))
    names = {"step-00000005", "step-00000020", "step-00000030"}
    assert checkpoints(target) == {*names, "index.jsonl", "latest", "best"}
    assert (target / "checkpoints" / "best").read_text() == "step-00000020\n"
    assert (target / "metrics.jsonl").stat().st_mode & 0o77 == 0


def test_a_copy_that_was_cut_short_before_latest_is_finished(tmp_path: Path) -> None:
    """Finds: a host whose power failed between the two is sent the same checkpoint for ever."""
    source, target = tmp_path / "a", tmp_path / "b"
    for step in (10, 20):
        saved(source, step)
        copies.receive(target, step, io.BytesIO(sent(source, step)))
    latest = target / "checkpoints" / "latest"
    latest.write_text("step-00000010\n")
    copies.receive(target, 20, io.BytesIO(sent(source, 20)))
    assert latest.read_text() == "step-00000020\n"
    copies.receive(target, 10, io.BytesIO(sent(source, 10)))
    assert latest.read_text() == "step-00000020\n"


def test_a_checkpoint_that_is_removed_while_it_is_copied_arrives(tmp_path: Path) -> None:
    """Finds: a link slower than two saves, on which no copy ever arrives."""
    folder = saved(tmp_path / "a", 7)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n" * 10_000)  # more than tarfile holds back

    class Removing(io.BytesIO):
        def write(self, data: Any) -> int:
            shutil.rmtree(folder, ignore_errors=True)
            return super().write(data)

    stream = Removing()
    copies.send(tmp_path / "a", 7, stream)
    stream.seek(0)
    copies.receive(tmp_path / "b", 7, stream)
    received = tmp_path / "b" / "checkpoints" / folder.name
    assert {path.name: path.read_bytes() for path in received.iterdir()} == whole


def test_a_copy_is_sent_where_the_limit_of_open_files_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a traceback in place of each copy, on macOS without a hard limit."""
    folder = saved(tmp_path / "a", 7)
    for refused in (ValueError("current limit exceeds maximum limit"), PermissionError("not permitted")):
        stream = io.BytesIO()
        with patch("resource.setrlimit", side_effect=refused):
            monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=stream))
            assert copies.main(["send", str(tmp_path / "a"), "7"]) == 0
            monkeypatch.undo()
        copies.receive(tmp_path / "b", 7, io.BytesIO(stream.getvalue()))
        assert folder.name in checkpoints(tmp_path / "b")


def test_a_sender_leaves_it_to_the_receiver_to_say_why_it_has_ended(tmp_path: Path) -> None:
    """Finds: "Broken pipe" where the disk of the receiver is full."""
    saved(tmp_path / "a", 7)
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n" * 100_000)  # more than a pipe holds
    command, pipe = [sys.executable, "-m", "paceline.launch.copies", "send", str(tmp_path / "a"), "7"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as sender:
        assert sender.stdout
        assert sender.stderr
        sender.stdout.close()
        assert not sender.stderr.read()
        assert sender.wait() == 0


def test_a_damaged_or_unfinished_copy_is_absent(tmp_path: Path) -> None:
    """Mutation: a copy is not compared with its manifest."""
    folder, target = saved(tmp_path / "a", 7), tmp_path / "b"
    weights = next(folder.glob("weights-*"))
    whole = weights.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1]):
        weights.write_bytes(damaged)
        with pytest.raises(copies.Damaged, match="did not arrive"):
            copies.receive(target, 7, io.BytesIO(sent(tmp_path / "a", 7)))
        assert not checkpoints(target)
    weights.write_bytes(whole)
    stream = sent(tmp_path / "a", 7)
    for cut in (0, 600, stream.index(whole) + len(whole) // 2):
        with pytest.raises((copies.Damaged, tarfile.TarError)):
            copies.receive(target, 7, io.BytesIO(stream[:cut]))
        assert not checkpoints(target)
        assert not (target / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["../secret", "step-00000007/../../x", "lock", "step-00000007/.hidden", "/etc/x", ""])
def test_only_records_and_files_of_a_checkpoint_are_written(tmp_path: Path, name: str) -> None:
    """Mutation: any name is written that the other host sends."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        copies._add(archive, name, b"x")
    stream.seek(0)
    with pytest.raises(copies.Damaged, match="is not a file"):
        copies.receive(tmp_path / "run", 7, stream)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"copy.lock", "lock"}


def test_a_folder_that_rank_0_writes_is_left_alone(tmp_path: Path) -> None:
    """Hosts that share a disk. Mutation: the records are replaced while rank 0 appends to them."""
    saved(tmp_path / "a", 7)
    (tmp_path / "b").mkdir()
    with (tmp_path / "b" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        copies.receive(tmp_path / "b", 7, io.BytesIO(sent(tmp_path / "a", 7)))
    assert not checkpoints(tmp_path / "b")


def test_a_host_that_gets_rank_0_while_a_copy_arrives_is_not_refused(tmp_path: Path) -> None:
    """Finds: a checkpoint that is read back for a minute, by which the loss of another host ends the run. And an older
    copy that ends late takes the rows of this host."""
    source, target = tmp_path / "a", tmp_path / "b"
    saved(source, 7)
    target.mkdir()
    with (target / "lock").open("w") as lock:

        class Locking(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return super().read(size)

        copies.receive(target, 7, Locking(sent(source, 7)))
        assert not checkpoints(target)
        fcntl.flock(lock, fcntl.LOCK_UN)

    class Saving(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            (target / "metrics.jsonl").write_text('{"step": 9}\n')
            (target / "checkpoints" / "latest").write_text("step-00000009\n")
            return super().read(size)

    copies.receive(target, 7, Saving(sent(source, 7)))
    assert checkpoints(target) == {"latest"}
    assert json.loads((target / "metrics.jsonl").read_text())["step"] == 9


def test_a_second_copy_leaves_the_first_alone(tmp_path: Path) -> None:
    """Finds: two copies of one step that write one folder, where the coordinator has tried again."""
    source, target = tmp_path / "a", tmp_path / "b"
    folder = saved(source, 7)
    stream = sent(source, 7)

    class Twice(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            copies.receive(target, 7, io.BytesIO(stream))
            assert not (target / "checkpoints" / folder.name).exists()
            return super().read(size)

    copies.receive(target, 7, Twice(stream))
    assert (target / "checkpoints" / folder.name).exists()


@pytest.fixture
def copier(tmp_path: Path) -> tuple[nodes.Copier, list[nodes.Node], Path]:
    """Copies from host a to b by an ssh that notes what it is to run, and succeeds."""
    calls, ssh = tmp_path / "calls", tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nfor last; do :; done; echo "$last" >> {calls}\n')
    ssh.chmod(0o755)
    hosts = [nodes.Node(NamedHost(name, "1")) for name in "ab"]
    for host, newest in zip(hosts, (20, 10), strict=True):
        state = State(num_ranks=1, newest=newest)
        host.connection = cast(Connection, SimpleNamespace(state=state, is_lost=lambda: False))
    return nodes.Copier(Ssh(str(ssh), "venv/bin/python", "/data"), Path("runs/x")), hosts, calls


def test_a_copy_runs_in_the_folder_of_the_login_and_once(
    copier: tuple[nodes.Copier, list[nodes.Node], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: an interpreter that is named from the login's folder looked for in that of the run; a checkpoint that is
    sent again before the host has said that it is there."""
    copying, hosts, calls = copier
    monkeypatch.setattr(nodes, "_REPORTED_S", 60.0)
    copying.look(hosts, hosts[0])
    while copying._processes:
        copying.look(hosts, hosts[0])
        time.sleep(0.01)
    copying.look(hosts, hosts[0])
    assert not copying._processes
    verbs = {f"exec venv/bin/python -m paceline.launch.copies {verb} /data/runs/x 20" for verb in ("send", "receive")}
    assert {line.partition("python")[2] for line in calls.read_text().splitlines()} == {
        line.partition("python")[2] for line in verbs
    }


def test_the_last_checkpoint_that_never_arrives_is_given_up(
    copier: tuple[nodes.Copier, list[nodes.Node], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Finds: copies that succeed, and leave nothing, are made for ever."""
    copying, hosts, _ = copier
    monkeypatch.setattr(nodes, "_REPORTED_S", 0.0)
    copying.copy_the_last(hosts, hosts[0], cast(StopSignals, SimpleNamespace(is_urgent=False)))
    copying.stop()
    assert "b: the run folder may lack the last checkpoint; a has it" in capfd.readouterr().err


def test_a_host_that_takes_no_copy_does_not_keep_the_others_from_theirs(
    copier: tuple[nodes.Copier, list[nodes.Node], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Finds: the copies for a full disk, again and again, while the host after it has no checkpoint."""
    copying, hosts, calls = copier
    third = nodes.Node(NamedHost("c", "1"))
    third.connection = hosts[1].connection
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$*" >> {calls}\ncase "$*" in *" b "*receive*) exit 1;; esac\n')
    monkeypatch.setattr(nodes, "_TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(nodes, "_REPORTED_S", 60.0)
    for _ in range(2):
        copying.look([*hosts, third], hosts[0])
        while copying._processes:
            copying.look([*hosts, third], hosts[0])
            time.sleep(0.01)
    receivers = [line.split(" exec ")[0][-1] for line in calls.read_text().splitlines() if " receive " in line]
    assert receivers == ["b", "c"]


def test_several_copies_that_never_arrive_are_given_up(
    copier: tuple[nodes.Copier, list[nodes.Node], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: a count of failures that is compared with a number that it jumps over."""
    copying, hosts, _ = copier
    more = [nodes.Node(NamedHost(name, "1")) for name in "cd"]
    for node in more:
        node.connection = hosts[1].connection
    monkeypatch.setattr(nodes, "_REPORTED_S", 0.0)
    copying.copy_the_last([*hosts, *more], hosts[0], cast(StopSignals, SimpleNamespace(is_urgent=False)))
    copying.stop()
