"""The law: one curve and equal replicas on processors that round differently. Environment variables that torch, MKL and
oneDNN read at their first operation stand for another processor."""

import os
import re
import sys
from pathlib import Path

import pytest
from program import TINY, losses, one_message, start_ranks
from ranks import run_ranks
from whole_runs import status_of, tiny, train_on, words

from paceline.base.errors import EXIT_RESUMABLE, UserError
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

ANOTHER = {"ATEN_CPU_CAPABILITY": "default"}  # no fused multiply-add
# The same vector units, other code of the libraries. On AMD processors MKL takes no notice of MKL_ENABLE_INSTRUCTIONS.
LIMITED = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
ALIKE: dict[str, str] = {}
SCRIPT = Path(__file__).parent / "unequal_script.py"
LONG = 30  # steps


def train_unequal(_: ParallelConfig, env: Environment, base: Path) -> str:
    """Trains as a processor that rounds otherwise where this is rank 1; returns why `ddp` is refused then."""
    os.environ |= ANOTHER if env.rank else ALIKE
    train_on(2, env, tiny(parallel__check_every=1), base / "run")
    with pytest.raises(UserError) as refused:
        train_on(2, env, tiny(parallel__strategy="ddp"), base / "ddp")
    return str(refused.value)


def test_unequal_processors_train_one_curve_with_equal_replicas(tmp_path: Path) -> None:
    """Finds: a strategy that repeats the update on each rank; a clip factor that each rank computes for itself."""
    refusals = run_ranks(train_unequal, 2, tmp_path, opened=False)
    said = words((tmp_path / "run/ranks/rank-00000.log").read_text())
    assert "strategy zero: processors round differently: CPU with " in said
    assert "Hosts differ" in said
    assert len(set(re.findall(r"CPU with \w+, rounding (\w+)", said))) == 2, "the second processor rounds as the first"
    assert status_of(tmp_path / "alone", tiny()) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    assert refusals[0] == refusals[1]
    for text in ("with strategy ddp", " on rank 0 (", " on rank 1 (", "Use --parallel.strategy zero"):
        assert text in refusals[0]
    assert not (tmp_path / "ddp").exists()


@pytest.mark.long
def test_the_command_refuses_once_what_would_repeat_the_update(tmp_path: Path) -> None:
    arguments = ("train", *TINY, "--out", str(tmp_path / "run"), "--parallel.strategy", "naive")
    said = one_message(start_ranks([arguments] * 2, [ALIKE, LIMITED]))
    assert "with strategy naive" in said
    assert not (tmp_path / "run").exists()


def train_unequal_for_long(
    _: ParallelConfig, env: Environment, folder: Path, limits: tuple[dict[str, str], ...], optimizer: str, resume: bool
) -> None:
    os.environ |= limits[env.rank]
    how = {"optim__name": optimizer, "optim__lr": 1e-3, "optim__grad_clip": 0.5, "parallel__check_every": 1}
    stop = 0 if resume else LONG // 2
    config = tiny(train__steps=LONG, train__stop_at_step=stop, **how)
    train_on(2, env, config, folder, EXIT_RESUMABLE if stop else 0, resume=resume)


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "optimizer"),
    [pytest.param(ANOTHER, "adamw", marks=pytest.mark.nightly), (ANOTHER | LIMITED, "muon")],
    ids=["aten-adamw", "both-muon"],
)
def test_replicas_stay_equal_also_after_ranks_change_places(
    tmp_path: Path, optimizer: str, limits: dict[str, str]
) -> None:
    """Replicas are compared after each step."""
    for resume, by_rank in ((False, (ALIKE, limits)), (True, (limits, ALIKE))):
        run_ranks(train_unequal_for_long, 2, tmp_path / "run", by_rank, optimizer, resume, opened=False)
    assert len(losses(tmp_path / "run")) == LONG


@pytest.mark.long
@pytest.mark.parametrize(
    "limits", [ANOTHER, pytest.param(LIMITED, marks=pytest.mark.nightly)], ids=["aten", "libraries"]
)
def test_scripts_keep_replicas_averages_and_resumes_equal(tmp_path: Path, limits: dict[str, str]) -> None:
    """What the script asserts is in unequal_script.py."""
    command = (sys.executable, str(SCRIPT), str(tmp_path / "saved"))
    first, second = start_ranks([()] * 2, [ALIKE, limits], command=command)
    digests = second.require().out.splitlines()
    assert [line for line in first.require().out.splitlines() if not line.startswith("restored step")] == digests
    assert len(digests) == 4
