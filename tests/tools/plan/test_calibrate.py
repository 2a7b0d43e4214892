"""What a calibration measures, and for which configs it counts."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from ranks import run_ranks
from whole_runs import tiny

from paceline.base.errors import UserError
from paceline.cli.main import main
from paceline.config import Config, load_preset
from paceline.record.console import Console
from paceline.tools.plan import calibrate, devices
from paceline.train.resolve import resolve
from paceline.world.runtime import World


def computes_twice(world: World, config: Config) -> bool:
    """Whether the model that a calibration times computes its blocks again in backward."""
    case = calibrate._Case(world, resolve(config, 512, world.facts), 1, Console(world.rank))
    case._step(3)  # also of a config whose step has one micro-batch
    return bool(case._replica.model.checkpoint_blocks)


def test_a_calibration_leaves_out_what_a_plan_adds_for_activation_checkpoints() -> None:
    assert run_ranks(computes_twice, 1, tiny(train__activation_checkpoint=True, train__device_batch_size=12)) == [False]


def calibrated_by_the_command(*_: object) -> str:
    def measured(world: World, *_: object) -> devices.Device:
        return replace(devices.gpu("H100", compiled=True), source=f"{world.threads} threads")

    with patch.object(calibrate, "measure", measured):
        assert main(["plan", "--preset", "tiny", "--calibrate", "--parallel.threads", "2"]) == 0
        assert main(["plan", "--preset", "tiny", "--calibrate", "--vary", "train.seed=1", "train.seed=2"]) == 2
    config = load_preset("tiny", Config())
    with pytest.raises(UserError, match="nothing was measured for this config"):
        devices.calibration(config.replace("parallel", threads=1), 1)
    return devices.calibration(config.replace("parallel", threads=2), 1).source


def test_a_calibration_is_of_as_many_threads_as_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert run_ranks(calibrated_by_the_command, 1, opened=False) == ["2 threads"]
