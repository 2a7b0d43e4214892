"""What scripts do beyond the plain loop, held against the same script by torch alone in one process."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline.replica.replica import Replica
from paceline.replica.share import share
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


# ---- two models against each other ----


def gan(world: World | None, strategy: str = "ddp") -> Tensors:
    """D on real and false rows by two losses, G's loss passes through D; noise by row; one optimizer each. strategy: of
    both, or of G and of D."""
    g, d = net(1, 3, 4), net(2, 4, 1)
    optimizers = adam(g), adam(d)
    torch.manual_seed(5)
    if world is None:
        for x, _ in loader():
            noise, more = torch.randn(len(x), 3), torch.randn(len(x), 3)
            (against(d(x), 1) + against(d(g(noise).detach()), 0)).backward()
            optimizers[1].step()
            g.zero_grad()
            against(d(g(more)), 1).backward()
            optimizers[0].step()
            g.zero_grad(), d.zero_grad()
        return {**weights(g), **{f"d.{name}": tensor for name, tensor in weights(d).items()}}
    strategies: Any = 2 * strategy.split(", ")
    g_replica, d_replica = (
        Replica(m, o, world, strategy=s) for m, o, s in zip((g, d), optimizers, strategies[:2], strict=True)
    )
    for batch in share(loader(), world, micro_batch_size=2):
        noises = []
        step = d_replica.step(batch)
        for x, _ in step:
            noise, more = step.draw(torch.randn, 3), step.draw(torch.randn, 3)
            noises.append(more)
            step.backward(against(d(x), 1), more=True)
            step.backward(against(d(g(noise).detach()), 0))
        step.finish()
        d.requires_grad_(not g_replica.sync.shards_weights)
        g_replica.train(batch.like(noises), lambda noise: against(d(g(noise)), 1))
        d.requires_grad_(True)
    return {**state(g_replica), **{f"d.{name}": tensor for name, tensor in state(d_replica).items()}}


def against(logits: torch.Tensor, target: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


# ---- the gradients of the whole batch, before the update ----


def reduced(world: World | None, strategy: Any = "ddp") -> Tensors:
    """Clipped by value, then each layer to a norm of its own; one gradient replaced, another read."""
    model, seen = net(), []
    optimizer = adam(model)
    replica = Replica(model, optimizer, world, strategy=strategy, bucket_mb=1e-4) if world else None

    def change() -> None:
        seen.append(torch.stack([p.grad.norm() for p in model.parameters()]))
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.06)
        model[2].bias.grad = model[2].bias.grad * 0.5

    if replica is None:
        for x, y in loader():
            mse_loss(model(x), y).backward()
            change()
            optimizer.step()
            optimizer.zero_grad()
        return {**weights(model), "seen": torch.stack(seen)}
    for step in replica.steps(loader(), micro_batch_size=1):
        for x, y in step:
            step.backward(mse_loss(model(x), y))
        step.reduce()
        change()
        assert step.finish().shared == [[]] * world.world_size
    return {**state(replica), "seen": torch.stack(seen)}


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
    for step in replica.steps(loader(), epochs=2):
        for x, y in step:
            too_much = 1e4 if overflows and step.number == 1 and step.rows.start == 0 else 1
            step.backward(mse_loss(model(x).float() * too_much, y))
        result = step.finish(max_norm=1.0)
        found["losses"].append(result.loss)
        found["skipped"].append(result.skipped is not None)
        found["scales"].append(replica.scaler.scale)
    return {**found, "weights": overall(replica.state_dict())}


# ---- frozen, compiled, copied, made again ----


class Adapted(nn.Module):
    """As peft makes it: a frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = net().requires_grad_(False)
        torch.manual_seed(4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def trained(world: World | None, model: nn.Module, strategy: Any = "ddp") -> Tensors:
    optimizer = adam(model)
    if world is None:
        for x, y in loader():
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)
    replica = Replica(model, optimizer, world, strategy=strategy)
    for step in replica.steps(loader()):
        replica.train(step, lambda x, y: mse_loss(model(x), y))
    return state(replica)


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

Case = tuple[Callable[..., Tensors], Any]
CASES: dict[str, Case] = {
    "gan": (gan, ("ddp", "zero", "fsdp, ddp", "zero, fsdp")),
    "reduced": (reduced, ("ddp", "zero", "naive")),
    "uneven": (uneven, ("fsdp", "zero")),
    "adapted": (lambda world, strategy="ddp": trained(world, Adapted(), strategy), ("ddp", "zero")),
}


def everything(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (script, strategies) in CASES.items():
        found |= {f"{name}, {strategy}": script(world, strategy) for strategy in strategies}
    found["halved"] = halved(world, "float32"), halved(world, "float16"), halved(world, "float16", overflows=True)
    found["copies"] = {strategy: copies(world, strategy) for strategy in ("ddp", "zero", "naive")}
    found["again"] = {
        (strategy, same): again(world, strategy, same) for strategy in ("ddp", "zero") for same in (True, False)
    }
    model = net()
    numbers = Replica(model, adam(model), world).step(data()[world.rank : world.rank + 1][0])
    numbers.backward(model(data()[world.rank : world.rank + 1][0]).square().mean())
    found["shared"] = numbers.finish(share=[world.rank, 0.5]).shared
    return found


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    with open_world(ParallelConfig(device="cpu", threads=1), detect()) as world:
        rows = {1: [everything(world)]}
    return rows | {size: run_ranks(everything, size) for size in (2, 3)}


def rows_of(worlds: dict[int, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for rows in worlds.values():
        yield from rows


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_script_equals_one_process(worlds: dict[int, list[dict[str, Any]]], name: str) -> None:
    """A GAN of two replicas; gradients changed after reduce(); S5: fsdp with unequal micro-batches, training and
    evaluation; a model that is frozen but for adapters."""
    script, strategies = CASES[name]
    wanted = script(None)
    for row in rows_of(worlds):
        for strategy in strategies:
            found = row[f"{name}, {strategy}"]
            for key, tensor in wanted.items():
                torch.testing.assert_close(found[key], tensor, rtol=0, atol=2e-6, msg=f"{name}, {strategy}: {key}")


@pytest.mark.long
def test_float16_scales_and_skips_on_all_ranks_together(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """D1."""
    for rows in worlds.values():
        for row in rows:
            full, half, skipped = row["halved"]
            assert row["halved"] == rows[0]["halved"]
            assert half["losses"] == pytest.approx(full["losses"], rel=5e-3)
            assert (half["skipped"], half["scales"]) == ([False] * 10, [2.0**16] * 10)
            assert (skipped["skipped"], skipped["scales"]) == ([True] + [False] * 9, [2.0**15] * 10)


@pytest.mark.long
def test_copies_and_files_of_a_model_hold_nothing_of_the_world(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """D3: torch.save(model) failed once a Replica existed."""
    for row in rows_of(worlds):
        for strategy, digests in row["copies"].items():
            assert len(set(digests)) == 1, strategy


@pytest.mark.long
def test_a_replica_of_the_same_model_or_optimizer_trains_on(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """S6. With zero an optimizer that several ranks share begins anew, and says so."""
    for size, rows in worlds.items():
        for row in rows:
            for (strategy, same), losses in row["again"].items():
                is_lost = strategy == "zero" and size > 1
                assert losses == pytest.approx(again_plain(same and not is_lost), abs=1e-6), (strategy, same, size)


@pytest.mark.long
def test_numbers_that_are_shared_in_a_step(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for size, rows in worlds.items():
        assert all(row["shared"] == [[float(rank), 0.5] for rank in range(size)] for row in rows)
