"""Scripts that were moved to the API give what they gave before: what moving real ones showed."""

from typing import Any

import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, TensorDataset

from paceline.replica.replica import Replica
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import World, open_world

NUM_STEPS, NUM_MICRO_BATCHES = 3, 4


def draw() -> torch.Tensor:
    return torch.randint(1_000_000, (1,))


def fetching_ahead(rate: float) -> tuple[list[list[int]], list[int]]:
    """nanoGPT's loop: what it trains on, by step, and what its evaluation before each update draws."""
    torch.manual_seed(5)
    trained, evaluated = [], []
    batch = draw()
    for _ in range(NUM_STEPS):
        evaluated.append(int(draw()))
        trained.append([])
        for _ in range(NUM_MICRO_BATCHES):
            dropout(torch.ones(3), rate)
            trained[-1].append(int(batch))
            batch = draw()
    return trained, evaluated


def whole_ported(world: World, rate: float) -> tuple[list[list[int]], list[int]]:
    torch.manual_seed(7)
    model = nn.Linear(1, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), 0.0), world)
    torch.manual_seed(5)
    trained: list[list[int]] = []
    evaluated = []
    for step in replica.steps(draw, micro_batches=NUM_MICRO_BATCHES, max_steps=NUM_STEPS):
        evaluated.append(int(draw()))
        trained.append([])
        for batch in step:
            dropout(torch.ones(3), rate)
            trained[-1].append(int(batch))
            step.backward(model(torch.ones(1, 1)).mean())
        step.finish()
    return trained, evaluated


def test_a_function_draws_between_the_scripts_own_draws_as_in_a_loop_that_fetches_ahead() -> None:
    with open_world(ParallelConfig(device="cpu"), detect()) as world:
        assert whole_ported(world, 0.5) == fetching_ahead(0.5)


def test_ranks_share_what_a_function_draws_alone_and_may_draw_before() -> None:
    trained, evaluated = fetching_ahead(0.0)
    found = run_ranks(whole_ported, 3, 0.0)
    assert [rank[1] for rank in found] == [evaluated] * 3
    assert [[number for rank in found for number in rank[0][step]] for step in range(NUM_STEPS)] == trained


def test_uneven_batches_give_the_bits_of_a_plain_loop() -> None:
    data = TensorDataset(torch.randn(7, 5, generator=torch.Generator().manual_seed(1)))

    def trained(replica: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        loader: DataLoader[Any] = DataLoader(data, batch_size=3)  # 3, 3 and 1 rows
        if replica:
            with open_world(ParallelConfig(device="cpu"), detect()) as world:
                own = Replica(model, optimizer, world)
                for step in own.steps(loader, epochs=3):
                    for (x,) in step:
                        step.backward(model(x).square().mean())
                    step.finish()
        else:
            for _ in range(3):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))
