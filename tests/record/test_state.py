"""The state of a run: running, ended, stopped, failed or stale, from what its folder holds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from paceline.record.folder import COMPLETE, RunFolder, create
from paceline.record.state import is_running, read_config, read_state

WRITER = """
import sys, time
from pathlib import Path
from paceline.record.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.lock()
folder.append_event("start")
folder.append_metrics({"step": 3, "loss": 2.5, "step_ms": 10.0})
print("written", flush=True)
time.sleep(60)
"""


def run_with(path: Path, *events: dict[str, Any]) -> RunFolder:
    """A run folder with these events and two rows."""
    folder = create(path)
    folder.config.write_text("[train]\nsteps = 0\ntokens_per_param = 20\n")
    folder.metrics.write_text('{"step": 2, "loss": 2.0}\n{"step": 2, "val_loss": 2.1}\n{"step": 3, "lo')
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.mark.parametrize(
    ("event", "kind", "why"),
    [
        ({"event": "end", "step": 4, "reason": COMPLETE}, "ended", ""),
        ({"event": "end", "step": 4, "reason": "SIGTERM on rank 0"}, "stopped", "SIGTERM on rank 0"),
        ({"event": "failed", "step": 4, "error": "rank 1 was lost\nmore"}, "failed", "rank 1 was lost"),
        ({"event": "hang", "step": 4, "message": "rank 1 hangs"}, "failed", "rank 1 hangs"),
        ({"event": "checkpoint", "step": 4}, "stale", "no end is recorded, and its process is gone or silent"),
    ],
)
def test_the_last_event_tells_how_a_run_ended(tmp_path: Path, event: dict[str, Any], kind: str, why: str) -> None:
    state = read_state(run_with(tmp_path / "run", {"event": "start", "num_steps": 4}, event))
    assert (state.kind, state.why, state.step, state.num_steps) == (kind, why, 4, 4)
    assert (state.last["loss"], state.evaluation["val_loss"]) == (2.0, 2.1)


def test_a_run_is_running_while_its_process_lives_and_stale_after_it_was_killed(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "written\n"
            state = read_state(folder)
            assert (state.kind, state.step, state.num_steps, state.last["loss"]) == ("running", 3, None, 2.5)
            born_s = psutil.Process(writer.pid).create_time()
            with patch.object(psutil.Process, "create_time", lambda process: born_s + 3600):  # the clock was set
                assert read_state(folder).kind == "running"
        finally:
            writer.send_signal(signal.SIGKILL)
    assert read_state(folder).kind == "stale"


def test_a_later_process_with_the_same_pid_is_not_the_run(tmp_path: Path) -> None:
    """Finds: a run that was killed is shown as running for ever, where its pid was given to another process."""
    folder = run_with(tmp_path / "run", {"event": "start"})
    folder.lock()  # as this process
    assert read_state(folder).kind == "running"
    holder = folder.path / "lock.holder"
    name, place, ticks = holder.read_text().splitlines()
    holder.write_text(f"{name}\n{place}\n{int(ticks) - 1}\n")
    assert read_state(folder).kind == "stale"
    for without_ticks in (f"{name}\n{place}\n", f"{name}\n{place}\n0\n"):  # an earlier version, another system
        holder.write_text(without_ticks)
        assert read_state(folder).kind == "running"
        os.utime(holder, (0, psutil.Process().create_time() - 3600))
        assert read_state(folder).kind == "stale"
    folder.close()


@pytest.mark.parametrize("host", [f"not-{socket.gethostname()}, pid 1", f"{socket.gethostname()}, pid 1\nanother boot"])
def test_of_a_run_on_another_host_only_the_age_of_its_records_is_known(tmp_path: Path, host: str) -> None:
    """Finds: a machine with this one's name is taken for it."""
    folder = run_with(tmp_path / "run", {"event": "start"})
    holder = folder.path / "lock.holder"
    holder.write_text(f"host {host}\n")
    assert read_state(folder).kind == "running"
    for path in (holder, folder.metrics, folder.events):
        os.utime(path, (0, time.time() - 300))
    assert read_state(folder).kind == "stale"


def test_a_run_on_another_host_is_silent_as_long_as_its_rows_take(tmp_path: Path) -> None:
    """Finds 120 s for each run: of a row each 100 steps, and of a long step, the next one may come later."""
    folder = run_with(tmp_path / "run", {"event": "start"})
    (folder.path / "lock.holder").write_text(f"host not-{socket.gethostname()}, pid 1\n")
    for steps, step_ms, silent_s, kind in (
        ((100, 200, 300), 2000, 550, "running"),
        ((100, 200, 300), 2000, 650, "stale"),
        ((100,), 2000, 550, "running"),
        ((1, 2, 3), 30000.0, 550, "running"),
        ((1, 2, 3), 10.0, 150, "stale"),
    ):
        folder.config.write_text("[log]\nevery = 100\n")
        rows = [{"step": step, "loss": 2.0, "step_ms": step_ms} for step in steps]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for path in (folder.path / "lock.holder", folder.metrics, folder.events):
            os.utime(path, (0, time.time() - silent_s))
        assert (read_state(folder).kind, is_running(folder)) == (kind, kind == "running"), (steps, silent_s)


def test_a_resumed_run_is_running_before_it_records_that(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", {"event": "end", "step": 4, "reason": COMPLETE})
    os.utime(folder.events, (0, time.time() - 10))
    folder.lock()
    assert read_state(folder).kind == "running"
    folder.close()
    assert read_state(folder).kind == "ended"


@pytest.mark.parametrize("text", ["a = [[", f"[a]\nb = {'1' * 5000}", "[a]\nb = " + "[" * 5000])
def test_a_config_that_cannot_be_read_has_no_settings(tmp_path: Path, text: str) -> None:
    """Also one with a number that is too long, which ended `runs` of all runs beside it."""
    (tmp_path / "config.toml").write_text(text)
    assert read_config(tmp_path / "config.toml") == {}


def test_a_folder_without_readable_records_has_no_step(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.metrics.write_bytes(b"\xff\x00\n[1]\n")
    state = read_state(folder)
    assert (state.kind, state.step, state.last) == ("stale", 0, {})
