"""Each thing that goes wrong silently elsewhere is done here on purpose, and the message says what and where."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import UserError
from paceline.script.replica import Replica
from paceline.sync.replicas import overall
from paceline.world.runtime import World

Said = dict[str, str]


def here(name: str) -> str:
    """`test_mistakes.py:LINE` of the line that ends with this mark."""
    lines = Path(__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# <- {name}"))
    return f"{Path(__file__).name}:{line}"


@contextmanager
def noted(said: Said, name: str) -> Iterator[None]:
    """Keeps what an error or a warning says, with its line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except UserError as error:
            said[name] = f"error: {error}"
            return
    ours = [w for w in caught if w.filename == __file__]
    said[name] = "; ".join(f"warning: {Path(w.filename).name}:{w.lineno}: {w.message}" for w in ours)


def net(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def made(world: World, model: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, Any, Replica]:
    model = model or net()
    optimizer = sgd(model)
    world.calls.travelling = None  # of the mistake before, which was survived here alone
    return model, optimizer, Replica(model, optimizer, world, **settings)


def x(rows: int = 2) -> torch.Tensor:
    return torch.ones(rows, 4)


# ---- before the first step ----


def start(world: World) -> Said:
    said: Said = {}
    with noted(said, "other seeds"):
        torch.manual_seed(world.rank)
        model = nn.Linear(4, 2)
        Replica(model, sgd(model), world)  # <- other seeds
    said["their weights"] = overall(dict(model.named_parameters()))
    torch.manual_seed(0)
    said["rank 0's weights"] = overall(dict(nn.Linear(4, 2).named_parameters()))
    with noted(said, "other values"):
        model = net()
        nn.init.constant_(model[0].bias, world.rank)
        Replica(model, sgd(model), world)  # <- other values
    with noted(said, "other shapes"):
        model = net(3 + world.rank)
        Replica(model, sgd(model), world)  # <- other shapes
    with noted(said, "other buffers"):
        model = net()
        model.register_buffer("table", torch.zeros(2 + world.rank))
        Replica(model, sgd(model), world)  # <- other buffers
    with noted(said, "made before"):
        optimizer = sgd(net())
        Replica(net(), optimizer, world)  # <- made before
    with noted(said, "twice"):
        model = net()
        Replica(model, [sgd(model), sgd(model)], world)  # <- twice
    with noted(said, "no optimizer"):
        model = net()
        Replica(model, sgd(model[0]), world)  # <- no optimizer
    with noted(said, "lbfgs"):
        model = net()
        Replica(model, torch.optim.LBFGS(model.parameters()), world)  # <- lbfgs
    with noted(said, "wrapped"):
        model = nn.parallel.DistributedDataParallel(net())
        Replica(model, sgd(model), world)  # <- wrapped
    with noted(said, "part wrapped"):
        model = nn.Sequential(nn.DataParallel(net()))
        Replica(model, sgd(model), world)  # <- part wrapped
    with noted(said, "elsewhere"):
        model = net().to("meta")
        Replica(model, sgd(model), world)  # <- elsewhere
    with noted(said, "batch norm"):
        model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        Replica(model, sgd(model), world)  # <- batch norm
    with noted(said, "prefix"):
        compiled = torch.compile(net())
        replica = Replica(compiled, sgd(compiled), world)
        compiled.state_dict()  # <- prefix
    with noted(said, "no prefix"):
        assert set(replica.state_dict()) == set(net().state_dict())
    with noted(said, "nothing wrong"):
        made(world)
    return said | sharded(world)


def sharded(world: World) -> Said:
    said: Said = {}
    with noted(said, "fsdp frozen"):
        model = net()
        model[0].requires_grad_(False)
        Replica(model, sgd(model), world, strategy="fsdp")  # <- fsdp frozen
    with noted(said, "fsdp whole"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        Replica(model, torch.optim.Muon(model.parameters()), world, strategy="fsdp")  # <- fsdp whole
    with noted(said, "fsdp scalar"):
        model = net()
        model.scale = nn.Parameter(torch.tensor(1.0))
        Replica(model, sgd(model), world, strategy="fsdp")  # <- fsdp scalar
    with noted(said, "fsdp uneven"):
        model, _, replica = made(world, strategy="fsdp")
        for batch in replica.micro_batches([x()] * (1 + world.rank)):  # <- fsdp uneven
            replica.backward(model(batch).mean())
    return said


START = {
    "other seeds": ("weights differ", "0 on rank 0, 1 on rank 1", "seed alike"),
    "other values": ("weights differ", "0.bias", "the seeds are the same"),
    "other shapes": ("rank 1 made another model than rank 0",),
    "other buffers": ("rank 1 made another model than rank 0",),
    "made before": ("4 of the optimizer's 4 parameters are not the model's", "made before the model was moved"),
    "twice": ("updated twice",),
    "no optimizer": ("no optimizer has 2.weight, 2.bias",),
    "lbfgs": ("LBFGS",),
    "wrapped": ("it is a DistributedDataParallel", ".module"),
    "part wrapped": ("its part 0 is a DataParallel",),
    "elsewhere": ("0.weight is on meta", "model.to(world.device)"),
    "batch norm": ("1 batch norms normalise", "averaged over ranks"),
    "prefix": ("_orig_mod.", "replica.state_dict()"),
    "fsdp frozen": ("0.weight, 0.bias is frozen",),
    "fsdp whole": ("Muon needs whole ones",),
    "fsdp scalar": ("scale is a single number",),
    "fsdp uneven": ("[1, 2] micro-batches",),
}
ON_RANK_0 = {"other seeds", "other values", "no optimizer", "batch norm", "prefix"}  # warnings, once


def test_mistakes_before_the_first_step_are_named_with_their_line(ranks: list[tuple[Said, dict[str, Said]]]) -> None:
    (first, _), (second, _) = ranks
    for name, parts in START.items():
        kind = "warning: " if name in ON_RANK_0 else "error: "
        assert first[name].startswith(f"{kind}{here(name)}: "), (name, first[name])
        for part in parts:
            assert part in first[name], (name, first[name])
        assert second[name] == ("" if name in ON_RANK_0 else first[name])
    assert first["nothing wrong"] == first["no prefix"] == ""
    assert first["their weights"] == second["their weights"] == first["rank 0's weights"]


# ---- in a step ----


def step(world: World, strategy: str) -> Said:
    """Each on a new replica; all ranks make the same mistake, so all come to the next."""
    said: Said = {}
    with noted(said, "own step"):
        model, optimizer, replica = made(world, strategy=strategy)
        replica.backward(model(x()).mean())
        optimizer.step()  # <- own step
    with noted(said, "own backward"):
        model, _, replica = made(world, strategy=strategy)
        model(x()).mean().backward()  # <- own backward
    with noted(said, "step in the loop"):
        model, _, replica = made(world, strategy=strategy)
        for batch in replica.micro_batches([x()]):
            replica.backward(model(batch).mean())
            replica.step()  # <- step in the loop
    with noted(said, "step too early"):
        model, _, replica = made(world, strategy=strategy)
        for batch in replica.micro_batches([x(), x()]):
            replica.backward(model(batch).mean())
            break
        replica.step()  # <- step too early
    with noted(said, "backward twice"):
        model, _, replica = made(world, strategy=strategy)
        for batch in replica.micro_batches([x()]):
            replica.backward(model(batch).mean())
            replica.backward(model(batch).mean())  # <- backward twice
    with noted(said, "left out"):
        model, _, replica = made(world, strategy=strategy)
        for number, batch in enumerate(replica.micro_batches([x(), x()])):  # <- left out
            if number == 0:
                replica.backward(model(batch).mean())
    with noted(said, "a vector"):
        model, _, replica = made(world, strategy=strategy)
        replica.backward(model(x()))  # <- a vector
    with noted(said, "weight"):
        model, _, replica = made(world, strategy=strategy)
        replica.backward(model(x()).mean(), weight=float("nan"))  # <- weight
    return said


def gradients(world: World, strategy: str) -> Said:
    """The same, of mistakes around gradients."""
    said: Said = {}
    with noted(said, "zero_grad in the loop"):
        model, _, replica = made(world, strategy=strategy)
        for batch in replica.micro_batches([x(), x()]):
            model.zero_grad()
            replica.backward(model(batch).mean())  # <- zero_grad in the loop
    with noted(said, "zeroed in place"):
        model, _, replica = made(world, strategy=strategy)
        for batch in replica.micro_batches([x(), x()]):
            model.zero_grad(set_to_none=False)
            replica.backward(model(batch).mean())  # <- zeroed in place
    with noted(said, "between"):
        model, _, replica = made(world, strategy=strategy)
        replica.backward(model(x()).mean())
        world.mean(1.0)  # <- between
    with noted(said, "unfrozen"):
        model = net()
        model[0].requires_grad_(False)
        model, _, replica = made(world, model, strategy=strategy)
        model[0].requires_grad_(True)
        replica.backward(model(x()).mean())  # <- unfrozen
    with noted(said, "reentrant"):
        model, _, replica = made(world, nn.Linear(4, 4), strategy=strategy)
        inside = checkpoint(model, x().requires_grad_(), use_reentrant=True)
        replica.backward(checkpoint(model, inside, use_reentrant=True).mean())  # <- reentrant
    with noted(said, "sparse"):
        model, _, replica = made(world, nn.Embedding(5, 2, sparse=True), strategy=strategy)
        replica.backward(model(torch.tensor([1])).mean())  # <- sparse
    with noted(said, "uneven average"):
        model, _, replica = made(world, strategy=strategy)
        replica.backward(model(x(2 + world.rank)).mean())
        replica.step()  # <- uneven average
    with noted(said, "nothing"):
        model, _, replica = made(world, strategy=strategy)
        replica.step()  # <- nothing
    with noted(said, "clipped"):
        model, _, replica = made(world, strategy=strategy)
        replica.backward(model(x()).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        replica.step()  # <- clipped
    with noted(said, "no graph"):
        model, _, replica = made(world, strategy=strategy)
        with torch.no_grad():
            loss = model(x()).mean()
        replica.backward(loss)  # <- no graph
    with noted(said, "added group"):
        model, optimizer, replica = made(world, strategy=strategy)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        replica.backward(model(x()).mean())
        replica.step()  # <- added group
    with noted(said, "assigned"):
        model, _, replica = made(world, strategy=strategy)
        model.load_state_dict(net().state_dict(), assign=True)
        replica.backward(model(x()).mean())
        replica.step()  # <- assigned
    with noted(said, "same rows"):
        model, _, replica = made(world, strategy=strategy)
        for batch in replica.micro_batches([x()]):
            replica.backward(model(batch).mean())
        replica.step()  # <- same rows
    with noted(said, "copied, and made again"):
        model, _, replica = made(world, strategy=strategy)
        copied = copy.deepcopy(model)
        model, _, replica = made(world, copied, strategy=strategy)
        model, _, replica = made(world, copied, strategy=strategy)
        replica.backward(model(x()).mean())
        replica.step()
    with noted(said, "nothing wrong"):
        model, optimizer, replica = made(world, strategy=strategy)
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(2):
                replica.backward(model(x(4 - number)).mean(), weight=4 - number, last=number == 1)
            replica.step(max_norm=1.0)
            world.mean(1.0)
    return said


def all_mistakes(world: World) -> tuple[Said, dict[str, Said]]:
    in_steps = {name: step(world, name) | gradients(world, name) for name in ("ddp", "zero", "naive")}
    return start(world), in_steps


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Said, dict[str, Said]]]:
    return run_ranks(all_mistakes, 2)


STEP = {
    "own step": "take optimizer.step() away",
    "own backward": "say replica.backward(loss) for loss.backward()",
    "step in the loop": "call it after that loop",
    "step too early": "came before the last micro-batch of the step",
    "backward twice": "called again after the last micro-batch of step 1",
    "left out": "the last micro-batch of a step had no replica.backward",
    "a vector": "the loss is of shape [2, 1]",
    "weight": "the weight of a micro-batch is nan",
    "zero_grad in the loop": "take zero_grad() and clip_grad_norm_() away",
    "zeroed in place": "take zero_grad() and clip_grad_norm_() away",
    "between": "World.mean was called between replica.backward and replica.step",
    "unfrozen": "0.weight, 0.bias was frozen when the replica was made",
    "reentrant": "came twice in one backward",
    "sparse": "say sparse=False",
    "uneven average": "micro-batches of 2 and of 3 rows would count alike",
    "nothing": "no rank had a micro-batch",
    "clipped": "gradients were changed after replica.backward",
    "no graph": "the loss depends on no weight that is trained",
    "added group": "an optimizer was given parameters after the replica was made",
    "assigned": "no gradient of this step reached a parameter",
    "same rows": "ranks 0, 1 began with the same micro-batch",
}


def test_mistakes_in_a_step_are_named_with_their_line(ranks: list[tuple[Said, dict[str, Said]]]) -> None:
    for rank, (_, by_strategy) in enumerate(ranks):
        for strategy, said in by_strategy.items():
            if rank:
                assert said.pop("same rows") == "", "one rank speaks"
            assert said["nothing wrong"] == said["copied, and made again"] == ""
            for name in STEP.keys() & said.keys():
                kind = "warning" if name == "same rows" else "error"
                assert said[name].startswith(f"{kind}: {here(name)}: "), (strategy, name, said[name])
                assert STEP[name] in said[name], (strategy, name, said[name])
            assert STEP.keys() - said.keys() <= {"same rows"}
