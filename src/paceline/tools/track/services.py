"""Trackers with a library of their own: trackio, MLflow, W&B. A point that is given twice is sent once."""

import json
import os
import posixpath
import re
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.record.config import TrackConfig
from paceline.record.folder import RunFolder
from paceline.record.state import read_config
from paceline.tools.track.points import Point

_PROJECT = "paceline"
_MOST_METRICS = 1000  # that MLflow takes in a request
_FLUSH_S = 1.0  # between writes of W&B's file; its own 15 s would be lost with a killed process
_WRITTEN_WITHIN_S = 60.0  # on a busy machine


class Trackio:
    """Writes trackio's local database. `log_id` makes a point that is there already no second row."""

    def __init__(self, folder: RunFolder, settings: TrackConfig, known: dict[str, Any]):
        from trackio.sqlite_storage import SQLiteStorage

        self._project, self._run = settings.project or _PROJECT, settings.name or folder.path.name
        self._id = known.setdefault("run", uuid.uuid4().hex)
        self._config = {"_Created": datetime.now(UTC).isoformat(), **read_config(folder.config)}
        self._log = SQLiteStorage.bulk_log  # trackio.log would return before anything is written

    def send(self, points: Sequence[Point]) -> None:
        self._log(
            self._project,
            self._run,
            [point.values for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time_s, UTC).isoformat() for point in points],
            log_ids=[f"{self._id}-{point.index}" for point in points],
            config=self._config,
            run_id=self._id,
        )

    def close(self, is_failed: bool) -> None: ...


class MLflow:
    """Sends to MLFLOW_TRACKING_URI. The server keeps one of two values with the same key, step and time."""

    def __init__(self, folder: RunFolder, settings: TrackConfig, known: dict[str, Any]):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the follower tries again by itself
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        mark = known.setdefault("mark", uuid.uuid4().hex)  # finds a run that was made just before a crash
        project = settings.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known_one = self._client.get_experiment_by_name(project)
        experiment = known_one.experiment_id if known_one else self._client.create_experiment(project)
        name, tags = settings.name or folder.path.name, {"paceline.mark": mark}
        runs = self._client.search_runs([experiment], f"tags.`paceline.mark` = '{mark}'")
        run = runs[0] if runs else self._client.create_run(experiment, run_name=name, tags=tags)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        config = {_key(key): str(value)[:500] for key, value in read_config(folder.config).items()}
        params = [Param(key, value) for key, value in config.items() if key not in run.data.params]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), value, round(1e3 * point.time_s), point.step)
            for point in points
            for name, value in point.values.items()
            if not isinstance(value, str)
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics[first : first + _MOST_METRICS])
        for point in points:
            if "event" in point.values:
                self._client.set_tag(self._id, f"event.{point.index:06d}", point.values["event"])

    def close(self, is_failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if is_failed else "FINISHED")


def _key(name: str) -> str:
    """Returns a name that MLflow takes: of few characters, at most 250, and a path without `//` and `..`."""
    return posixpath.normpath(re.sub(r"[^\w/. :-]", "_", name).replace("..", "__")[:250])


class WandB:
    """Logs by wandb's own process, which sends or, with WANDB_MODE=offline, keeps a file for `wandb sync`. A point
    counts as sent when it is in that file, RUN/track/wandb/*/*.wandb."""

    def __init__(self, folder: RunFolder, settings: TrackConfig, known: dict[str, Any]):
        import wandb

        local = folder.path / "track"
        self._run = wandb.init(
            id=known.setdefault("run", uuid.uuid4().hex[:8]),
            resume="allow",
            project=settings.project or os.environ.get("WANDB_PROJECT", _PROJECT),
            name=settings.name or os.environ.get("WANDB_NAME", folder.path.name),
            dir=local,
            config=read_config(folder.config),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                x_disable_stats=True,  # they would be the follower's
                init_timeout=120,
                x_transaction_log_flush_interval=_FLUSH_S,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        files = local.glob(f"wandb/*run-*/run-{self._run.id}.wandb")  # the others are of an earlier sending
        stored = [index for path in files for index, _ in _Log(path).rows()]
        self._next = self._run.step if not self._run.offline else max(stored, default=-1) + 1
        self._log = _Log(Path(self._run.settings.sync_file))

    def send(self, points: Sequence[Point]) -> None:
        points = [point for point in points if point.index >= self._next]
        for point in points:
            values = {**point.values, "step": point.step, "_timestamp": point.time_s}
            self._run.log(values, step=point.index, commit=True)
        deadline = time.monotonic() + _WRITTEN_WITHIN_S
        while points and self._next <= points[-1].index:
            if time.monotonic() > deadline:
                raise TimeoutError(f"wandb has not written its file within {_WRITTEN_WITHIN_S:.0f} s")
            time.sleep(_FLUSH_S / 2)
            self._next = max([self._next, *(index + 1 for index, _ in self._log.rows())])

    def close(self, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))


class _Log:
    """The rows in a .wandb file: protocol buffers in the blocks of LevelDB's log format."""

    def __init__(self, path: Path):
        self._path, self._at = path, 7  # after the file's own header

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields `_step` and the values of each row that was written since the last call."""
        from wandb.proto.wandb_internal_pb2 import Record

        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        begin, body, at = self._at, b"", 0
        while at + 7 <= len(data):
            if (left := 32768 - (begin + at) % 32768) < 7:  # too short for a header
                at += left
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            if at + 7 + length > len(data):
                return
            body += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # the whole of a record, or its last part
                self._at = begin + at
                record = Record()
                record.ParseFromString(body)
                body = b""
                if record.WhichOneof("record_type") == "history":
                    values = {
                        item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
                    }
                    yield record.history.step.num, values
