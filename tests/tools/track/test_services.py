"""What trackers with a library of their own have afterwards, read back from their stores.

They are large, so `make setup` leaves them out and these tests are skipped. `.ci/nightly trackers` installs and runs
them.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import Program, run
from recorded import Recorded, losses, put_back, val_losses

pytestmark = [pytest.mark.long]
Rows = list[tuple[int, float]]


@pytest.fixture
def made(tmp_path: Path) -> Recorded:
    """A run that was killed while it was sent, went on from an older checkpoint, and has ended."""
    return Recorded(tmp_path / "run")


def track_through_a_crash(made: Recorded, name: str, env: dict[str, str]) -> None:
    """Kills the follower twice: while it sends, and after it sent a batch and before it noted that."""
    path = made.folder.path
    state = path / "track" / f"{name}.json"
    before: dict[str, Any] = {}
    for first, last in ((1, 50), (51, 100)):
        made.steps(first, last)
        before = json.loads(state.read_text()) if state.exists() else {}
        with Program("track", str(path), "--to", name, env=env) as program:
            program.wait_for(
                lambda last=last: state.exists() and json.loads(state.read_text())["position"]["step"] == last
            )
            assert all(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in program.pids())
            os.kill(program.pid, signal.SIGKILL)
    put_back(made.folder, name, before)
    made.resume(70, 100)
    made.steps(71, 130)
    made.end()
    run("track", str(path), "--to", name, env=env).require()
    run("track", str(path), "--to", name, env=env).require()


def series(rows: list[tuple[int, dict[str, Any]]], key: str) -> Rows:
    return [(step, values[key]) for step, values in rows if key in values]


def test_trackio_has_each_row_once(made: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    track_through_a_crash(made, "trackio", {"TRACKIO_DIR": str(tmp_path / "store")})
    with sqlite3.connect(tmp_path / "store" / "paceline.db") as store:
        found = store.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = store.execute("SELECT config FROM configs").fetchone()
    rows = [(step, json.loads(metrics)) for step, metrics in found]
    assert series(rows, "train/loss") == losses(130)
    assert series(rows, "eval/val_loss") == val_losses(130)
    assert json.loads(config)["optim.lr"] == 0.1


def test_wandb_has_each_row_once_in_its_files(made: Recorded) -> None:
    pytest.importorskip("wandb")
    from paceline.tools.track.services import _Log  # W&B has no reader of its own

    track_through_a_crash(made, "wandb", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    files = sorted((made.folder.path / "track" / "wandb").glob("*run-*/*.wandb"))
    assert len(files) > 1
    found = [row for file in files for row in _Log(file).rows()]
    assert [index for index, _ in found] == list(range(len(found)))
    rows = [(int(values["step"]), values) for _, values in found]
    assert series(rows, "train/loss") == losses(130)
    assert series(rows, "eval/val_loss") == val_losses(130)
    (made.folder.path / "track" / "wandb.json").unlink()  # to send it again
    run("track", str(made.folder.path), "--to", "wandb", env={"WANDB_MODE": "offline"}).require()
    (file,) = {*(made.folder.path / "track" / "wandb").glob("*run-*/*.wandb")} - {*files}
    rows = [(int(values["step"]), values) for _, values in _Log(file).rows()]
    assert series(rows, "train/loss") == losses(130)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """Its address, and how to start it."""
    pytest.importorskip("mlflow.server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/store.db"]
    servers: list[subprocess.Popen[bytes]] = []
    address = f"http://127.0.0.1:{port}"

    def start() -> None:
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        servers.append(subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True))
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health").close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("mlflow server did not start")

    yield address, start
    for server in servers:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_mlflow_has_each_row_once_though_its_server_was_down_at_first(
    made: Recorded, mlflow_server: tuple[str, Any]
) -> None:
    from mlflow.tracking import MlflowClient

    address, start = mlflow_server
    env = {"MLFLOW_TRACKING_URI": address}
    made.steps(1, 1)
    with Program("track", str(made.folder.path), "--to", "mlflow", env=env) as program:
        time.sleep(4)
        assert program.process.poll() is None
    start()
    made.folder.metrics.unlink()  # the crash below begins at the first step again
    track_through_a_crash(made, "mlflow", env)
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("paceline")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.data.params["optim.lr"]) == ("FINISHED", "0.1")
    for key, wanted in (("train/loss", losses(130)), ("eval/val_loss", val_losses(130))):
        history = client.get_metric_history(found.info.run_id, key)
        assert sorted((metric.step, metric.value) for metric in history) == wanted


def test_tensorboards_own_library_reads_the_same(made: Recorded) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track_through_a_crash(made, "tensorboard", {})
    path = str(made.folder.path / "tensorboard")
    read = accumulator.EventAccumulator(path, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == losses(130)
    (text,) = read.Tensors("config")[0].tensor_proto.string_val
    assert b"optim.lr = 0.1" in text
