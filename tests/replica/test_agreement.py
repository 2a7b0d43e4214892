"""What ranks can compare, they compare: numbers of the update in each step, weights and buffers after the first."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Call, run_calls, run_ranks
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from paceline.base.errors import PacelineError
from paceline.replica.replica import Replica
from paceline.sync.replicas import overall
from paceline.world.runtime import World

ROWS = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    first, second, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first, second]}, {"params": others, "lr": 0.02}], lr=0.01, **settings)


def made(world: World, model: nn.Module | None = None, **settings: Any) -> Replica:
    model = model or net()
    return Replica(model, adamw(model), world, **settings)


def train(replica: Replica, steps: int, **settings: Any) -> None:
    """Batches of 4 rows in micro-batches of 2: a third rank has none."""
    for step in replica.steps(ROWS, batch_size=4, micro_batch_size=2, max_steps=replica.num_steps + steps):
        for (x,) in step:
            step.backward(replica.model(x).square().mean())
        step.finish(**settings)


def said(act: Callable[[], object]) -> str:
    with pytest.raises(PacelineError) as error:
        act()
    return f"{type(error.value).__name__}: {error.value}"


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Any]]:
    """What the functions below return on each of two ranks."""
    return run_calls({each.__name__: Call(each) for each in (numbers, exchanges, alike, compared, normalised)}, 2)


# ---- numbers of the update ----

KEYS = ("lr", "weight_decay", "eps", "betas", "decay_of_script", "max_norm")


def numbers(world: World) -> dict[str, str]:
    """What a step says of each number that is another on rank 1."""
    found = {}
    for strategy in ("ddp", "zero", "local", "naive", "fsdp"):
        replica = made(world, strategy=strategy, sync_every=2 if strategy == "local" else 0)
        train(replica, 2)
        group = replica.param_groups()[1]
        group["lr"] = 0.02 + 0.001 * world.rank
        before = overall({name: t.clone() for name, t in replica.sync.weights().items()})
        found[strategy] = said(lambda replica=replica: train(replica, 1))
        assert overall({name: t.clone() for name, t in replica.sync.weights().items()}) == before
    for key in KEYS:
        replica = made(world)
        group = replica.param_groups()[1]
        if key != "max_norm":
            group[key] = (0.9, 0.95 + 0.01 * world.rank) if key == "betas" else 0.5 + world.rank
        found[key] = said(
            lambda replica=replica, key=key: train(replica, 1, max_norm=1.0 + (key == "max_norm") * world.rank)
        )
    replica = made(world)
    replica.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.25 * (1 + world.rank))
    found["tensor"] = said(lambda: train(replica, 1))
    with_total = made(world)
    with_total.param_groups()[0]["lr"] = float(world.rank)
    step = with_total.step(ROWS[:4][0], total=world.world_size)
    step.backward(with_total.model(ROWS[:4][0]).mean())
    found["total"] = said(step.finish)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    of_one_class = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in layers]
    several = Replica(layers, of_one_class, world)
    of_one_class[3].param_groups[0]["lr"] = 0.5 + world.rank
    found["of one class"] = said(lambda: train(several, 1))
    return found


def test_a_number_that_differs_by_rank_is_an_error_in_its_step(two_ranks: dict[str, list[Any]]) -> None:
    """Newcomer's script: a schedule by each rank's own clock; ranks ended with different weights and status 0."""
    one, other = two_ranks["numbers"]
    assert one == other
    for strategy in ("ddp", "zero", "local", "naive", "fsdp"):
        assert "lr of group 1 differs by rank: 0.02 on rank 0, 0.021" in one[strategy]
    for key in KEYS[:-1]:
        assert f"{key} of group 1 differs by rank: " in one[key]
    assert "betas of group 1 differs by rank: 0.9, 0.95 on rank 0, 0.9, 0.96 on rank 1" in one["betas"]
    assert "UserError: test_agreement.py" in one["max_norm"]
    assert "max_norm differs by rank: 1.0 on rank 0, 2.0 on rank 1" in one["max_norm"]
    assert "lr of group 0 differs by rank: 0.25 on rank 0, 0.5 on rank 1" in one["tensor"]
    assert "lr of group 0 differs by rank: 0.0 on rank 0, 1.0 on rank 1" in one["total"]
    assert (
        "lr of group 0 of SGD differs by rank: 0.5, 0.5, 0.5, 0.5 on rank 0, 0.5, 0.5, 0.5, 1.5" in one["of one class"]
    )
    assert all("world.mean(progress)" in text for text in one.values())


def exchanges(world: World) -> list[int]:
    """The collectives of small numbers in each of 4 steps."""
    replica, counts = made(world), []
    for _ in range(4):
        count, share = [0], world.group.share

        def counted(values: list[float], count: list[int] = count, share: Any = share) -> Any:
            count[0] += 1
            return share(values)

        world.group.share = counted  # type: ignore[method-assign]
        train(replica, 1)
        world.group.share = share  # type: ignore[method-assign]
        counts.append(count[0])
    return counts


def test_comparing_takes_no_collective_of_its_own(two_ranks: dict[str, list[Any]]) -> None:
    assert two_ranks["exchanges"] == [[1] * 4] * 2


def alike(world: World) -> str:
    """Numbers that say how a rank computes may differ, and nan is equal to nan."""
    replica = made(world)
    for group in replica.param_groups():
        group |= {"foreach": world.rank == 0, "lowest": math.nan}
    train(replica, 3)
    return overall(dict(replica.model.named_parameters()))


def test_how_a_rank_computes_is_its_own_affair(two_ranks: dict[str, list[Any]]) -> None:
    one, other = two_ranks["alike"]
    assert one == other


# ---- weights and buffers ----


class WithBuffer(nn.Module):
    """kind: how its buffer comes to differ between ranks."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 6)
        self.kind = kind
        if kind == "codebook":
            self.register_buffer("codes", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if self.kind == "codebook":
            self.codes.lerp_(out.detach().mean(0), 0.1)
        elif not hasattr(self, "scale"):
            self.register_buffer("scale", torch.tensor(0.5))
        return out.sum(1)


def compared(world: World) -> dict[str, str]:
    found = {}
    for strategy in ("ddp", "zero"):
        replica = made(world, strategy=strategy)
        train(replica, 1)
        if world.rank == 1:
            replica.model[0].bias.data.add_(1e-3)
        found[strategy] = said(lambda replica=replica: train(replica, 1))
    replica = made(world)
    replica.compare_every = 3
    train(replica, 2)
    if world.rank == 1:
        replica.model[0].bias.data.add_(1e-3)
    train(replica, 1)
    found["later"] = said(lambda: train(replica, 1))
    for kind in ("codebook", "in forward")[: world.world_size - 1]:  # in forward: only a third rank has no micro-batch
        replica = Replica(model := WithBuffer(kind), torch.optim.SGD(model.parameters(), lr=0.1), world)
        train(replica, 1)
        found[kind] = said(lambda replica=replica: train(replica, 1))
    replica = Replica(model := WithBuffer("codebook"), torch.optim.SGD(model.parameters(), lr=0.1), world)
    for _ in range(3):
        train(replica, 1)
        model.codes.copy_(world.mean(model.codes))
    return found


def require_named(by_rank: list[dict[str, str]]) -> None:
    one, *others = by_rank
    assert all(other == one for other in others)
    for name, step in (("ddp", 1), ("zero", 1), ("later", 3)):
        assert one[name].startswith("RunError: test_agreement.py:")
        assert f"replicas are not equal after step {step}: 0.bias has 2 different values" in one[name]
    assert "buffers are not equal after step 1: codes has" in one["codebook"]
    assert "model.codes.copy_(world.mean(model.codes))" in one["codebook"]


def test_weights_and_buffers_that_differ_are_named_in_the_second_step(two_ranks: dict[str, list[Any]]) -> None:
    """Not at the first save, hours later. As the message says it, a codebook is made equal."""
    require_named(two_ranks["compared"])


@pytest.mark.long
def test_a_buffer_that_a_rank_without_micro_batches_does_not_have_is_named() -> None:
    by_rank = run_ranks(compared, 3)
    require_named(by_rank)
    assert "after step 1 only rank 0, 1 has scale: make it in __init__" in by_rank[0]["in forward"]


def normalised(world: World) -> dict[str, float]:
    """Sums of the buffers of norms that follow the data, 3 micro-batches on 2 ranks."""
    warnings.simplefilter("ignore")
    found = {}
    kinds: dict[str, Callable[[], nn.Module]] = {
        "instance": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        "batch": lambda: nn.BatchNorm1d(3),
        "spectral": lambda: parametrizations.spectral_norm(nn.Conv1d(3, 3, 3)),
        "spectral hook": lambda: nn.utils.spectral_norm(nn.Conv1d(3, 3, 3)),
    }
    x = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(1))
    for name, make in kinds.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 3), make())
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
        for step in replica.steps(TensorDataset(x), batch_size=3, micro_batch_size=1):
            for (rows,) in step:
                step.backward(model(rows).square().mean())
            step.finish()
        found[name] = float(sum(buffer.double().abs().sum() for buffer in model.buffers()))
    return found


def test_norms_that_follow_the_data_are_equal_on_all_ranks(two_ranks: dict[str, list[Any]]) -> None:
    """An instance norm that tracks statistics, and a spectral norm whose ranks made different numbers of iterations."""
    one, other = two_ranks["normalised"]
    assert one == other
