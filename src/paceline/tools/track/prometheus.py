"""The newest values of a run as Prometheus's text format: by HTTP on loopback, and as a file for node_exporter.

prometheus.io/docs/instrumenting/exposition_formats; base units, so seconds and ratios.
"""

import math
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from paceline.base.files import replace
from paceline.base.jsonl import Row
from paceline.base.serving import QuietHandler, Server
from paceline.record.config import TrackConfig
from paceline.record.folder import RunFolder
from paceline.record.read import number
from paceline.record.state import read_config
from paceline.tools.track.points import Point, is_event

# Name, help, field of a row, factor.
_OF_ROWS = (
    ("loss_nats", "Training loss of the last step, nats per token.", "loss", 1.0),
    ("validation_loss_nats", "Loss of the last evaluation, nats per token.", "val_loss", 1.0),
    ("learning_rate", "Learning rate of the last step.", "lr", 1.0),
    ("gradient_norm", "Norm of the last gradient, before clipping.", "grad_norm", 1.0),
    ("tokens_per_second", "Tokens of all ranks in a second of the last step.", "tokens_per_s", 1.0),
    ("model_flops_utilization_ratio", "Model FLOP/s over the peak of all ranks.", "mfu", 1.0),
    ("step_duration_seconds", "Duration of the last step.", "step_ms", 1e-3),
    ("ranks", "World size.", "world_size", 1.0),
    ("steps_total", "Steps made; a resume may go back.", "step", 1.0),
    ("tokens_total", "Tokens seen by all ranks; a resume may go back.", "tokens", 1.0),
)
_OF_EVENTS = (
    ("checkpoints_total", "Checkpoints saved.", "checkpoint"),
    ("resumes_total", "Starts from a checkpoint.", "resume"),
    ("stragglers_total", "Ranks reported as slow.", "straggler"),
    ("skipped_steps_total", "Steps without an update, their gradient not being finite.", "skipped step"),
)
_PHASES = ("data", "forward", "backward", "exposed_comm", "optim")


class Prometheus:
    """Keeps nothing on the disk: a new one reads the run from its beginning. Each batch replaces the text."""

    def __init__(self, folder: RunFolder, settings: TrackConfig, known: dict[str, Any]):
        self._name, self._file = settings.name or folder.path.name, settings.prometheus_file
        self._unit = str(read_config(folder.config).get("run.unit", "tokens"))  # what a script's rows count
        self._row: Row = {}
        self._counts: dict[str, int] = {}
        self._num_points = 0
        self._last_step_s = 0.0
        self.text = b""
        self._server = None
        if settings.prometheus_port:
            self._server = Server(("127.0.0.1", settings.prometheus_port), _handler(self))
            self._server.begin()

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.index < self._num_points:  # it comes again: the file could not be written
                continue
            self._num_points = point.index + 1
            if is_event(point.row):
                self._counts[point.row["event"]] = self._counts.get(point.row["event"], 0) + 1
                continue
            if "loss" in point.row:
                # What an older row alone has, such as times by rank, is of another world.
                self._row, self._last_step_s = {"val_loss": self._row.get("val_loss"), **point.row}, point.time_s
            elif point.row.get("val_loss") is not None:  # a script's evaluation may have other numbers only
                self._row["val_loss"] = point.row["val_loss"]
        self.text = self._exposition().encode(errors="replace")
        if self._file:
            replace(Path(self._file).absolute(), self.text)

    def close(self, is_failed: bool) -> None:
        if self._server is not None:
            self._server.end()

    def _exposition(self) -> str:
        labels = f'{{run="{_escaped(self._name)}",unit="{_escaped(self._unit)}"}}'
        text = _family("run_info", "gauge", "The run.", [(labels, 1)])
        for metric, told, key, factor in _OF_ROWS:
            if math.isfinite(value := number(self._row.get(key))):
                text += _family(metric, "gauge", told, [("", value * factor)])
        for metric, told, event in _OF_EVENTS:
            text += _family(metric, "counter", told, [("", self._counts.get(event, 0))])
        by_rank = []
        for phase in _PHASES:
            values = self._row.get(f"rank_{phase}_ms")
            known = enumerate(map(number, values)) if isinstance(values, list) else ()
            by_rank += [(f'{{rank="{rank}",phase="{phase}"}}', ms / 1e3) for rank, ms in known if math.isfinite(ms)]
        if by_rank:
            text += _family("phase_duration_seconds", "gauge", "A part of the last step, by rank.", by_rank)
        return text + _family("last_step_timestamp_seconds", "gauge", "When it ended.", [("", self._last_step_s)])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _family(name: str, kind: str, told: str, samples: Sequence[tuple[str, float]]) -> str:
    lines = [f"# HELP paceline_{name} {told}", f"# TYPE paceline_{name} {kind}"]
    return "\n".join([*lines, *(f"paceline_{name}{labels} {value!r}" for labels, value in samples)]) + "\n"


def _handler(source: Prometheus) -> type[QuietHandler]:
    class Handler(QuietHandler):
        timeout = 10.0  # of a client that sends or reads nothing

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(source.text, "text/plain; version=0.0.4")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

    return Handler
