"""A replica makes the updates that the same script would make on one process with the whole batch in its hands."""

import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.sync.replicas import overall
from paceline.world.runtime import World

STEPS = 4
ROWS = ((2, 2, 2, 1), (2, 2, 2, 1), (1,), (2, 2, 2, 1))  # of each step's micro-batches; step 3 leaves ranks without one
BUCKET_MB = 300 / 2**20  # several buckets
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    """Tied and frozen weights, a scalar, a constant buffer, a layer that only some micro-batches use, one that none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 2)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("offset", torch.linspace(0, 1, 6))

    def forward(self, tokens: torch.Tensor, detour: bool = True) -> torch.Tensor:
        x = self.embed(tokens) * self.fixed + self.offset
        x = torch.tanh(self.inner(x)) * self.scale
        if detour:
            x = x + self.sometimes(x)
        return self.head(x)


def rows(step: int) -> torch.Tensor:
    """(rows, 5) tokens of a step's whole batch; the last column only is a target."""
    return torch.randint(0, 9, (sum(ROWS[step]), 5), generator=torch.Generator().manual_seed(step))


def mean_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def sum_and_tokens(net: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Mean over the targets that count (those that are not 0), and how many that are."""
    targets = batch[:, 1:].flatten()
    return cross_entropy(net(batch[:, :-1]).flatten(0, 1), targets, ignore_index=0), float((targets != 0).sum())


def token_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return sum_and_tokens(net, batch)[0]


def two_losses(net: nn.Module, batch: UserDict[str, torch.Tensor]) -> torch.Tensor:
    """Two inputs, two passes, two losses."""
    logits = net(batch["tokens"][:, :-1]), net(batch["others"][:, :-1])
    return cross_entropy(logits[0].flatten(0, 1), batch["tokens"][:, 1:].flatten()) + 0.3 * logits[1].square().mean()


def as_dict(batch: torch.Tensor) -> UserDict[str, torch.Tensor]:
    """As a tokenizer of transformers gives it."""
    return UserDict(tokens=batch, others=batch.flip(1))


def adamw(net: nn.Module) -> Optimizers:
    decayed = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)]


def sgd(net: nn.Module) -> Optimizers:
    return [torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01, nesterov=True)]


def muon(net: nn.Module) -> Optimizers:
    matrices = [net.inner.weight, net.sometimes.weight]
    others = [p for p in net.parameters() if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


@dataclass(frozen=True)
class Case:
    """A script."""

    optimizers: Callable[[nn.Module], Optimizers]
    loss: Callable[[nn.Module, Any], torch.Tensor] = mean_loss
    weighted: Callable[[nn.Module, Any], tuple[torch.Tensor, float]] | None = None
    batch: Callable[[torch.Tensor], Any] = lambda batch: batch
    max_norm: float = 0.0
    schedule: bool = False
    leftover: bool = False  # its optimizer.zero_grad() stayed


CASES = {
    "adamw, groups, schedule, clipped": Case(adamw, max_norm=0.5, schedule=True),
    "sgd, tokens": Case(sgd, token_loss, sum_and_tokens, leftover=True),
    "muon and adamw": Case(muon, max_norm=1.0),
    "two inputs and losses of a dict": Case(adamw, two_losses, batch=as_dict),
}


@dataclass
class Course:
    """What came of a script."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain(case: Case) -> Course:
    """The oracle: one process, torch alone, the whole batch at once."""
    net = Net()
    optimizers = case.optimizers(net)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers if case.schedule]
    course = Course([], [], {})
    for step in range(STEPS):
        loss = case.loss(net, case.batch(rows(step)))
        loss.backward()
        course.losses.append(loss.item())
        parameters = [p for p in net.parameters() if p.grad is not None]
        course.norms.append(float(nn.utils.clip_grad_norm_(parameters, case.max_norm or math.inf)))
        for thing in (*optimizers, *schedules):
            thing.step()
        net.zero_grad()
    course.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return course


def mine(case: Case, world: World, step: int) -> Batch:
    """This rank's micro-batches of a step, which know their rows."""
    borders = [0, *accumulate(ROWS[step])]
    places = [range(*pair) for pair in pairwise(borders)][world.rank :: world.world_size]
    return Batch([case.batch(rows(step)[place.start : place.stop]) for place in places], rows=places)


def replicated(case: Case, world: World, strategy: Any, net: nn.Module | None = None) -> Course:
    """The same script, changed for paceline."""
    net = net or Net()
    optimizers = case.optimizers(net)
    replica = Replica(net, optimizers, world, strategy=strategy, bucket_mb=BUCKET_MB)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers if case.schedule]
    course = Course([], [], {})
    for step in range(STEPS):
        if case.leftover:
            optimizers[0].zero_grad()
        one = replica.step(mine(case, world, step))
        for batch in one:
            if case.weighted is None:
                one.backward(case.loss(replica.model, batch))
            else:
                loss, weight = case.weighted(replica.model, batch)
                one.backward(loss, weight=weight)
        result = one.finish(max_norm=case.max_norm)
        for schedule in schedules:
            schedule.step()
        course.losses.append(result.loss)
        course.norms.append(result.grad_norm)
        assert result.skipped is None
    found = replica.state_dict()
    course.weights = {name: found[name].clone() for name, _ in net.named_parameters()}
    return course


def courses(world: World) -> dict[tuple[str, str], Course]:
    strategies = ("ddp", "zero", "naive")
    return {(name, s): replicated(case, world, s) for name, case in CASES.items() for s in strategies}


def require_same(found: Course, wanted: Course, what: object, tolerance: float = 5e-6) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance), what
    if wanted.norms:
        assert found.norms == pytest.approx(wanted.norms, rel=tolerance), what
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=10 * tolerance, msg=f"{what}: {name}")


@pytest.fixture(scope="module")
def oracle() -> dict[str, Course]:
    return {name: plain(case) for name, case in CASES.items()}


def test_one_process_without_a_launcher(world: World, oracle: dict[str, Course]) -> None:
    for (name, strategy), course in courses(world).items():
        require_same(course, oracle[name], (name, strategy))


def test_uneven_batches_give_the_bits_of_a_plain_loop(world: World) -> None:
    """Three, three and one rows, in one process: a mean over rows is not multiplied and divided again."""
    data = TensorDataset(torch.randn(7, 5, generator=torch.Generator().manual_seed(1)))

    def begun() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(2)
        model = nn.Linear(5, 1)
        return model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), DataLoader(data, batch_size=3)

    model, optimizer, loader = begun()
    replica = Replica(model, optimizer, world)
    for step in replica.steps(loader, epochs=2):
        replica.train(step, lambda x: model(x).square().mean())
    plain, optimizer, loader = begun()
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def require_all_alike(on_ranks: list[dict[tuple[str, str], Course]], oracle: dict[str, Course]) -> None:
    for key, course in on_ranks[0].items():
        require_same(course, oracle[key[0]], key)
        for other in on_ranks[1:]:
            assert overall(other[key].weights) == overall(course.weights), key
            assert (other[key].losses, other[key].norms) == (course.losses, course.norms), key


# ---- what has its own ways ----


def norms(world: World, strategy: Any) -> dict[str, Any]:
    """Batch norms at the input, whose statistics are of data alone: one that learns, one in eval()."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    model[1].running_mean.copy_(torch.tensor([0.1, 0.2, 0.3, 0.7]))
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world, strategy=strategy)
    for step in range(3):
        one = replica.step(Batch(samples(step)[world.rank :: world.world_size]))
        for batch in one:
            one.backward(model(batch).square().mean(), weight=len(batch))
        one.finish()
    return {name: buffer.clone() for name, buffer in replica.buffers().items()}


def samples(step: int) -> list[torch.Tensor]:
    """Three micro-batches of 3, 4 and 2 rows, so rank 0 of two has 5 of 9."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(rows, 4, generator=generator) for rows in (3, 4, 2)]


def expected_statistics() -> dict[str, torch.Tensor]:
    """Of two ranks, each by itself from the step's beginning, and the mean by rows."""
    together = nn.BatchNorm1d(4)
    for step in range(3):
        states = []
        for rank in range(2):
            norm = nn.BatchNorm1d(4)
            norm.load_state_dict(together.state_dict())
            for batch in samples(step)[rank::2]:
                norm(batch)
            states.append(norm.state_dict())
        for name in ("running_mean", "running_var"):
            together.state_dict()[name].copy_((states[0][name] * 5 + states[1][name] * 4) / 9)
    return together.state_dict()


class Mixed(nn.Module):
    """bfloat16 in the middle; a layer that one micro-batch in two uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.narrow, self.last = nn.Linear(4, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 1)
        self.sometimes = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, detour: bool) -> torch.Tensor:
        x = self.narrow(self.first(x).bfloat16()).float()
        return self.last(self.sometimes(x) if detour else x).square().mean()


def mixed(world: World | None, strategy: Any = "ddp") -> Course:
    """On two ranks only rank 0 uses `sometimes`. World None: plain torch."""
    model, course = Mixed(), Course([], [], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = Replica(model, optimizer, world, strategy=strategy) if world else None
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        halves = [(torch.randn(4, 4, generator=generator), number == 0) for number in range(2)]
        if replica is not None and world is not None:
            one = replica.step(Batch(halves[world.rank :: world.world_size]), total=2 if step else None)
            for half in one:
                one.backward(model(*half))
            course.losses.append(one.finish().loss)
        else:
            loss = (model(*halves[0]) + model(*halves[1])) / 2
            loss.backward()
            course.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    course.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return course


def not_finite(world: World, strategy: Any) -> tuple[str, bool, float]:
    """What is said of rank 1's infinity, whether anything changed, the loss of the next step."""
    model = Mixed()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world, strategy=strategy)
    detour = partial(model, detour=True)
    before = overall(replica.state_dict())
    result = replica.train(torch.full((2, 4), torch.inf if world.rank == 1 else 1.0), detour, max_norm=1.0)
    is_same = overall(replica.state_dict()) == before
    return str(result.skipped), is_same, replica.train(torch.ones(2, 4), detour).loss


def left_behind(world: World) -> dict[str, Any]:
    """A pass before the replica, what rank 0 does alone, what is kept of transfers."""
    net = Net()
    mean_loss(net, rows(0)).backward()
    course = replicated(CASES["sgd, tokens"], world, "ddp", net)
    model = Net()
    replica = Replica(model, sgd(model), world)
    called = world.calls.last()
    state = replica.state_dict()
    return {
        "course": course,
        "alone": world.calls.last() == called,
        "tied": state["head.weight"] is state["embed.weight"] and set(state) == set(model.state_dict()),
        "transfers": len(world.group.take_traffic().transfers) <= 20,
    }


class Even(nn.Module):
    """For fsdp: rows to divide, and nothing frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.inner = nn.Embedding(9, 7), nn.Linear(7, 5)
        self.never, self.head = nn.Linear(3, 3), nn.Linear(5, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


def compiled(world: World | None, how: str) -> tuple[Course, int]:
    """Without inductor, for time; also how many graphs were made after the second step. how: the model "wrapped", or a
    block "in place" with zero, whose hook waits for the block's weights."""
    net, course = Even(), Course([], [], {})
    torch._dynamo.reset()
    model: Any = torch.compile(net, backend="aot_eager") if how == "wrapped" else net
    if how == "in place":
        net.inner.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    replica = None
    if world is not None:
        strategy: Any = "zero" if how == "in place" else "ddp"
        replica = Replica(model, optimizer, world, strategy=strategy, blocks=[net.inner], bucket_mb=1e-4)
        replica.waits_at_once = False
    num_graphs = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        halves = list(torch.randint(0, 9, (8, 5), generator=generator).split(4))
        if replica is not None and world is not None:
            one = replica.step(Batch(halves[world.rank :: world.world_size]))
            for half in one:
                one.backward(mean_loss(model, half))
            course.losses.append(one.finish().loss)
        else:
            loss = mean_loss(net, torch.cat(halves))
            loss.backward()
            course.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    course.weights = {name: t.clone() for name, t in (replica.state_dict() if replica else net.state_dict()).items()}
    return course, num_graphs[-1] - num_graphs[1]


def even(world: World | None, strategy: Any = "ddp") -> Course:
    net, course = Even(), Course([], [], {})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    replica = Replica(net, optimizer, world, strategy=strategy, blocks=[net.inner]) if world else None
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        quarters = list(torch.randint(0, 9, (8, 5), generator=generator).split(2))
        if replica is not None and world is not None:
            batch = Batch(quarters[world.rank :: world.world_size])
            result = replica.train(batch, partial(mean_loss, net), max_norm=0.5)
            course.losses.append(result.loss)
            course.norms.append(result.grad_norm)
        else:
            loss = mean_loss(net, torch.cat(quarters))
            loss.backward()
            course.losses.append(loss.item())
            course.norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    course.weights = {name: t.clone() for name, t in (replica.state_dict() if replica else net.state_dict()).items()}
    return course


def last_of_a_step(world: World) -> list[str]:
    """The order of what a step of known weight sends after its update."""
    net, seen = nn.Linear(4, 4), []
    replica = Replica(net, torch.optim.SGD(net.parameters()), world, strategy="zero", blocks=[net])
    share, publish = world.group.share, replica.sync.publish
    world.group.share = lambda values: (seen.append("share"), share(values))[1]
    replica.sync.publish = lambda: (seen.append("publish"), publish())[1]
    step = replica.step(torch.ones(2, 4), total=4)
    step.backward(net(torch.ones(2, 4)).mean(), weight=2)
    seen.clear()
    step.finish()
    del world.group.share
    return seen


def on_ranks(world: World) -> dict[str, Any]:
    strategies = ("ddp", "zero", "naive")
    return {
        "courses": courses(world),
        "norms": [norms(world, strategy) for strategy in strategies],
        "mixed": {strategy: mixed(world, strategy) for strategy in strategies},
        "not finite": [not_finite(world, strategy) for strategy in strategies],
        "left behind": left_behind(world),
        "last of a step": last_of_a_step(world),
        "even": {strategy: even(world, strategy) for strategy in ("fsdp", "zero", "ddp")},
    }


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """What two ranks made of all this."""
    return run_ranks(on_ranks, 2)


def test_two_ranks_make_the_updates_of_one_process(ranks: Ranks, oracle: dict[str, Course]) -> None:
    require_all_alike([rank["courses"] for rank in ranks], oracle)


def test_a_layer_in_bfloat16_that_one_rank_uses_is_trained_on_all(ranks: Ranks) -> None:
    straight = mixed(None)
    for strategy, course in ranks[0]["mixed"].items():
        assert overall(course.weights) == overall(ranks[1]["mixed"][strategy].weights), strategy
        require_same(course, straight, strategy, 2e-3)


def test_fsdp_clips_and_leaves_alone_what_nobody_uses(ranks: Ranks) -> None:
    straight = even(None)
    for rank in ranks:
        for strategy, course in rank["even"].items():
            require_same(course, straight, strategy)


def test_statistics_of_batch_norms_are_means_over_the_rows_of_all_ranks(ranks: Ranks) -> None:
    wanted = expected_statistics()
    for mine, other in zip(ranks[0]["norms"], ranks[1]["norms"], strict=True):
        assert overall(mine) == overall(other)
        torch.testing.assert_close(mine["0.running_mean"], wanted["running_mean"])
        torch.testing.assert_close(mine["0.running_var"], wanted["running_var"])
        assert mine["1.running_mean"].tolist() == torch.tensor([0.1, 0.2, 0.3, 0.7]).tolist()


def test_an_infinity_of_one_rank_is_named_and_no_rank_updates(ranks: Ranks) -> None:
    assert ranks[0]["not finite"] == ranks[1]["not finite"]
    for said, is_same, loss in ranks[0]["not finite"]:
        assert "by rank 1" in said
        assert is_same
        assert math.isfinite(loss)


def test_numbers_are_shared_before_weights_are_sent(ranks: Ranks) -> None:
    """Or the next forward pass could not begin while weights are under way."""
    assert ranks[0]["last of a step"][-2:] == ["share", "publish"]


def test_a_pass_before_the_replica_leaves_no_gradient(ranks: Ranks, oracle: dict[str, Course]) -> None:
    """Besides: state_dict takes no collective, tied weights are one tensor, and few transfers are remembered."""
    for rank in ranks:
        left = dict(rank["left behind"])
        require_same(left.pop("course"), oracle["sgd, tokens"], "a pass before")
        assert all(left.values()), left


def compiled_in_both_ways(world: World) -> dict[str, tuple[Course, int]]:
    return {how: compiled(world, how) for how in ("wrapped", "in place")}


@pytest.mark.long
def test_a_compiled_model_trains_as_it_is_and_is_compiled_once() -> None:
    straight = compiled(None, "not")[0]
    for rank in run_ranks(compiled_in_both_ways, 2):
        for how, (course, num_more_graphs) in rank.items():
            require_same(course, straight, how)
            assert num_more_graphs == 0, how
