"""A later life knows its folder, and nobody else's: what is refused, gone on with, or over already."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.base.process import LAUNCHER, STATUS_FOLDER
from paceline.cli.start import for_this_attempt
from paceline.cli.train import _continued
from paceline.config import Config, to_toml
from paceline.launch.job import job_name
from paceline.record import folder as run_folder
from paceline.train.request import Request
from paceline.world.env import Environment


def life(attempt: int, run_id: str = "100") -> Environment:
    return Environment(world_size=2, local_world_size=2, master_addr="a", master_port=1, job=run_id, attempt=attempt)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a run folder as a first life with run id 100 leaves it."""
    monkeypatch.chdir(tmp_path)

    def write(path: Path, *reasons: str, request: Request) -> Path:
        first, _ = for_this_attempt(request, life(0))
        assert not first.is_restart
        folder = run_folder.create(path)
        folder.lock(first.job)
        folder.append_event("start")
        for reason in reasons:
            folder.append_event("end", reason=reason)
        folder.close()
        return path

    return write


@pytest.mark.parametrize(
    ("reasons", "attempt", "is_restart", "over"),
    [
        ((), 0, True, ""),  # crashed, and requeued
        ((), 1, True, ""),
        (("SIGTERM on rank 0",), 0, True, ""),  # saved, and requeued
        (("SIGTERM on rank 0",), 1, True, "SIGTERM on rank 0"),  # torchrun takes 75 for a failure
        ((run_folder.COMPLETE,), 0, False, ""),  # another run of the same kind
        ((run_folder.COMPLETE,), 1, True, ""),  # a rank died on its way out
    ],
)
@pytest.mark.parametrize("has_out", [True, False])
def test_what_becomes_of_a_folder(
    written: Callable[..., Path], reasons: tuple[str, ...], attempt: int, is_restart: bool, over: str, has_out: bool
) -> None:
    path = Path("runs") / "first"
    request = Request(Config(), path if has_out else None)
    written(path, *reasons, request=request)
    found, why = for_this_attempt(request, life(attempt))
    assert (found.is_restart, why) == (is_restart, over)
    assert found.out == (path if has_out or is_restart else None)


def test_another_command_or_job_is_another_run(written: Callable[..., Path]) -> None:
    path = Path("runs") / "first"
    request = Request(Config(), path)
    written(path, request=request)
    other = Request(Config().replace("optim", lr=1.0), path)
    elsewhere = Request(Config().replace("parallel", interface="eth1"), path)
    assert not for_this_attempt(other, life(1))[0].is_restart, "people use run ids again"
    assert not for_this_attempt(request, life(1, "101"))[0].is_restart
    for changed in (Config().replace("parallel", strategy="local"), Config().replace("train", init_from="/base")):
        found, _ = for_this_attempt(Request(changed, None), life(0))
        assert found.out is None, "two commands of one job, each without --out"
    assert for_this_attempt(elsewhere, life(1))[0].is_restart, "rank 0 may move to another host"


def test_a_checkpoint_that_was_asked_for_is_asked_for_until_it_is_restored(written: Callable[..., Path]) -> None:
    path = Path("runs") / "first"
    request = Request(Config(), path, resume=True, resume_step=20)
    written(path, request=request)
    first, _ = for_this_attempt(request, life(0))
    assert first.resume_step == 20
    assert for_this_attempt(request, life(1))[0].resume_step == 20
    folder = run_folder.RunFolder(path)
    folder.append_event("resume", job="another")
    assert for_this_attempt(request, life(1))[0].resume_step == 20
    folder.append_event("resume", job=first.job)
    assert for_this_attempt(request, life(1))[0].resume_step is None


def test_without_a_launcher_each_command_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    found, _ = for_this_attempt(Request(Config(), None, "name"), Environment())
    assert found.job is None
    assert not found.is_restart
    assert found.out is None, "the folder is made when nothing can be refused any more"


def test_a_run_that_stopped_on_request_in_the_torchrun_that_began_it_is_over(written: Callable[..., Path]) -> None:
    """By `--resume auto`, whose later attempts have the run's resolved config. Finds: the next attempt trains on."""
    path = Path("runs") / "first"
    request = Request(Config().replace("train", steps=20, stop_at_step=10), path)
    written(path, "train.stop-at-step", request=request)
    resolved = request.config.replace("model", vocab_size=512).replace("train", global_batch_size=8)
    (path / "config.toml").write_text(to_toml(resolved))
    again, over = for_this_attempt(_continued(request), life(1))
    assert over == "train.stop-at-step"
    assert again.config.model.vocab_size == 512


def test_the_stop_of_an_earlier_session_does_not_end_a_later_one(written: Callable[..., Path]) -> None:
    """Whose first attempt died before it recorded anything. Finds: its restarts say that it was asked to stop."""
    path = Path("runs") / "first"
    request = Request(Config(), path)
    written(path, "SIGINT on rank 0", request=request)
    assert for_this_attempt(request, life(1))[1] == "SIGINT on rank 0"
    later_ns = (path / "events.jsonl").stat().st_mtime_ns + 1_000_000
    os.utime(path / "job", ns=(later_ns, later_ns))
    again, over = for_this_attempt(request, life(1))
    assert (again.is_restart, over) == (True, "")


def test_the_name_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert job_name("", "train") is None
    assert job_name("7", "train") == job_name("7", "train") != job_name("7", "other")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # a static rendezvous: the agent is the job
    name = job_name("", "train")
    assert name is not None
    assert name.startswith(f"{os.uname().nodename}:{os.getppid()}:")
    assert name == job_name("", "train")
    monkeypatch.setenv(STATUS_FOLDER, "x")
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    assert job_name("uuid", "train") == "uuid" == job_name("uuid", "other")
