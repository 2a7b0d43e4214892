"""Choices that a run makes by itself: a function of the config and of the facts of all ranks."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_facts import FACTS

from paceline.base import units
from paceline.base.errors import UserError
from paceline.config import Config
from paceline.model import cost
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.train.resolve import Settings, out_of_memory, resolve
from paceline.train.size import decay_for
from paceline.world.facts import RankFacts

SEQ_LEN = 64
VOCAB_SIZE = 100


def settings_of(free_bytes: list[float], dtypes: tuple[str, ...] = ("float32",), **changes: Any) -> Settings:
    """What is resolved for ranks on CPUs with so much free memory; `changes` as `section__field=value`."""
    config = Config().replace("model", n_layer=2, n_head=2, n_embd=32).replace("data", seq_len=SEQ_LEN)
    config = config.replace("train", global_batch_size=12, steps=5)
    for name, value in changes.items():
        section, field = name.split("__")
        config = config.replace(section, **{field: value})
    facts = [replace(FACTS, free_bytes=free, dtype=dtypes[rank % len(dtypes)]) for rank, free in enumerate(free_bytes)]
    return resolve(config, VOCAB_SIZE, facts)


def test_the_strategy_is_the_simplest_that_fits_on_the_rank_with_the_least_memory() -> None:
    """Finds a rank without room for the copy of its part of a save, 12 bytes a parameter: its first save killed it."""
    total = cost.num_parameters(settings_of([1e9]).config.model).total
    plenty, ddp, zero = 1e12, (16 + 12 / 3) * total / 0.6 + 1, (8 + 8 / 3 + 12 / 3) * total / 0.6 + 1
    for least, wanted in ((ddp, "ddp"), (ddp - 2, "zero"), (zero, "zero"), (zero - 2, "fsdp")):
        for free in ([least, plenty, plenty], [plenty, plenty, least]):
            assert settings_of(free).config.parallel.strategy == wanted
    assert settings_of([1.0]).config.parallel.strategy == "ddp", "one rank shares nothing"


@pytest.mark.parametrize(("tokens", "num_steps"), [(1, 1), (12 * SEQ_LEN, 1), (12 * SEQ_LEN + 1, 2), (9_000, 12)])
def test_a_horizon_in_tokens_is_reached(tokens: int, num_steps: int) -> None:
    settings = settings_of([1e9, 1e9], train__steps=0, train__tokens=tokens)
    assert settings.num_steps == num_steps == math.ceil(tokens / settings.tokens_per_step)


def test_a_horizon_in_tokens_a_parameter_counts_those_outside_the_embeddings() -> None:
    settings = settings_of([1e9], train__steps=0, train__tokens_per_param=2.0)
    model = build(settings.config.model, 0, "cpu")
    outside = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed_"))
    assert settings.num_steps == math.ceil(2.0 * outside / settings.tokens_per_step)


def test_a_horizon_that_no_number_holds_is_refused() -> None:
    """It was an OverflowError on every rank."""
    config = Config().replace("train", steps=0, tokens_per_param=1e305)
    with pytest.raises(UserError, match=r"train.tokens-per-param is 1e\+305; it must be at most 1e\+15"):
        config.check()
    settings_of([1e9], train__steps=0, train__tokens_per_param=1e15)


def test_a_batch_given_in_tokens_is_that_many_sequences() -> None:
    for tokens, sequences in ((12 * SEQ_LEN, 12), (12 * SEQ_LEN - 1, 12)):
        plan = settings_of([1e9], train__global_batch_size=0, train__global_batch_tokens=tokens).plan
        assert plan.global_batch_size == sequences


def test_a_micro_batch_is_a_part_of_the_batch_however_that_is_given() -> None:
    """Finds: a run that trains, and that nothing resumes, because its config.toml has a batch that is too small."""
    tokens = {"train__global_batch_size": 0, "train__global_batch_tokens": 4 * SEQ_LEN}
    with pytest.raises(UserError, match=r"is 8, larger than train\.global-batch-tokens 256, which are 4 sequences"):
        settings_of([1e9], **tokens, train__device_batch_size=8)
    chosen = settings_of([1e9], train__global_batch_size=0, train__device_batch_size=300)
    assert chosen.plan.global_batch_size == 300
    chosen.config.check()


@pytest.mark.parametrize(
    ("horizon", "says"),
    [({}, "best for {}, 20 a parameter"), ({"train__steps": 0, "train__tokens_per_param": 20.0}, "{} of training")],
)
def test_a_batch_says_of_which_horizon_it_is(horizon: dict[str, Any], says: str) -> None:
    """Finds: the tokens of another horizon than the run's, called tokens of training."""
    settings = settings_of([1e9], train__global_batch_size=0, **horizon)
    parameters = cost.num_parameters(settings.config.model).non_embedding
    (why,) = [each.why for each in settings.choices if each.flag == "--train.global-batch-size"]
    assert why == says.format(f"{units.count(20 * parameters)} tokens")


def test_a_horizon_of_less_than_a_token_is_one_step() -> None:
    settings = settings_of([1e9], train__steps=0, train__tokens_per_param=1e-9, train__global_batch_size=0)
    assert (settings.num_steps, settings.plan.global_batch_size) == (1, 1)


@pytest.mark.parametrize(("batch", "ranks", "micro"), [(200, 2, 50), (64, 1, 64), (65, 1, 33), (3, 4, 1), (390, 3, 44)])
def test_a_share_is_split_into_equal_micro_batches_of_at_most_4096_tokens(batch: int, ranks: int, micro: int) -> None:
    plan = settings_of([1e9] * ranks, train__global_batch_size=batch).plan
    assert (plan.global_batch_size, plan.device_batch_size, plan.world_size) == (batch, micro, ranks)


@pytest.mark.parametrize("given", [{"train__global_batch_size": 10**12}, {"train__steps": 0, "train__tokens": 10**30}])
def test_a_step_of_more_sequences_than_fit_in_memory_as_objects_is_refused(given: dict[str, Any]) -> None:
    """Finds a start, and a `paceline plan`, that takes all memory: a list of a trillion micro-batches."""
    with pytest.raises(UserError, match=r"a step would have \d+ sequences; it has at most 1048576"):
        settings_of([1e9], **{"train__global_batch_size": 0, **given})


def test_ranks_with_different_number_formats_compute_in_float32() -> None:
    formats = ("bfloat16", "float16")
    assert settings_of([1e9] * 2, ("bfloat16",)).config.train.dtype == "bfloat16"
    assert settings_of([1e9] * 2, formats).config.train.dtype == "float32"
    assert settings_of([1e9] * 2, formats, train__dtype="float16").config.train.dtype == "float16"


def test_layered_micro_batches_need_memory_for_all_their_activations() -> None:
    given = {"train__layered_micro_batches": 3, "train__device_batch_size": 2, "parallel__strategy": "zero"}
    assert settings_of([1e9] * 2, **given).plan.num_micro_batches(0) == 3
    with pytest.raises(
        UserError, match=r"of activations; rank 1 has .*: give --train.layered-micro-batches 1"
    ) as error:
        settings_of([1e9, 2.2e6], **given)
    assert error.value.reach == "world"
    settings_of([1e9, 2.2e6], **{**given, "train__device_batch_size": 6})  # one micro-batch a rank: nothing to keep
    with pytest.raises(UserError, match=r"parallel\.strategy fsdp would gather a block's weights again"):
        settings_of([1e9] * 2, **{**given, "parallel__strategy": "fsdp"})


ANY_RANK = st.builds(
    replace,
    st.just(FACTS),
    host=st.sampled_from("ab"),
    device=st.sampled_from(("cpu", "cuda")),
    instructions=st.sampled_from(("AVX512", "DEFAULT")),
    rounding=st.sampled_from(("1234", "5678")),
    threads=st.integers(1, 64),
    free_bytes=st.floats(0, 1e12),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
)


@given(
    st.lists(ANY_RANK, min_size=1, max_size=16),
    st.sampled_from(("auto", "ddp", "zero", "fsdp", "naive")),
    st.sampled_from(("auto", "bfloat16")),
    st.sampled_from(("adamw", "muon")),
    st.integers(1, 200),
)
def test_any_facts_give_one_possible_choice_or_one_refusal(
    facts: list[RankFacts], strategy: Any, dtype: Any, optimizer: Any, batch: int
) -> None:
    """What `resolve` reads is its arguments, which are equal on all ranks: so a second call, as a second rank makes it,
    and one with the ranks in another order decide alike."""
    config = Config().replace("model", n_layer=2, n_head=2, n_embd=32).replace("data", seq_len=SEQ_LEN)
    config = config.replace("train", global_batch_size=batch, steps=5, dtype=dtype)
    config = config.replace("parallel", strategy=strategy).replace("optim", name=optimizer)
    is_unequal = len({each.kind for each in facts}) > 1
    is_staged = any(each.device == "cuda" for each in facts)  # the backend is gloo
    if (is_unequal and strategy in ("ddp", "naive")) or (is_staged and strategy == "fsdp"):
        for order in (facts, facts[::-1]):
            with pytest.raises(UserError, match=f"strategy {strategy}") as refusal:
                resolve(config, VOCAB_SIZE, order)
            assert refusal.value.reach == "world"
        return
    found, again, reversed_ = (resolve(config, VOCAB_SIZE, order) for order in (facts, list(facts), facts[::-1]))
    assert found == again
    assert (found.config, found.plan) == (reversed_.config, reversed_.plan)
    chosen, plan = found.config.parallel.strategy, found.plan
    assert chosen == strategy or strategy == "auto"
    assert not (is_unequal and chosen in ("ddp", "naive", "auto"))
    assert not (is_staged and chosen == "fsdp")
    assert plan.device_batch_size >= 1
    found.config.check()  # as a resume does
    parts = [plan.micro_batches(rank) for rank in range(len(facts))]
    assert [place for part in itertools.chain(*parts) for place in part] == list(range(batch))
    assert (
        dtype == "bfloat16"
        or found.config.train.dtype == "float32"
        or {each.dtype for each in facts} == {found.config.train.dtype}
    )


def test_a_full_gpu_says_what_needs_less() -> None:
    on_gpu = replace(FACTS, device="cuda", backend="nccl", free_bytes=8e9, dtype="bfloat16")
    config = Config().replace("train", global_batch_size=64, device_batch_size=32, steps=1).replace("data", seq_len=64)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8. See the manual")
    two = [on_gpu, on_gpu]
    said = str(out_of_memory(full, resolve(config, VOCAB_SIZE, two), on_gpu))
    assert said == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. This needs less, for the same losses: "
        "--train.device-batch-size 16, --train.activation-checkpoint, --parallel.strategy zero"
    )
    small = replace(on_gpu, free_bytes=2e9)  # room for some sequences
    unequal = config.replace("train", device_batch_size=0).replace("parallel", shares="auto", strategy="zero")
    settings = resolve(unequal, VOCAB_SIZE, [on_gpu, small])
    fits = settings.plan.limits[1]
    assert 1 < fits < settings.plan.device_batch_size
    said = str(out_of_memory(full, settings, small))
    assert said.endswith(f"--train.device-batch-size {fits // 2}, --train.activation-checkpoint"), "fsdp is refused"
    tight = replace(on_gpu, free_bytes=1e6)
    assert "--train.device-batch-size 1," in str(out_of_memory(full, resolve(config, VOCAB_SIZE, [tight] * 2), tight))
    config = config.replace("train", device_batch_size=1, activation_checkpoint=True)
    least = resolve(config.replace("parallel", strategy="fsdp"), VOCAB_SIZE, two)
    assert str(out_of_memory(full, least, on_gpu)).endswith("needs a smaller model, or more ranks")


@pytest.mark.parametrize(("of_data", "of_model"), [(50257, 50304), (50304, 50304), (8193, 8256), (257, 257)])
def test_a_large_vocabulary_is_rounded_up_and_said(of_data: int, of_model: int) -> None:
    config = Config().replace("train", global_batch_size=4, steps=1)
    found = resolve(config, of_data, [FACTS])
    assert found.config.model.vocab_size == of_model
    said = [choice.why for choice in found.choices if choice.flag == "--model.vocab-size"]
    assert said == ([] if of_model == of_data else [f"{of_data} of the data, rounded up to a multiple of 64"])
    given = resolve(config.replace("model", vocab_size=of_data), of_data, [FACTS])
    assert given.config.model.vocab_size == of_data


def test_size_auto_grows_with_what_the_machine_computes_in_the_time() -> None:
    config = Config().replace("model", size="auto", n_layer=3, n_head=3, n_embd=96)
    config = config.replace("train", time_budget=100.0, global_batch_size=5)

    def sized(flops_per_s: float) -> tuple[int, int, int]:
        found = resolve(config, 4096, [FACTS] * 2, flops_per_s)
        assert any(choice.flag == "--model.size given" for choice in found.choices), "said in the banner"
        assert found.config.model.size == "given", "what a resume reads"
        model = found.config.model
        assert model.n_embd == 64 * model.n_head == 64 * model.n_layer or not flops_per_s
        return model.n_layer, model.n_embd, found.config.train.global_batch_size

    assert sized(0.0) == (3, 96, 5), "nothing measured: as given"
    sizes = [sized(10.0**power) for power in range(10, 17)]
    assert sizes == sorted(sizes)
    assert sizes[0][0] == 2 < sizes[-1][0]
    slow = resolve(config.replace("train", device_batch_size=4), 4096, [FACTS] * 3, 1e9).config
    assert slow.train.global_batch_size == 6, "a slow machine's batch still holds the micro-batch that was given"
    config = config.replace("train", max_epochs=4.0)
    unlimited, small = (resolve(config, 4096, [FACTS], 1e14, tokens).config for tokens in (10**12, 10**6))
    assert small.model.n_layer < unlimited.model.n_layer, "as large as four passes over the data can train"
    assert small.train.time_budget == 100, "what a resume reads"
    enough = round(1e6 * _times_as_much(resolve(config, 4096, [FACTS], 1e14, 10**6)))
    assert _times_as_much(resolve(config, 4096, [FACTS], 1e14, round(1.05 * enough))) == 0, "nothing limits it"
    assert 1.0 <= _times_as_much(resolve(config, 4096, [FACTS], 1e14, round(0.9 * enough))) <= 1.2
    limited = [resolve(config, 4096, [FACTS], 10.0 ** (power / 4), 10**6) for power in range(36, 57)]
    layers = [each.config.model.n_layer for each in limited]
    assert layers == sorted(layers)
    in_time = max(each.config.model.n_layer for each in limited if not _times_as_much(each))
    assert layers[-1] == in_time + 2, "time that is left trains a larger model, of which this much is measured"
    config = config.replace("train", max_epochs=0.0)
    assert resolve(config.replace("train", time_budget=0.0, steps=5), 4096, [FACTS], 1e12).config.model.n_embd == 96


def _times_as_much(settings: Settings) -> float:
    """Returns how many times as much text is said to be enough; 0: nothing is said."""
    said = [match for choice in settings.choices if (match := re.search(r"([\d.]+) times as much", choice.why))]
    return float(said[0][1]) if said else 0.0


@pytest.mark.parametrize(("passes", "more"), [(0.5, 0), (1.0, 0), (3.0, 5.4), (8.0, 18.9), (100.0, 29.7)])
def test_size_auto_takes_more_decay_for_more_passes(passes: float, more: float) -> None:
    """Mutation: the decay of one pass for any number, with which eight passes are worse than three."""
    config = Config().replace("model", size="auto").replace("train", time_budget=100.0)
    chosen = resolve(config, 4096, [FACTS], 1e12)
    tokens = chosen.config.train.time_budget * 1e12 / cost.flops_per_token(chosen.config.model, config.data.seq_len)
    chosen = resolve(config, 4096, [FACTS], 1e12, round(tokens / passes))
    parameters = cost.num_parameters(replace(chosen.config.model, vocab_size=4096)).non_embedding
    decay = 0.1 + 0.1 * more * (parameters * passes / tokens) ** (1 / 3)
    assert chosen.weight_decay == chosen.config.optim.weight_decay == pytest.approx(decay, rel=1e-3)
    assert resolve(chosen.config, 4096, [FACTS], 1e12, 10).weight_decay == chosen.weight_decay, "a resume keeps it"
    said = [choice.what for choice in chosen.choices if choice.flag == "--model.size given"]
    assert ("weight decay 0.1 ->" in said[0]) == bool(more)


@pytest.mark.parametrize(("layers", "best"), [(2, 4.1), (3, 5.7), (4, 7.5)])
def test_decay_for_eight_passes_over_little_text_is_what_was_measured(layers: int, best: float) -> None:
    """Mutation: one decay for all sizes. By parabolas through four decays (docs/log/ablations.md)."""
    shape = ModelConfig(arch="llama", n_layer=layers, n_head=layers, n_embd=64 * layers, vocab_size=512)
    assert decay_for(0.1, 8.0, cost.num_parameters(shape).non_embedding / 61_000) == pytest.approx(best, rel=0.1)


@pytest.mark.parametrize(
    ("shares_memory", "strategy", "says"),
    [(True, "ddp", "in shared memory"), (False, "zero", "over sockets"), (True, "naive", None)],
)
def test_where_gradients_are_added_is_said_of_cpu_ranks_of_one_host(
    shares_memory: bool, strategy: str, says: str | None
) -> None:
    config = settings_of([1e9, 1e9], parallel__strategy=strategy).config
    facts = [replace(FACTS, shares_memory=shares_memory)] * 2
    said = [choice.what for choice in resolve(config, VOCAB_SIZE, facts).choices]
    assert [what for what in said if "gradients added" in what] == ([f"gradients added {says}"] if says else [])
    apart = resolve(config, VOCAB_SIZE, [FACTS, replace(FACTS, host="b")])
    assert not any("gradients added" in choice.what for choice in apart.choices)


def test_scaling_with_the_batch_that_makes_decay_a_wrecker_is_refused() -> None:
    """A short run at the default references got weight decay 4,150 and stood still (mutation: refuse from 1 on only).
    What the user or a preset gives is not touched, also where scaling keeps it."""
    scaled = {"optim__scale_with_batch": True, "optim__lr": 3e-3}
    with pytest.raises(UserError, match=r"scale-with-batch makes weight decay 0.1 \d.*--optim.reference-tokens"):
        settings_of([1e9], **scaled, train__global_batch_size=64, train__steps=12)
    near = {"optim__reference_tokens": 5 * 12 * SEQ_LEN, "optim__reference_batch_tokens": 12 * SEQ_LEN}
    assert settings_of([1e9], **scaled, **near).weight_decay == pytest.approx(0.1)
    given = {"optim__lr": 0.1, "optim__weight_decay": 0.7}
    assert settings_of([1e9], **given).weight_decay == 0.7
    assert settings_of([1e9], **{**scaled, **near, **given}).weight_decay == pytest.approx(0.7)
