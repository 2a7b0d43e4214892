"""Sharded strategies train as `ddp` does, at any world size, with a share of the optimizer's state a rank.

One start of each world serves all checks: every strategy trains the same model on the same micro-batches, of which
some ranks get none; one step is skipped because a rank's gradient was poisoned. What a world has half-way goes to the
next one, which goes on from it with another strategy.
"""

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from paceline.base.ownership import Slice
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build
from paceline.optim.adamw import MOMENTS as ADAMW_MOMENTS
from paceline.optim.clip import clip_
from paceline.optim.config import OptimConfig
from paceline.optim.muon import MOMENTS as MUON_MOMENTS
from paceline.optim.muon import Muon, update_cost
from paceline.optim.optimizer import ParamSlice, is_updated_whole, make_optimizers
from paceline.sync.make import make_strategy
from paceline.sync.strategy import Strategy
from paceline.sync.zero import ShardedSync
from paceline.world.config import ParallelConfig
from paceline.world.group import DistributedGroup, Group, LocalGroup
from paceline.world.hierarchy import Hosts
from paceline.world.runtime import World

SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 64, "n_positions": 16, "vocab_size": 128}
MODELS = {  # by optimizer: tied embeddings and biases, or neither
    "adamw": ModelConfig(arch="gpt2", bias=True, **SHAPE),  # type: ignore[arg-type]
    "muon": ModelConfig(arch="llama", qk_norm=True, embed_mix=2, **SHAPE),  # type: ignore[arg-type]
}
NUM_STEPS, HALF, POISONED_STEP = 6, 3, 2
MICRO_BATCH, NUM_MICRO_BATCHES = 2, 3  # on four ranks one has none
NUM_TOKENS = MICRO_BATCH * NUM_MICRO_BATCHES * SHAPE["n_positions"]
LR, WEIGHT_DECAY = 2e-3, 0.1
EPS = 1e-6  # above rounding in a gradient, see tests/parity
POISONED = "layers.1.mlp.down_proj.weight"
RUNS = [("ddp", "adamw"), ("ddp", "muon"), ("naive", "adamw"), ("zero", "adamw"), ("zero", "muon"), ("fsdp", "adamw")]
RUNS += [("padded", "adamw"), ("padded", "muon")]  # zero as on NCCL, over Gloo
RUNS += [("fsdp", "muon"), ("hsdp", "adamw"), ("hsdp", "muon")]  # hsdp: four ranks as two hosts
SHARDED = ("zero", "fsdp", "padded")
# What goes on from what another world left: strategy and optimizer before -> strategy after.
HANDED_ON = {("zero", "adamw"): "fsdp", ("fsdp", "adamw"): "zero", ("zero", "muon"): "fsdp", ("fsdp", "muon"): "zero"}
CPU = torch.device("cpu")
pytestmark = pytest.mark.long


@dataclass
class Snapshot:
    """What a checkpoint holds: no ranks in it once the states of all ranks are joined."""

    weights: dict[str, torch.Tensor]
    state: dict[Slice, torch.Tensor]
    num_updates: int


@dataclass
class Trained:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    own_weights: dict[Slice, torch.Tensor] = field(default_factory=dict)
    half_way: Snapshot | None = None
    not_finite: tuple[str | None, bool | None] | None = None
    state_share: float = 0.0
    sent_bytes: float = 0.0


def micro_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    uniform = torch.rand(MICRO_BATCH, SHAPE["n_positions"] + 1, generator=generator)
    ids = (SHAPE["vocab_size"] * uniform**3).long()  # small ids are frequent: that can be learned
    return ids[:, :-1], ids[:, 1:]


class Adopted:
    """The optimizers of a model, over a strategy's slices of its parameters as a Replica has them; state by slices."""

    def __init__(self, config: OptimConfig, model: GPT) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "compute_dtype": torch.float32}
        self.optimizers = make_optimizers(config, model.named_parameters(), **settings)  # type: ignore[arg-type]

    def adopt(self, slices: list[ParamSlice], donor: Snapshot | None = None) -> None:
        self.slices = slices
        by_name = {part.name: part for part in slices}
        whole = {item.name: tensor for item, tensor in donor.state.items()} if donor else {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                mine = [by_name[name] for p in group["params"] if (name := self._names[p]) in by_name]
                group["params"] = [part.parameter for part in mine]
                if donor:
                    group["step"] = donor.num_updates
                    for part in mine:
                        moments = MUON_MOMENTS if isinstance(optimizer, Muon) else ADAMW_MOMENTS
                        optimizer.state[part.parameter] = {
                            key: whole[f"{part.name}/{key}"][part.start : part.stop].clone().view_as(part.parameter)
                            for key in moments
                        }

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[Slice, torch.Tensor]:
        return {
            Slice(f"{part.name}/{key}", part.start, part.stop): tensor.view(-1)
            for optimizer in self.optimizers
            for part in self.slices
            for key, tensor in optimizer.state.get(part.parameter, {}).items()
        }

    @property
    def num_updates(self) -> int:
        return int(self.optimizers[0].param_groups[0]["step"])


def make(group: Group, strategy: str, name: str, donor: Snapshot | None) -> tuple[GPT, Strategy, Adopted]:
    config = OptimConfig(name=name, eps=EPS)  # type: ignore[arg-type]
    model = build(MODELS[name], 1, "cpu")
    if donor:
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.copy_(donor.weights[parameter_name])
    parallel = ParallelConfig(strategy=strategy, bucket_mb=0.05)  # type: ignore[arg-type]
    costs = {n: update_cost(*p.shape) for n, p in model.named_parameters() if is_updated_whole(config, n, p.shape)}
    optimizer = Adopted(config, model)
    if isinstance(group, DistributedGroup) and strategy == "hsdp":
        group.hosts = Hosts.of("aabb" if group.size == 4 else "abc"[: group.size])
    if strategy == "padded":
        sync: Strategy = ShardedSync(model, group, 50_000, costs, list(model.layers), is_padded=True)
    else:
        sync = make_strategy(parallel, model, group, costs, list(model.layers))
    optimizer.adopt(sync.slices(), donor)
    return model, sync, optimizer


def train(group: Group, strategy: str, name: str, donor: Snapshot | None = None) -> Trained:
    model, sync, optimizer = make(group, strategy, name, donor)
    seen = Trained()
    group.take_traffic()
    for step in range(HALF if donor else 0, NUM_STEPS):
        is_poisoned = step == POISONED_STEP and group.rank == 1 % group.size
        loss_sum = backward(model, sync, group, step, poison=strategy if is_poisoned else "")
        norm = clip_(sync.reduce(), 1.0, 1.0, sync.total)
        seen.losses.append(world_loss(group, loss_sum))
        assert (step == POISONED_STEP) == (norm != norm), f"step {step}: the norm is {norm}"
        if step == POISONED_STEP:
            seen.not_finite = sync.not_finite()
        else:
            optimizer.step()
        sync.publish()
        if step == HALF - 1:
            sync.wait_for_params()
            state = {item: tensor.clone() for item, tensor in optimizer.state().items()}
            weights = {n: weight.clone() for n, weight in sync.full_weights().items()}
            seen.half_way = Snapshot(weights, state, optimizer.num_updates)
    sync.wait_for_params()
    seen.sent_bytes = group.take_traffic().num_bytes
    seen.weights = {n: weight.clone() for n, weight in sync.full_weights().items()}
    seen.own_weights = {item: weight.clone() for item, weight in sync.weights().items()}
    config, plain = OptimConfig(name=name), build(MODELS[name], 1, "cpu").named_parameters()  # type: ignore[arg-type]
    num_all = sum(p.numel() * (1 if is_updated_whole(config, n, p.shape) else 2) for n, p in plain)  # moments
    num_held = sum(tensor.numel() for tensor in optimizer.state().values())
    seen.state_share = num_held / num_all
    return seen


def backward(model: GPT, sync: Strategy, group: Group, step: int, poison: str) -> float:
    """The passes of a step; returns the sum of this rank's losses. A rank that is to be poisoned says its strategy."""
    mine = range(group.rank, NUM_MICRO_BATCHES, group.size)
    num_passes = -(-NUM_MICRO_BATCHES // group.size) if sync.lockstep else len(mine)
    loss_sum = 0.0
    for i in range(num_passes):
        weight = float(i < len(mine))
        with sync.accumulate(last=i == num_passes - 1):
            loss = model(*micro_batch(step, mine[i] if i < len(mine) else 0))
            if poison in ("fsdp", "hsdp"):
                weight = torch.nan
            elif poison and i == 0:
                parameter = dict(model.named_parameters())[POISONED]
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad[0, 0] = torch.nan
            (loss * (weight / NUM_TOKENS)).backward()
        loss_sum += float(loss.detach()) * (i < len(mine))
    return loss_sum


def world_loss(group: Group, loss_sum: float) -> float:
    """The step's loss. After `reduce`: until then buckets are launched, on a rank without a micro-batch later."""
    return sum(row[0] for row in group.share([loss_sum])) / NUM_TOKENS


def all_runs(group: Group, donors: dict[Any, Snapshot]) -> dict[Any, Trained]:
    seen = {run: train(group, *run) for run in RUNS}
    return seen | {(*run, HANDED_ON[run]): train(group, HANDED_ON[run], run[1], donor) for run, donor in donors.items()}


def on_ranks(world: World, donors: dict[Any, Any]) -> tuple[dict[Any, Trained], dict[str, Any]]:
    snapshots = {run: Snapshot(*parts) for run, parts in donors.items()}
    return all_runs(world.group, snapshots), stale_weights(world.group)


# ---- weights that are still on their way ----


def stale_weights(group: Group) -> dict[str, Any]:
    """A forward on all ranks right after `publish`, which one rank reaches 0.3 s late: what each module read."""
    model = build(MODELS["adamw"], 1, "cpu")
    sync = ShardedSync(model, group, 4096, {}, list(model.layers))
    read: dict[str, torch.Tensor] = {}
    later: dict[str, int] = {}

    def note(module: nn.Module, name: str) -> None:
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            read[parameter_name] = parameter.detach().clone()

    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda m, _, name=name: note(m, name))  # type: ignore[misc]
    for i, block in enumerate(model.layers):
        count = lambda *_, i=i: later.update({str(i): sum(b.gathering is not None for b in sync.buckets)})  # noqa: E731
        block.register_forward_pre_hook(count)
    before = {name: weight.clone() for name, weight in sync.full_weights().items()}
    group.barrier()
    if group.rank == group.size - 1:
        time.sleep(0.3)
    with torch.no_grad():
        for part in sync.slices():
            part.parameter.add_(1 + group.rank)
    sync.publish()
    raw = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model(*micro_batch(0, 0))
    return {"before": before, "raw": raw, "read": read, "later": later, "settled": dict(sync.full_weights())}


# ---- the worlds, each started once ----


def join(rows: list[dict[Any, Trained]], run: Any) -> tuple[Any, ...]:
    """The fields of one snapshot of what the ranks have half-way; every element of the state must be somewhere once."""
    snapshots = [row[run].half_way for row in rows]
    found: dict[str, list[tuple[Slice, torch.Tensor]]] = {}
    for snapshot in snapshots if run[0] in SHARDED else snapshots[:1]:
        assert snapshot is not None
        for item, tensor in snapshot.state.items():
            found.setdefault(item.name, []).append((item, tensor))
    state = {}
    for name, parts in found.items():
        parts.sort(key=lambda part: part[0])
        edges = [0, *(item.stop for item, _ in parts)]
        assert [item.start for item, _ in parts] == edges[:-1], f"{run} {name}: gaps or overlaps"
        state[Slice(name, 0, edges[-1])] = torch.cat([tensor for _, tensor in parts])
    assert snapshots[0] is not None
    return snapshots[0].weights, state, snapshots[0].num_updates


@pytest.fixture(scope="module")
def worlds() -> dict[Any, list[dict[Any, Trained]]]:
    """By world size, and "local" for one process without a group; each goes on from the one before it."""
    local = LocalGroup(CPU)
    rows: dict[Any, Any] = {"local": [all_runs(local, {})]}
    rows["stale"] = {}
    before: Any = "local"
    for size in (4, 3, 1):
        donors = {run: join(rows[before], run) for run in HANDED_ON}
        answers = run_ranks(on_ranks, size, donors)
        rows[size] = [runs for runs, _ in answers]
        rows["stale"][size] = [stale for _, stale in answers]
        before = size
    return rows


WORLDS = pytest.mark.parametrize("size", [1, 3, 4])


@WORLDS
def test_every_strategy_learns_as_one_process_does(worlds: Any, size: int) -> None:
    for rank, row in enumerate(worlds[size]):
        for run in RUNS:
            wanted = worlds["local"][0]["ddp", run[1]]
            assert wanted.losses[0] - wanted.losses[-1] > 0.1, "nothing learned"
            assert row[run].losses == pytest.approx(wanted.losses, abs=1e-5), f"{run}, rank {rank}"
            for name, weight in row[run].weights.items():
                torch.testing.assert_close(weight, wanted.weights[name], rtol=0, atol=1e-4, msg=f"{run} {name}")


@WORLDS
def test_replicas_are_bit_identical(worlds: Any, size: int) -> None:
    first, *others = worlds[size]
    for run, seen in first.items():
        for row in others:
            assert all(torch.equal(weight, row[run].weights[name]) for name, weight in seen.weights.items()), run


@WORLDS
@pytest.mark.parametrize("run", [run for run in RUNS if run[0] in SHARDED], ids="-".join)
def test_a_rank_holds_its_share_of_the_optimizers_state_and_no_more(worlds: Any, size: int, run: Any) -> None:
    shares = [row[run].state_share for row in worlds[size]]
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) <= (1.2 if run == ("padded", "muon") else 1.03) / size


@WORLDS
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_zero_moves_no_more_than_ddp(worlds: Any, size: int, name: str) -> None:
    """Beside the gradients' and weights' bytes, 8 a step for the norm to each other rank."""
    zero, ddp = (sum(row[strategy, name].sent_bytes for row in worlds[size]) for strategy in ("zero", "ddp"))
    assert (ddp > 0) == (size > 1)
    assert ddp - 1 <= zero <= ddp + NUM_STEPS * 8 * (size - 1) * size + 1


@WORLDS
def test_weights_that_a_rank_holds_are_all_of_them_or_its_share(worlds: Any, size: int) -> None:
    for run in RUNS:
        whole = worlds[size][0][run].weights
        counted = dict.fromkeys(whole, 0)
        for row in worlds[size]:
            for item, weight in row[run].own_weights.items():
                assert torch.equal(weight, whole[item.name].view(-1)[item.start : item.stop])
                counted[item.name] += item.num_elements
        copies = {"hsdp": size // 2 if size == 4 else size}.get(run[0], 1 if run[0] in SHARDED else size)
        assert counted == {name: copies * weight.numel() for name, weight in whole.items()}


@WORLDS
def test_what_was_not_finite_is_named_by_who_has_it_and_who_brought_it(worlds: Any, size: int) -> None:
    for run in RUNS:
        seen = [row[run].not_finite for row in worlds[size]]
        names = {name for name, _ in seen}
        if run[0] in ("fsdp", "hsdp"):  # there the whole loss was
            assert None not in names
            if run[0] == "hsdp" and size < 4:
                continue
            assert [mine for _, mine in seen] == ([None] if size == 1 else [rank == 1 for rank in range(size)])
            continue
        assert [mine for _, mine in seen] == [rank == 1 % size for rank in range(size)], run
        is_zero = run[0] in ("zero", "padded")
        assert names == ({POISONED, None} if is_zero and size > 1 else {POISONED}), run
        assert not is_zero or [name for name, _ in seen].count(POISONED) == 1


@WORLDS
@pytest.mark.parametrize("run", HANDED_ON, ids="-".join)
def test_another_world_and_strategy_goes_on_from_a_state_joined_by_slices(worlds: Any, size: int, run: Any) -> None:
    wanted = worlds["local"][0]["ddp", run[1]]
    for row in worlds[size]:
        went_on = row[*run, HANDED_ON[run]]
        assert went_on.losses == pytest.approx(wanted.losses[HALF:], abs=1e-5)
        for name, weight in went_on.weights.items():
            torch.testing.assert_close(weight, wanted.weights[name], rtol=0, atol=1e-4)


@WORLDS
def test_no_module_reads_a_weight_that_has_not_arrived(worlds: Any, size: int) -> None:
    for row in worlds["stale"][size]:
        # The positions' table is no module that is called: it is read after the model's own hook.
        assert row["settled"].keys() - row["read"].keys() == {"embed_positions.weight"}
        for name, weight in row["read"].items():
            assert torch.equal(row["settled"][name], weight), name
            assert not torch.equal(weight, row["before"][name]), f"{name} has not changed: this test shows nothing"
    if size > 1:  # on the first rank, long before the last one came, there was something stale to be read
        row = worlds["stale"][size][0]
        assert any(not torch.equal(row["raw"][name], weight) for name, weight in row["settled"].items())


@WORLDS
def test_a_block_waits_for_its_own_weights_only(worlds: Any, size: int) -> None:
    for row in worlds["stale"][size]:
        later = [row["later"][str(i)] for i in range(SHAPE["n_layer"])]
        assert later == sorted(later, reverse=True)
        assert later[0] > 0


# ---- one process ----


def test_a_parameter_that_two_stages_share_is_waited_for_by_both() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.Linear(4, 4)))
    sync = ShardedSync(model, LocalGroup(CPU), 1, {}, list(model))
    seen: dict[int, int] = {}
    for i, stage in enumerate(model):
        stage.register_forward_pre_hook(
            lambda *_, i=i: seen.update({i: sum(b.gathering is not None for b in sync.buckets)})  # type: ignore[misc]
        )
    sync.publish()
    model(torch.ones(1, 4))
    assert seen == {0: 2, 1: 0}


def test_a_bucket_is_gathered_when_the_next_one_is_to_be_updated() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sync = ShardedSync(model, LocalGroup(CPU), 1, {}, list(model))
    seen = [
        ([part.name for part in slices], sum(bucket.gathering is not None for bucket in sync.buckets))
        for slices in sync.parts()
    ]
    assert seen == [([name], i) for i, name in enumerate(["0.weight", "0.bias", "1.weight", "1.bias"])]
    begun = [bucket.gathering for bucket in sync.buckets]
    sync.publish()  # begins none again, and all of them after a step without an update
    assert [bucket.gathering for bucket in sync.buckets] == begun
    sync.publish()
    assert not any(bucket.gathering in begun for bucket in sync.buckets)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_norm_and_the_output_layer_wait_for_their_weights_after_the_blocks(name: str) -> None:
    model = build(MODELS[name], 1, "cpu")
    sync = ShardedSync(model, LocalGroup(CPU), 1, {}, model.stages())
    missing = lambda *_: {bucket.names[0] for bucket in sync.buckets if bucket.gathering is not None}  # noqa: E731
    seen: list[set[str]] = []
    model.layers[-1].register_forward_hook(lambda *_: seen.append(missing()))
    sync.publish()
    tokens_BT = torch.ones(1, 8, dtype=torch.int64)
    model(tokens_BT, tokens_BT)
    assert seen == [{name for name, _ in model.named_parameters() if name.startswith(("norm", "lm_head"))}]
    assert not missing()


def test_half_a_block_waits_for_its_own_weights_only() -> None:
    model = build(MODELS["adamw"], 1, "cpu")
    sync = ShardedSync(model, LocalGroup(CPU), 1, {}, model.stages())
    missing = lambda *_: {name for bucket in sync.buckets if bucket.gathering for name in bucket.names}  # noqa: E731
    seen: list[set[str]] = []
    model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(missing()))
    sync.publish()
    tokens_BT = torch.ones(1, 8, dtype=torch.int64)
    model(tokens_BT, tokens_BT)
    of_block = {name for name, _ in model.named_parameters() if name.startswith("layers.0.")}
    assert seen[0] & of_block == {name for name in of_block if "mlp" in name or "post_attention" in name}


def compiled(world: World) -> list[list[float]]:
    """Losses with blocks compiled in place, and plain; one rank publishes late, so a stale weight would show."""
    found = []
    for is_compiled in (True, False):
        model = build(MODELS["adamw"], 1, "cpu")
        if is_compiled:
            for block in model.layers:
                block.compile(backend="eager")
        optimizer = Adopted(OptimConfig(eps=EPS), model)
        sync = ShardedSync(model, world.group, 50_000, {}, list(model.layers))
        optimizer.adopt(sync.slices())
        losses = []
        for step in range(8):
            loss_sum = backward(model, sync, world.group, step, poison="")
            clip_(sync.reduce(), 1.0, 1.0, sync.total)
            losses.append(world_loss(world.group, loss_sum))
            optimizer.step()
            if world.rank == 1:
                time.sleep(0.1)
            sync.publish()
        sync.wait_for_params()
        found.append(losses)
    return found


def test_compiled_blocks_wait_for_their_weights_too() -> None:
    for with_compiler, plain in run_ranks(compiled, 2):
        assert with_compiler == pytest.approx(plain, abs=1e-5)
        assert plain[0] - plain[-1] > 0.1, "nothing learned"


def alive_while_read(world: World) -> int:
    """The most complete tensors that exist at once while all of them are read."""
    model = build(MODELS["adamw"], 0, "cpu")
    sync = make_strategy(ParallelConfig(strategy="fsdp"), model, world.group, stages=list(model.layers))
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0
    for tensor in sync.full_weights().values():
        seen.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in seen))
    return most


def test_a_sharded_model_is_read_tensor_by_tensor() -> None:
    assert max(run_ranks(alive_while_read, 2)) <= 2, "the one that is read, and the one before"
