"""Steps that make no update: all weights are 0, a gradient is not finite. A micro-batch of weight 0 adds nothing."""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Call, run_calls
from torch import nn
from torch.utils.data import TensorDataset

from paceline.base.errors import UserError
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.replica.batch import Batch
from paceline.replica.checkpoints import Checkpoints
from paceline.replica.replica import Replica
from paceline.sync.replicas import digests, overall
from paceline.world.runtime import World

STRATEGIES: dict[str, dict[str, Any]] = {
    "naive": {},
    "ddp": {},
    "zero": {},
    "fsdp": {},
    "local": {"sync_every": 2},
    "int8": {"strategy": "zero", "wire": "int8"},
}
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
IS_LABELLED = torch.arange(40) // 4 % 2 == 0  # of each micro-batch of 4 rows, every second has no label
DATA = TensorDataset(X, X.sum(1), IS_LABELLED)
NO_LABELS = TensorDataset(X, X.sum(1), torch.arange(40) // 8 != 2)  # none in the third step of 8 rows


def made(world: World, name: str) -> Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Replica(model, optimizer, world, **{"strategy": name, **STRATEGIES[name]})


def train(replica: Replica, data: TensorDataset, steps: int, is_mean: bool = True, reduces: bool = False) -> list[Any]:
    """The results of some steps. A masked mean over no items is 0 / 0, and so is its gradient."""
    found = []
    until = replica.num_steps + steps
    for step in replica.steps(data, batch_size=8, micro_batch_size=4, max_steps=until, shuffle=False):
        for x, y, keep in step:
            losses = (replica.model(x).squeeze(1) - y) ** 2 * keep
            loss = losses.sum() / keep.sum() if is_mean else losses.sum()
            step.backward(loss, weight=int(keep.sum()), is_sum=not is_mean)
        if reduces:
            step.reduce()
        found.append(step.finish(max_norm=1.0))
    return found


def plain() -> list[float]:
    """The losses of the same steps without the rows that have no label, by torch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for first in range(0, 40, 8):
        x = X[first : first + 4]
        loss = ((model(x).squeeze(1) - x.sum(1)) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def masked(world: World, *names: str) -> dict[str, list[float]]:
    """The losses with these strategies, and with ddp where losses are sums."""
    found = {}
    for name, is_mean in [*((name, True) for name in names), ("ddp", False)]:
        results = train(made(world, name), DATA, 5, is_mean)
        assert not any(result.skipped for result in results), (name, is_mean)
        found[f"{name} {is_mean}"] = [result.loss for result in results]
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the functions of this file return on each of two ranks."""
    calls = {"masked": Call(masked, *STRATEGIES), "empty": Call(empty, tmp_path_factory.mktemp("ranks"))}
    return run_calls({**calls, "idle": Call(idle)}, 2)


def test_a_mean_over_no_items_contributes_nothing(world: World, two_ranks: dict[str, list[Any]]) -> None:
    """On 2 ranks one of them has no label in each step. Its gradient was not a number, and no rank updated."""
    one, other = two_ranks["masked"]
    assert one == other
    del one["local True"]  # whose ranks have weights of their own
    for found in (one, masked(world, "ddp", "zero", "local")):
        for name, losses in found.items():
            assert losses == pytest.approx(plain(), abs=0.02 if "int8" in name else 1e-5), name


def empty(world: World, folder: Path) -> dict[str, Any]:
    """Five steps of which the third has no label; with zero also with a stop after it."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in STRATEGIES:
        replica = made(world, name)
        train(replica, NO_LABELS, 2)
        before = overall(dict(replica.sync.weights().items()))  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (result,) = train(replica, NO_LABELS, 1)
            (again,) = train(replica, TensorDataset(X, X.sum(1), torch.zeros(40, dtype=torch.bool)), 1)
        said = [str(each.message) for each in caught if "all weights of step" in str(each.message)]
        assert len(said) == world.is_main, said  # once
        for each in (result, again):
            assert math.isnan(each.loss)
            assert (each.weight, each.grad_norm) == (0, 0) or name == "int8"  # which has a part of earlier gradients
            assert str(each.skipped) == "all weights of the step were 0"
        if name not in ("local", "int8"):  # these exchange in each step
            assert overall(dict(replica.sync.weights().items())) == before, name  # type: ignore[arg-type]

        straight = made(world, name)
        losses = [each.loss for each in train(straight, NO_LABELS, 5)]
        found[name] = losses[:2] + losses[3:]
    del found["local"]
    assert math.isnan(train(made(world, "ddp"), NO_LABELS, 3, reduces=True)[2].loss)
    stopped, resumed = made(world, "zero"), made(world, "zero")
    checkpoints = Checkpoints(folder, net=stopped)
    train(stopped, NO_LABELS, 3)
    checkpoints.save()
    checkpoints.finish()
    assert Checkpoints(folder, net=resumed).restore() == 3
    assert [each.loss for each in train(resumed, NO_LABELS, 2)] == found["zero"][2:]
    return found


def test_a_step_without_any_label_makes_no_update_and_training_goes_on(two_ranks: dict[str, list[Any]]) -> None:
    """It ended the job, and each resume ended at the same batch."""
    one, other = two_ranks["empty"]
    assert one == other
    assert all(losses == pytest.approx(one["naive"], abs=0.02 if n == "int8" else 1e-5) for n, losses in one.items())


def idle(world: World) -> list[float]:
    """A step in which no rank has a micro-batch is a mistake. With local a rank without rows stays where it is."""
    with pytest.raises(UserError, match="no rank had a micro-batch in this step"):
        made(world, "ddp").step(Batch([])).finish()
    replica = made(world, "local")
    train(replica, TensorDataset(X, X.sum(1), torch.ones(40)), 2)
    step = replica.step(Batch([X[:4]] if world.is_main else []))
    for x in step:
        step.backward(replica.model(x).mean(), weight=4)
    step.finish()
    return [float(state["step"]) for state in replica.optimizers[0].state.values()]


def test_with_local_a_rank_without_rows_makes_no_blind_update(two_ranks: dict[str, list[Any]]) -> None:
    """Momentum and decay moved its weights by 0.08 and 0.18 in steps without a row."""
    one, other = two_ranks["idle"]
    assert (set(one), set(other)) == ({3.0}, {2.0})


# ---- a gradient that is not finite, on a device that decides by itself ----

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_a_device_that_skips_by_itself_makes_the_updates_of_a_host_that_decides(world: World, strategy: Any) -> None:
    """A GPU skips an update by itself, and the host learns of it afterwards."""
    assert trained_gpt(world, strategy, is_queued=True) == trained_gpt(world, strategy, is_queued=False)


def trained_gpt(world: World, strategy: Any, is_queued: bool) -> str:
    """Losses, norms, skips and digests of weights and state after each of five steps; the gradient of the third is not
    finite, nor that of the first, before there is any state."""
    found: list[Any] = []
    model = build(SMALL, 1, "cpu")
    config = replace(OptimConfig(), name="muon")
    optimizers = make_optimizers(
        config, list(model.named_parameters()), lr=0.05, weight_decay=0.1, compute_dtype=torch.float32
    )
    mine = Replica(model, optimizers, world, strategy=strategy)
    world.group.is_queued = is_queued  # after zero has made its buckets, which are padded for NCCL
    for step in range(5):
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
        one = mine.step(tokens, total=32.0)
        factor = math.inf if step in (0, 2) else 1.0
        one.backward(model(tokens, tokens) * factor, weight=32, is_sum=True)
        result = one.finish(max_norm=0.5)
        states = [each for optimizer in optimizers for each in optimizer.state.values()]
        state = {f"{i} {key}": value for i, each in enumerate(states) for key, value in each.items()}
        weights_and_state = digests(mine.state_dict() | (state if step else {}))
        counts = [group.get("step") for group in mine.param_groups()]
        found.append((result.grad_norm, result.loss, result.skipped, counts, weights_and_state))
    world.group.is_queued = False
    return repr(found)
