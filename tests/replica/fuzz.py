"""Random training scripts on a Replica, each compared with a plain loop of torch.

    python tests/replica/fuzz.py --cases 500 --seed 0      # prints each case that is wrong, and counts

A case is a function of its seed: model and memory formats, optimizers, strategy, data, and what a script does beside
training (EMA, clipping, freezing, replaced memory, weights of 0, a checkpoint that another number of ranks restores).
`plain` runs it as one would without paceline, over whole batches; `replicated` runs it on the ranks of a world. Both
compute in float64, so that a difference above rounding is a mistake: the order of sums changes the last digits only.

A case that paceline refuses counts as right only if its `may_refuse` says why.
"""

import argparse
import contextlib
import io
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import paceline
from paceline.base.errors import UserError

TOLERANCE = 1e-8  # of losses and weights near 1 in float64; optimizers divide by small numbers, which costs digits

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Optimizers = list[torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    # without momentum: torch's kernel takes none for a parameter that is used first in a later step (TypeError)
    "sgd fused": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1, "fused": True}),
    "adam fused": (torch.optim.Adam, {"lr": 0.02, "amsgrad": True, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "amsgrad": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.02, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "adagrad fused": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "eps": 1e-4}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "nadam": (torch.optim.NAdam, {"lr": 0.02}),
    "asgd": (torch.optim.ASGD, {"lr": 0.02}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "radam": (torch.optim.RAdam, {"lr": 0.02}),
}
# torch's own fused kernels go wrong when a script changes the memory format between two steps, so `plain` has none.
_PLAIN = {"fused": False, "foreach": False}
STRATEGIES = ("ddp", "ddp", "ddp", "zero", "zero", "zero", "naive")
SAMPLERS = ("in order", "shuffled", "generator", "subset", "weighted", "replacement")
REPLACEMENTS = ("clone", "vector", "channels_last")
SOURCES = ("one loader", "one loader", "a loader an epoch", "two loaders")


@dataclass(frozen=True)
class Case:
    """What one script does. Sizes are in samples, steps are updates."""

    seed: int
    world_size: int
    strategy: str
    optimizer: str
    has_two_optimizers: bool
    is_channels_last: bool
    is_turned: bool  # a parameter that is a transposed view
    has_blocks: bool
    calls_parts: bool  # model.head(model.features(x)) instead of model(x)
    bucket_mb: float
    num_samples: int
    batch_size: int
    micro_batch_size: int | None
    shares: tuple[int, ...]
    sampler: str
    source: str
    is_named: bool  # whether the script names its sources to Checkpoints
    epochs: int
    max_norm: float
    has_schedule: bool
    has_ema: bool
    losses: str  # one, more (two backward calls of means), sums (of sums), weighted (by sample, also 0)
    changes_gradients: bool
    replaced: str | None  # how `.data` of parameters is replaced before step `at`
    freezes: bool  # a layer, before step `at`
    at: int
    saves_at: int | None  # a checkpoint after this step, then other ranks go on
    restored_size: int
    restored_strategy: str
    overwrites: bool  # weights in place, right after save()
    may_refuse: frozenset[str] = field(compare=False)  # words of messages with which paceline may refuse the case

    @classmethod
    def of(cls, seed: int, world_size: int) -> "Case":
        """Returns the case of this seed on so many ranks."""
        draw = random.Random(f"{seed} {world_size}")
        batch_size = draw.randrange(2, 9)
        losses = draw.choice(("one", "one", "one", "more", "more", "weighted", "weighted", "weighted", "sums"))
        replaced = draw.choice(REPLACEMENTS) if draw.random() < 0.2 else None
        freezes = draw.random() < 0.15 and replaced is None
        saves_at = draw.randrange(1, 5) if draw.random() < 0.5 else None
        source = draw.choice(SOURCES)
        micro_batch_size = draw.choice((None, 1, 2, 3))
        has_shares = draw.random() < 0.4 and source == "one loader"
        shares = tuple(draw.randrange(1, 5) for _ in range(world_size)) if has_shares else ()
        may_refuse = set()
        is_named = draw.random() < 0.6 and source != "a loader an epoch"
        if saves_at is not None and not is_named:
            may_refuse |= {"Checkpoints("}  # with the names that are missing
        strategy, restored_strategy = draw.choice(STRATEGIES), draw.choice(STRATEGIES)
        optimizer = draw.choice(list(OPTIMIZERS))
        if "naive" in (strategy, restored_strategy) and "fused" in optimizer:
            replaced = (
                None  # naive keeps nothing for the script: its optimizers go wrong as torch's own do (see _PLAIN)
            )
        return cls(
            seed=seed,
            world_size=world_size,
            strategy=strategy,
            optimizer=optimizer,
            has_two_optimizers=draw.random() < 0.2,
            is_channels_last=draw.random() < 0.4,
            is_turned=draw.random() < 0.5,
            has_blocks=strategy == "zero" and draw.random() < 0.5,
            calls_parts=draw.random() < 0.4,
            bucket_mb=draw.choice((0.0, 300 / 2**20, 1500 / 2**20)),
            num_samples=draw.randrange(5, 14),
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            shares=shares,
            sampler=draw.choice(SAMPLERS),
            source=source,
            is_named=is_named,
            epochs=draw.randrange(2, 4),
            max_norm=draw.choice((0.0, 0.5, 0.5)),
            has_schedule=draw.random() < 0.5,
            has_ema=draw.random() < 0.4,
            losses=losses,
            changes_gradients=draw.random() < 0.25,
            replaced=replaced,
            freezes=freezes,
            at=draw.randrange(1, 4),
            saves_at=saves_at,
            restored_size=draw.randrange(1, 4),
            restored_strategy=restored_strategy,
            overwrites=draw.random() < 0.5,
            may_refuse=frozenset(may_refuse),
        )


# ---- the script's parts, alike in both loops ----


class Net(nn.Module):
    """Parameters of all kinds: tied, frozen, unused, used by some samples, scalar, empty, transposed."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.enter = nn.Linear(48, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.enter_again = nn.Parameter(torch.randn(8, 8) / 3)
        turned = torch.randn(8, 8) / 3
        self.turned = nn.Parameter(turned.t() if case.is_turned else turned)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.shift = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("note", torch.arange(3))
        self.double()
        if case.is_channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 2, 4, 4) -> (batch, 8)"""
        hidden = torch.tanh(self.enter(self.conv(x).flatten(1)))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden

    def head(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 2)"""
        hidden = torch.tanh(self.tied(torch.tanh(hidden @ self.turned)) * self.scale + self.shift + self.frozen(hidden))
        hidden = hidden @ self.enter_again
        chosen = x.flatten(1).sum(1) > 2  # by sample, so that the cut into micro-batches changes nothing
        if chosen.any():
            hidden = hidden.index_put((chosen,), hidden[chosen] + self.sometimes(hidden[chosen]))
        return self.out(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x), x)


def make_optimizers(case: Case, model: Net, *, is_plain: bool = False) -> Optimizers:
    """Returns one or two optimizers, with the parameters in random groups."""
    draw = random.Random(case.seed)
    parameters = list(model.parameters())
    draw.shuffle(parameters)
    cut = draw.randrange(1, len(parameters))
    first, second = {"params": parameters[:cut], "weight_decay": 0.1}, {"params": parameters[cut:]}
    kind, settings = OPTIMIZERS[case.optimizer]
    settings = {name: _PLAIN.get(name, value) if is_plain else value for name, value in settings.items()}
    if case.has_two_optimizers:
        return [kind([first], **settings), torch.optim.SGD([second], lr=0.05, momentum=0.9)]
    return [kind([first, second], **settings)]


def make_schedules(case: Case, optimizers: Optimizers) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(each, 2, 0.7) for each in optimizers] if case.has_schedule else []


def make_ema(model: Net) -> AveragedModel:
    average: AveragedModel = AveragedModel(model, avg_fn=lambda old, new, _: 0.8 * old + 0.2 * new)
    return average


def make_loader(case: Case, which: int = 0) -> DataLoader[Any]:
    """Returns the loader number `which`: each has samples, and for some samplers a seed, of its own."""
    generator = torch.Generator().manual_seed(case.seed + which)
    num_samples = case.num_samples + which % 3
    x = torch.randn(num_samples, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(num_samples, 2, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, 3, (num_samples,), generator=generator).double()
    if which % 2 == 0:
        counts[: case.batch_size] = 0.0  # in order, a whole batch without weight
    data = TensorDataset(x, y, counts)
    own = torch.Generator().manual_seed(10 + case.seed + which)
    samplers: dict[str, Callable[[], Any]] = {
        "subset": lambda: SubsetRandomSampler(range(0, num_samples, 2), own),
        "weighted": lambda: WeightedRandomSampler([1.0 + i for i in range(num_samples)], num_samples, generator=own),
        "replacement": lambda: RandomSampler(data, replacement=True, num_samples=num_samples + 2, generator=own),
    }
    if case.sampler in samplers:
        return DataLoader(data, case.batch_size, sampler=samplers[case.sampler]())
    is_shuffled = case.sampler != "in order"
    return DataLoader(
        data, case.batch_size, shuffle=is_shuffled, generator=own if case.sampler == "generator" else None
    )


def predict(case: Case, model: Net, x: torch.Tensor) -> torch.Tensor:
    return model.head(model.features(x), x) if case.calls_parts else model(x)


def losses_of(case: Case, model: Net, batch: Batch) -> list[tuple[torch.Tensor, float]]:
    """Returns (sum over samples, weight) of each loss of a batch or micro-batch; their means are added."""
    x, y, counts = batch
    by_sample = (predict(case, model, x) - y).square().mean(1)
    if case.losses == "weighted":
        return [((by_sample * counts).sum(), float(counts.sum()))]
    if case.losses == "one":
        return [(by_sample.sum(), float(len(x)))]
    second = 0.1 * predict(case, model, x).square().mean(1)
    return [(by_sample.sum(), float(len(x))), (second.sum(), float(len(x)))]


def disturb(case: Case, model: Net, step: int) -> None:
    """What the script does to its model before step `case.at`; steps count from 0."""
    if step != case.at:
        return
    if case.freezes:
        model.blocks[0].requires_grad_(False)
    if case.replaced == "clone":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    elif case.replaced == "vector":
        parameters = list(model.parameters())
        vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        nn.utils.vector_to_parameters(vector, parameters)
    elif case.replaced == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def clip_gradients(model: Net, max_norm: float) -> None:
    """Algorithm 1 of arXiv 1211.5063. torch's function adds 1e-6 to the norm, which would hide small mistakes."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)


def limit_gradients(model: Net) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.01, 0.01)


@dataclass
class Outcome:
    """Losses by step, then weights, buffers and EMA by name; or why paceline refused the case."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    refused: str | None = None


# ---- the plain loop ----


def batches_of(case: Case) -> Iterator[Batch]:
    if case.source == "one loader":
        loader = make_loader(case)
        for _ in range(case.epochs):
            yield from loader
    elif case.source == "a loader an epoch":
        for epoch in range(case.epochs):
            yield from make_loader(case, epoch)
    else:
        loaders = [make_loader(case, 0), make_loader(case, 1)]
        for epoch in range(case.epochs):
            yield from loaders[epoch % 2]


def plain(case: Case) -> Outcome:
    """Runs the case without paceline, in one process, over whole batches."""
    model = Net(case, case.seed)
    optimizers = make_optimizers(case, model, is_plain=True)
    schedules = make_schedules(case, optimizers)
    ema = make_ema(model)
    outcome = Outcome()
    torch.manual_seed(5)
    for step, batch in enumerate(batches_of(case)):
        disturb(case, model, step)
        for each in optimizers:
            each.zero_grad()
        terms = [loss_sum / weight for loss_sum, weight in losses_of(case, model, batch) if weight]
        if terms:
            loss = torch.stack(terms).sum()
            loss.backward()
            if case.changes_gradients:
                limit_gradients(model)
            if case.max_norm:
                clip_gradients(model, case.max_norm)
            for each in optimizers:
                each.step()
        outcome.losses.append(loss.item() if terms else float("nan"))
        for schedule in schedules:
            schedule.step()
        ema.update_parameters(model)
    outcome.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if case.has_ema:
        outcome.weights |= {f"ema {name}": tensor.clone() for name, tensor in ema.module.state_dict().items()}
    return outcome


# ---- the same with paceline ----


class Script:
    """One process's part of a case: from the start to step `until`, or from its checkpoint to the end."""

    def __init__(self, case: Case, world: Any, folder: Path, is_restored: bool) -> None:
        self.case, self.world, self.is_restored = case, world, is_restored
        # What is restored may not depend on what was there before.
        self.model = Net(case, case.seed + 1000 * is_restored)
        self.optimizers = make_optimizers(case, self.model)
        if is_restored and case.freezes and (case.saves_at or 0) > case.at:
            self.model.blocks[0].requires_grad_(False)  # as a script does that counts its steps
        self.schedules = make_schedules(case, self.optimizers)
        self.replica = paceline.Replica(
            self.model,
            self.optimizers,
            world,
            strategy=case.restored_strategy if is_restored else case.strategy,
            bucket_mb=case.bucket_mb,
            blocks=list(self.model.blocks) if case.has_blocks and not is_restored else (),
        )
        self.ema = make_ema(self.model)
        torch.manual_seed(5 if not is_restored else 99)
        self.sources = self._sources()
        self.outcome = Outcome()
        if case.saves_at is None:
            return
        objects = {f"schedule_{number}": schedule for number, schedule in enumerate(self.schedules)}
        named = self.sources if case.is_named else {}
        self.checkpoints = paceline.Checkpoints(folder, net=self.replica, ema=self.ema, **objects, **named)
        self.checkpoints.restore()

    def _sources(self) -> dict[str, Any]:
        case = self.case
        cut: dict[str, Any] = {"micro_batch_size": case.micro_batch_size}
        if case.shares and not (self.is_restored and case.restored_size != case.world_size):
            cut["shares"] = case.shares
        if case.source == "a loader an epoch":
            return {}
        loaders = [make_loader(case, which) for which in range(2 if case.source == "two loaders" else 1)]
        return {f"data_{which}": paceline.share(loader, self.world, **cut) for which, loader in enumerate(loaders)}

    def _steps(self) -> Iterator[Any]:
        case = self.case
        if case.source == "one loader":
            yield from self.replica.steps(self.sources["data_0"], epochs=case.epochs)
        elif case.source == "a loader an epoch":
            for epoch in range(case.epochs):
                loader = make_loader(case, epoch)
                yield from self.replica.steps(loader, micro_batch_size=case.micro_batch_size)
        else:
            for epoch in range(case.epochs):
                yield from self.replica.steps(self.sources[f"data_{epoch % 2}"], epochs=epoch // 2 + 1)

    def run(self) -> Outcome:
        case, replica = self.case, self.replica
        for step in self._steps():
            disturb(case, self.model, replica.num_steps)
            for batch in step:
                self._backward(step, batch)
            if case.changes_gradients:
                step.reduce()
                limit_gradients(self.model)
            self.outcome.losses.append(step.finish(max_norm=case.max_norm).loss)
            for schedule in self.schedules:
                schedule.step()
            self.ema.update_parameters(self.model)
            if not self.is_restored and replica.num_steps == case.saves_at:
                self._save()
                return self.outcome
        self.outcome.weights = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
        if case.has_ema:
            state = self.ema.module.state_dict()
            self.outcome.weights |= {f"ema {name}": tensor.clone() for name, tensor in state.items()}
        return self.outcome

    def _backward(self, step: Any, batch: Batch) -> None:
        losses = losses_of(self.case, self.model, batch)
        for number, (loss_sum, weight) in enumerate(losses, start=1):
            more = number < len(losses)
            if self.case.losses in ("weighted", "sums"):
                step.backward(loss_sum, weight=weight, is_sum=True, more=more)
            else:
                step.backward(loss_sum / weight, more=more)

    def _save(self) -> None:
        self.checkpoints.save()
        if self.case.overwrites:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.clamp_(-0.001, 0.001)
                for tensor in self.ema.module.state_dict().values():
                    tensor.zero_()
        self.checkpoints.finish()


def replicated(world: Any, cases: list[Case], folder: str, is_restored: bool) -> list[Outcome]:
    """Runs the cases one after the other on the ranks of a world. Collective."""
    outcomes = []
    for case in cases:
        print(f"case {case.seed} on {world.world_size} ranks, restored {is_restored}", flush=True)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                outcomes.append(Script(case, world, Path(folder, f"{case.seed}"), is_restored).run())
            except UserError as error:
                outcomes.append(Outcome(refused=str(error)))
            except Exception as error:  # a wrong case, and the next one is to run
                outcomes.append(Outcome(refused=f"{type(error).__name__}: {error}"))
    return outcomes


# ---- comparing ----


def run_cases(cases: list[Case], folder: str) -> dict[Case, Outcome]:
    """Returns what each case did on its ranks, the restored part appended to the first."""
    from ranks import run_ranks

    begun: dict[Case, Outcome] = {}
    for world_size in sorted({case.world_size for case in cases}):
        group = [case for case in cases if case.world_size == world_size]
        begun |= zip(group, run_ranks(replicated, world_size, group, folder, False)[0], strict=True)
    ended = dict(begun)
    saved = [case for case in cases if begun[case].refused is None and not begun[case].weights]
    for world_size in sorted({case.restored_size for case in saved}):
        group = [case for case in saved if case.restored_size == world_size]
        for case, rest in zip(group, run_ranks(replicated, world_size, group, folder, True)[0], strict=True):
            ended[case] = Outcome(begun[case].losses + rest.losses, rest.weights, rest.refused)
    return ended


def problem_of(case: Case, outcome: Outcome) -> str | None:
    """Returns what is wrong with the case's outcome, or None."""
    if outcome.refused is not None:
        is_allowed = any(word in outcome.refused for word in case.may_refuse)
        return None if is_allowed else f"refused: {outcome.refused}"
    expected = plain(case)
    if len(outcome.losses) != len(expected.losses):
        return f"{len(outcome.losses)} steps instead of {len(expected.losses)}"
    for step, (loss, right) in enumerate(zip(outcome.losses, expected.losses, strict=True), start=1):
        if right == right and not abs(loss - right) <= TOLERANCE * (1 + abs(right)):  # NaN: a step without weight
            return f"step {step}: loss {loss:.12g} instead of {right:.12g}"
    for name, right_tensor in expected.weights.items():
        error = (outcome.weights[name] - right_tensor).abs().max().item() if right_tensor.numel() else 0.0
        if not error <= 100 * TOLERANCE:
            return f"{name} differs by {error:.3g}"
    return None


def problems_of(cases: list[Case]) -> tuple[dict[Case, str], Counter[str]]:
    """Returns the wrong cases, and how many were refused by the first words of the message."""
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as folder:
        outcomes = run_cases(cases, folder)
    refused = Counter((outcome.refused or "")[:60] for outcome in outcomes.values() if outcome.refused)
    problems = {case: problem_of(case, outcome) for case, outcome in outcomes.items()}
    return {case: problem for case, problem in problems.items() if problem}, refused


def cases_of(first: int, num_cases: int) -> list[Case]:
    """Returns cases of consecutive seeds, on 1, 2 and 3 ranks in turn."""
    return [Case.of(seed, 1 + seed % 3) for seed in range(first, first + num_cases)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--at-once", type=int, default=30, help="cases in one set of ranks")
    arguments = parser.parse_args()
    num_wrong, refused = 0, Counter[str]()
    for first in range(arguments.seed, arguments.seed + arguments.cases, arguments.at_once):
        num_cases = min(arguments.at_once, arguments.seed + arguments.cases - first)
        problems, refused_here = problems_of(cases_of(first, num_cases))
        refused += refused_here
        num_wrong += len(problems)
        for case, problem in problems.items():
            print(f"WRONG: {problem}\n  {case}", flush=True)
    print(f"{arguments.cases} cases from seed {arguments.seed}: {num_wrong} wrong, {refused.total()} refused")
    for message, count in refused.most_common():
        print(f"  {count} x {message}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
