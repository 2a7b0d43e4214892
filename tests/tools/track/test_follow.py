"""`paceline track`: each row arrives once, whatever happens to the follower, the run, the disk or the tracker."""

import contextlib
import importlib.util
import itertools
import json
import os
import posixpath
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from program import DEADLINE_S, Program, one_message, rows, run
from recorded import Recorded, losses, put_back, scalars, val_losses

from paceline.base.serving import Server
from paceline.record.config import TrackConfig
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.tools.track import follow
from paceline.tools.track.points import Point, Position, Reader
from paceline.tools.track.prometheus import Prometheus, _handler
from paceline.tools.track.services import MLflow
from paceline.tools.track.tensorboard import TensorBoard
from paceline.train import follower as train_follower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cli"))
from in_process import here

MISSING = [name for name in ("wandb", "trackio", "mlflow") if importlib.util.find_spec(name) is None]


@contextlib.contextmanager
def a_used_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_an_old_run_is_sent_in_full_and_never_twice(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    made.steps(1, 450)  # several batches
    made.end()
    for _ in range(2):
        assert "has all of" in run("track", str(made.folder.path), "--to", "tensorboard").require().out
    found = scalars(made.folder.path)
    assert found["train/loss"] == losses(450)
    assert found["eval/val_loss"] == val_losses(450)
    assert found["events/checkpoint"] == [(10 * n, n) for n in range(1, 46)]
    assert (found["time/slowest_rank_compute_ms"][0], "train/mfu" in found) == ((1, 8.0), False)


def test_after_kill_9_and_a_resume_from_an_older_checkpoint_there_is_no_gap_and_nothing_twice(tmp_path: Path) -> None:
    """TensorBoard can replace rows: of the steps that were trained again it has the last ones."""
    made = Recorded(tmp_path / "run")
    path, last = made.folder.path, 0
    wanted: list[tuple[int, float]] = []
    for attempt in range(3):
        made.steps(last + 1, last + 80)
        wanted = [*wanted[:last], *((step, float(attempt)) for step in range(last + 1, last + 81))]
        last += 80
        if attempt == 2:
            break
        with Program("track", str(path), "--to", "tensorboard") as program:
            program.wait_for((path / "track" / "tensorboard.json").exists)
            time.sleep(0.2 * attempt)  # before, while or after it sends the rows
            os.kill(program.pid, signal.SIGKILL)
        made.resume(last - 30, last)
        last -= 30
    made.end()
    run("track", str(path), "--to", "tensorboard").require()
    found = scalars(path)
    assert found["train/loss"] == losses(last)
    assert found["train/tokens_per_s"] == wanted
    assert found["eval/val_loss"] == val_losses(last)


def test_a_run_that_is_resumed_while_it_is_followed_is_read_from_its_new_rows(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    made.steps(1, 40)
    at, found = Position(), []
    reader = Reader(made.folder, at, True)
    for change in (None, lambda: made.resume(20, 40), lambda: made.steps(21, 25), None, lambda: made.steps(26, 300)):
        if change:
            change()
        points, at = reader.read(at)
        found += [(point.step, point.row["tokens_per_s"]) for point in points if "loss" in point.row]
    points, at = reader.read(at)
    found += [(point.step, point.row["tokens_per_s"]) for point in points if "loss" in point.row]
    made.end()
    assert found == [(step, 0.0) for step in range(1, 41)] + [(step, 1.0) for step in range(21, 301)]


def test_a_batch_that_was_being_sent_when_it_was_killed_is_sent_again_in_its_place(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    made.steps(1, 20)
    command = ("track", str(made.folder.path), "--to", "tensorboard")
    state = made.folder.path / "track" / "tensorboard.json"
    with Program(*command) as program:
        program.wait_for(lambda: state.exists() and json.loads(state.read_text())["position"].get("step") == 20)
        os.kill(program.pid, signal.SIGKILL)
    begin = {"file": json.loads(state.read_text())["known"]["file"], "bytes": 0}
    put_back(made.folder, "tensorboard", {"known": begin, "position": {}})
    made.resume(10, 20)  # the rows of the batch are gone
    made.steps(11, 15)
    made.end()
    run(*command).require()
    assert scalars(made.folder.path)["train/loss"] == losses(15)
    state.write_text("{")
    assert "remove it to send the run as a new one" in run(*command).require(1).err


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux's policy")
def test_while_a_run_trains_its_follower_gets_only_processor_time_that_is_left_over(tmp_path: Path) -> None:
    usual = {(os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))}
    for name, wanted in (("trains", {(os.SCHED_IDLE, 19)}), ("is-over", usual)):
        made = Recorded(tmp_path / name)
        made.steps(1, 10)
        if name == "is-over":
            made.end()
        with a_used_port() as port:  # so it waits
            to = ("--to", "tensorboard,prometheus", "--prometheus-port", str(port))
            with Program("track", str(made.folder.path), *to) as program:
                program.wait_for((made.folder.path / "track" / "tensorboard.json").exists)
                assert priorities(program.pid) == wanted


def test_rows_since_the_last_batch_are_sent_after_the_runs_end_however_long_ago_that_batch_was(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    made.steps(1, 10)
    state = made.folder.path / "track" / "tensorboard.json"
    flags = ("--to", "tensorboard", "--give-up-after-s", "0")
    with Program("track", str(made.folder.path), *flags) as program:
        program.wait_for(lambda: state.exists() and json.loads(state.read_text())["position"]["step"] == 10)
        made.steps(11, 20)
        made.end()
        program.wait().require()
    assert scalars(made.folder.path)["train/loss"] == losses(20)


def priorities(pid: int) -> set[tuple[int, int]]:
    """Policy and nice value of each thread, as the kernel has them."""
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return {(os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)) for thread in threads}


def test_a_full_disk_is_said_once_and_costs_no_row(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    disk = made.folder.path / "tensorboard"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        filler = disk / "filler"
        filler.write_bytes(b"x" * 450_000)
        with Program("track", str(made.folder.path), "--to", "tensorboard") as program:
            made.steps(1, 600)
            program.wait_for(lambda: "No space left" in program._said())
            assert json.loads((made.folder.path / "track" / "tensorboard.json").read_text())["position"]["step"] < 600
            filler.unlink()
            made.end()
            ended = program.wait().require()
        assert scalars(made.folder.path)["train/loss"] == losses(600)
        said = [line for line in ended.err.splitlines() if line.startswith("track: ")]
        assert ["No space left" in said[0], "works again" in said[1], len(said)] == [True, True, 2]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_prometheus_reads_the_newest_values_on_loopback_and_from_a_file(tmp_path: Path) -> None:
    made, file = Recorded(tmp_path / "run"), tmp_path / "node.prom"
    made.steps(1, 10)
    made.folder.append_event("straggler", step=10, rank=1)
    with a_used_port() as port:
        pass
    flags = ("--to", "prometheus", "--prometheus-port", str(port), "--prometheus-file", str(file))
    with Program("track", str(made.folder.path), *flags) as program:
        program.wait_for(file.exists)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text, kind = answer.read().decode(), answer.headers["Content-Type"]
        made.end()
        program.wait().require()
    assert kind == "text/plain; version=0.0.4"
    assert file.read_text().startswith("# HELP paceline_run_info The run.\n# TYPE paceline_run_info gauge\n")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['paceline_phase_duration_seconds{rank="1",phase="data"}'] == "0.002"
    assert float(values["paceline_loss_nats"]) == 5 - 10 / 256
    assert float(values["paceline_validation_loss_nats"]) == 6 - 10 / 256
    assert float(values["paceline_steps_total"]) == 10
    assert float(values["paceline_stragglers_total"]) == 1
    assert abs(float(values["paceline_last_step_timestamp_seconds"]) - time.time()) < 60


def test_prometheus_works_again_when_the_folder_of_its_file_is_there(tmp_path: Path) -> None:
    made, file = Recorded(tmp_path / "run"), tmp_path / "later" / "node.prom"
    made.steps(1, 10)
    with a_used_port() as port:
        pass
    flags = ("--to", "prometheus", "--prometheus-port", str(port), "--prometheus-file", str(file))
    with Program("track", str(made.folder.path), *flags) as program:
        program.wait_for(lambda: "prometheus does not work now" in program._said())
        file.parent.mkdir()
        program.wait_for(file.exists)
        made.end()
        assert "prometheus works again" in program.wait().require().err
    assert "\npaceline_checkpoints_total 1\n" in file.read_text(), "its only one, though the rows were sent twice"


def test_prometheus_gets_seconds_and_only_this_machine_gets_them(tmp_path: Path) -> None:
    """Finds: milliseconds under a name that ends in seconds; a port that other hosts can read."""
    with a_used_port() as port:
        pass
    sent = Prometheus(RunFolder(tmp_path), TrackConfig(prometheus_port=port), {})
    try:
        row = {"loss": 1.0, "step_ms": 250.0, "rank_data_ms": [5.0]}
        sent.send([Point(index=0, step=1, time_s=5.0, values={}, row=row)])
        assert b"\npaceline_step_duration_seconds 0.25\n" in sent.text
        assert b'\npaceline_phase_duration_seconds{rank="0",phase="data"} 0.005\n' in sent.text
        listening = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        assert [address for address, number in listening if number == port] == ["127.0.0.1"]
    finally:
        sent.close(is_failed=False)


def test_the_last_step_ended_when_it_did_and_not_when_its_evaluation_did(tmp_path: Path) -> None:
    sent = Prometheus(RunFolder(tmp_path), TrackConfig(prometheus_port=0), {})
    rows = ({"loss": 1.0}, {"val_loss": 1.0})
    sent.send([Point(index=n, step=1, time_s=5.0 + n, values={}, row=row) for n, row in enumerate(rows)])
    assert b"\npaceline_last_step_timestamp_seconds 5.0\n" in sent.text


@pytest.mark.skipif(not MISSING, reason="all libraries are installed")
def test_training_is_not_disturbed_by_trackers_that_are_missing_or_do_not_work(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with a_used_port() as port:
        to = f"tensorboard,{MISSING[0]},prometheus"
        flags = ("--train.steps", "6", "--train.eval-sequences", "8", "--train.device-batch-size", "12")
        flags = (*flags, "--train.sample-tokens", "0", "--track.prometheus-port", str(port))
        with Program("train", "--preset", "tiny", "--out", str(out), "--track.to", to, *flags) as program:
            program.wait().require()
            program.wait_until_gone(DEADLINE_S)  # on a busy machine the follower ends after training
            ended = program.wait()
    said = [line for line in ended.err.splitlines() if line.startswith("track: ")]
    name = MISSING[0]
    again = f"`paceline track {out} --to {name} --prometheus-port={port}` sends the rest"
    missing = f"{name} is not installed; pip install {follow._LIBRARIES[name]}, then {again}"
    assert f"track: {missing}" in said
    refused, left = [line for line in said if "prometheus does not" in line]
    assert f"prometheus does not work now: cannot listen on 127.0.0.1:{port}: Address already in use" in refused
    assert f"prometheus does not have all of {out}" in left
    assert len(said) == 3
    recorded = [(row["step"], pytest.approx(row["loss"])) for row in rows(out / "metrics.jsonl") if "loss" in row]
    assert scalars(out)["train/loss"] == recorded


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name the trackers"),
        (("--to", "tensorbord"), "did you mean 'tensorboard'?"),
        (("--to", "prometheus", "--prometheus-port", "70000"), "the port for Prometheus is 70000"),
        (("--to", "prometheus", "--prometheus-file", "x.txt"), "reads only *.prom"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    made = Recorded(tmp_path / "run")
    assert message in one_message([here("track", str(made.folder.path), *flags, cwd=tmp_path)])


def test_values_of_a_wrong_type_count_as_missing(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    times = {"step_ms": None, "rank_compute_ms": [6.0, None, "x", 8.0]}
    made.folder.append_metrics({"step": 1, "loss": 5.0, "tokens": 10**400, "lr": "x", **times})
    made.end()
    points, _ = Reader(made.folder, Position(), False).read(Position())
    slowest, fastest = "time/slowest_rank_compute_ms", "time/fastest_rank_compute_ms"
    assert [point.values for point in points if point.step] == [{"train/loss": 5.0, slowest: 8.0, fastest: 6.0}]


def test_values_of_a_wrong_type_stop_no_text_for_prometheus(tmp_path: Path) -> None:
    """Finds: a number of 400 digits, or a list by rank with something else in it, was an error for each later batch."""
    made = Recorded(tmp_path / "run")
    by_rank = {"rank_forward_ms": [6.0, None, "x", 8.0], "rank_data_ms": None, "rank_optim_ms": 3}
    made.folder.append_metrics({"step": 1, "loss": 5.0, "tokens": 10**400, "lr": "x", **by_rank})
    made.end()
    points, _ = Reader(made.folder, Position(), False).read(Position())
    sent = Prometheus(made.folder, TrackConfig(prometheus_port=0), {})
    sent.send(points)
    text = sent.text.decode()
    assert "paceline_loss_nats 5.0\n" in text
    assert "paceline_tokens_total " not in text
    phases = [line for line in text.splitlines() if line.startswith("paceline_phase_duration_seconds{")]
    rank = 'paceline_phase_duration_seconds{{rank="{}",phase="forward"}} {}'.format
    assert phases == [rank(0, 0.006), rank(3, 0.008)]


def test_the_time_of_a_row_counts_all_steps_since_the_row_before(tmp_path: Path) -> None:
    """Mutation: only those since the last evaluation, so that the clock falls behind."""
    made = Recorded(tmp_path / "run")
    for step in range(50, 1001, 50):
        if step % 100 == 0:
            made.folder.append_metrics({"step": step, "loss": 5.0, "step_ms": 1000.0})
        made.folder.append_metrics({"step": step, "val_loss": 6.0, "eval_ms": 2000.0})
    made.end()
    start, *others = Reader(made.folder, Position(), False).read(Position())[0]
    (last,) = [point.time_s for point in others if point.row.get("loss") and point.step == 1000]
    assert last - start.time_s == 1000 + 19 * 2


def test_a_file_of_tensorboard_that_is_gone_is_not_filled_up_with_zeros(tmp_path: Path) -> None:
    known: dict[str, Any] = {}
    TensorBoard(RunFolder(tmp_path), TrackConfig(), known).close(False)
    (tmp_path / "tensorboard" / known["file"]).unlink()
    with pytest.raises(ValueError, match=r"lacks what was written there; remove .*track/tensorboard\.json"):
        TensorBoard(RunFolder(tmp_path), TrackConfig(), known)


def test_followers_stop_hurrying_when_another_attempt_of_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_unhurried(follower: follow._Follower) -> None:
        follower.hurry.wait(60)
        for _ in range(500):
            if not follower.hurry.is_set():
                follower.has_everything = True
                break
            time.sleep(0.01)
        follower.is_over = True

    runs = itertools.cycle([False, True])
    monkeypatch.setattr(follow, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(follow, "is_running", lambda folder: next(runs))
    monkeypatch.setattr(follow._Follower, "run", until_unhurried)
    assert follow.follow(RunFolder(tmp_path), TrackConfig(to="tensorboard"), 60.0) == 0


def test_of_a_run_that_may_still_train_on_another_host_nothing_has_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Recorded(tmp_path / "run")
    made.steps(1, 10)
    folder = made.folder
    folder.close()
    (folder.path / "lock.holder").write_text(f"host not-{socket.gethostname()}, pid 1\n")
    for path in (folder.path / "lock.holder", folder.metrics, folder.events, folder.config):
        os.utime(path, (0, time.time() - 300))
    assert follow.follow(folder, TrackConfig(to="tensorboard"), 60.0) == 1
    said = capfd.readouterr()
    assert "no end is recorded, and its host has written nothing for 30" in said.err
    assert "sends the rest" in said.err
    assert scalars(folder.path)["train/loss"] == losses(10)
    made.resume(10, 10)
    made.end()
    assert follow.follow(folder, TrackConfig(to="tensorboard"), 60.0) == 0


def test_while_a_runs_disk_is_away_nothing_has_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a folder that cannot be looked at counts as a run that is over, and its later rows are never sent."""
    made, away, looks, statuses = Recorded(tmp_path / "run"), tmp_path / "away", list[int](), list[int]()
    made.steps(1, 10)
    is_running, folder = follow.is_running, made.folder.path

    def look(run_folder: RunFolder) -> bool:
        looks.append(threading.get_ident())
        return is_running(run_folder)

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not (is_so() or statuses) and time.monotonic() < deadline:
            time.sleep(0.01)

    for name in ("_LOOK_EVERY_S", "_EVERY_S"):
        monkeypatch.setattr(follow, name, 0.05)
    monkeypatch.setattr(follow, "is_running", look)
    flags = TrackConfig(to="tensorboard")
    thread = threading.Thread(target=lambda: statuses.append(follow.follow(made.folder, flags, 60.0)))
    thread.start()
    state = folder / "track/tensorboard.json"
    until(
        lambda: state.exists() and (saved := json.loads(state.read_text()))["position"]["index"] and not saved["batch"]
    )
    folder.rename(away)
    before = len(looks)
    until(lambda: min(looks[before:].count(each) for each in set(looks)) > 3)
    is_over = bool(statuses)
    away.rename(folder)
    made.steps(11, 20)
    made.end()
    thread.join()
    assert (is_over, statuses, scalars(folder)["train/loss"]) == (False, [0], losses(20))


@pytest.mark.parametrize(
    ("job", "grace_s", "is_stopped", "said"),
    [
        ("7", 60.0, False, ""),
        ("7", 0.2, False, "not all records have been sent to trackers; `paceline"),
        ("7", 60.0, True, "not all records have been sent to trackers; `paceline"),
        ("", 60.0, False, "still sends records to trackers"),
    ],
)
def test_a_follower_that_slurm_would_kill_is_waited_for(
    job: str,
    grace_s: float,
    is_stopped: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_follower, "_LAST_S", 0.1)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 2)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    waiting = train_follower.Follower(TrackConfig(to="wandb"), Console(0))
    with subprocess.Popen(["sleep", "60" if said else "0.5"]) as process:
        waiting._process = process
        waiting.wait(grace_s, lambda: is_stopped)
        assert (process.poll() is None) == bool(said)
        process.kill()
    printed = capsys.readouterr().out
    assert said in printed
    assert said or not printed


def test_a_terminal_that_is_gone_ends_no_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone = open(writer, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", gone)
    with pytest.raises(BrokenPipeError):
        print("what nobody reads", file=sys.stderr, flush=True)
    follow._say("a tracker does not work now")  # raises nothing
    assert sys.stderr is gone
    with contextlib.suppress(BrokenPipeError):
        gone.close()


def test_prometheus_serves_one_text_though_it_is_replaced_meanwhile() -> None:
    class Shrinking:
        lengths = itertools.count(100, -1)

        @property
        def text(self) -> bytes:
            return b"x" * next(self.lengths)

    server = Server(("127.0.0.1", 0), _handler(Shrinking()))  # type: ignore[arg-type]
    server.begin()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        assert answer.read() == b"x" * 100
    server.end()


def test_prometheus_takes_a_name_that_is_not_utf_8() -> None:
    sent = Prometheus(RunFolder(Path(os.fsdecode(b"run\xff"))), TrackConfig(prometheus_port=0), {})
    sent.send([])
    assert b'paceline_run_info{run="run?",unit="tokens"} 1' in sent.text


def test_prometheus_names_what_the_rows_of_a_script_count(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nunit = "rows\\"\\\\"\n')
    sent = Prometheus(RunFolder(tmp_path), TrackConfig(prometheus_port=0, name="x"), {})
    sent.send([])
    assert rb'paceline_run_info{run="x",unit="rows\"\\"} 1' in sent.text


def test_after_a_resume_prometheus_has_what_the_attempt_of_now_records(tmp_path: Path) -> None:
    """Of the times by rank of a smaller world nothing stays; a script's evaluation without a loss removes none."""
    sent = Prometheus(RunFolder(tmp_path), TrackConfig(prometheus_port=0), {})
    rows: list[dict[str, Any]] = [
        {"step": 5, "loss": 1.0, "tokens": 50, "world_size": 2, "rank_data_ms": [5.0, 6.0]},
        {"step": 5, "val_loss": 1.5},
        {"step": 5, "val_loss": None, "f1": 0.5},
        {"step": 3, "loss": 2.0, "tokens": 30, "world_size": 9},
    ]
    sent.send([Point(index=n, step=row["step"], time_s=5.0, values={}, row=row) for n, row in enumerate(rows)])
    assert b"phase_duration" not in sent.text
    assert b"\npaceline_validation_loss_nats 1.5\n" in sent.text
    for name in (b"steps", b"tokens"):  # a counter never falls
        assert b"# TYPE paceline_%s_total gauge\n" % name in sent.text
    assert b"\npaceline_tokens_total 30.0\n" in sent.text


def evaluations(reader: Reader, at: Position) -> tuple[list[tuple[int, Any]], Position]:
    """The evaluations after a position, as a tracker gets them, and the position after all there is."""
    found: list[tuple[int, Any]] = []
    while True:
        points, at = reader.read(at)
        if not points:
            return found, at
        assert all(point.time_s > 1e9 for point in points), "since 1970"
        found += [(point.step, point.values) for point in points if "val_loss" in point.row]


@pytest.mark.parametrize("can_forget", [True, False])
def test_each_evaluation_of_a_script_is_sent_once(tmp_path: Path, can_forget: bool) -> None:
    """One before the first step, and a second one of a step, whose row has other numbers."""
    made = Recorded(tmp_path / "run")
    second: dict[str, Any] = {"step": 4, "val_loss": None, "f1": 0.5}

    def write(*rows: dict[str, Any]) -> None:
        for row in rows:
            made.folder.append_metrics(row)

    write({"step": 0, "val_loss": 3.0})
    made.steps(1, 4)
    write({"step": 4, "val_loss": 2.0}, second)
    at = Position()
    reader = Reader(made.folder, at, can_forget)
    sent, at = evaluations(reader, at)
    of_step_4 = [(4, {"eval/val_loss": 2.0}), (4, {"eval/f1": 0.5})]
    assert sent == [(0, {"eval/val_loss": 3.0}), *of_step_4]
    made.resume(4, 4)
    write({"step": 4, "val_loss": None, "recall": 0.25})
    sent, at = evaluations(reader, at)
    assert sent == [(4, {"eval/recall": 0.25})]
    made.resume(2, 4)
    made.steps(3, 4)
    write({"step": 4, "val_loss": 2.0}, second)
    sent, at = evaluations(reader, at)
    assert sent == (of_step_4 if can_forget else [])
    made.resume(4, 4)
    sent, at = evaluations(reader, at)
    assert sent == []
    earlier = Position(step=4, eval_step=4, events=at.events)  # as an earlier paceline has saved it
    assert evaluations(Reader(made.folder, earlier, can_forget), earlier)[0] == []
    made.end()


def test_a_number_that_a_script_names_event_is_no_event(tmp_path: Path) -> None:
    made = Recorded(tmp_path / "run")
    made.folder.append_metrics({"step": 1, "loss": 2.0, "step_ms": 10.0, "event": 1.0})
    made.end()
    points, _ = Reader(made.folder, Position(), False).read(Position())
    row = next(point for point in points if point.step)
    assert row.values == {"train/loss": 2.0, "time/step_ms": 10.0, "train/event": 1.0}
    sent = Prometheus(made.folder, TrackConfig(prometheus_port=0), {})
    sent.send(points)
    assert b"\npaceline_loss_nats 2.0\n" in sent.text


def test_a_number_beyond_those_of_float32_does_not_stop_tensorboard(tmp_path: Path) -> None:
    values: dict[str, float | str] = {"train/high": 1e39, "train/low": -1e39, "train/usual": 0.5}
    sent = TensorBoard(RunFolder(tmp_path), TrackConfig(), {})
    sent.send([Point(index=0, step=1, time_s=1.0, values=values)])
    sent.close(False)
    largest = 3.4028234663852886e38
    expected = {"train/high": [(1, largest)], "train/low": [(1, -largest)], "train/usual": [(1, 0.5)]}
    assert scalars(tmp_path) == expected


def test_names_that_mlflow_would_refuse_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of mlflow/utils/validation.py. Its library, which is large, and its server are stand-ins here."""
    sent: list[Any] = []
    before = SimpleNamespace(info=SimpleNamespace(run_id="1"), data=SimpleNamespace(params={"train.steps": "4"}))
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="0"),
        search_runs=lambda *query: [before],
        update_run=lambda *run, **status: None,
        log_batch=lambda _, metrics=(), params=(): sent.extend([*metrics, *params]),
    )
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric = entities.Param = lambda *fields: fields  # type: ignore[attr-defined]
    tracking.MlflowClient = lambda: client  # type: ignore[attr-defined]
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT", "SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "0")
    (tmp_path / "config.toml").write_text('[train]\nsteps = 4\n[config]\n"top@1" = 5\n')
    tracker = MLflow(RunFolder(tmp_path), TrackConfig(), {})
    assert sent == [("config.top_1", "5")], "what the run does not have, after a batch that failed"
    sent.clear()
    names = ["accuracy (%)", "a//b", "../up", "top/", "größe: 1", "n" * 300]
    tracker.send([Point(index=0, step=1, time_s=1.0, values={f"train/{name}": 1.0 for name in names})])
    keys = [key for key, *_ in sent]
    assert keys[:-1] == ["train/accuracy ___", "train/a/b", "train/__/up", "train/top", "train/größe: 1"]
    for key in keys:
        assert re.fullmatch(r"[/\w.\- :]{1,250}", key)
        assert posixpath.normpath(key) == key
