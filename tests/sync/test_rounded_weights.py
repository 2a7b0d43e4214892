"""Weights and gradients that lose no bit in bfloat16 are sent in it: the same losses and weights, bit for bit."""

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import run_ranks

from paceline.base.errors import RunError
from paceline.base.ownership import Slice
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.sync.wire import wire_bits
from paceline.sync.zero import ShardedSync
from paceline.world.config import ParallelConfig
from paceline.world.runtime import World

NUM_STEPS, NUM_TOKENS = 3, 16
WIDTH = 64
ROUNDED = {"gpt2": 2 * (12 * WIDTH * WIDTH + 9 * WIDTH), "llama": 2 * (4 + 3 * 3) * WIDTH * WIDTH}  # in two layers
CASES = [  # family, optimizer, head, micro-batches of a rank in a step: each pair of choices is in some case
    ("gpt2", "adamw", "tied", 1),
    ("gpt2", "muon", "untied", 2),
    ("llama", "adamw", "untied", 2),
    ("llama", "muon", "tied", 2),
    ("llama", "muon", "untied", 1),
]
SOME = (CASES[0], CASES[1], CASES[3])  # with fsdp, and on three ranks
LOSSY = CASES[3]  # the one that is trained with rounded gradients, too
pytestmark = pytest.mark.long


@dataclass
class Trained:
    """What one rank has at the end."""

    losses: list[float]
    exact: dict[str, torch.Tensor]
    own: dict[Slice, torch.Tensor]
    read: dict[str, torch.Tensor]  # what forward passes use
    released: dict[str, torch.Tensor]
    sent_bytes: float


def built(arch: str, head: str) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "n_hidden": 0 if arch == "gpt2" else 3 * WIDTH}
    config = ModelConfig(arch=arch, head=head, bias=arch == "gpt2", n_positions=NUM_TOKENS, vocab_size=128, **shape)  # type: ignore[arg-type]
    model = build(config, 1, "cpu")
    model.compute_dtype = torch.bfloat16
    return model


def micro_batch(step: int, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    ids = (128 * torch.rand(2, NUM_TOKENS + 1, generator=generator) ** 3).long()
    return ids[:, :-1], ids[:, 1:]


def trained(
    world: World,
    case: tuple[str, str, str, int],
    sent_as: torch.dtype | None,
    wire: str = "exact",
    strategy: Any = "zero",
) -> Trained:
    """After NUM_STEPS steps. sent_as: of weights that are read in bfloat16."""
    arch, name, head, count = case
    model = built(arch, head)
    optim = OptimConfig(name=name)  # type: ignore[arg-type]
    optimizers = make_optimizers(
        optim, model.named_parameters(), lr=2e-3, weight_decay=0.1, compute_dtype=torch.float32
    )
    replica = Replica(
        model,
        optimizers,
        world,
        strategy=strategy,
        blocks=list(model.layers),
        bucket_mb=0.05,
        wire=wire,  # type: ignore[arg-type]
        read_as=dict.fromkeys(model.read_as(), sent_as) if sent_as else {},
        rounded_gradients=model.rounded_gradients() if sent_as else (),
    )
    losses, sent_bytes = [], 0.0
    world.group.take_traffic()  # of the replica before
    for number in range(NUM_STEPS):
        batch = Batch([micro_batch(number, world.rank, i) for i in range(count)], passes=count)
        step = replica.step(batch, total=world.world_size * count * 2.0 * NUM_TOKENS)
        for tokens, targets in step:
            step.backward(model(tokens, targets), weight=2 * NUM_TOKENS, is_sum=True)
        result = step.finish()
        losses.append(result.loss)
        sent_bytes += result.times.comm_bytes
    replica.wait_for_params()
    exact = {key: weight.clone() for key, weight in replica.sync.full_weights().items()}
    own = {item: weight.clone() for item, weight in replica.sync.weights().items()}
    if strategy == "fsdp":  # the model's parameters are shards
        return Trained(losses, exact, own, {}, {}, sent_bytes)
    read = {key: p.detach().clone() for key, p in model.named_parameters()}
    replica.release()
    return Trained(losses, exact, own, read, dict(model.named_parameters()), sent_bytes)


def all_cases(world: World) -> dict[Any, Trained]:
    dtypes = [torch.float32, torch.bfloat16, *([None] if world.world_size <= 2 else [])]
    cases = CASES if world.world_size == 2 else SOME
    found = {(case, sent_as): trained(world, case, sent_as) for case in cases for sent_as in dtypes}
    if world.world_size == 2:
        found |= {
            ("fsdp", case, sent_as): trained(world, case, sent_as, strategy="fsdp")
            for case in SOME
            for sent_as in dtypes[:2]
        }
    return found | {"bf16": trained(world, LOSSY, torch.bfloat16, "bf16")}


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"world-{size}")
def rows(request: pytest.FixtureRequest) -> list[dict[Any, Trained]]:
    config = ParallelConfig(device="cpu", threads=1, timeout_s=30.0, shared_memory=False)  # else nothing is rounded
    return run_ranks(all_cases, request.param, config=config)


def equal(left: dict[Any, torch.Tensor], right: dict[Any, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def cases_of(rows: list[Any]) -> list[Any]:
    """The cases that were trained in this world."""
    return [case for case in CASES if (case, torch.bfloat16) in rows[0]]


def test_losses_and_masters_are_those_of_weights_sent_in_float32(rows: list[Any]) -> None:
    for case, row in itertools.product(cases_of(rows), rows):
        plain, rounded = row[case, torch.float32], row[case, torch.bfloat16]
        assert not equal(plain.exact, dict(built(case[0], case[2]).named_parameters())), f"{case}: nothing learned"
        assert rounded.losses == plain.losses, case
        assert equal(rounded.own, plain.own), case
        assert equal(rounded.exact, plain.exact), case
        if len(rows) <= 2:  # in other buckets: with three ranks these decide the order of a sum's terms
            assert equal(rounded.exact, row[case, None].exact), case


def test_all_ranks_read_the_same_rounded_weights_and_own_an_exact_share(rows: list[Any]) -> None:
    for case, row in itertools.product(cases_of(rows), rows):
        layers = built(case[0], case[2]).read_as()
        mine, first = row[case, torch.bfloat16], rows[0][case, torch.bfloat16]
        assert equal(mine.read, first.read), case
        assert equal(mine.exact, first.exact), case
        assert equal(mine.released, mine.exact), case
        for name, weight in mine.exact.items():
            assert torch.equal(mine.read[name], weight.bfloat16().float() if name in layers else weight), case
        for item, weight in mine.own.items():
            assert torch.equal(weight, mine.exact[item.name].view(-1)[item.start : item.stop]), case


def test_what_is_rounded_costs_two_bytes_to_each_other_rank(rows: list[Any]) -> None:
    for case in cases_of(rows):
        arch, _, head, count = case
        num_elements = ROUNDED[arch] * (2 if count == 1 else 1) + (128 * WIDTH if head == "untied" else 0)
        plain, rounded = (sum(row[case, dtype].sent_bytes for row in rows) for dtype in (torch.float32, torch.bfloat16))
        assert plain - rounded == NUM_STEPS * 2 * num_elements * (len(rows) - 1), case


@pytest.mark.parametrize("rows", [2], indirect=True)
@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join(map(str, case)))
def test_fsdp_gathers_in_two_bytes_what_is_read_so_and_nothing_else_changes(rows: list[Any], case: Any) -> None:
    plain, rounded = ([row["fsdp", case, dtype] for row in rows] for dtype in (torch.float32, torch.bfloat16))
    for mine, other in zip(rounded, plain, strict=True):
        assert mine.losses == other.losses == pytest.approx(rows[0][case, torch.bfloat16].losses, abs=1e-2)
        assert equal(mine.exact, other.exact)
    arch, optimizer, head, count = case
    num_blocks, num_head = ROUNDED[arch], 128 * WIDTH if head == "untied" else 0
    saved = sum(row.sent_bytes for row in plain) - sum(row.sent_bytes for row in rounded)
    # Blocks are gathered in forward and backward of each micro-batch, the head with the embeddings.
    expected = NUM_STEPS * 2 * (2 * count * num_blocks + count * num_head) * (len(rows) - 1)
    assert expected <= saved <= 1.03 * expected  # torch pads shards to equal lengths
    if optimizer == "muon":  # whose matrices go to their owners and back, too
        return
    num_elements = sum(weight.numel() for weight in plain[0].exact.values())
    said = wire_bits("fsdp", "exact", 16, passes=count).bytes_sent(
        len(rows), num_elements, num_elements - num_blocks - num_head, num_elements - num_blocks
    )
    assert sum(row.sent_bytes for row in rounded) == pytest.approx(NUM_STEPS * len(rows) * said, rel=0.03)


def test_gradients_rounded_to_bfloat16_cost_half_and_change_only_rounding(rows: list[Any]) -> None:
    plain, rounded = ([row[key] for row in rows] for key in ((LOSSY, torch.bfloat16), "bf16"))
    num_elements = sum(weight.numel() for weight in plain[0].exact.values())
    saved = sum(row.sent_bytes for row in plain) - sum(row.sent_bytes for row in rounded)
    assert saved == NUM_STEPS * 2 * num_elements * (len(rows) - 1)
    assert (rounded[0].losses == plain[0].losses) == (len(rows) == 1)
    assert rounded[0].losses == pytest.approx(plain[0].losses, abs=2e-2)
    assert all(equal(row.read, rounded[0].read) for row in rounded)


def two_passes(world: World) -> str:
    """What is said if a gradient that is said to be rounded is a sum of two."""
    model = built("gpt2", "tied")
    sync = ShardedSync(model, world.group, 1 << 20, {}, (), model.read_as(), model.rounded_gradients())
    sync.is_one_pass = True
    for index in range(2):
        with pytest.raises(RunError) if index else contextlib.nullcontext() as found, sync.accumulate(last=index == 1):
            model(*micro_batch(0, world.rank, index)).backward()
    return str(found.value) if found else ""


def test_a_gradient_of_more_bits_than_was_said_is_refused() -> None:
    assert all("has more bits than torch.bfloat16" in said for said in run_ranks(two_passes, 2))
