"""Each thing that goes wrong silently elsewhere is done here on purpose, and the message says what and where."""

import copy
import gc
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
from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.replica.share import share
from paceline.replica.step import Step
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
    world.calls.reducing = None  # of the mistake before, which was survived here alone
    return model, optimizer, Replica(model, optimizer, world, **settings)


def begun(
    world: World, given: list[torch.Tensor], model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, Step]:
    """A first step of a new replica over these micro-batches."""
    model, _, replica = made(world, model, **settings)
    return model, replica.step(Batch(given))


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
        compiled = torch.compile(net(), backend="eager")  # whose import takes no second
        replica = Replica(compiled, sgd(compiled), world)
        compiled.state_dict()  # <- prefix
    with noted(said, "no prefix"):
        assert set(replica.state_dict()) == set(net().state_dict())
    with noted(said, "idle"):
        share(list(range(4)), world, batch_size=4, micro_batch_size=4)  # <- idle
    with noted(said, "nothing wrong"):
        made(world)
        share(list(range(4)), world, batch_size=4, micro_batch_size=2)
    return said | sharded(world)


def sharded(world: World) -> Said:
    said: Said = {}
    with noted(said, "fsdp frozen"):
        model = net()
        model[0].requires_grad_(False)
        Replica(model, sgd(model), world, strategy="fsdp")  # <- fsdp frozen
    with noted(said, "fsdp scalar"):
        model = net()
        model.scale = nn.Parameter(torch.tensor(1.0))
        Replica(model, sgd(model), world, strategy="fsdp")  # <- fsdp scalar
    with noted(said, "fsdp dtypes"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 2, bias=False))
        muon = torch.optim.Muon(model.parameters())
        Replica(model, muon, world, strategy="fsdp", blocks=[*model])  # <- fsdp dtypes
    with noted(said, "fsdp again"):
        model = made(world, strategy="fsdp")[0]
        Replica(model, sgd(model), world)  # <- fsdp again
    with noted(said, "fsdp uneven"):
        model, step = begun(world, [x()] * world.rank, strategy="fsdp")
        for batch in step:  # <- fsdp uneven
            step.backward(model(batch).mean())
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
    "idle": ("fewer micro-batches than the 2 ranks", "make the micro-batches smaller"),
    "fsdp frozen": ("0.weight, 0.bias is frozen",),
    "fsdp scalar": ("scale is a single number",),
    "fsdp dtypes": ("parameters of torch.bfloat16, torch.float32 are updated as a whole", "take strategy zero"),
    "fsdp again": ("the model is sharded already",),
    "fsdp uneven": ("ranks have [0, 1] micro-batches",),
}
ON_RANK_0 = {"other seeds", "other values", "no optimizer", "batch norm", "prefix", "idle"}  # warnings, once


def test_mistakes_before_the_first_step_are_named_with_their_line(ranks: list[tuple[Said, Said]]) -> None:
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


def in_step(world: World, strategy: str) -> Said:  # noqa: C901 -- one mistake after the other
    """Each on a new replica; all ranks make the same mistake, so all come to the next."""
    said: Said = {}

    def begin(given: list[torch.Tensor] | None = None, model: nn.Module | None = None) -> tuple[nn.Module, Step]:
        return begun(world, [x()] if given is None else given, model, strategy=strategy)

    with noted(said, "own step"):
        model, optimizer, replica = made(world, strategy=strategy)
        replica.step(x()).backward(model(x()).mean())
        optimizer.step()  # <- own step
    with noted(said, "own backward"):
        model, _ = begin()
        model(x()).mean().backward()  # <- own backward
    with noted(said, "own backward, too"):
        model, step = begin()
        step.backward(model(x()).mean())
        model(x()).mean().backward()  # <- own backward, too
    with noted(said, "finish in the loop"):
        model, step = begin()
        for batch in step:
            step.backward(model(batch).mean())
            step.finish()  # <- finish in the loop
    with noted(said, "finish too early"):
        model, step = begin([x(), x()])
        for batch in step:
            step.backward(model(batch).mean())
            break
        step.finish()  # <- finish too early
    with noted(said, "finish twice"):
        model, step = begin()
        step.backward(model(x(2 + world.rank)).mean(), weight=1)
        step.finish()
        step.finish()  # <- finish twice
    with noted(said, "no finish"):
        model, _, replica = made(world, strategy=strategy)
        for step in replica.steps(torch.ones(8, 4), batch_size=4):  # <- no finish
            for batch in step:
                step.backward(model(batch).mean())
    with noted(said, "no finish of a step of one's own"):
        model, _, replica = made(world, strategy=strategy)
        for _ in range(3):
            step = replica.step(x())  # <- no finish of a step of one's own
            step.backward(model(x()).mean())
    with noted(said, "backward twice"):
        model, step = begin()
        for batch in step:
            step.backward(model(batch).mean())
            step.backward(model(batch).mean())  # <- backward twice
    with noted(said, "backward twice, amid"):
        model, step = begin([x(), x()])
        for batch in step:
            step.backward(model(batch).mean())
            step.backward(model(batch).mean())  # <- backward twice, amid
    with noted(said, "only more"):
        model, step = begin()
        for batch in step:  # <- only more
            step.backward(model(batch).mean(), more=True)
    with noted(said, "left out"):
        model, step = begin([x(), x()])
        for number, batch in enumerate(step):  # <- left out
            if number == 1:
                step.backward(model(batch).mean())
    with noted(said, "changed between two losses"):
        model, step = begin()
        for batch in step:
            first, second = model(batch).mean(), model(batch).square().mean()
            step.backward(first, more=True)
            with torch.no_grad():
                model[2].weight.add_(1)
            step.backward(second)  # <- changed between two losses
    with noted(said, "a vector"):
        model, step = begin()
        step.backward(model(x()))  # <- a vector
    with noted(said, "weight"):
        model, step = begin()
        step.backward(model(x()).mean(), weight=float("nan"))  # <- weight
    with noted(said, "no graph"):
        model, step = begin()
        with torch.no_grad():
            loss = model(x()).mean()
        step.backward(loss)  # <- no graph
    with noted(said, "GradScaler"):
        model, step = begin()
        scaler = torch.amp.GradScaler("cpu")
        step.backward(scaler.scale(model(x()).mean()))  # <- GradScaler
    with noted(said, "divided by its own number"):
        model, step = begin([x(), 2 * x()])
        for batch in step:
            step.backward(model(batch).mean() / 2)  # <- divided by its own number
    with noted(said, "divided by that of all ranks"):
        model, step = begin([x(), 2 * x()])
        for batch in step:
            step.backward(model(batch).mean() / 4)  # <- divided by that of all ranks
    with noted(said, "uneven average"):
        model, step = begin([x(2 + world.rank)])
        for batch in step:
            step.backward(model(batch).mean())
        step.finish()  # <- uneven average
    with noted(said, "nothing"):
        begin([])[1].finish()  # <- nothing
    with noted(said, "same rows"):
        model, _, replica = made(world, strategy=strategy)
        step = replica.step(x())
        step.backward(model(x()).mean())
        step.finish()  # <- same rows
    return said


def gradients(world: World, strategy: str) -> Said:
    """The same, of mistakes around gradients and of a model that was changed."""
    said: Said = {}

    def begin(given: list[torch.Tensor] | None = None, model: nn.Module | None = None) -> tuple[nn.Module, Step]:
        return begun(world, [x(2 + world.rank)] if given is None else given, model, strategy=strategy)

    with noted(said, "zero_grad in the loop"):
        model, step = begin([x(), x()])
        for batch in step:
            model.zero_grad()
            step.backward(model(batch).mean())  # <- zero_grad in the loop
    with noted(said, "zeroed in place"):
        model, step = begin([x(), x()])
        for batch in step:
            model.zero_grad(set_to_none=False)  # <- zeroed in place
            step.backward(model(batch).mean())
    with noted(said, "clipped"):
        model, step = begin()
        step.backward(model(x()).mean(), weight=1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- clipped
    with noted(said, "read"):
        model, step = begin()
        step.backward(model(x()).mean(), weight=1)
        float(model[0].weight.grad.norm())  # <- read
    with noted(said, "replaced"):
        model, step = begin()
        step.backward(model(x()).mean(), weight=1)
        model[0].weight.grad = torch.zeros(3, 4)
        step.finish()  # <- replaced
    with noted(said, "between"):
        model, step = begin()
        step.backward(model(x()).mean(), weight=1)
        world.mean(1.0)  # <- between
    with noted(said, "unfrozen"):
        model = net()
        model[0].requires_grad_(False)
        model, step = begin(None, model)
        model[0].requires_grad_(True)
        step.backward(model(x()).mean(), weight=1)  # <- unfrozen
    with noted(said, "reentrant"):
        model, step = begin(None, nn.Linear(4, 4))
        inside = checkpoint(model, x().requires_grad_(), use_reentrant=True)
        step.backward(checkpoint(model, inside, use_reentrant=True).mean())  # <- reentrant
    with noted(said, "reentrant behind another model"):
        behind = made(world, nn.Linear(4, 4), strategy=strategy)[0]
        model, step = begin(None, nn.Linear(4, 4))
        step.backward(checkpoint(model, behind(x()), use_reentrant=True).mean())  # <- reentrant behind another model
    with noted(said, "reentrant, once"):
        model, step = begin(None, nn.Linear(4, 4))
        step.backward(checkpoint(model, x().requires_grad_(), use_reentrant=True).mean(), weight=1)
        step.finish()
    with noted(said, "sparse"):
        model, step = begin([torch.tensor([1])], nn.Embedding(5, 2, sparse=True))
        step.backward(model(torch.tensor([1])).mean())  # <- sparse
    with noted(said, "added group"):
        model, optimizer, replica = made(world, strategy=strategy)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        step = replica.step(None)
        step.backward(model(x()).mean())
        step.finish()  # <- added group
    with noted(said, "assigned"):
        model, step = begin()
        model.load_state_dict(net().state_dict(), assign=True)
        step.backward(model(x()).mean(), weight=1)
        step.finish()  # <- assigned
    with noted(said, "copied, and made again"):
        copied = copy.deepcopy(begin()[0])
        begin(None, copied)
        model, step = begin(None, copied)
        step.backward(model(x()).mean(), weight=1)
        step.finish()
    with noted(said, "nothing wrong"):
        model, optimizer, replica = made(world, strategy=strategy)
        for _ in range(2):
            optimizer.zero_grad()
            step = replica.step(Batch([x(3 - number) * (1 + world.rank) for number in range(2)]))
            for batch in step:
                step.backward(model(batch).mean() / 5, weight=len(batch))
            step.reduce()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step.finish()
            world.mean(1.0)
    return said


def all_mistakes(world: World, strategy: str) -> tuple[Said, Said]:
    """Rank 1 frees nothing that is in a cycle, such as a replica that an error's traceback holds: what a step does may
    not depend on it."""
    if world.rank == 1:
        gc.disable()
    return start(world), in_step(world, strategy) | gradients(world, strategy)


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("zero", "naive")]


@pytest.fixture(scope="module", params=["ddp", *OTHERS])
def ranks(request: pytest.FixtureRequest) -> list[tuple[Said, Said]]:
    return run_ranks(all_mistakes, 2, request.param)


UNFINISHED = "a gradient was read or changed between step.backward and step.finish"
STEP = {
    "own step": "remove optimizer.step()",
    "own backward": "replace loss.backward() by step.backward(loss)",
    "own backward, too": UNFINISHED,
    "finish in the loop": "call it after that loop",
    "finish too early": "came before the last micro-batch had its step.backward(loss)",
    "finish twice": "step.finish() was called twice for one step",
    "no finish": "a step of replica.steps had no step.finish()",
    "no finish of a step of one's own": "two steps in a row had no step.finish()",
    "backward twice": "step.backward was called again after the last one of step 1: pass more=True",
    "backward twice, amid": "this micro-batch already had its step.backward: pass more=True",
    "only more": "leave more=True out of that",
    "left out": "a micro-batch had no step.backward(loss)",
    "changed between two losses": "were changed in place between forward and backward",
    "a vector": "the loss is of shape [2, 1]",
    "weight": "the weight of a micro-batch is nan",
    "no graph": "the loss depends on no weight that is trained",
    "GradScaler": 'use Replica(..., dtype="float16")',
    "divided by its own number": "the loss is divided by 2, the number of micro-batches",
    "divided by that of all ranks": "the loss is divided by 4, the number of micro-batches",
    "uneven average": "micro-batches of 2 and of 3 rows would have equal weight",
    "nothing": "no rank had a micro-batch",
    "same rows": "ranks 0, 1 began with the same micro-batch",
    "zero_grad in the loop": UNFINISHED,
    "zeroed in place": UNFINISHED,
    "clipped": UNFINISHED,
    "read": UNFINISHED,
    "replaced": UNFINISHED,
    "between": "World.mean was called between",
    "unfrozen": "0.weight, 0.bias was frozen when the replica was made",
    "reentrant": "use_reentrant=False",
    "reentrant behind another model": "the loss passed through another model, and through torch.utils.checkpoint",
    "sparse": "set sparse=False",
    "added group": "an optimizer was given parameters after the replica was made",
    "assigned": "no gradient of this step reached a parameter",
}
WARNED = {"same rows", "divided by its own number", "divided by that of all ranks"}  # once, by rank 0


def test_mistakes_in_a_step_are_named_with_their_line(ranks: list[tuple[Said, Said]]) -> None:
    """D1, D9, D10; silent were: a loss divided by accumulation steps, `.grad` read between backward and finish."""
    for rank, (_, said) in enumerate(ranks):
        assert said["nothing wrong"] == said["copied, and made again"] == said["reentrant, once"] == ""
        for name, text in STEP.items():
            if rank and name in WARNED:
                assert said[name] == ""
                continue
            kind = "warning" if name in WARNED else "error"
            assert said[name].startswith(f"{kind}: {here(name)}: "), (name, said[name])
            assert text in said[name], (name, said[name])
