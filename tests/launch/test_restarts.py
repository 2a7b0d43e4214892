"""The lives of ranks, without training: when they begin again, what they know, and what ends them for good."""

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from program import Program

from paceline.launch.restarts import Failure, Records, delay_s

STAND_IN = Path(__file__).with_name("stand_in.py")


@contextmanager
def launched(run: Path, *lives: list[str], env: dict[str, str] | None = None, **options: Any) -> Iterator[Program]:
    """A launcher, which needs torch, and ranks that do as `lives` says without it."""
    run.mkdir(exist_ok=True)
    plan = {"num_ranks": len(lives[0]), "lives": lives, **options}
    with Program("launch", str(run), json.dumps(plan), command=(sys.executable, str(STAND_IN)), env=env) as program:
        yield program


def note(run: Path, life: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"life-{life}-rank-{rank}.json").read_text())
    return found


def wait_for_life(program: Program, run: Path, life: int, num_ranks: int) -> None:
    program.wait_for(lambda: all((run / f"life-{life}-rank-{rank}.json").exists() for rank in range(num_ranks)))


def listening(program: Program) -> set[tuple[str, int]]:
    """Addresses on which any process of the command listens."""
    found = set()
    for pid in program.pids():
        found |= {tuple(c.laddr) for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN}
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_killed_rank_is_named_and_all_begin_again_as_the_same_job_on_loopback_alone(tmp_path: Path) -> None:
    port = free_port()
    lives = (["6 stop", "kill", "parent"], ["8 fail", "done", "done"], ["9 wait", "wait", "wait"])
    with launched(tmp_path, *lives, max_restarts=3, port=port, env={"GLOO_SOCKET_IFNAME": "eth0"}) as program:
        wait_for_life(program, tmp_path, 2, 3)
        assert listening(program) == {("127.0.0.1", port)}, "one port for all lives, and no other"
        assert len(program.pids()) == 4, "nothing is left of the lives before, nor of what their ranks started"
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(75)
        program.wait_until_gone()
    warning, *said = ended.err.splitlines()
    assert warning.startswith("warning: GLOO_SOCKET_IFNAME is eth0; ranks of one host use lo")
    assert said[0].startswith("rank 1 was killed by SIGKILL (")
    assert said[0].endswith("after step 6; restart 1 of 3")
    assert said[1] == "rank 0 failed, after step 8; restart 2 of 3"
    assert said[2] == "2 restarts; 8 steps were made twice", "3 and 5: the stand-in goes on from step 3"
    assert len(said) == 3
    notes = [note(tmp_path, life, rank) for life in range(3) for rank in range(3)]
    assert [facts["PACELINE_ATTEMPT"] for facts in notes] == [*"000111222"]
    assert len({facts["PACELINE_JOB"] for facts in notes}) == 1
    assert {(facts["MASTER_ADDR"], facts["MASTER_PORT"]) for facts in notes} == {("127.0.0.1", str(port))}
    assert {facts["TORCHELASTIC_USE_AGENT_STORE"] for facts in notes} == {"True"}
    assert {facts["GLOO_SOCKET_IFNAME"] for facts in notes} == {"lo"}, (
        "exported for several hosts, it opened ports here"
    )
    assert notes[3]["time"] - notes[1]["time"] > 2, "given to those that do not end by themselves"


def test_what_the_user_must_change_is_not_tried_again(tmp_path: Path) -> None:
    with launched(tmp_path, ["user", "kill"], max_restarts=3) as program:
        ended = program.wait().require(2)
    assert ended.err == ""
    assert not (tmp_path / "life-1-rank-0.json").exists()


def test_saved_beats_done(tmp_path: Path) -> None:
    with launched(tmp_path, ["done", "saved", "done"], max_restarts=3) as program:
        assert program.wait().require(75).err == ""


def test_three_failures_at_one_step_end_it_with_all_of_them_told(tmp_path: Path) -> None:
    with launched(tmp_path, ["7 kill"], max_restarts=10) as program:
        ended = program.wait().require(1)
    assert "restart 1 of 10\n" in ended.err
    assert "restart 2 of 10 in 1 s\n" in ended.err
    assert "failed three times in a row at the same step" in ended.err
    assert [line.split(": ")[0].strip() for line in ended.err.splitlines()[-3:]] == [f"attempt {k}" for k in range(3)]
    assert f"Nothing had been saved: `paceline resume {tmp_path}` begins again at step 0" in ended.err


def test_a_rank_that_dies_is_told_with_host_and_step_and_log_and_the_way_out(tmp_path: Path) -> None:
    """Rank 0, which writes the events, is dead, and its last line cut short: the launcher closes them."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000004\n")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-00000.log").touch()
    with launched(tmp_path, ["6 kill", "wait"]) as program:
        wait_for_life(program, tmp_path, 0, 1)
        ended = program.wait().require(1)
    assert ended.err == (
        f"rank 0 was killed by SIGKILL (the kernel does that when memory runs out), on {socket.gethostname()}, after "
        f"step 6; the other ranks were stopped. The log of rank 0 is {tmp_path}/ranks/rank-00000.log. "
        f"The newest checkpoint is of step 4: `paceline resume {tmp_path}` resumes from there\n"
    )
    first, last = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert first["event"] == "resume"
    del last["time"]
    said = "rank 0 was killed by SIGKILL (the kernel does that when memory runs out)"
    assert last == {"event": "failed", "step": 6, "error": said, "by": "launcher"}


@pytest.mark.parametrize(
    ("last", "was_said", "is_closed"),
    [
        ({"event": "checkpoint"}, True, True),
        ({"event": "failed", "error": "Connection reset by peer"}, False, True),
        ({"event": "failed", "error": "its disk is full"}, True, False),
        ({"event": "hang"}, False, False),
        ({"event": "end"}, False, False),
        (None, False, False),
    ],
)
def test_events_end_with_how_the_run_ended(tmp_path: Path, last: Any, was_said: bool, is_closed: bool) -> None:
    events = tmp_path / "events.jsonl"
    if last is not None:
        events.write_text(json.dumps(last) + '\n{"event": "check')
    Records(tmp_path).close("rank 0 was killed", was_said)
    found = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")] if last else []
    assert [row.get("error") for row in found if row.get("by") == "launcher"] == ["rank 0 was killed"] * is_closed
    assert found[:1] == ([last] if last else [])


def test_a_failure_that_a_rank_has_told_is_followed_by_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000004\n")
    with launched(tmp_path, ["6 fail", "done"]) as program:
        ended = program.wait().require(1)
    assert ended.err == f"The newest checkpoint is of step 4: `paceline resume {tmp_path}` resumes from there\n"


def test_restarts_are_counted(tmp_path: Path) -> None:
    with launched(tmp_path, ["5 kill"], ["6 fail"], ["7 kill"], max_restarts=1) as program:
        ended = program.wait().require(1)
    assert "the run failed after 1 restart;" in ended.err
    assert not (tmp_path / "life-2-rank-0.json").exists()


def test_restarts_that_a_signal_prevented_are_not_counted(tmp_path: Path) -> None:
    with launched(tmp_path, ["5 kill"], ["6 hurt"], max_restarts=3) as program:
        wait_for_life(program, tmp_path, 1, 1)
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(1)
    assert "the run failed after 1 restart;" in ended.err


@pytest.mark.parametrize(("sent", "heard"), [("SIGUSR1", "SIGUSR1"), ("SIGHUP", "SIGHUP"), ("SIGQUIT", "SIGTERM")])
def test_a_signal_reaches_each_rank_once_as_one_it_knows(tmp_path: Path, sent: str, heard: str) -> None:
    with launched(tmp_path, ["wait", "wait"], max_restarts=3) as program:
        wait_for_life(program, tmp_path, 0, 2)
        os.kill(program.pid, signal.Signals[sent])
        ended = program.wait().require(75)
        program.wait_until_gone()
    assert ended.out.splitlines() == [f"heard {heard}"] * 2
    assert ended.err == ""


def test_a_rank_that_is_killed_while_it_saves_has_not_stopped_well(tmp_path: Path) -> None:
    """Rank 1 has saved, and rank 0 writes no byte of its save within the grace: that was "before training", with 75."""
    with launched(tmp_path, ["5 deaf", "deaf"], grace_s=1.0) as program:
        wait_for_life(program, tmp_path, 0, 2)
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(1)
        program.wait_until_gone()
    assert ended.err.startswith("rank 0, 1 did not end after SIGTERM, and 1 s without a byte of a save, and was killed")
    assert "--checkpoint.grace-s" in ended.err
    assert "before training" not in ended.err


@pytest.mark.parametrize("ranks", [["deaf", "wait"], ["wait", "deaf"]])
def test_a_rank_that_is_killed_before_training_has_lost_nothing(tmp_path: Path, ranks: list[str]) -> None:
    """A library that prepares data may hear no signal within the grace: that was a failure of the run, with 1."""
    with launched(tmp_path, ranks, grace_s=1.0) as program:
        wait_for_life(program, tmp_path, 0, 2)
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(75)
        program.wait_until_gone()
    # Rank 0 says so itself; if it was killed, the launcher does.
    says = ["stopped by SIGTERM before training began. Nothing was saved: start the same command again"]
    assert ended.err.splitlines() == (says if ranks[0] == "deaf" else [])


def test_a_save_that_makes_progress_may_take_longer_than_the_grace(tmp_path: Path) -> None:
    with launched(tmp_path, ["5 save"], grace_s=1.0) as program:
        wait_for_life(program, tmp_path, 0, 1)
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(75)
    assert ended.err == ""


def test_a_cleaner_of_temporary_files_ends_no_run(tmp_path: Path) -> None:
    """Nor do the ranks' reports need the folder in which the launcher looks for them."""
    temporary, run = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    with launched(run, ["5 wait", "wait"], env={"TMPDIR": str(temporary)}) as program:
        wait_for_life(program, run, 0, 2)
        for folder in (*temporary.iterdir(), run / "ranks"):
            shutil.rmtree(folder)
        os.kill(program.pid, signal.SIGTERM)
        assert program.wait().require(75).err == ""
    assert not (run / "ranks").exists(), "nothing was begun"


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, ["deaf", "deaf"], max_restarts=3) as program:
        wait_for_life(program, tmp_path, 0, 2)
        os.kill(program.pid, signal.SIGINT)
        program.wait_for(lambda: "heard SIGINT" in program._said())  # two signals that come together count as one
        os.kill(program.pid, signal.SIGINT)
        program.wait(40).require(130)  # deaf ranks would be given a minute
        program.wait_until_gone()


def test_a_signal_between_two_lives_of_a_saved_run_ends_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    with launched(tmp_path, ["5 kill"], ["4 kill"], ["3 kill"], ["9 wait"], max_restarts=5) as program:
        program.wait_for(lambda: "restart 3 of 5 in 2 s" in program._said())
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(75)
        program.wait_until_gone()
    assert "stopped by SIGTERM before training began" in ended.err
    assert not (tmp_path / "life-3-rank-0.json").exists()


def test_waits_grow_while_nothing_is_gained() -> None:
    def delays(*reached: int, most: int = 100) -> list[float | None]:
        failures = [Failure("rank 0 failed", step) for step in reached]
        return [delay_s(failures[: n + 1], 10, most) for n in range(len(failures))]

    assert delays(20, 30, 40) == [0, 0, 0]
    assert delays(20, 15, 18, 16, 17) == [0, 1, 2, 4, 8]
    assert delays(20, 15, 18, 21, 15) == [0, 1, 2, 0, 1]
    assert delays(*[20, 15] * 5)[-1] == 60
    assert delays(*[20, 15] * 600, most=2000)[-1] == 60
    assert delays(20, 20, 20) == [0, 1, None]
    assert delays(10, 10, 10) == [0, 1, None], "no step at all"
    assert delays(20, 30, 40, most=2) == [0, 0, None]
    assert delays(20, most=0) == [None]


def test_progress_is_read_from_records_that_a_crash_cut_short(tmp_path: Path) -> None:
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    records = Records(tmp_path)
    assert (records.last_step(), records.began_at(), records.newest_checkpoint()) == (0, None, None)
    metrics.write_text("".join(json.dumps({"step": k, "more": "x" * 9000}) + "\n" for k in range(1, 90)) + '{"step": 9')
    events.write_text('{"event": "start"}\n{"event": "chec')
    assert (records.last_step(), records.began_at(), records.began_at()) == (89, 0, None)
    events.write_text('{"event": "start"}\n{"event": "resume", "step": 80}\n{"event": "end", "step": 89}\n')
    assert records.began_at() == 80
    assert Records(tmp_path).began_at() is None, "what was before is no attempt of this launcher"


def test_progress_without_a_row_shows_in_checkpoints(tmp_path: Path) -> None:
    """With --log.every 100 three failures at the steps 30, 60 and 90 are not failures at one step."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000030\n")
    assert Records(tmp_path).last_step() == 30
    (tmp_path / "metrics.jsonl").write_text('{"step": 31}\n')
    assert Records(tmp_path).last_step() == 31
