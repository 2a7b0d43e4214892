"""What real scripts need that were moved here: a GAN's two models on one batch, a loader that reuses its buffer."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.base.errors import UserError
from paceline.replica.checkpoints import Checkpoints, load_weights
from paceline.replica.replica import Replica
from paceline.replica.share import share
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import World, open_world

NUM_ROWS, BATCH, FEATURES = 22, 8, 6  # the last batch has 6 rows: a third rank has none of them


def models(norm: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(3, 8), norm(8), nn.Tanh(), nn.Linear(8, FEATURES))
    return generator, nn.Sequential(nn.Linear(FEATURES, 8), norm(8), nn.Tanh(), nn.Linear(8, 1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def images() -> TensorDataset:
    return TensorDataset(torch.randn(NUM_ROWS, FEATURES, generator=torch.Generator().manual_seed(2)))


def error_of(found: torch.Tensor, label: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, label))


def train_by_hand() -> list[float]:
    """The script as it is without paceline."""
    generator, critic = models(nn.LayerNorm)
    for_critic, for_generator = optimizer_of(critic), optimizer_of(generator)
    torch.manual_seed(3)
    losses = []
    for (real,) in DataLoader(images(), batch_size=BATCH, shuffle=True):
        critic.zero_grad()
        error_of(critic(real), 1.0).backward()  # type: ignore[no-untyped-call]
        fake = generator(torch.randn(len(real), 3))
        error_of(critic(fake.detach()), 0.0).backward()  # type: ignore[no-untyped-call]
        for_critic.step()
        generator.zero_grad()
        loss = error_of(critic(fake), 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        for_generator.step()
        losses.append(loss.item())
    return losses


def train_shared(world: World, norm: type[nn.Module], folder: str = "") -> list[float]:
    generator, critic = models(norm)
    for_critic = Replica(critic, optimizer_of(critic), world)
    for_generator = Replica(generator, optimizer_of(generator), world)
    batches = share(DataLoader(images(), batch_size=BATCH, shuffle=True), world)
    checkpoints = Checkpoints(folder, critic=for_critic, generator=for_generator, data=batches) if folder else None
    torch.manual_seed(3)
    losses = []
    for batch in batches:
        step, fakes = for_critic.step(batch), []
        for (real,) in step:
            step.backward(error_of(critic(real), 1.0), more=True)
            fakes.append(generator(step.draw(torch.randn, 3)))
            step.backward(error_of(critic(fakes[-1].detach()), 0.0))
        step.finish()
        step = for_generator.step(batch.like(fakes))
        for fake in step:
            step.backward(error_of(critic(fake), 1.0))
        losses.append(step.finish().loss)
        if checkpoints is not None:
            checkpoints.save()
    if checkpoints is not None:
        checkpoints.finish()
    return losses


def alone() -> Any:
    return open_world(ParallelConfig(device="cpu", threads=1), detect({}))


def test_a_gan_of_one_process_computes_bit_for_bit_what_the_plain_script_does() -> None:
    with alone() as world:
        assert train_shared(world, nn.LayerNorm) == train_by_hand()


def test_a_gan_of_three_ranks_has_the_losses_of_one_process() -> None:
    wanted = train_by_hand()
    for losses in run_ranks(train_shared, 3, nn.LayerNorm):
        assert losses == pytest.approx(wanted, abs=1e-6)


def test_batch_norms_that_the_other_replica_s_step_went_through_are_saved(tmp_path: Any) -> None:
    run_ranks(train_shared, 3, nn.BatchNorm1d, str(tmp_path / "gan"))
    assert load_weights(tmp_path / "gan", "critic")["1.num_batches_tracked"] == 3 * -(-NUM_ROWS // BATCH)


def test_a_batch_that_was_gone_through_says_what_the_second_model_is_to_be_given() -> None:
    with alone() as world:
        generator, critic = models(nn.LayerNorm)
        first, second = Replica(critic, optimizer_of(critic), world), Replica(generator, optimizer_of(generator), world)
        batch = next(iter(share(images(), world, batch_size=BATCH)))
        for (x,) in (step := first.step(batch)):
            step.backward(error_of(critic(x), 1.0))
        step.finish()
        with pytest.raises(UserError, match=r"another step has already used this batch.*batch\.like"):
            next(iter(second.step(batch)))
        with pytest.raises(UserError, match="0 micro-batches cannot stand for the 1"):
            batch.like([])


def test_print_may_be_what_the_world_says(capsys: pytest.CaptureFixture[str]) -> None:
    with alone() as world:
        print_ = world.say
        print_("\rstep", 3, end="", sep="-", flush=True)
    assert capsys.readouterr().out == "\rstep-3"
