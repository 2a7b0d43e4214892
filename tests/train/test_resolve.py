"""Choices that a run makes by itself: a function of the config and of the facts of all ranks."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config import Config
from paceline.data.blend import Blend
from paceline.model import cost
from paceline.train.agree import RankFacts
from paceline.train.resolve import Settings, resolve

SEQ_LEN = 64


def settings_of(free_bytes: list[float], dtypes: tuple[str, ...] = ("float32",), **changes: Any) -> Settings:
    """What is resolved for ranks on CPUs with so much free memory; `changes` as `section__field=value`."""
    config = Config().replace("model", n_layer=2, n_head=2, n_embd=32).replace("data", seq_len=SEQ_LEN)
    config = config.replace("train", global_batch_size=12, steps=5)
    for name, value in changes.items():
        section, field = name.split("__")
        config = config.replace(section, **{field: value})
    facts = [
        RankFacts(
            device="cpu",
            dtype=dtypes[rank % len(dtypes)],
            dtype_reason="a reason",
            free_bytes=free,
            threads=1,
            threads_reason="one core",
        )
        for rank, free in enumerate(free_bytes)
    ]
    return resolve(config, cast(Blend, SimpleNamespace(vocab_size=100)), facts)


def test_the_strategy_is_the_simplest_that_fits_on_the_rank_with_the_least_memory() -> None:
    total = cost.num_parameters(settings_of([1e9]).config.model).total
    plenty, ddp, zero = 1e12, 16 * total / 0.6 + 1, (8 + 8 / 3) * total / 0.6 + 1
    for least, wanted in ((ddp, "ddp"), (ddp - 2, "zero"), (zero, "zero"), (zero - 2, "fsdp")):
        for free in ([least, plenty, plenty], [plenty, plenty, least]):
            assert settings_of(free).config.parallel.strategy == wanted
    assert settings_of([1.0]).config.parallel.strategy == "ddp", "one rank shares nothing"


@pytest.mark.parametrize(("tokens", "num_steps"), [(1, 1), (12 * SEQ_LEN, 1), (12 * SEQ_LEN + 1, 2), (9_000, 12)])
def test_a_horizon_in_tokens_is_reached(tokens: int, num_steps: int) -> None:
    settings = settings_of([1e9, 1e9], train__steps=0, train__tokens=tokens)
    assert settings.num_steps == num_steps == math.ceil(tokens / settings.tokens_per_step)


@pytest.mark.parametrize(("batch", "ranks", "micro"), [(200, 2, 50), (64, 1, 64), (65, 1, 33), (3, 4, 1), (390, 3, 44)])
def test_a_share_is_split_into_equal_micro_batches_of_at_most_4096_tokens(batch: int, ranks: int, micro: int) -> None:
    plan = settings_of([1e9] * ranks, train__global_batch_size=batch).plan
    assert (plan.global_batch_size, plan.device_batch_size, plan.world_size) == (batch, micro, ranks)


def test_ranks_with_different_number_formats_compute_in_float32() -> None:
    formats = ("bfloat16", "float16")
    assert settings_of([1e9] * 2, ("bfloat16",)).config.train.dtype == "bfloat16"
    assert settings_of([1e9] * 2, formats).config.train.dtype == "float32"
    assert settings_of([1e9] * 2, formats, train__dtype="float16").config.train.dtype == "float16"
