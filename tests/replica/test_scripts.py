"""What scripts do beyond the plain loop, held against the same script by torch alone in one process."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline.replica.replica import Replica
from paceline.sync.replicas import overall
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import World, open_world

Tensors = dict[str, torch.Tensor]
ROWS, BATCH = 22, 5  # four batches of 5 and one of 2, which leaves ranks without a row


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 2, generator=generator))


def loader() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=BATCH)


def net(seed: int = 0, inside: int = 4, outside: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inside, 6), nn.Tanh(), nn.Linear(6, outside))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)


def weights(model: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def state(replica: Replica) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in replica.state_dict().items()}


# ---- fsdp: equally many passes on all ranks ----


def uneven(world: World | None, strategy: Any = "fsdp") -> Tensors:
    """Training and evaluation where ranks have unequal numbers of micro-batches, one in a batch of two rows none."""
    model = net(inside=4, outside=4)
    optimizer = adam(model)
    replica = Replica(model, optimizer, world, strategy=strategy) if world else None
    target = lambda y: torch.cat([y, y], 1)  # noqa: E731
    loss_of = lambda x, y: mse_loss(model(x), target(y))  # noqa: E731
    if replica is None:
        for x, y in loader():
            loss_of(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            means = loss_of(*data().tensors), mse_loss(model(data().tensors[0]), torch.zeros(ROWS, 4))
        return {**weights(model), "means": torch.stack(means)}
    for step in replica.steps(loader(), micro_batch_size=2):
        replica.train(step, loss_of)
    both = lambda x, y: {"a": loss_of(x, y), "b": mse_loss(model(x), torch.zeros(len(x), 4))}  # noqa: E731
    found = replica.evaluate(data(), both, batch_size=5, micro_batch_size=2)
    assert replica.evaluate(loader(), loss_of) == pytest.approx(found["a"], abs=1e-6)
    return {**state(replica), "means": torch.tensor([found["a"], found["b"]])}


# ---- float16 ----


def halved(world: World, dtype: Any, overflows: bool = False) -> dict[str, Any]:
    """Its losses, what was skipped, and the scale. overflows: in the first step, by one rank's rows alone."""
    model = net()
    replica = Replica(model, adam(model), world, strategy="zero", dtype=dtype)
    found: dict[str, Any] = {"losses": [], "skipped": [], "scales": []}
    for step in replica.steps(loader()):
        for x, y in step:
            too_much = 1e4 if overflows and step.number == 1 and step.rows.start == 0 else 1
            step.backward(mse_loss(model(x).float() * too_much, y))
        result = step.finish(max_norm=1.0)
        found["losses"].append(result.loss)
        found["skipped"].append(result.skipped is not None)
        found["scales"].append(replica.scaler.scale)
    return {**found, "weights": overall(replica.state_dict())}


# ---- copied, made again ----


def copies(world: World, strategy: Any) -> list[str]:
    """Digests of the model and of what torch.save, pickle and deepcopy make of it; each copy trains."""
    model = net()
    optimizer = adam(model)
    replica = Replica(model, optimizer, world, strategy=strategy, blocks=[model[0]])
    replica.train(data()[: 2 + world.rank][0], lambda x: (model(x).square().mean(), len(x)))
    whole = replica.state_dict()  # waits for the weights
    file = io.BytesIO()
    torch.save(model, file)
    assert len(file.getvalue()) < 20_000, "it took more than the model with it"
    file.seek(0)
    made = [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    digests = [overall(dict(each.state_dict())) for each in (*made, model)]
    for each in made:
        each(torch.ones(1, 4)).sum().backward()
        adam(each).step()
    assert overall(replica.state_dict()) == overall(whole), "a copy shares the model's memory"
    return digests


def again(world: World, strategy: Any, same_optimizer: bool) -> list[float]:
    """A notebook's cell that runs again: another Replica of the same model, perhaps of the same optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        if not same_optimizer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = Replica(model, optimizer, world, strategy=strategy)
        steps = replica.steps(loader(), max_steps=2)
        losses += [replica.train(step, lambda x, y: mse_loss(model(x), y)).loss for step in steps]
    return losses


def again_plain(same_optimizer: bool) -> list[float]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        if not same_optimizer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for (x, y), _ in zip(loader(), range(2), strict=False):
            loss = mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


# ---- the worlds ----


def everything(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {f"uneven, {strategy}": uneven(world, strategy) for strategy in ("fsdp", "zero")}
    found["halved"] = halved(world, "float32"), halved(world, "float16"), halved(world, "float16", overflows=True)
    found["copies"] = {strategy: copies(world, strategy) for strategy in ("ddp", "zero", "naive")}
    found["again"] = {
        (strategy, same): again(world, strategy, same) for strategy in ("ddp", "zero") for same in (True, False)
    }
    model = net()
    rows = data()[world.rank : world.rank + 1][0]
    step = Replica(model, adam(model), world).step(rows)
    step.backward(model(rows).square().mean())
    found["shared"] = step.finish(numbers=[world.rank, 0.5]).numbers
    return found


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """By size."""
    with open_world(ParallelConfig(device="cpu", threads=1), detect()) as world:
        alone = everything(world)
    return {1: [alone], 2: run_ranks(everything, 2)}


def rows_of(worlds: dict[int, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for rows in worlds.values():
        yield from rows


def test_ranks_may_have_unequal_numbers_of_micro_batches(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """S5. Finds: fsdp without equally many passes on all ranks, in training and in evaluation."""
    wanted = uneven(None)
    for row in rows_of(worlds):
        for strategy in ("fsdp", "zero"):
            for key, tensor in wanted.items():
                found = row[f"uneven, {strategy}"][key]
                torch.testing.assert_close(found, tensor, rtol=0, atol=2e-6, msg=f"{strategy}: {key}")


def test_float16_scales_and_skips_on_all_ranks_together(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """D1."""
    for rows in worlds.values():
        for row in rows:
            full, half, skipped = row["halved"]
            assert row["halved"] == rows[0]["halved"]
            assert half["losses"] == pytest.approx(full["losses"], rel=5e-3)
            assert (half["skipped"], half["scales"]) == ([False] * 5, [2.0**16] * 5)
            assert (skipped["skipped"], skipped["scales"]) == ([True] + [False] * 4, [2.0**15] * 5)


def test_copies_and_files_of_a_model_hold_nothing_of_the_world(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """D3: torch.save(model) failed once a Replica existed."""
    for row in rows_of(worlds):
        for strategy, digests in row["copies"].items():
            assert len(set(digests)) == 1, strategy


def test_a_replica_of_the_same_model_or_optimizer_trains_on(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """S6. With zero an optimizer that several ranks share begins anew, and says so."""
    for size, rows in worlds.items():
        for row in rows:
            for (strategy, same), losses in row["again"].items():
                is_lost = strategy == "zero" and size > 1
                assert losses == pytest.approx(again_plain(same and not is_lost), abs=1e-6), (strategy, same, size)


def test_numbers_that_are_shared_in_a_step(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for size, rows in worlds.items():
        assert all(row["shared"] == [[float(rank), 0.5] for rank in range(size)] for row in rows)
