"""Each switch does what it says: whole runs of a tiny model in this process, looked at from their records.

What is decided before the first step is in test_resolve.py; strategies and shares are in tests/laws.
"""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_curve
from program import losses, run, steps
from whole_runs import BATCH, SEQ_LEN, STEPS, evaluations, events, status_of, tiny, words

from paceline.config import Config, to_toml
from paceline.data.config import Quiet
from paceline.model.gpt import GPT
from paceline.optim.schedule import lr_factor
from paceline.replica.updates import LossScaler
from paceline.train.data import open_data

TOKENS_A_STEP = BATCH * SEQ_LEN


def rows_of(folder: Path, config: Config, **request: Any) -> list[dict[str, Any]]:
    """Trains and returns the training rows."""
    assert status_of(folder, config, **request) == 0
    return steps(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the preset as it is."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert status_of(folder, tiny()) == 0
    return folder


# ---- what is computed, and how ----


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            **{"optim__beta1": 0.5, "optim__beta2": 0.8, "optim__eps": 1e-2, "optim__weight_decay": 5.0},
            **{"optim__grad_clip": 0.01, "optim__min_lr_frac": 0.9, "optim__warmup_steps": 0, "train__seed": 7},
            **{"model__qk_norm": True, "model__head": "tied"},
        },
        {
            **{"optim__schedule": "wsd", "optim__decay_frac": 0.9, "optim__embedding_lr_ratio": 4.0},
            **{"model__arch": "gpt2"},
        },
    ],
    ids=["preset", "adamw", "wsd"],
)
def test_settings_of_model_and_update_have_the_effect_they_have_in_a_plain_loop(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Finds: any of them without effect, betas swapped, a learning rate of the step before."""
    config = tiny(**changes)
    assert status_of(tmp_path / "run", config) == 0
    assert losses(tmp_path / "run") == pytest.approx(plain_curve(config).losses, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({"train__activation_checkpoint": True}, [(4, True), (4, True), (4, True)]),
        ({"train__device_batch_size": 5}, [(5, False), (5, False), (2, False)]),
        ({"train__layered_micro_batches": 2}, [(4, False), (8, False)]),
    ],
    ids=str,
)
def test_how_it_is_computed_is_as_asked_and_changes_no_loss(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], passes: list[tuple[int, bool]]
) -> None:
    """passes: sequences of each forward pass of the first step, and whether its blocks are computed again in backward.
    Finds: one of these flags without effect, which no loss shows."""
    seen, forward = [], GPT.forward

    def look(model: GPT, tokens_BT: torch.Tensor, *others: Any) -> Any:
        seen.append((len(tokens_BT), model.checkpoint_blocks))
        return forward(model, tokens_BT, *others)

    monkeypatch.setattr(GPT, "forward", look)
    assert status_of(tmp_path / "run", tiny(train__eval_every=-1, **change)) == 0
    assert seen == STEPS * passes
    assert losses(tmp_path / "run") == pytest.approx(losses(plain), abs=1e-5)


def test_blocks_are_compiled_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GPT] = []
    monkeypatch.setattr(GPT, "compile_blocks", lambda model: compiled.append(model))
    for is_asked in (False, True):
        config = tiny(train__steps=1, train__eval_every=-1, train__compile=is_asked)
        assert status_of(tmp_path / str(is_asked), config) == 0
        assert len(compiled) == is_asked


@pytest.mark.long
def test_compiled_blocks_give_the_same_losses(tmp_path: Path) -> None:
    """The one test that makes C++ of blocks; tests/model has their graphs and names."""
    config = tiny(model__dropout=0.2, model__n_kv_head=1, train__sample_tokens=20)
    assert status_of(tmp_path / "plain", config) == 0
    (tmp_path / "config.toml").write_text(to_toml(config.replace("train", compile=True)))
    # A process of its own: torch's compiler leaves a pool of workers behind in the one that called it.
    run("train", "--config", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")).require()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_half_precision_stays_near_float32(plain: Path, tmp_path: Path, dtype: str) -> None:
    assert status_of(tmp_path / "run", tiny(train__dtype=dtype)) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(plain), abs=0.02)
    assert losses(tmp_path / "run") != losses(plain)


# ---- how long ----


def test_a_batch_that_is_not_given_is_chosen_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(tmp_path / "run", tiny(train__global_batch_size=0, train__device_batch_size=0, train__steps=1))
    said = capsys.readouterr().out
    assert "--train.global-batch-size" in said
    assert "--train.device-batch-size" in said
    line = next(x for x in (tmp_path / "run/config.toml").read_text().splitlines() if "global_batch_size" in x)
    assert int(line.split("=")[1]) >= 1


def test_a_time_budget_ends_by_the_clock_and_the_rate_follows_it(tmp_path: Path) -> None:
    """Each step sleeps for a tenth of a second, beside which other programs on the machine are little."""
    config = tiny(train__steps=0, train__time_budget=1.5, optim__warmup_steps=0, train__eval_every=-1)
    slow = "rank=0 step=1 phase=data kind=sleep seconds=0.1 times=60"
    found = rows_of(tmp_path / "run", config, faults=slow)
    ended_s = list(itertools.accumulate(row["step_ms"] / 1e3 for row in found))
    began_s = [0.0, *ended_s[:-1]]
    assert began_s[-1] < 1.5 * 1.05, "no step begins after the end"
    assert ended_s[-1] > 1.5 * 0.7  # what is between steps counts, too
    expected = [config.optim.lr * lr_factor(config.optim, step, s / 1.5) for step, s in enumerate(began_s)]
    assert [row["lr"] for row in found] == pytest.approx(expected, abs=0.3 * config.optim.lr)
    assert [row["lr"] for row in found] == sorted((row["lr"] for row in found), reverse=True)


@pytest.mark.parametrize("packing", ["stream", "bestfit"])
def test_a_time_budget_ends_sooner_after_its_passes_over_the_data_and_the_rate_follows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str
) -> None:
    config = tiny(train__steps=0, train__time_budget=600.0, train__max_epochs=0.04, optim__warmup_steps=0)
    config = config.replace("data", packing=packing)
    num_tokens = open_data(config, Quiet()).training.sources[0].num_sequences * SEQ_LEN
    found = rows_of(tmp_path / "run", config)
    tokens = [TOKENS_A_STEP * done for done in range(len(found) + 1)]
    assert tokens[-2] < 0.04 * num_tokens <= tokens[-1]
    expected = [
        config.optim.lr * lr_factor(config.optim, i, tokens[i] / (0.04 * num_tokens)) for i in range(len(found))
    ]
    assert [row["lr"] for row in found] == pytest.approx(expected)
    assert "after 0.04 passes over the data" in words(capsys.readouterr().out)


def test_the_rate_follows_the_batch_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(
        train__steps=1,
        train__eval_every=-1,
        optim__scale_with_batch=True,
        optim__reference_batch_tokens=4 * TOKENS_A_STEP,
        optim__reference_tokens=2 * TOKENS_A_STEP,
        optim__warmup_steps=0,
    )
    (row,) = rows_of(tmp_path / "run", config)
    assert row["lr"] == pytest.approx(config.optim.lr / 2)
    assert "lr 0.003 -> 0.0015, weight decay 0.1 -> 0.1" in capsys.readouterr().out  # sqrt(1/4) * 2


# ---- what is recorded and saved, and when ----


def test_evaluations_come_when_asked_and_change_nothing(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert status_of(folder, tiny(train__eval_every=2)) == 0
    assert losses(folder) == losses(plain)
    assert list(evaluations(folder)) == [2, 4, 6]


def test_a_process_without_a_process_group_exchanges_nothing(plain: Path) -> None:
    assert [(row["comm_ms"], row["comm_bytes"]) for row in steps(plain)] == [(0, 0)] * STEPS


def test_rows_come_every_so_many_steps(tmp_path: Path) -> None:
    assert [row["step"] for row in rows_of(tmp_path / "run", tiny(log__every=4, train__eval_every=-1))] == [4]
    assert evaluations(tmp_path / "run") == {}


def test_checkpoints_come_when_asked_and_the_newest_stay(tmp_path: Path) -> None:
    rows_of(tmp_path / "run", tiny(checkpoint__every=1, checkpoint__keep=3, train__eval_every=-1))
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    # One that comes due while another is being written is made later: which ones there are depends on the disk.
    saved = [f"step-{event['step']:08d}" for event in events(tmp_path / "run") if event["event"] == "checkpoint"]
    assert names == ["index.jsonl", "latest", *saved[-3:]]
    assert saved[0] == "step-00000001"
    assert saved[-1] == "step-00000006"


def test_resuming_from_a_named_step_sets_the_later_ones_aside(tmp_path: Path) -> None:
    folder, config = tmp_path / "run", tiny(checkpoint__every=2, checkpoint__keep=3, train__eval_every=-1)
    straight = [row["loss"] for row in rows_of(folder, config)]
    rows_of(folder, config, resume=True, resume_step=2)
    assert losses(folder) == straight
    ends = [event["digest"] for event in events(folder) if event["event"] == "end"]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert (folder / "checkpoints/superseded-step-00000006").is_dir()


# ---- steps that are skipped ----


def test_the_loss_scaler_halves_on_overflow_and_doubles_after_2000_finite_steps() -> None:
    scaler = LossScaler.for_dtype(torch.float16)
    start = scaler.scale
    scaler.observe(skipped=True)
    assert scaler.scale == start / 2
    for _ in range(1999):
        scaler.observe(skipped=False)
    assert scaler.scale == start / 2
    scaler.observe(skipped=False)
    assert scaler.scale == start
    fixed = LossScaler.for_dtype(torch.bfloat16)
    fixed.observe(skipped=True)
    assert fixed == LossScaler()


def test_a_gradient_that_overflows_changes_nothing_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 with a scale that is much too large: steps are skipped until it fits, then training goes on."""
    scaler = dataclasses.replace(LossScaler.for_dtype(torch.float16), scale=2.0**32)
    monkeypatch.setattr(LossScaler, "for_dtype", classmethod(lambda cls, dtype: dataclasses.replace(scaler)))
    found = rows_of(tmp_path / "run", tiny(train__dtype="float16", train__steps=12, train__eval_every=-1))
    skipped = [row["skipped"] for row in found]
    assert skipped[0]
    assert not skipped[-1]
    first = skipped.index(False)
    assert all(skipped[:first])
    assert len([event for event in events(tmp_path / "run") if event["event"] == "skipped step"]) == sum(skipped)
    assert all(row["grad_norm"] is None for row in found[:first])


def test_deterministic_kernels_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's stays
    try:
        for wanted in (False, True):
            rows_of(tmp_path / str(wanted), tiny(train__deterministic=wanted, train__steps=1, train__eval_every=-1))
            assert torch.are_deterministic_algorithms_enabled() is wanted
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
