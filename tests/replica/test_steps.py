"""Steps over shared sources: true weights, noise by row, functions that draw, micro-batches when they are needed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.base.seeds import key
from paceline.replica import generators
from paceline.world.runtime import World


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


def test_a_micro_batch_weighs_its_true_number_of_samples(world: World, on_ranks: list["Seen"]) -> None:
    """S4: five samples in micro-batches of three and two, whatever the first dimension of their first tensor is."""
    model = linear()
    optimizer = sgd(model)
    loss = model(SAMPLES).square().mean()
    loss.backward()
    optimizer.step()
    expected = model[1].weight.flatten().tolist()  # type: ignore[index,union-attr]
    for found in (weighed(world), *(seen.weighed for seen in on_ranks)):
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


def test_the_second_micro_batch_is_read_after_the_first_one_s_forward(world: World) -> None:
    """S11."""
    data, model = Noted(), linear()
    replica = paceline.Replica(model, sgd(model), world)
    for step in replica.steps(DataLoader(data, 4), micro_batch_size=2):
        for x in step:
            data.events.append("forward")
            step.backward(model(x).mean())
        step.finish()
    one = [["read 0", "read 1", "forward"], ["read 2", "read 3", "forward"]]
    two = [["read 4", "read 5", "forward"], ["read 6", "read 7", "forward"]]
    assert data.events == sum([*one, *two], [])  # noqa: RUF017


# ---- noise by row ----


def noisy(world: World, shares: tuple[int, ...] = ()) -> tuple[dict[int, list[float]], list[int]]:
    """The noise that each sample of each step got on this rank, and the generator at the end."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), world)
    torch.manual_seed(5)
    found: dict[int, list[float]] = {}
    sharing: dict[str, Any] = {"batch_size": 5, "micro_batch_size": 2, "shuffle": False, "shares": shares}
    for step in replica.steps(torch.arange(8), **sharing):  # then one of 3
        for numbers in step:
            noise, other = step.draw(torch.randn, 3), step.draw(torch.rand)
            found |= {int(n): [*row.tolist(), float(more)] for n, row, more in zip(numbers, noise, other, strict=True)}
            step.backward(model(noise).mean())
        step.finish()
    return found, torch.get_rng_state().tolist()


def waited_for(world: World) -> list[tuple[float, float]]:
    """Exposed communication and length of two steps, in ms; before each a script's own call waits for rank 2."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), world)
    found = []
    for _ in range(2):
        time.sleep(0.2 * (world.rank == 2))
        world.mean(1.0)
        times = replica.train(SAMPLES, lambda x: model(x).square().mean()).times
        found.append((times.exposed_comm_ms, times.step_ms))
    return found


@dataclass(frozen=True)
class Seen:
    """By one of three ranks."""

    waited_for: list[tuple[float, float]]
    weighed: dict[str, tuple[float, float, list[float]]]
    noisy: tuple[dict[int, list[float]], list[int]]
    noisy_beside: tuple[dict[int, list[float]], list[int]]  # rank 0 has no rows
    drawn: Any
    drawn_with_dropout: Any
    random_evaluation: float


def see(world: World) -> Seen:
    return Seen(
        waited_for(world),
        weighed(world),
        noisy(world),
        noisy(world, (0, 1, 1)),
        drawing(world, 0.0),
        drawing(world, 0.5),
        random_evaluation(world),
    )


@pytest.fixture(scope="module")
def on_ranks() -> list[Seen]:
    return run_ranks(see, 3)


def test_noise_belongs_to_the_sample_on_any_number_of_ranks(world: World, on_ranks: list[Seen]) -> None:
    """D6: with several micro-batches, and ranks without one, also rank 0; and the generators stay equal."""
    expected, state = noisy(world)
    assert sorted(expected) == list(range(8))
    assert len({row[0] for row in expected.values()}) == 8
    for by_rank in ([seen.noisy for seen in on_ranks], [seen.noisy_beside for seen in on_ranks]):
        assert {n: row for rows, _ in by_rank for n, row in rows.items()} == expected
        assert [at_end == state for _, at_end in by_rank] == [True] * len(on_ranks)


def test_a_wait_before_a_step_is_no_part_of_it(on_ranks: list[Seen]) -> None:
    for seen in on_ranks:
        assert all(exposed_ms <= step_ms for exposed_ms, step_ms in seen.waited_for)


# ---- functions that draw ----

NUM_STEPS, NUM_MICRO_BATCHES = 3, 4


def draw() -> torch.Tensor:
    return torch.rand(1, 3)


def numbers_of(batch: torch.Tensor) -> list[float]:
    return batch.flatten().tolist()


def fetching_ahead(rate: float) -> tuple[list[list[list[float]]], list[list[float]]]:
    """nanoGPT's loop: what it trains on, by step, and what its evaluation before each update draws."""
    torch.manual_seed(5)
    trained: list[list[list[float]]] = []
    evaluated = []
    batch = draw()
    for _ in range(NUM_STEPS):
        evaluated.append(numbers_of(draw()))
        trained.append([])
        for _ in range(NUM_MICRO_BATCHES):
            nn.functional.dropout(torch.ones(3), rate)
            trained[-1].append(numbers_of(batch))
            batch = draw()
    return trained, evaluated


def drawing(world: World, rate: float) -> tuple[list[list[list[float]]], list[list[float]]]:
    """The same loop with a replica: on ranks, this rank's part."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), world)
    torch.manual_seed(5)
    trained: list[list[list[float]]] = []
    evaluated = []
    for step in replica.steps(draw, micro_batches=NUM_MICRO_BATCHES, max_steps=NUM_STEPS):
        evaluated.append(numbers_of(draw()))
        trained.append([])
        for batch in step:
            nn.functional.dropout(torch.ones(3), rate)
            trained[-1].append(numbers_of(batch))
            step.backward(model(batch).square().mean())
        step.finish()
    return trained, evaluated


def test_a_function_draws_between_the_scripts_own_draws_as_in_a_loop_that_fetches_ahead(world: World) -> None:
    assert drawing(world, 0.5) == fetching_ahead(0.5)


def test_ranks_share_what_a_function_draws_alone(on_ranks: list[Seen]) -> None:
    """Dropout draws on each rank as often as it has micro-batches; the next step's draws are rank 0's all the same."""
    trained, evaluated = fetching_ahead(0.0)
    parts = [seen.drawn for seen in on_ranks]
    assert [[batch for part in parts for batch in part[0][step]] for step in range(NUM_STEPS)] == trained
    assert [part[1] for part in parts] == [evaluated] * len(parts)
    dropped = [seen.drawn_with_dropout[1] for seen in on_ranks]
    assert dropped == dropped[:1] * len(dropped)


def test_an_evaluation_over_a_function_that_draws_is_one_step_of_it(world: World) -> None:
    """It never ended."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), world)
    draws: list[torch.Tensor] = []

    def get_batch() -> torch.Tensor:
        draws.append(torch.rand(2, 3))
        return draws[-1]

    found = replica.evaluate(get_batch, lambda x: model(x).mean(), micro_batches=3)
    assert len(draws) == 3
    with torch.no_grad():
        assert found == pytest.approx(float(torch.stack([model(x).mean() for x in draws]).mean()))


def random_evaluation(world: World) -> float:
    """The mean of numpy's numbers that an evaluation draws beside the samples."""
    model = linear()
    replica = paceline.Replica(model, sgd(model), world)
    return float(replica.evaluate(torch.arange(3), lambda x: float(np.random.rand()), batch_size=3))


def test_an_evaluation_draws_the_same_whatever_it_reads(on_ranks: list[Seen]) -> None:
    """Finds: reading, which draws by the row, seeds the generator of an evaluation anew."""
    with generators.seeded(5):
        first, second, third = (np.random.rand() for _ in range(3))
    with generators.seeded(5):
        assert np.random.rand() == first
        with generators.seeded(6):
            np.random.rand()
            with generators.seeded(7):
                np.random.rand()
        assert np.random.rand() == second
        with generators.seeded(8), generators.seeded(9), generators.seeded(10):
            np.random.rand()
        assert np.random.rand() == third
    with generators.seeded(key("evaluation")):
        drawn = float(np.random.rand())
    assert [seen.random_evaluation for seen in on_ranks] == pytest.approx([drawn] * len(on_ranks))


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


def test_an_evaluation_with_random_draws_before_a_save_resumes_to_the_same_curve(world: World, tmp_path: Path) -> None:
    """D5."""
    straight = curve(world, tmp_path, save_at=6)
    assert len(straight) == 9
    assert curve(world, tmp_path, save_at=0) == straight[5:]


def test_what_is_drawn_aside_leaves_no_trace(world: World, tmp_path: Path) -> None:
    """D5."""
    assert curve(world, tmp_path / "a", 0, "never") == curve(world, tmp_path / "b", 0, "aside")
    assert curve(world, tmp_path / "c", 0, "never") != curve(world, tmp_path / "d", 0, "draws")
