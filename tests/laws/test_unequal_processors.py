"""The law: one curve and equal replicas on processors that round differently. Environment variables that torch, MKL and
oneDNN read when they are loaded stand for another processor."""

import sys
from pathlib import Path

import pytest
from program import TINY, losses, one_message, start_ranks

from paceline.base.errors import EXIT_RESUMABLE

ANOTHER = {"ATEN_CPU_CAPABILITY": "default"}  # no fused multiply-add
# The same vector units, other code of the libraries. On AMD processors MKL takes no notice of MKL_ENABLE_INSTRUCTIONS.
LIMITED = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
ALIKE = {"OMP_NUM_THREADS": "1"}
SCRIPT = Path(__file__).parent / "unequal_script.py"


def trained(out: Path, *flags: str, envs: tuple[dict[str, str], ...] = (ALIKE, ANOTHER), status: int = 0) -> Path:
    arguments = ("train", *TINY, "--out", str(out), *flags)
    for ended in start_ranks([arguments] * len(envs), envs, deadline_s=200):
        ended.require(status)
    return out


def test_unequal_processors_train_one_curve_with_equal_replicas(runs, tmp_path: Path) -> None:
    """TINY compares replicas after every step."""
    (first, second) = start_ranks([("train", *TINY, "--out", str(tmp_path / "run"))] * 2, [ALIKE, ANOTHER])
    first.require(), second.require()
    said = " ".join(first.out.split())
    assert "strategy zero: processors round differently: CPU with " in said
    assert "CPU with DEFAULT, rounding " in said
    assert "Hosts differ" in said
    assert losses(tmp_path / "run") == pytest.approx(losses(runs.get(2)), abs=1e-5)
    assert losses(tmp_path / "run") != losses(runs.get(2)), "the second processor rounds as the first"
    assert "Hosts differ" not in runs.ended(2)[1].out


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("naive", marks=pytest.mark.long)])
def test_strategies_that_repeat_the_update_are_refused(tmp_path: Path, strategy: str) -> None:
    arguments = ("train", *TINY, "--out", str(tmp_path / "run"), "--parallel.strategy", strategy)
    said = one_message(start_ranks([arguments] * 2, [{}, {"ddp": ANOTHER, "naive": LIMITED}[strategy]]))
    for text in (f"with strategy {strategy}", " on rank 0 (", " on rank 1 (", "Use --parallel.strategy zero"):
        assert text in said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "optimizer"),
    [(ANOTHER, "adamw"), (ANOTHER | LIMITED, "muon")],
    ids=["aten-adamw", "both-muon"],
)
def test_replicas_stay_equal_also_after_ranks_change_places(
    tmp_path: Path, optimizer: str, limits: dict[str, str]
) -> None:
    flags = ("--train.steps", "60", "--optim.name", optimizer, "--optim.lr", "1e-3", "--optim.grad-clip", "0.5")
    flags = (*flags, "--train.stop-at-step", "30")
    alike = trained(tmp_path / "alike", *flags, envs=(ALIKE, ALIKE), status=EXIT_RESUMABLE)
    unequal = trained(tmp_path / "run", *flags, envs=(ALIKE, limits), status=EXIT_RESUMABLE)
    for ended in start_ranks([("resume", str(unequal))] * 2, [limits, ALIKE], deadline_s=200):
        ended.require(0)
    assert len(losses(unequal)) == 60
    assert losses(unequal)[:30] == pytest.approx(losses(alike)[:30], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("limits", [ANOTHER, LIMITED], ids=["aten", "libraries"])
def test_scripts_keep_replicas_averages_and_resumes_equal(tmp_path: Path, limits: dict[str, str]) -> None:
    """What the script asserts is in unequal_script.py."""
    command = (sys.executable, str(SCRIPT), str(tmp_path / "saved"))
    first, second = start_ranks([()] * 2, [ALIKE, limits], command=command)
    digests = second.require().out.splitlines()
    assert [line for line in first.require().out.splitlines() if not line.startswith("restored step")] == digests
    assert len(digests) == 4
