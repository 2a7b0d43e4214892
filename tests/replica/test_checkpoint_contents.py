"""All that a script is made of in one checkpoint: several replicas, averaged weights, tensors, generators, the data's
position, in the middle of a step and after it; for any world and strategy."""

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from whole_runs import former_manifest

from paceline.base.errors import UserError
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.steps import MANIFEST
from paceline.checkpoint.writers import save_complete
from paceline.replica.checkpoints import Checkpoints, load_weights
from paceline.replica.replica import Replica
from paceline.sync.replicas import overall
from paceline.world.runtime import World


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 2))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(13, 4, generator=generator), torch.randn(13, 2, generator=generator))


class Script:
    """Two replicas of equal shapes, EMA in two ways, a schedule, tensors and numbers in a dict, a generator."""

    def __init__(self, world: World, strategy: Any = "ddp", seed: int = 0) -> None:
        self.world = world
        self.first, self.second = (
            Replica(model, torch.optim.AdamW(model.parameters(), lr=0.02), world, strategy=strategy)
            for model in (net(seed), net(seed + 1))
        )
        self.ema = AveragedModel(self.first.model, multi_avg_fn=None)
        self.slow = copy.deepcopy(self.first.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.second.optimizers[0], 0.9)
        self.extra: dict[str, Any] = {"best": math.inf, "ids": torch.arange(3), "a.b": torch.zeros(2), "a": {}}
        self.chance = torch.Generator().manual_seed(seed)
        self.loader = DataLoader(data(), batch_size=5, shuffle=True)

    def checkpoints(self, folder: Path | str, **settings: Any) -> Checkpoints:
        kept = {name: getattr(self, name) for name in ("ema", "slow", "schedule", "extra", "chance")}
        return Checkpoints(folder, first=self.first, second=self.second, **kept, **settings)

    def train(self, max_steps: int, checkpoints: Checkpoints | None = None, save_at: int = -1) -> list[float]:
        """As nanoGPT's loop: evaluation, with random numbers, and the save stand before the step is made."""
        losses = []
        for step in self.first.steps(self.loader, max_steps=max_steps, micro_batch_size=2):
            self.first.evaluate(self.loader, lambda x, y: mse_loss(self.first.model(x), y))
            torch.randn(3)
            if checkpoints is not None and step.number == save_at:
                checkpoints.save()
            for x, y in step:
                noise = step.draw(torch.randn, 4)
                step.backward(mse_loss(self.first.model(x + 0.1 * noise), y))
            result = step.finish()
            x, y = torch.randn(3, 4, generator=self.chance), torch.ones(3, 2)
            loss_of = lambda x, y: (mse_loss(self.second.model(x), y), 3)  # noqa: E731
            second = self.second.train((x, y), loss_of)
            self.schedule.step()
            self.average(step.number, result.loss)
            losses += [result.loss, second.loss]
        return losses

    def average(self, number: int, loss: float) -> None:
        self.ema.update_parameters(self.first.model)
        for mine, other in zip(self.slow.parameters(), self.first.model.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)
        self.extra["best"] = min(self.extra["best"], loss)
        self.extra["ids"] = self.extra["ids"] + number
        self.extra["a"]["b"] = torch.full((2,), float(number), dtype=torch.float64)

    def outcome(self) -> dict[str, torch.Tensor]:
        modules = {"ema": self.ema, "slow": self.slow}
        found = {f"{name}.{key}": t for name, module in modules.items() for key, t in module.state_dict().items()}
        found |= {f"first.{key}": t for key, t in self.first.state_dict().items()}
        found |= {f"second.{key}": t for key, t in self.second.state_dict().items()}
        numbers = torch.tensor([self.extra["best"], self.schedule.get_last_lr()[0]])
        return {**found, "ids": self.extra["ids"], "a.b": self.extra["a.b"], "b": self.extra["a"]["b"], "n": numbers}


STEPS, SAVED = 6, 4  # three steps are a pass


def straight(world: World, folder: str, *strategies: str) -> dict[str, Any]:
    """The run that nobody interrupts; it saves before its step SAVED + 1 and after its step SAVED."""
    found = {}
    for strategy in strategies:
        for when in ("before", "after"):
            script = Script(world, strategy)
            torch.manual_seed(9)
            checkpoints = script.checkpoints(f"{folder}/{strategy}-{when}")
            losses = script.train(SAVED)
            if when == "after":
                checkpoints.save()
            losses += script.train(STEPS, checkpoints, SAVED + 1 if when == "before" else -1)
            checkpoints._end()
            found[f"{strategy}-{when}"] = losses, script.outcome()
    return found


def resumed(world: World, folder: str, *pairs: tuple[str, str]) -> dict[tuple[str, str], Any]:
    """What another run makes of it: with other weights, seeds and strategies."""
    found = {}
    for saved, strategy in pairs:
        for when in ("before", "after"):
            script = Script(world, strategy, seed=50)
            torch.manual_seed(77)
            checkpoints = script.checkpoints(f"{folder}/{saved}-{when}")
            assert checkpoints.restore() == SAVED
            assert (script.first.num_steps, script.second.num_steps) == (SAVED, SAVED)
            checkpoints._end()
            world.group.barrier()
            found[f"{saved}-{when}", strategy] = script.train(STEPS), script.outcome()
    return found


def require_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for (saved, strategy), (losses, tensors) in found.items():
        straight_losses, straight_tensors = wanted[saved]
        assert losses == pytest.approx(straight_losses[2 * SAVED :], abs=1e-6), (saved, strategy)
        for name, tensor in straight_tensors.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=2e-6, msg=f"{saved} {strategy}: {name}")
            assert tensors[name].dtype == tensor.dtype


@pytest.mark.long
def test_everything_goes_on_in_another_world(tmp_path: Path) -> None:
    """S2, D2, D5: saved by two ranks, before a step is made and after it, in the middle of a pass; three go on. Each
    replica of equal shapes gets its own back."""
    wanted = run_ranks(straight, 2, str(tmp_path), "ddp", "zero")[0]
    assert wanted["ddp-before"][0] == pytest.approx(wanted["ddp-after"][0], abs=1e-6)
    for found in run_ranks(resumed, 3, str(tmp_path), ("ddp", "zero"), ("zero", "ddp")):
        require_same(found, wanted)


def test_one_process_goes_on_to_the_bit(world: World, tmp_path: Path) -> None:
    wanted = straight(world, str(tmp_path), "zero")
    for (saved, _), (losses, tensors) in resumed(world, str(tmp_path), ("zero", "zero")).items():
        assert losses == wanted[saved][0][2 * SAVED :]
        assert overall(tensors) == overall(wanted[saved][1])


def test_how_updates_are_computed_is_not_restored(world: World, tmp_path: Path) -> None:
    """The script says it, perhaps on another device; the learning rate is that of the checkpoint."""
    for is_fused, lr in ((False, 0.02), (True, 0.5)):
        model = net(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=is_fused)
        checkpoints = Checkpoints(tmp_path, net=Replica(model, optimizer, world))
        checkpoints.restore()
        assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["lr"]) == (is_fused, 0.02)
        checkpoints.save()
        checkpoints._end()


def test_a_part_is_restored_with_a_warning_and_weights_are_read_by_name(world: World, tmp_path: Path) -> None:
    script = Script(world, "zero")
    script.train(2)
    script.checkpoints(tmp_path).save()
    other = Script(world, seed=30)
    untouched = overall(other.second.state_dict())
    with pytest.warns(UserWarning, match="second, ema, slow and 3 more was saved and is not restored"):
        assert Checkpoints(tmp_path, first=other.first).restore() == 2
    assert overall(other.first.state_dict()) == overall(script.first.state_dict())
    assert overall(other.second.state_dict()) == untouched
    for name, replica in (("first", script.first), ("second", script.second)):
        assert overall(load_weights(tmp_path, name)) == overall(replica.state_dict())
    with pytest.raises(UserError, match="holds the weights of first, second: name one of them"):
        load_weights(tmp_path)
    with pytest.raises(UserError, match="holds no weights of third; it has first, second"):
        load_weights(tmp_path, "third")


def test_a_checkpoint_of_the_former_format_is_refused_and_its_weights_are_read(world: World, tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in net(3).state_dict().items()}
    folder = save_complete(tmp_path / "checkpoints", 5, weights, {}, {"kept": {}})
    content = former_manifest(folder)
    former = {kind: specs for kind, specs in content["tensors"].items() if kind != "extra"}
    (folder / MANIFEST).write_bytes(mf.seal({**content, "format": 2, "tensors": former}))
    with pytest.raises(UserError, match=r"format 2, which an earlier paceline wrote.*load_weights\("):
        Script(world).checkpoints(tmp_path).restore()
    assert overall(load_weights(tmp_path)) == overall(weights)


def test_float16_goes_on_with_its_scale(world: World, tmp_path: Path) -> None:
    """D1."""
    found = []
    for model in (net(0), net(1)):
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world, dtype="float16")
        checkpoints = Checkpoints(tmp_path, net=replica)
        if not found:
            replica.train(torch.ones(2, 4), lambda x, model=model: model(x).float().sum() * math.inf)
            replica.train(torch.ones(2, 4), lambda x, model=model: model(x).float().square().mean())
            checkpoints.save()
        else:
            assert checkpoints.restore() == 2
        found.append((replica.scaler.scale, replica.scaler.num_finite))
    assert found == [(2.0**15, 1)] * 2


@pytest.mark.long
def test_saving_and_restoring_take_time_in_proportion_to_the_parameters(world: World, tmp_path: Path) -> None:
    """S11: ten times as many took a hundred times as long."""
    seconds = []
    for count in (100, 1000):
        model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(count)])
        replica = Replica(model, torch.optim.AdamW(model.parameters()), world)
        replica.train(torch.ones(1), lambda x, model=model: sum(p.sum() for p in model))  # type: ignore[misc]
        checkpoints = Checkpoints(tmp_path / str(count), net=replica)
        began = time.process_time()
        checkpoints.save()
        checkpoints.finish()
        assert checkpoints.restore() == 1
        seconds.append(time.process_time() - began)
    assert seconds[1] < 25 * seconds[0] + 0.5, seconds


# ---- frozen parameters ----


def with_frozen_base(seed: int) -> nn.Sequential:
    model = net(seed)
    model[0].requires_grad_(False)
    return model


def resumed_without_base(world: World, folder: Path, settings: Any) -> dict[str, Any]:
    """A save without the frozen layer, and what it is restored to: the same base, and another one."""
    results: dict[str, Any] = {}
    for seed in (0, 1):
        model = with_frozen_base(seed)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        replica = Replica(model, torch.optim.AdamW(trained, lr=0.02), world, **settings)
        checkpoints = Checkpoints(folder, net=replica, frozen=False)
        if seed == 0:
            for _ in range(2):
                replica.train(torch.ones(2, 4), lambda x, model=model: model(x).square().mean())
            checkpoints.save()
            checkpoints.finish()
            results["saved"] = overall(replica.state_dict())
            nn.init.zeros_(model[3].weight)
            checkpoints.restore()
            results["restored"] = overall(replica.state_dict())
            results["names"] = sorted(load_weights(folder))
        else:
            with pytest.raises(UserError) as error:
                checkpoints.restore()
            results["refused"] = str(error.value)
    return results


@pytest.mark.parametrize("settings", [{}, {"strategy": "local", "sync_every": 2}], ids=["ddp", "local"])
def test_a_save_without_frozen_parameters_is_restored_to_the_same_ones_only(tmp_path: Path, settings: Any) -> None:
    """Finds: a restore that does not compare the frozen parameters, or a save that has them."""
    for row in run_ranks(resumed_without_base, 2, tmp_path, settings):
        assert row["restored"] == row["saved"]
        assert row["names"] == ["3.bias", "3.weight"]
        assert "they are other ones here" in row["refused"]
