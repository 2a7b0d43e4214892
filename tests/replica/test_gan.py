"""A GAN trains two replicas on one batch, whose generator's loss passes through the other model."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from paceline.base.errors import UserError
from paceline.replica.checkpoints import Checkpoints, load_weights
from paceline.replica.replica import Replica
from paceline.replica.share import share
from paceline.world.runtime import World

ROWS, BATCH, FEATURES = 14, 8, 4
STRATEGIES = (("ddp", "ddp"), ("fsdp", "zero"), ("fsdp", "fsdp"))  # of the generator and the critic
Result = tuple[list[float], dict[str, torch.Tensor]]  # the generator's losses, both models' weights


def models(norm: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(3, 8), norm(8), nn.Tanh(), nn.Linear(8, FEATURES))
    return generator, nn.Sequential(nn.Linear(FEATURES, 8), norm(8), nn.Tanh(), nn.Linear(8, 2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def images() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(2)))


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(images(), batch_size=BATCH, shuffle=True)


def error_of(logits: torch.Tensor, label: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def train_by_hand() -> Result:
    """The script as it is without paceline."""
    generator, critic = models(nn.LayerNorm)
    for_critic, for_generator = optimizer_of(critic), optimizer_of(generator)
    torch.manual_seed(3)
    losses = []
    for (real,) in loader():
        critic.zero_grad()
        error_of(critic(real), 1.0).backward()
        fake = generator(torch.randn(len(real), 3))
        error_of(critic(fake.detach()), 0.0).backward()
        for_critic.step()
        generator.zero_grad()
        loss = error_of(critic(fake), 1.0)
        loss.backward()
        for_generator.step()
        losses.append(loss.item())
    return losses, generator.state_dict() | {f"critic.{name}": t for name, t in critic.state_dict().items()}


def train_replicas(
    world: World,
    strategies: tuple[str, str] = ("ddp", "ddp"),
    norm: type[nn.Module] = nn.LayerNorm,
    folder: Path | None = None,
    micro_batch_size: int | None = None,
) -> Result:
    generator, critic = models(norm)
    for_generator, for_critic = (
        Replica(model, optimizer_of(model), world, strategy=strategy)  # type: ignore[arg-type]
        for model, strategy in zip((generator, critic), strategies, strict=True)
    )
    batches = share(loader(), world, micro_batch_size=micro_batch_size)
    checkpoints = folder and Checkpoints(folder, critic=for_critic, generator=for_generator, data=batches)
    is_sharded = for_generator.sync.shards_weights  # then its passes are within its own step
    is_frozen = is_sharded and not for_critic.sync.shards_weights
    torch.manual_seed(3)
    losses = []
    for batch in batches:
        step, for_its_step = for_critic.step(batch), []
        for (real,) in step:
            step.backward(error_of(critic(real), 1.0), more=True)
            noise = step.draw(torch.randn, 3)
            fake = generator(noise)
            step.backward(error_of(critic(fake.detach()), 0.0))
            for_its_step.append(noise if is_sharded else fake)
        step.finish()
        critic.requires_grad_(not is_frozen)
        step = for_generator.step(batch.like(for_its_step))
        for given in step:
            step.backward(error_of(critic(generator(given) if is_sharded else given), 1.0))
        losses.append(step.finish().loss)
        critic.requires_grad_(True)
    if checkpoints is not None:
        checkpoints.save()
        checkpoints.finish()
    weights = for_generator.state_dict() | {f"critic.{name}": t for name, t in for_critic.state_dict().items()}
    return losses, {name: tensor.clone() for name, tensor in weights.items()}


def test_one_process_computes_bit_for_bit_what_the_plain_script_does(world: World) -> None:
    """Finds: noise in another order than the script's, a loss through the other model that leaves gradients in it."""
    losses, weights = train_replicas(world)
    wanted_losses, wanted = train_by_hand()
    assert losses == wanted_losses
    assert {name for name, tensor in weights.items() if not torch.equal(tensor, wanted[name])} == set()


def refuse_a_plain_backward(world: World) -> None:
    """With fsdp, in the second step: in the first its gathered parameters have no hook yet."""
    _, critic = models(nn.LayerNorm)
    replica = Replica(critic, optimizer_of(critic), world, strategy="fsdp")
    replica.train(images()[:2], lambda x: (error_of(critic(x), 1.0), 2))
    replica.step(images()[:2])
    for _ in range(2):
        with pytest.raises(UserError, match=r"a gradient came without step\.backward: replace loss\.backward"):
            error_of(critic(images()[:2][0]), 1.0).backward()


def on_ranks(world: World, folder: Path) -> dict[tuple[str, str], Result]:
    """Micro-batches of 6 and 2 rows; of the last batch one of 6, so that rank 1 has none."""
    train_replicas(world, norm=nn.BatchNorm1d, folder=folder)
    refuse_a_plain_backward(world)
    return {strategies: train_replicas(world, strategies, micro_batch_size=6) for strategies in STRATEGIES}


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_train_as_one_process_and_save_what_both_steps_changed(tmp_path: Path) -> None:
    """Finds: batch norms of the critic saved as they were before the generator's step went through them.

    Mutation: with fsdp the critic's step adds the gradients that the generator's loss left in it."""
    wanted_losses, wanted = train_by_hand()
    for found in run_ranks(on_ranks, 2, tmp_path / "gan"):
        for strategies, (losses, weights) in found.items():
            assert losses == pytest.approx(wanted_losses, abs=1e-6), strategies
            for name, tensor in wanted.items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=f"{strategies}: {name}")
    assert load_weights(tmp_path / "gan", "critic")["1.num_batches_tracked"] == 3 * -(-ROWS // BATCH)


def test_a_batch_that_was_gone_through_says_what_the_second_model_is_to_be_given(world: World) -> None:
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
