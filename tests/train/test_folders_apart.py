"""Hosts whose run folders are their own, as on nodes without a shared disk: what a host that lacks the run does."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from program import losses
from ranks import run_ranks
from whole_runs import STEPS, first_ranks, tiny

from paceline.base.errors import RunError, UserError
from paceline.cli.resume import stored_config
from paceline.cli.train import _continued
from paceline.record.folder import RunFolder, has_begun
from paceline.train import meet
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment


def lost_with_its_disk(env: Environment, base: Path, folder: Path, request: Request) -> None:
    """Rank 0's folder is lost: an empty host has its place, or the other one."""
    away = folder.with_name("away")
    if env.rank == 0:
        folder.rename(away)
    other = base / f"host-{1 - env.rank}/run"
    for again in (replace(request, out=folder), replace(request, out=other, is_restart=True)):
        with first_ranks(2, env, base) as world:
            assert world
            with pytest.raises(UserError, match=r"was saved, as host .* knows, and no host here has its checkpoints"):
                train(again, world)
    if env.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)


def stopped_and_continued(_: ParallelConfig, env: Environment, base: Path) -> None:
    """Trains on two ranks. The second one's folder is lost, and the command comes again with a setting left out."""
    folder = base / f"host-{env.rank}/run"
    asked = tiny(train__dtype="auto", train__eval_every=-1)
    begun = asked.replace("optim", beta1=0.5)
    for config, status in ((begun.replace("train", stop_at_step=2), 75), (asked, 0)):
        request = _continued(Request(config, folder))
        with first_ranks(2, env, base) as world:
            assert world
            assert train(request, world) == status
        if status == 75:  # the next job counts its nodes in another order
            swapped = replace(request, out=base / f"host-{1 - env.rank}/run", is_restart=True)
            with first_ranks(2, env, base) as world:
                assert world
                with pytest.raises(UserError, match=r"has checkpoints in .* which has rank 0, has none"):
                    train(swapped, world)
            lost_with_its_disk(env, base, folder, request)
        if env.rank == 1:
            shutil.rmtree(folder)
    if env.rank == 0:
        assert train(Request(begun, base / "straight"), Environment()) == 0


def test_a_host_that_lacks_the_run_continues_it_with_the_others(tmp_path: Path) -> None:
    """Mutation: rank 0 begins at step 0 where another host has the run's checkpoints, or knows that there were some.

    Finds: stored and asked configs are compared, so that a node which replaces another ends the run. And: its own
    settings count."""
    run_ranks(stopped_and_continued, 2, tmp_path, opened=False)
    assert losses(tmp_path / "host-0/run") == pytest.approx(losses(tmp_path / "straight"), abs=1e-5)


def resumed_with_another_end(_: ParallelConfig, env: Environment, base: Path) -> int:
    """Trains on two hosts of one rank each, and resumes with a later end. Returns the end in this host's config."""
    folder = base / f"host-{env.rank}/run"
    config, resume = tiny(train__eval_every=-1, train__stop_at_step=1), False
    with patch("socket.gethostname", lambda: f"host-{env.rank}"):
        for _ in range(2):
            with first_ranks(2, env, base) as world:
                assert world
                host = replace(world, local_rank=0, local_world_size=1)
                assert train(Request(config, folder, resume=resume), host) == 75
            config, resume = config.replace("train", steps=STEPS + 2, stop_at_step=2), True
    return stored_config(RunFolder(folder)).train.steps


def test_each_host_keeps_the_settings_that_a_resume_changed(tmp_path: Path) -> None:
    """Finds: only rank 0's host has them, so that the next resume is refused: ranks differ."""
    assert run_ranks(resumed_with_another_end, 2, tmp_path, opened=False) == [STEPS + 2] * 2


TOO_LARGE = RunError("does not fit", reach="world")


def refused(_: ParallelConfig, env: Environment, base: Path) -> bool:
    """Starts on two hosts of one rank each, where the model does not fit. Returns whether a run has begun there."""
    folder = base / f"host-{env.rank}/run"
    with (
        patch("socket.gethostname", lambda: f"host-{env.rank}"),
        patch.object(meet, "make_replica", side_effect=TOO_LARGE),
    ):
        host = replace(env, local_rank=0, local_world_size=1)
        with pytest.raises(RunError, match="does not fit"):
            train(Request(tiny(), folder), host)
    return has_begun(folder)


def test_a_start_that_fails_leaves_no_run_on_any_host(tmp_path: Path) -> None:
    """Finds: the other hosts have a config.toml, so that the same command with another setting is refused there."""
    assert run_ranks(refused, 2, tmp_path, opened=False) == [False, False]
