"""Each switch does what it says: whole runs of a tiny model in this process, looked at from their records."""

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from program import run
from whole_runs import STEPS, events, status_of, tiny

from paceline.config import Config
from paceline.data.prepare import Quiet
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.optim.schedule import lr_factor
from paceline.replica.updates import LossScaler
from paceline.train.data import open_data


def rows_of(folder: Path, config: Config, status: int = 0, **request: Any) -> list[dict[str, Any]]:
    """Trains and returns the training rows."""
    assert status_of(folder, config, **request) == status
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step_ms" in row]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rows_of(tmp_path_factory.mktemp("plain") / "run", tiny())


@pytest.mark.parametrize(
    "change",
    [
        {"train__activation_checkpoint": True},
        {"train__device_batch_size": 5},
        {"train__device_batch_size": 12},
        {"train__layered_micro_batches": 4},
        {"parallel__strategy": "naive"},
        {"parallel__bucket_mb": 0.01},
        {"parallel__shares": "12"},
        {"parallel__shares": "auto", "train__device_batch_size": 5},
    ],
    ids=str,
)
def test_how_it_is_computed_changes_no_loss(
    plain: list[dict[str, Any]], tmp_path: Path, change: dict[str, Any]
) -> None:
    assert losses(rows_of(tmp_path / "run", tiny(**change))) == pytest.approx(losses(plain), abs=1e-5)


@pytest.mark.long
def test_compiled_blocks_give_the_same_losses_and_the_same_names(tmp_path: Path) -> None:
    plain = rows_of(tmp_path / "plain", tiny(model__dropout=0.2, model__n_kv_head=1))
    # A process of its own: torch's compiler leaves a pool of workers behind in the one that called it.
    flags = ("--train.steps", str(STEPS), "--parallel.threads", "1", "--train.sample-tokens", "20", "--train.compile")
    flags = (*flags, "--model.dropout", "0.2", "--model.n-kv-head", "1")
    run("train", "--preset", "tiny", "--out", str(tmp_path / "run"), *flags).require()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses([row for row in rows if "step_ms" in row]) == pytest.approx(losses(plain), abs=1e-4)
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["config"]["train"]["compile"] is True
    from safetensors import safe_open

    with safe_open(tmp_path / "run/checkpoints/step-00000006/weights-00000-of-00001.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {name for name, _ in GPT(ModelConfig(**manifest["config"]["model"])).named_parameters()}


@pytest.mark.parametrize(
    "change",
    [
        {"model__dropout": 0.2},
        {"model__arch": "gpt2"},
        {"model__qk_norm": True},
        {"model__head": "tied"},
        {"optim__name": "muon"},
        {"optim__schedule": "wsd", "optim__decay_frac": 0.9},
        {"optim__weight_decay": 5.0},
        {"optim__grad_clip": 0.01},
        {"optim__beta1": 0.5},
        {"optim__eps": 1e-2},
        {"optim__min_lr_frac": 0.9},
        {"optim__warmup_steps": 0},
        {"train__seed": 7},
        {"train__dtype": "bfloat16"},
        {"train__dtype": "float16"},
    ],
    ids=str,
)
def test_what_is_computed_changes_the_losses(
    plain: list[dict[str, Any]], tmp_path: Path, change: dict[str, Any]
) -> None:
    found = losses(rows_of(tmp_path / "run", tiny(**change)))
    assert found != losses(plain)
    assert abs(found[-1] - losses(plain)[-1]) < 1.0


def test_half_precision_stays_near_float32(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        rows = rows_of(tmp_path / dtype, tiny(train__dtype=dtype))
        assert losses(rows) == pytest.approx(losses(plain), abs=0.02)


def test_horizons_in_steps_tokens_and_tokens_a_parameter_agree(tmp_path: Path) -> None:
    tokens_per_step = 12 * 64
    by_tokens = tiny(train__steps=0, train__tokens=STEPS * tokens_per_step - 5)
    assert len(rows_of(tmp_path / "a", by_tokens)) == STEPS
    manifest = json.loads((tmp_path / "a/checkpoints/step-00000006/manifest.json").read_text())
    model = GPT(ModelConfig(**manifest["config"]["model"]))
    outside = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed_"))
    per_parameter = tiny(train__steps=0, train__tokens_per_param=(STEPS - 0.5) * tokens_per_step / outside)
    assert len(rows_of(tmp_path / "b", per_parameter)) == STEPS


def test_a_batch_given_in_tokens_is_that_many_sequences(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    config = tiny(train__global_batch_size=0, train__global_batch_tokens=12 * 64, train__device_batch_size=2)
    assert losses(rows_of(tmp_path / "run", config)) == losses(plain)


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
    config = tiny(train__steps=0, train__time_budget=1.5, optim__warmup_steps=0)
    rows = rows_of(tmp_path / "run", config)
    ended_s = list(itertools.accumulate(row["step_ms"] / 1e3 for row in rows))
    began_s = [0.0, *ended_s[:-1]]
    assert began_s[-1] < 1.5 * 1.05, "no step begins after the end"
    assert ended_s[-1] > 1.5 * 0.7  # what is between steps counts, too
    expected = [config.optim.lr * lr_factor(config.optim, step, s / 1.5) for step, s in enumerate(began_s)]
    assert [row["lr"] for row in rows] == pytest.approx(expected, abs=0.3 * config.optim.lr)
    assert [row["lr"] for row in rows] == sorted((row["lr"] for row in rows), reverse=True)


def test_a_time_budget_ends_sooner_after_its_passes_over_the_data_and_the_rate_follows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(train__steps=0, train__time_budget=600.0, train__max_epochs=0.01, optim__warmup_steps=0)
    rows, num_tokens = rows_of(tmp_path / "run", config), open_data(config, Quiet()).blend.num_tokens[0]
    tokens = [12 * 64 * done for done in range(len(rows) + 1)]
    assert tokens[-2] < 0.01 * num_tokens <= tokens[-1]
    expected = [config.optim.lr * lr_factor(config.optim, i, tokens[i] / (0.01 * num_tokens)) for i in range(len(rows))]
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    assert "after 0.01 passes over the data" in capsys.readouterr().out


def test_the_rate_and_the_decay_follow_the_batch_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(
        optim__scale_with_batch=True,
        optim__reference_batch_tokens=4 * 12 * 64,
        optim__reference_tokens=2 * STEPS * 12 * 64,
        optim__warmup_steps=0,
        optim__schedule="wsd",
        optim__decay_frac=0.0,
    )
    rows = rows_of(tmp_path / "run", config)
    assert rows[0]["lr"] == pytest.approx(config.optim.lr / 2)
    assert "lr 0.003 -> 0.0015, weight decay 0.1 -> 0.1" in capsys.readouterr().out  # sqrt(1/4) * 2


def test_evaluations_come_when_asked_and_change_nothing(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "run", tiny(train__eval_every=2))
    assert losses(rows) == losses(plain)
    every = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in every if "val_loss" in row] == [2, 4, 6]
    assert rows_of(tmp_path / "never", tiny(train__eval_every=-1))
    assert "val_loss" not in (tmp_path / "never/metrics.jsonl").read_text()


def test_rows_come_every_so_many_steps(tmp_path: Path) -> None:
    assert [row["step"] for row in rows_of(tmp_path / "run", tiny(log__every=4))] == [4]


def test_checkpoints_come_when_asked_and_the_newest_stay(tmp_path: Path) -> None:
    rows_of(tmp_path / "run", tiny(checkpoint__every=1, checkpoint__keep=3))
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    # One that comes due while another is being written is made later: which ones there are depends on the disk.
    saved = [f"step-{event['step']:08d}" for event in events(tmp_path / "run") if event["event"] == "checkpoint"]
    assert names == ["latest", *saved[-3:]]
    assert saved[0] == "step-00000001"
    assert saved[-1] == "step-00000006"


def test_resuming_from_a_named_step_sets_the_later_ones_aside(tmp_path: Path) -> None:
    config = tiny(checkpoint__every=2, checkpoint__keep=3)
    straight = rows_of(tmp_path / "run", config)
    again = rows_of(tmp_path / "run", config, resume=True, resume_step=2)
    assert losses(again) == losses(straight)
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6]
    ends = [event["digest"] for event in events(tmp_path / "run") if event["event"] == "end"]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert (tmp_path / "run/checkpoints/superseded-step-00000006").is_dir()


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
    rows = rows_of(tmp_path / "run", tiny(train__dtype="float16", train__steps=12))
    skipped = [row["skipped"] for row in rows]
    assert skipped[0]
    assert not skipped[-1]
    first = skipped.index(False)
    assert all(skipped[:first])
    assert len([event for event in events(tmp_path / "run") if event["event"] == "skipped step"]) == sum(skipped)
    assert all(row["grad_norm"] is None for row in rows[:first])


def test_deterministic_kernels_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's stays
    try:
        for wanted in (False, True):
            rows_of(tmp_path / str(wanted), tiny(train__deterministic=wanted, train__steps=1))
            assert torch.are_deterministic_algorithms_enabled() is wanted
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
