"""How runs end: stopped, crashed, in an evaluation. What is saved by then, and what is said."""

import contextlib
import dataclasses
import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from program import COLD, TINY, Program, digest, losses, rows, run, steps
from ranks import run_ranks
from whole_runs import SEQ_LEN, STEPS, evaluations, events, former_manifest, saved, status_of, tiny, words

from paceline.base import faults
from paceline.base.clock import Stopwatch
from paceline.base.errors import RunError, Stopped, UserError
from paceline.base.faults import Injected
from paceline.base.process import stopped_early
from paceline.checkpoint import manifest as mf
from paceline.config import Config, to_toml
from paceline.launch.signals import has_handler
from paceline.record.folder import RunFolder
from paceline.train import evaluate as evaluate_module
from paceline.train import loop as loop_module
from paceline.train import meet as meet_module
from paceline.train import restoring as restoring_module
from paceline.train import saves as saves_module
from paceline.train.loop import train
from paceline.train.meet import Setup
from paceline.train.progress import Progress
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

# At this rate the validation loss stays above that of the first step.
GROWING = {"optim__lr": 1.0, "optim__warmup_steps": 3, "optim__min_lr_frac": 1.0}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed, evaluated every two steps."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert status_of(folder, tiny(train__eval_every=2)) == 0
    return folder


# ---- what is saved, and when ----


def test_a_crash_in_the_last_evaluation_loses_nothing(tmp_path: Path, straight: Path) -> None:
    """A1. The last checkpoint is there before the last evaluation begins; a resume evaluates and ends."""
    folder = tmp_path / "run"
    with pytest.raises(Injected):
        status_of(folder, tiny(train__eval_every=2), f"rank=0 step={STEPS + 1} phase=evaluate kind=raise")
    assert saved(folder) == [STEPS]
    assert STEPS not in evaluations(folder)
    assert status_of(folder, tiny(train__eval_every=2), resume=True) == 0
    assert evaluations(folder) == evaluations(straight)
    assert losses(folder) == losses(straight)
    assert digest(folder) == digest(straight)


def test_a_kill_in_an_evaluation_resumes_at_its_step(tmp_path: Path, straight: Path) -> None:
    """A1. Where a save was due at the step that is evaluated, the save comes first."""
    folder = tmp_path / "run"
    config = tiny(train__eval_every=2, checkpoint__every=4)
    (tmp_path / "config.toml").write_text(to_toml(config))
    killed = "rank=0 step=5 phase=evaluate kind=sleep seconds=1; rank=0 step=5 phase=evaluate kind=kill"
    flags = ("--config", str(tmp_path / "config.toml"), "--out", str(folder))
    with Program("train", *flags, env={"PACELINE_FAULTS": killed}) as program:
        program.wait().require(-signal.SIGKILL)
    assert saved(folder) == [4]
    assert sorted(evaluations(folder)) == [2]
    assert status_of(folder, config, resume=True) == 0
    assert [event["step"] for event in events(folder, "resume")] == [4]
    assert sorted(evaluations(folder)) == [2, 4, 6]
    assert evaluations(folder) == pytest.approx(evaluations(straight), abs=1e-5)


def test_saves_come_by_the_clock_and_the_banner_says_when_the_first_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A1. By default, too: a crash never loses more than the interval."""
    assert Config().checkpoint.every == 0
    assert Config().checkpoint.every_s > 0
    status_of(tmp_path / "a", tiny(train__steps=1, train__eval_every=-1))
    assert "every 10m00s of training, and at the end; the first after 10m00s" in words(capsys.readouterr().out)
    slow = "rank=0 step=3 phase=data kind=sleep seconds=3"
    status_of(tmp_path / "b", tiny(checkpoint__every_s=3.0, train__eval_every=-1), slow)
    assert events(tmp_path / "b", "checkpoint")[0]["step"] == 3
    changes: dict[str, Any] = {"checkpoint__every": 5, "train__eval_every": -1}
    status_of(tmp_path / "c", tiny(**changes, train__stop_at_step=1))
    assert "every 5 steps, and at the end; the first at step 5" in words(capsys.readouterr().out)
    status_of(tmp_path / "c", tiny(**changes, train__stop_at_step=2), resume=True)
    assert "every 5 steps, and at the end; the newest 2 stay" in words(capsys.readouterr().out)


def best_of(folder: Path) -> tuple[str, float]:
    """What `best` names, and the validation loss that is noted there."""
    name = (folder / "checkpoints/best").read_text().strip()
    losses = {row["step"]: row["val_loss"] for row in rows(folder / "checkpoints/index.jsonl")}
    return name, losses[int(name.removeprefix("step-"))]


def test_the_best_and_multiples_stay_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1. Saves and evaluations of the same steps: the best is among the first, saved before it was evaluated."""
    folder = tmp_path / "run"
    kept = {"checkpoint__keep_every": 4, "checkpoint__keep_best": True}
    config = tiny(checkpoint__every=1, train__eval_every=1, train__steps=8, **kept, **GROWING)
    save_if_due = saves_module.Saves.save_if_due

    def save_before_the_next_step(saves: saves_module.Saves) -> None:
        save_if_due(saves)
        saves._saver.finish()

    monkeypatch.setattr(saves_module.Saves, "save_if_due", save_before_the_next_step)
    assert status_of(folder, config) == 0
    found = evaluations(folder)
    best = min(found, key=lambda step: found[step])
    assert best < 7
    assert best_of(folder) == (f"step-{best:08d}", found[best])
    assert saved(folder) == sorted({best, 4, 7, 8})


def test_the_best_is_marked_where_the_run_died_before_it_was(tmp_path: Path) -> None:
    """A1. The evaluation is in the records, the mark beside the checkpoints is not."""
    folder = tmp_path / "run"
    config = tiny(checkpoint__keep_best=True, train__eval_every=6)
    assert status_of(folder, config) == 0
    before = best_of(folder)
    assert before == (f"step-{STEPS:08d}", evaluations(folder)[STEPS])
    (folder / "checkpoints/best").unlink()
    (folder / "checkpoints/index.jsonl").unlink()
    assert status_of(folder, tiny(checkpoint__keep_best=True, train__steps=STEPS + 2), resume=True) == 0
    assert best_of(folder)[1] == min(evaluations(folder).values())
    assert saved(folder)[0] == STEPS


def test_the_best_is_kept_from_the_resume_on_that_asks_for_it(tmp_path: Path) -> None:
    """It was saved and evaluated when nobody did."""
    folder = tmp_path / "run"
    changes = {"checkpoint__every": 1, "train__eval_every": 1, **GROWING}
    assert status_of(folder, tiny(**changes, checkpoint__keep=9, train__stop_at_step=3)) == 75
    assert status_of(folder, tiny(**changes, checkpoint__keep_best=True), resume=True) == 0
    found = evaluations(folder)
    best = min(found, key=lambda step: found[step])
    assert best < 3
    assert best_of(folder) == (f"step-{best:08d}", found[best])


def test_a_lower_loss_of_a_checkpoint_that_is_gone_keeps_no_other_from_being_the_best(tmp_path: Path) -> None:
    """Mutation: after a resume that turns keep-best on, none is as good as one that nobody kept."""
    folder = tmp_path / "run"
    assert status_of(folder, tiny(train__eval_every=1, train__stop_at_step=2)) == 75
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "val_loss": 1.0}\n')
    config = tiny(train__eval_every=1, train__steps=3, checkpoint__keep_best=True)
    assert status_of(folder, config, resume=True) == 0
    evaluated = [row for row in rows(folder / "metrics.jsonl") if "val_loss" in row]
    assert best_of(folder) == ("step-00000003", evaluated[-1]["val_loss"])


def test_a_step_whose_save_failed_keeps_no_later_one_from_being_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: its loss stays the one to beat, and `best` names the first step for ever."""
    folder, evaluate, found = tmp_path / "run", loop_module.evaluate, {1: 4.0, 2: 1.0, 3: 2.0, 4: 3.0}

    def with_loss(setup: Setup) -> Any:
        setup.checkpoints.saver.finish()
        row = evaluate(setup)
        assert row
        return dataclasses.replace(row, val_loss=found[setup.progress.step])

    monkeypatch.setattr(loop_module, "evaluate", with_loss)
    config = tiny(train__eval_every=1, train__steps=4, checkpoint__keep_best=True)
    assert status_of(folder, config, "rank=0 step=2 phase=save.write kind=full") == 0
    assert best_of(folder) == ("step-00000003", found[3])
    assert saved(folder) == [3, 4]


# ---- stopped at an evaluation ----


def test_a_stop_at_an_evaluation_step_evaluates_it_after_the_resume(tmp_path: Path, straight: Path) -> None:
    """C7. And keep-best keeps it: the step that is stopped at is the best of the whole run."""
    folder = tmp_path / "run"
    changes = {"train__eval_every": 1, "checkpoint__keep_best": True, "train__steps": 4, **GROWING}
    assert status_of(folder, tiny(**changes, train__stop_at_step=1)) == 75
    assert evaluations(folder) == {}
    assert status_of(folder, tiny(**changes), resume=True) == 0
    found = evaluations(folder)
    assert sorted(found) == [1, 2, 3, 4]
    assert min(found, key=lambda step: found[step]) == 1
    assert best_of(folder) == ("step-00000001", found[1])


def test_the_last_line_says_the_step_that_was_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A3. It was stopped at step 5, and evaluated at step 4."""
    assert status_of(tmp_path / "run", tiny(train__eval_every=4, train__stop_at_step=5)) == 75
    said = words(capsys.readouterr().out)
    assert re.search(r"validation loss [\d.]+, [\d.]+ bits per byte at step 4, ", said)
    assert "stopping at step 5 (train.stop-at-step): saving" in said


LONG_EVALUATION = ("--train.eval-every", "4", "--train.eval-sequences", "2800", "--train.steps", "8")


@pytest.mark.long
def test_a_signal_in_a_long_evaluation_ends_at_its_step_and_a_resume_evaluates_it(tmp_path: Path) -> None:
    """A2. On rank 1 alone; the reason reads the same on the terminal, in the events and in the report."""
    folder = tmp_path / "run"
    mark = tmp_path / "evaluates"
    begun = {"PACELINE_FAULTS": f"rank=1 step=5 phase=evaluate kind=sleep seconds=0 mark={mark}"}
    with Program("train", *TINY, *LONG_EVALUATION, "--nproc", "2", "--out", str(folder), env=begun) as program:
        program.wait_for(mark.exists)
        os.kill(program.ranks()[1], signal.SIGTERM)
        ended = program.wait().require(75)
    assert len(steps(folder)) == 4, "no further step"
    assert evaluations(folder) == {}
    reason = "SIGTERM on rank 1"
    assert f"stopping at step 4 ({reason}): saving" in ended.out
    assert f"stopped at step 4 ({reason}); everything is saved" in ended.out
    assert [event["reason"] for event in events(folder, "end")] == [reason]
    assert saved(folder) == [4]
    run("resume", str(folder), "--train.stop-at-step", "5").require(75)
    assert list(evaluations(folder)) == [4]
    run("report", str(folder), "--out", str(tmp_path / "report.html"), cwd=tmp_path).require()
    assert "stopped: train.stop-at-step" in (tmp_path / "report.html").read_text()


def test_a_signal_in_the_last_evaluation_leaves_only_that_to_the_resume(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2. All steps are made and saved."""
    folder, strike = tmp_path / "run", faults.strike
    config = tiny(train__eval_every=2, train__device_batch_size=2)  # four passes an evaluation: it asks in between

    def ask(phase: str, step: int) -> str | None:
        if (phase, step) == ("evaluate", STEPS + 1):
            assert saved(folder)[-1] == STEPS
            os.kill(os.getpid(), signal.SIGTERM)
        return strike(phase, step)

    with monkeypatch.context() as patched:
        patched.setattr(faults, "strike", ask)
        assert status_of(folder, config) == 75
    assert [event["reason"] for event in events(folder, "end")] == ["SIGTERM on rank 0"]
    assert sorted(evaluations(folder)) == [2, 4]
    assert status_of(folder, config, resume=True) == 0
    assert evaluations(folder) == pytest.approx(evaluations(straight), abs=1e-5)


def test_what_takes_long_at_the_end_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B14. A save and an evaluation; others than rank 0 can only wait for it."""
    monkeypatch.setattr(saves_module, "_SAY_EVERY_S", 0.5)
    monkeypatch.setattr(evaluate_module, "_SAY_EVERY_S", 0.5)
    slow = (
        f"rank=0 step={STEPS} phase=save.write kind=sleep seconds=2; "
        f"rank=0 step={STEPS + 1} phase=evaluate kind=sleep seconds=1"
    )
    assert status_of(tmp_path / "run", tiny(), slow) == 0
    said = words(capsys.readouterr().out)
    assert re.search(rf"saving the checkpoint of step {STEPS}: \d+ s", said)
    assert re.search(rf"evaluating step {STEPS}: \d+ of 8 sequences after \d+ s", said)


# ---- before the first step ----


def test_two_commands_of_one_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: of jobs that begin at once all but one are refused, though nobody gave them one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *form: "now")
    for _ in range(2):
        assert train(Request(tiny(train__steps=1, train__eval_every=-1), None, "x"), Environment()) == 0
    assert sorted(os.listdir("runs")) == ["x-now", "x-now-2"]


def ask_when_ready(program: Program, number: signal.Signals, num_ranks: int, is_time: Callable[[], bool]) -> None:
    """Sends the signal to the command when each rank takes signals, and it is time."""

    def are_ready() -> bool:
        pids = program.ranks().values() if num_ranks > 1 else [program.pid]
        return len(pids) == num_ranks and all(has_handler(pid, signal.SIGTERM) for pid in pids)

    program.wait_for(lambda: are_ready() and is_time())
    os.kill(program.pid, number)


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "number", "status"), [(1, signal.SIGINT, 130), (2, signal.SIGTERM, 75)])
def test_a_signal_while_data_is_prepared(tmp_path: Path, nproc: int, number: signal.Signals, status: int) -> None:
    """A7. Nothing was saved: a queue that starts again on 75 starts it again."""
    text = tmp_path / "text.txt"  # whose preparation takes longer than the signal
    text.write_text("".join(f"{number} {number * 7919 % 10007} is a line of text\n" for number in range(100_000)))
    flags = ("--data.path", str(text), "--out", str(tmp_path / "run"), "--nproc", str(nproc))
    flags = (*flags, "--checkpoint.grace-s", "2")  # the tokenizer may hear the signal after its time
    # No fork: in a forked process the tokenizer hears no signal until it has encoded all of it.
    with Program("train", *TINY, *flags, env={**COLD, "PACELINE_CACHE": str(tmp_path / "cache")}) as program:
        ask_when_ready(program, number, nproc, lambda: any((tmp_path / "cache").glob("*/.preparing/lock")))
        ended = program.wait().require(status)
        program.wait_until_gone()
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert ended.err.count("\n") == 1, "one line"
    expected = "stopped by SIGTERM before training began" if status == 75 else "interrupted"
    assert ended.err.startswith(expected)


def is_listening(program: Program, port: int) -> bool:
    known = psutil.Process(program.pid).net_connections()
    return any(each.laddr.port == port for each in known if each.status == psutil.CONN_LISTEN)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_a_rank_that_waits_for_the_others(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """A7. A rank of a world whose second one never comes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = ("--parallel.interface", "lo", "--out", str(tmp_path / "run"))
    with Program("train", *TINY, *flags, env={**world, **address}) as program:
        ask_when_ready(program, number, 1, lambda: is_listening(program, port))
        program.wait().require(status)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("library", ["", "numpy", "torch", "libtorch_python"])
def test_a_signal_at_once(tmp_path: Path, library: str, number: signal.Signals, status: int) -> None:
    """A7. As soon as the process takes signals, and while each of these libraries is imported."""

    def is_there() -> bool:
        is_ready = has_handler(program.pid, signal.SIGTERM)
        return is_ready and library in Path(f"/proc/{program.pid}/maps").read_text()

    with Program("train", *TINY, "--out", str(tmp_path / "run")) as program:
        program.wait_for(is_there)
        os.kill(program.pid, number)
        ended = program.wait().require(status)
    assert ended.err == f"{'interrupted' if status == 130 else stopped_early('SIGTERM')}\n"
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_exception_a_library_swallows_stops_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Between meeting and training; Python ignores what a destructor or a weak reference's callback raises."""
    meet = loop_module.meet

    def signalled(*args: Any) -> Any:
        with contextlib.suppress(Stopped, KeyboardInterrupt):
            os.kill(os.getpid(), number)
        return meet(*args)

    monkeypatch.setattr(loop_module, "meet", signalled)
    assert status_of(tmp_path / "run", tiny()) == 75
    assert saved(tmp_path / "run") == [1]


@pytest.mark.long
def test_a_signal_between_meeting_and_the_first_step_and_the_same_command_again(tmp_path: Path) -> None:
    """A7. In a restore: the checkpoint stays as it is. A run that never trained begins in its folder."""
    folder = tmp_path / "run"
    assert status_of(folder, tiny(train__stop_at_step=2)) == 75
    mark = tmp_path / "restores"
    slow = f"rank=0 step=3 phase=restore kind=sleep seconds=20 mark={mark}"
    with Program("resume", str(folder), "--nproc", "2", env={"PACELINE_FAULTS": slow}) as program:
        ask_when_ready(program, signal.SIGTERM, 2, mark.exists)
        ended = program.wait().require(75)
        program.wait_until_gone()
    assert "stopped by SIGTERM before training began" in ended.err
    assert saved(folder) == [2]
    assert status_of(folder, tiny(), resume=True) == 0
    assert len(losses(folder)) == STEPS


def test_a_checkpoint_of_the_former_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Its weights are read all the same."""
    folder = tmp_path / "run"
    assert status_of(folder, tiny(train__stop_at_step=2)) == 75
    path = folder / "checkpoints/step-00000002/manifest.json"
    manifest = former_manifest(path.parent)
    for name in ("replicas", "objects", "generators", "numbers"):
        del manifest[name]
    del manifest["tensors"]["extra"]
    path.write_bytes(mf.seal({**manifest, "format": 2, "num_updates": 2, "scaler": {"scale": 1.0, "num_finite": 0}}))
    with pytest.raises(UserError) as told:
        status_of(folder, tiny(), resume=True)
    assert "is of format 2, which an earlier paceline wrote and this one does not resume" in str(told.value)
    assert f"paceline train --init-from {folder}" in str(told.value)
    assert saved(folder) == [2]
    status_of(tmp_path / "on", tiny(train__init_from=str(folder), model__vocab_size=320, model__n_positions=SEQ_LEN))
    assert run("sample", str(folder), "--tokens", "3", cwd=tmp_path).require().out


# ---- gradients that are not finite ----


def test_too_many_skipped_steps_in_a_row_end_the_run_with_the_state_before_them(tmp_path: Path) -> None:
    """Also at `checkpoint.to`. Mutation: the process ends before its thread has sent that."""
    folder, there = tmp_path / "run", tmp_path / "bucket/x"
    nan = "; ".join(f"rank=0 step={step} kind=nan" for step in (4, 5))
    config = tiny(train__max_skips=2, checkpoint__to=there.as_uri(), checkpoint__retry_s=30.0)
    with pytest.raises(RunError, match=r"not finite in 2 steps in a row, up to step 5; .* is saved as step 3") as told:
        status_of(folder, config, nan)
    assert [event["step"] for event in events(folder, "checkpoint sent")] == saved(there) == [3]
    advice = "Try this: lower --optim.lr, or use --train.dtype bfloat16 or float32"
    assert str(told.value).endswith(advice), "one rank: it may be the recipe, or the machine"
    assert saved(folder) == [3]
    assert events(folder)[-1]["event"] == "failed"
    assert status_of(folder, tiny(train__stop_at_step=4), resume=True) == 75
    assert [event["step"] for event in events(folder, "resume")] == [3]


def test_a_resumed_run_that_gives_up_again_keeps_the_state_before_them(tmp_path: Path) -> None:
    """Saves after the resume removed the checkpoint that it began with, which counted as saved: none was left."""
    folder = tmp_path / "run"
    assert status_of(folder, tiny(train__stop_at_step=3)) == 75
    nan = "; ".join(f"rank=0 step={step} kind=nan" for step in (4, 5, 6))
    with pytest.raises(RunError, match="is saved as step 3"):
        status_of(folder, tiny(train__max_skips=3, checkpoint__every=1), nan, resume=True)
    assert saved(folder) == [3]
    assert (folder / "checkpoints/latest").read_text().strip() == "step-00000003"
    assert status_of(folder, tiny(train__stop_at_step=4), resume=True) == 75


def test_where_the_state_before_them_cannot_be_saved_later_checkpoints_stay_for_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    faulty = "rank=0 step=4 kind=nan; rank=0 step=5 kind=nan; rank=0 step=3 phase=save.write kind=full"
    with pytest.raises(RunError, match=r"up to step 5; .* is not saved: .*No space left on device"):
        status_of(folder, tiny(train__max_skips=2, checkpoint__every=2), faulty)
    assert saved(folder) == [2, 4]
    assert (folder / "checkpoints/latest").read_text().strip() == "step-00000004"
    assert status_of(folder, tiny(), resume=True) == 0


def test_a_disk_that_is_away_when_the_last_save_fails_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finds: the message looks for the newest checkpoint there, and an OSError ended the run in place of retry-s."""
    away = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(saves_module, "_RETRY_EVERY_S", 0.0)
    monkeypatch.setattr(saves_module, "list_steps", fail(away))
    faulty = f"rank=0 step={STEPS} phase=save.write kind=full"
    assert status_of(tmp_path / "run", tiny(checkpoint__retry_s=60.0), faulty) == 0
    assert saved(tmp_path / "run") == [STEPS]
    said = words(capsys.readouterr().out)
    assert (
        "this is the last checkpoint of the run. Which checkpoint is the newest cannot be seen now: Stale file" in said
    )


# ---- memory, samples ----

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8")


def fail(error: Exception) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> None:
        raise error

    return raises


def test_a_gpu_that_is_full_when_ranks_meet_says_what_needs_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meet_module, "make_replica", fail(FULL))
    advice = r"allocate 2\.00 GiB\. This needs less, for the same losses: --train\.device-batch-size 2, "
    with pytest.raises(RunError, match=advice):
        status_of(tmp_path / "run", tiny())


NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate. Error 12")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("no id for this. More"), "no id for this"),
        (FULL, "CUDA out of memory"),
        (NO_MEMORY, "DefaultCPUAllocator: can't allocate"),
    ],
    ids=["prompt", "memory", "memory of the host"],
)
def test_a_sample_that_fails_does_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(evaluate_module, "generate", fail(error))
    config = tiny(train__steps=1, train__eval_every=-1, train__sample_tokens=1)
    assert status_of(tmp_path / "run", config) == 0
    assert f"no sample: {reason} run folder" in words(capsys.readouterr().out)


def test_a_seed_may_have_more_than_64_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(train__steps=1, train__eval_every=-1, train__sample_tokens=1, train__seed=1 << 64)
    assert status_of(tmp_path / "run", config) == 0
    assert "A sample (temperature" in capsys.readouterr().out


def test_a_second_host_whose_disk_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of its own disk; rank 0 has dropped what comes later."""
    monkeypatch.setattr(restoring_module, "from_rank_0", lambda *_: ([], 0))
    monkeypatch.setattr(RunFolder, "write_setup", fail(OSError(errno.ENOSPC, "No space left on device")))
    setup: Any = SimpleNamespace(
        folder=RunFolder(tmp_path / "run"),
        world=SimpleNamespace(rank=1, local_rank=0),
        group=None,
        progress=Progress(),
        checkpoints=SimpleNamespace(writers=[0]),
        config=tiny(),
        data=SimpleNamespace(blend=SimpleNamespace(first=SimpleNamespace(tokenizer_json=None))),
    )
    with pytest.raises(RunError, match=r"cannot write to the run folder .*run: No space left"):
        restoring_module._forget_later_steps(setup)


# ---- slow, and no hang ----


def test_writing_a_trace_is_no_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watches, passed = list[Stopwatch](), list[bool]()

    class Noted(Stopwatch):
        def __init__(self, elapsed_s: float) -> None:
            super().__init__(elapsed_s)
            watches.append(self)

    def export(*_: object) -> None:
        before = watches[0].elapsed_s
        time.sleep(0.01)
        passed.append(watches[0].elapsed_s > before)

    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # which a traced step sets
    monkeypatch.setattr(loop_module, "Stopwatch", Noted)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    status_of(tmp_path / "run", tiny(train__profile=2, train__eval_every=-1))
    assert passed == [False]


def slow_sample(_: ParallelConfig, env: Environment, folder: Path) -> int:
    """Each token of the sample takes a while, all of them much longer than a rank may be silent."""
    generate = evaluate_module.generate
    tighten = loop_module.Training._tighten_timeouts

    def slowly(*args: object, **kwargs: object) -> Iterator[int]:
        for token in generate(*args, **kwargs):  # type: ignore[arg-type]
            time.sleep(0.5)
            yield token

    def tighten_at_once(training: loop_module.Training, step_s: float) -> None:
        tighten(training, min(step_s, 0.1))  # ten of the first step would be waited for

    evaluate_module.generate = slowly  # type: ignore[assignment]
    loop_module.Training._tighten_timeouts = tighten_at_once  # type: ignore[method-assign]
    first_s = time.monotonic()
    config = tiny(train__steps=2, train__eval_every=-1, train__sample_tokens=8, parallel__step_timeout_s=1.0)
    status = train(Request(config, folder), env)
    assert time.monotonic() - first_s > 4
    return status


def test_a_slow_sample_is_no_hang(tmp_path: Path) -> None:
    """C9. Four seconds, where a second of silence ends a run; the other rank waits at the end of the world."""
    assert run_ranks(slow_sample, 2, tmp_path / "run", opened=False, timeout_s=90) == [0, 0]
    assert events(tmp_path / "run")[-1]["event"] == "end"


def test_stop_after_counts_from_the_start_of_the_process(tmp_path: Path) -> None:
    """C15. This process is older than that already: after the first step the time is over."""
    folder = tmp_path / "run"
    assert status_of(folder, tiny(train__stop_after=0.5)) == 75
    assert len(steps(folder)) == 1
    assert [event["reason"] for event in events(folder, "end")] == ["train.stop-after on rank 0"]
    assert (folder / "checkpoints/latest").read_text().strip() == "step-00000001"


# ---- what is said at the start ----


def test_epochs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B15. Of a small set many, of a large one a part of one."""
    text = tmp_path / "small.txt"
    text.write_text("".join(f"{number} is a number, and this is a line about it\n\n" for number in range(60)))
    status_of(tmp_path / "a", tiny(train__steps=2, train__eval_every=-1))
    assert "2 steps = 384 tokens = 1.72% of an epoch of this data" in words(capsys.readouterr().out)
    status_of(tmp_path / "b", tiny(train__steps=8, data__path=str(text), train__eval_every=-1))
    found = re.search(r"8 steps = [\d.]+k tokens = ([\d.]+) epochs of this data", words(capsys.readouterr().out))
    assert found is not None
    assert float(found[1]) > 1


@pytest.mark.long
def test_unequal_parts_of_the_batch_are_said_with_a_micro_batch_that_balances(tmp_path: Path) -> None:
    """A12. Twelve sequences in micro-batches of 3 on three ranks: rank 0 has two of them."""
    flags = ("--train.steps", "1", "--train.eval-every", "-1", "--nproc", "3", "--out", str(tmp_path / "run"))
    said = words(run("train", *TINY, *flags, "--train.device-batch-size", "3").require().out)
    assert "rank 0 computes 6 sequences of a step, rank 2 3, and waiting takes 33% of all ranks' time" in said
    assert "--train.device-batch-size 2 would divide it better" in said
