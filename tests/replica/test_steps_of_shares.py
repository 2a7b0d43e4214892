"""Steps over shared sources: true weights, noise by row, functions that draw, micro-batches when they are needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World, open_world


@pytest.fixture
def alone() -> Iterator[World]:
    with open_world(ParallelConfig(device="cpu", threads=1), Environment()) as world:
        yield world


def linear(width: int = 3, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(width, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---- weights ----

SAMPLES = torch.arange(15.0).view(5, 3).sin()
COLLATED: dict[str, Any] = {  # how samples become a micro-batch, and the mean loss over it
    "images": (torch.stack, lambda model, x: model(x).square().mean()),
    "sequence first": (lambda rows: torch.stack(rows, 1), lambda model, x: model(x.T).square().mean()),
    "dicts": (
        lambda rows: {"n": torch.ones(2), "x": torch.stack(rows)},
        lambda model, b: model(b["x"]).square().mean(),
    ),
    "uncollated": (list, lambda model, rows: torch.stack([model(x) for x in rows]).square().mean()),
}


def weighed(world: World) -> dict[str, tuple[float, float, list[float]]]:
    found = {}
    for name, (collate, loss_of) in COLLATED.items():
        model = linear()
        replica = paceline.Replica(model, sgd(model), world)
        loader = DataLoader(list(SAMPLES), 5, collate_fn=collate)  # type: ignore[arg-type]
        for step in replica.steps(loader, micro_batch_size=3):
            for micro_batch in step:
                step.backward(loss_of(model, micro_batch))
            result = step.finish()
        found[name] = result.loss, result.weight, model[1].weight.flatten().tolist()  # type: ignore[index,union-attr]
    return found


def test_a_micro_batch_weighs_its_true_number_of_samples(alone: World) -> None:
    """S4: five samples in micro-batches of three and two, whatever the first dimension of their first tensor is."""
    model = linear()
    optimizer = sgd(model)
    loss = model(SAMPLES).square().mean()
    loss.backward()
    optimizer.step()
    expected = model[1].weight.flatten().tolist()  # type: ignore[index,union-attr]
    for found in (weighed(alone), *run_ranks(weighed, 2)):
        for name in COLLATED:
            mean, weight, weights = found[name]
            assert (mean, weight) == (pytest.approx(loss.item()), 5.0), name
            assert weights == pytest.approx(expected), name


# ---- when data is read ----


class Noted(Dataset[torch.Tensor]):
    """Samples that say when they are read."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.events.append(f"read {index}")
        return torch.ones(3)


def test_the_second_micro_batch_is_read_after_the_first_one_s_forward(alone: World) -> None:
    """S11."""
    data, model = Noted(), linear()
    replica = paceline.Replica(model, sgd(model), alone)
    for step in replica.steps(DataLoader(data, 4), micro_batch_size=2):
        for x in step:
            data.events.append("forward")
            step.backward(model(x).mean())
        step.finish()
    one = [["read 0", "read 1", "forward"], ["read 2", "read 3", "forward"]]
    two = [["read 4", "read 5", "forward"], ["read 6", "read 7", "forward"]]
    assert data.events == sum([*one, *two], [])  # noqa: RUF017


# ---- noise by row ----


def noisy(world: World) -> tuple[dict[int, list[float]], list[int]]:
    """The noise that each sample of each step got on this rank, and the generator at the end."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), world)
    torch.manual_seed(5)
    found: dict[int, list[float]] = {}
    for step in replica.steps(torch.arange(8), batch_size=5, micro_batch_size=2, shuffle=False):  # then one of 3
        for numbers in step:
            noise, other = step.draw(torch.randn, 3), step.draw(torch.rand)
            found |= {int(n): [*row.tolist(), float(more)] for n, row, more in zip(numbers, noise, other, strict=True)}
            step.backward(model(noise).mean())
        step.finish()
    return found, torch.get_rng_state().tolist()


def test_noise_belongs_to_the_sample_on_any_number_of_ranks(alone: World) -> None:
    """D6: with several micro-batches, and ranks without one; and the generators stay equal."""
    expected, state = noisy(alone)
    assert sorted(expected) == list(range(8))
    assert len({row[0] for row in expected.values()}) == 8
    for world_size in (2, 3):
        results = run_ranks(noisy, world_size)
        assert {n: row for found, _ in results for n, row in found.items()} == expected
        assert [after == state for _, after in results] == [True] * world_size


# ---- functions that draw ----


def drawing(world: World, dropout: float) -> tuple[list[list[float]], list[list[float]], bool]:
    """The micro-batches that this rank was given, all that the function drew, and whether generators end equal."""
    model = linear(dropout=dropout)
    replica = paceline.Replica(model, sgd(model), world)
    torch.manual_seed(11)
    drawn: list[list[float]] = []

    def get_batch() -> torch.Tensor:
        drawn.append(torch.rand(3).tolist())
        return torch.tensor([drawn[-1]])

    given = []
    for step in replica.steps(get_batch, micro_batches=4, max_steps=3):
        for x in step:
            given.append(x[0].tolist())
            step.backward(model(x).square().mean())
        step.finish()
    return given, drawn


def test_a_function_gives_the_same_micro_batches_on_any_number_of_ranks(alone: World) -> None:
    plain, all_of_it = drawing(alone, 0.0)
    assert plain == all_of_it
    torch.manual_seed(11)
    assert plain == [torch.rand(3).tolist() for _ in range(12)]
    for world_size in (2, 3):
        results = run_ranks(both_drawings, world_size)
        counts = [len(given) // 3 for (given, _), _ in results]
        steps = [
            [given[k * n : (k + 1) * n] for ((given, _), _), n in zip(results, counts, strict=True)] for k in range(3)
        ]
        assert [row for step in steps for of_rank in step for row in of_rank] == plain
        # Dropout draws on each rank as often as it has micro-batches; the next step's draws are rank 0's all the same.
        assert all(dropped[1] == results[0][1][1] for _, dropped in results)


def test_an_evaluation_over_a_function_that_draws_is_one_step_of_it(alone: World) -> None:
    """It never ended."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), alone)
    draws: list[torch.Tensor] = []

    def get_batch() -> torch.Tensor:
        draws.append(torch.rand(2, 3))
        return draws[-1]

    found = replica.evaluate(get_batch, lambda x: model(x).mean(), micro_batches=3)
    assert len(draws) == 3
    with torch.no_grad():
        assert found == pytest.approx(float(torch.stack([model(x).mean() for x in draws]).mean()))


def both_drawings(world: World) -> Any:
    return drawing(world, 0.0), drawing(world, 0.5)


# ---- nanoGPT's loop ----


def curve(world: World, folder: Path, save_at: int, evaluates: str = "draws") -> list[float]:
    """Losses by step. Evaluates with random draws, then saves, then trains, as nanoGPT does, all in the body."""
    model = linear(dropout=0.3)
    replica = paceline.Replica(model, sgd(model), world)
    checkpoints = paceline.Checkpoints(folder, net=replica)
    torch.manual_seed(3)
    checkpoints.restore()
    found = []

    def get_batch() -> torch.Tensor:
        return torch.rand(2, 3)

    def evaluate() -> None:
        with torch.no_grad():
            model(get_batch())

    for step in replica.steps(get_batch, micro_batches=2, max_steps=9):
        if step.number % 2 == 0 and evaluates == "draws":
            evaluate()
        elif evaluates == "aside":
            with replica.aside():
                evaluate()
        if step.number == save_at:
            checkpoints.save()
        for x in step:
            step.backward(model(x).square().mean())
        found.append(step.finish().loss)
    checkpoints.finish()
    return found


def test_an_evaluation_with_random_draws_before_a_save_resumes_to_the_same_curve(alone: World, tmp_path: Path) -> None:
    """D5."""
    straight = curve(alone, tmp_path, save_at=6)
    assert len(straight) == 9
    assert curve(alone, tmp_path, save_at=0) == straight[5:]


def test_what_is_drawn_aside_leaves_no_trace(alone: World, tmp_path: Path) -> None:
    """D5."""
    assert curve(alone, tmp_path / "a", 0, "never") == curve(alone, tmp_path / "b", 0, "aside")
    assert curve(alone, tmp_path / "c", 0, "never") != curve(alone, tmp_path / "d", 0, "draws")
