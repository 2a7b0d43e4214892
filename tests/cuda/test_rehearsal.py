"""Training on GPUs, rehearsed without one: no race, no host wait and no copy that is not listed here."""

import re
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import gpu
import no_gpu
import pytest
import torch
import torch.distributed as dist
from steps import SEQ_LEN, rehearsal

from paceline.model import gpt, loss
from paceline.model.layers import Block, attends_by_document
from paceline.optim import clip
from paceline.replica import model as replicated
from paceline.replica.batch import Batch
from paceline.replica.contents import ReplicaContents
from paceline.sync import owned
from paceline.sync.replicas import differences, digests
from paceline.world.transfer import Transfer

if reason := no_gpu.why_not():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("_pretended")

# What a step waits for. One of these leaves the GPU idle for as long as the host takes to queue the next kernels.
WAITS = {"device_clock.py finish": 1}  # the end of the update, for norm, loss and times; the GPU itself skips an update
COPIES = {"to the host: step.py _read": 1}
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def _pretended() -> None:
    no_gpu.pretend()


@pytest.mark.parametrize(
    ("preset", "strategy", "size", "layers", "micro_batches", "dtype"),
    [
        ("gpt2-124m", "ddp", 1, 1, 1, torch.float8_e4m3fn),
        ("gpt2-124m", "fsdp", 1, 1, 2, BF16),  # without a launcher: its model is made on the host
        ("gpt2-124m", "ddp", 8, 1, 3, FP16),
        ("gpt2-124m", "naive", 2, 1, 1, BF16),
        ("gpt2-124m-modern", "zero", 8, 1, 0, BF16),  # a rank without a micro-batch
        pytest.param("gpt2-124m-modern", "fsdp", 4, 2, 2, BF16, marks=pytest.mark.long),
        pytest.param("gpt2-124m", "hsdp", 8, 2, 1, BF16, marks=pytest.mark.long),
        pytest.param("gpt2-124m", "ddp", 8, 12, 2, BF16, marks=pytest.mark.long),
        pytest.param("gpt2-124m-modern", "zero", 8, 4, 2, BF16, marks=pytest.mark.long),
    ],
)
def test_a_step_has_no_race_and_no_wait_or_copy_but_those_listed(
    preset: str, strategy: str, size: int, layers: int, micro_batches: int, dtype: torch.dtype
) -> None:
    with rehearsal(preset, strategy, size, layers=layers, dtype=dtype) as rank:
        rank.step(micro_batches)
        rank.gpu.waits.clear()
        rank.gpu.copies.clear()
        rank.step(micro_batches)
    assert rank.gpu.races == []
    assert without_lines(rank.gpu.waits) == WAITS, f"the host waits in {dict(rank.gpu.waits)}"
    assert without_lines(rank.gpu.copies) == COPIES
    if size > 1:
        assert (
            rank.gpu.collectives.keys()
            == {
                "ddp": {"all-reduce"},
                "naive": {"all-reduce"},
                "zero": {"reduce-scatter", "all-reduce", "all-gather"},
                "fsdp": {"reduce-scatter", "all-reduce", "all-gather", "messages"},  # of Muon's matrices
                "hsdp": {"reduce-scatter", "all-reduce", "all-gather"},
            }[strategy]
        )


def float64_of_a_step(preset: str, is_apple: bool, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files whose lines compute in float64, of a step, an evaluation, digests and what a checkpoint holds."""
    for module in (clip, replicated):
        monkeypatch.setattr(module, "has_float64", lambda _: not is_apple)
    with rehearsal(preset, "ddp", 1, layers=1, dtype=FP16) as rank:
        rank.group.is_queued = False
        tokens, model = torch.zeros(1, 1024, dtype=torch.int64, device=gpu.CUDA), rank.replica.model
        step = rank.replica.step(Batch([tokens]), total=1024.0)
        for tokens_BT in step:
            step.backward(model(tokens_BT, tokens_BT) / 1024, weight=1024)
        step.finish(max_norm=1.0)
        with torch.no_grad():
            float(model.eval()(tokens, tokens))
        digests(rank.replica.sync.on_all_ranks())
        state, _, _ = ReplicaContents(rank.replica, "").state()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    return {place.split(":")[0] for place in +rank.gpu.float64}


def test_an_apple_gpu_which_has_no_float64_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU stands in for it."""
    assert float64_of_a_step("gpt2-124m-modern", True, monkeypatch) == set()


def test_another_gpu_adds_up_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float64_of_a_step("gpt2-124m", False, monkeypatch) == {"clip.py", "step.py"}


def test_replicas_are_compared_by_one_small_copy() -> None:
    with rehearsal("gpt2-124m", "ddp", 8, layers=2) as rank:
        rank.step(1)
        rank.gpu.copies.clear()
        assert differences(rank.replica.sync.on_all_ranks(), rank.group) == []
    assert without_lines(rank.gpu.copies) == {"to the host, blocking: replicas.py digests": 1}


def without_lines(places: Counter[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for place, count in places.items():
        found[re.sub(r":\d+", "", place)] += count
    return dict(found)


@pytest.mark.parametrize(
    ("strategy", "mutation"),
    [("ddp", "results"), ("naive", "order"), ("zero", "order"), ("zero", "weights"), ("fsdp", "results")],
)
def test_a_removed_wait_is_found(strategy: str, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation == "results":
        monkeypatch.setattr(Transfer, "wait", lambda _: None)
    elif mutation == "weights":
        monkeypatch.setattr(owned.OwnedBucket, "wait", lambda _: None)
    with rehearsal("gpt2-124m-modern", strategy, 4, layers=1) as rank:
        if mutation == "order":  # collectives begin before backward has computed what they send
            wait = gpu.Stream.wait_stream
            monkeypatch.setattr(
                gpu.Stream, "wait_stream", lambda mine, other: wait(mine, other) if mine is rank.gpu.nccl else None
            )
        rank.step(1)
        if not rank.gpu.races:  # the weights of a step are waited for in the next one
            rank.step(1)
    assert rank.gpu.races


@pytest.mark.parametrize(
    ("strategy", "held"),
    [
        ("ddp", "all-reduce"),
        ("zero", "reduce-scatter"),
        ("zero", "all-gather"),
        ("fsdp", "all-gather"),
        ("fsdp", "reduce-scatter"),
        ("hsdp", "all-reduce"),
    ],
)
def test_the_watchdog_sees_which_collective_a_blocked_host_waits_for(strategy: str, held: str) -> None:
    """Other ranks do not join a collective. NCCL blocks no call: the host blocks where it reads a result."""
    seen: list[str | None] = []
    with rehearsal("gpt2-124m", strategy, 4, layers=1) as rank:
        rank.step(1)

        def ask() -> None:  # as the watchdog does, from its thread
            thread = threading.Thread(target=lambda: seen.append(rank.group.waiting_for))
            thread.start()
            thread.join()

        rank.gpu.held, rank.gpu.when_held = held, ask
        rank.step(1)
        if not seen:  # what gathers weights is waited for in the next step
            rank.step(1)
    assert seen
    assert all(name is not None and held in name for name in seen), seen


def test_a_rank_whose_own_gpu_is_stuck_does_not_count_as_waiting() -> None:
    """A kernel of ours never ends; a collective is queued behind it."""
    with rehearsal("gpt2-124m", "ddp", 4, layers=1) as rank:
        rank.step(1)
        rank.gpu.hold_from_now(rank.gpu.default)
        rank.step(1)
        assert rank.group.waiting_for is None


def test_compiling_a_model_on_cuda_compiles_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def of_chunk(logits_RV: torch.Tensor, *rest: Any) -> Any:
        given.append(logits_RV)
        return loss._fused_chunk(logits_RV, *rest)

    compiled: list[Any] = []
    monkeypatch.setattr(Block, "compile", lambda _, options: compiled.append(options))
    monkeypatch.setattr(loss, "_compiled", lambda: of_chunk)
    with rehearsal("gpt2-124m", "ddp", 1, layers=1) as rank:
        rank.step(1)
        assert given == []
        rank.replica.model.compile_blocks()  # type: ignore[operator]
        rank.step(1)
    assert {logits_RV.dtype for logits_RV in given} == {BF16}
    assert without_lines(rank.gpu.waits).keys() >= WAITS.keys()
    assert compiled == [gpt._compiler_options()]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 and 2.12 have no fake addmm with out_dtype")
def test_attention_inside_documents_is_a_flash_kernel_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    names, kernel = [], gpu.Gpu.kernel
    monkeypatch.setattr(gpu.Gpu, "kernel", lambda mine, name, *rest: names.append(name) or kernel(mine, name, *rest))
    monkeypatch.setattr(gpt, "document_bounds", lambda _: torch.zeros(9, dtype=torch.int32))
    with rehearsal("gpt2-124m-modern", "ddp", 1, layers=1) as rank:
        tokens = torch.zeros(4, SEQ_LEN, dtype=torch.int64, device=gpu.CUDA)
        documents = torch.zeros(4, SEQ_LEN, dtype=torch.int32)
        for listed in (rank.gpu.waits, rank.gpu.copies):
            listed.clear()
        model = rank.replica.model
        torch.autograd.grad(model(tokens, tokens, documents=documents), next(model.layers.parameters()))  # type: ignore[union-attr,operator]
    attention = [name for name in names if "attention" in name]
    assert attention == ["aten._flash_attention_forward.default", "aten._flash_attention_backward.default"]
    assert rank.gpu.waits == {}
    assert without_lines(rank.gpu.copies) == {"to the GPU: gpt.py _mask": 1}
    for dtype, width in ((torch.float32, 64), (BF16, 12), (BF16, 256)):
        assert not attends_by_document(gpu.CUDA, dtype, width)


def test_nccls_timeout_which_ends_a_process_comes_long_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}

    def process_group(name: str) -> Any:
        return SimpleNamespace(set_timeout=lambda timeout: given.update({name: timeout.total_seconds()}))

    with rehearsal("gpt2-124m", "ddp", 4, layers=1) as rank:
        monkeypatch.setattr(rank.group, "_control", process_group("Gloo"))
        dist.group.WORLD = process_group("NCCL")
        try:
            rank.group.set_timeout(65.0)
        finally:
            dist.group.WORLD = None
    assert given == {"NCCL": 130.0, "Gloo": 65.0}
