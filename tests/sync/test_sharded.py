"""Sharded strategies train as one process does, with a share of the optimizer's state a rank.

Four ranks are started once: every strategy trains the same model on the same micro-batches, of which one rank gets
none; one step is skipped because a rank's gradient was poisoned. Then what `zero` does while weights are on their way.
"""

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import Call, run_calls, run_ranks
from torch import nn

from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import is_updated_whole, make_optimizers
from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.sync.make import make_strategy
from paceline.sync.zero import ShardedSync
from paceline.world.config import ParallelConfig
from paceline.world.group import LocalGroup
from paceline.world.hierarchy import Hosts
from paceline.world.runtime import World

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 16, "vocab_size": 128}
MODELS = {  # by optimizer: tied embeddings and biases, or neither
    "adamw": ModelConfig(arch="gpt2", bias=True, **SHAPE),  # type: ignore[arg-type]
    "muon": ModelConfig(arch="llama", qk_norm=True, embed_mix=2, **SHAPE),  # type: ignore[arg-type]
}
NUM_RANKS, NUM_STEPS, POISONED_STEP = 4, 4, 1
MICRO_BATCH, NUM_MICRO_BATCHES = 2, 3  # on four ranks one has none
NUM_TOKENS = MICRO_BATCH * NUM_MICRO_BATCHES * SHAPE["n_positions"]
EPS = 1e-6  # above rounding in a gradient, see tests/parity
POISONED = "layers.1.mlp.down_proj.weight"
SHARDED = ("zero", "padded", "fsdp")  # padded: zero as on NCCL, over Gloo
STRATEGIES = ("ddp", *SHARDED, "hsdp")  # hsdp: four ranks as two hosts
RUNS = [(strategy, optimizer) for strategy in STRATEGIES for optimizer in MODELS]
CPU = torch.device("cpu")


@dataclass
class Trained:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    own_weights: dict[Slice, torch.Tensor] = field(default_factory=dict)
    trouble: list[tuple[str | None, list[int] | None] | None] = field(default_factory=list)  # of each step
    state_share: float = 0.0
    sent_bytes: float = 0.0


def micro_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    uniform = torch.rand(MICRO_BATCH, SHAPE["n_positions"] + 1, generator=generator)
    ids = (SHAPE["vocab_size"] * uniform**3).long()  # small ids are frequent: that can be learned
    return ids[:, :-1], ids[:, 1:]


def made(optimizer: str) -> tuple[GPT, list[Any]]:
    model = build(MODELS[optimizer], 1, "cpu")
    config = OptimConfig(name=optimizer, eps=EPS)  # type: ignore[arg-type]
    settings = {"lr": 5e-3, "weight_decay": 0.1, "compute_dtype": torch.float32}
    return model, list(make_optimizers(config, model.named_parameters(), **settings))  # type: ignore[arg-type]


def plain(optimizer: str) -> Trained:
    """The oracle: one process, torch's own clipping."""
    model, optimizers = made(optimizer)
    seen = Trained()
    for step in range(NUM_STEPS):
        loss = sum(model(*micro_batch(step, index)) for index in range(NUM_MICRO_BATCHES)) / NUM_TOKENS
        seen.losses.append(float(loss.detach()))
        if step != POISONED_STEP:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in optimizers:
                each.step()
        model.zero_grad()
    seen.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return seen


def trained(world: World, strategy: str, optimizer: str) -> Trained:
    model, optimizers = made(optimizer)
    world.group.hosts = Hosts.of("aabb" if strategy == "hsdp" else "aaaa")  # type: ignore[attr-defined]
    world.group.is_queued = strategy == "padded"
    named: Any = {"padded": "zero"}.get(strategy, strategy)
    replica = Replica(model, optimizers, world, strategy=named, blocks=list(model.layers), bucket_mb=0.05)
    world.group.is_queued = False
    seen = Trained()
    for number in range(NUM_STEPS):
        mine = [micro_batch(number, index) for index in range(world.rank, NUM_MICRO_BATCHES, world.world_size)]
        is_poisoned = number == POISONED_STEP and world.rank == 1
        if is_poisoned and strategy not in ("fsdp", "hsdp"):
            hook = model.get_parameter(POISONED).register_hook(lambda gradient: gradient * torch.nan)
        batch = Batch(mine, passes=1, stand_in=lambda number=number: micro_batch(number, 0))
        step = replica.step(batch, total=NUM_TOKENS)
        for ids, targets in step:
            loss = model(ids, targets)
            if is_poisoned and strategy in ("fsdp", "hsdp"):  # whose parameters are shards
                loss = loss * torch.nan
            step.backward(loss, weight=targets.numel(), is_sum=True)
        result = step.finish(max_norm=1.0)
        if is_poisoned and strategy not in ("fsdp", "hsdp"):
            hook.remove()
        seen.losses.append(result.loss)
        seen.trouble.append(result.skipped and (result.skipped.parameter, result.skipped.ranks))
        seen.sent_bytes += result.times.comm_bytes
    replica.wait_for_params()
    seen.weights = {name: weight.clone() for name, weight in replica.sync.full_weights().items()}
    seen.own_weights = {item: weight.clone() for item, weight in replica.sync.weights().items()}
    seen.state_share = num_moments(replica) / sum(
        parameter.numel() * (1 if is_updated_whole(OptimConfig(name=optimizer), name, parameter.shape) else 2)  # type: ignore[arg-type]
        for name, parameter in made(optimizer)[0].named_parameters()
    )
    replica.release()
    return seen


def num_moments(replica: Replica) -> int:
    states = [state for each in replica.optimizers for state in each.state.values()]
    return sum(
        tensor.to_local().numel() if hasattr(tensor, "to_local") else tensor.numel()
        for state in states
        for tensor in state.values()
        if tensor.dim()
    )


def all_runs(world: World) -> dict[Any, Trained]:
    return {run: trained(world, *run) for run in RUNS}


@pytest.fixture(scope="module")
def rows() -> list[dict[Any, Trained]]:
    return run_ranks(all_runs, NUM_RANKS)


@pytest.mark.long
def test_every_strategy_learns_as_one_process_does_and_replicas_are_bit_identical(rows: Any) -> None:
    for name in MODELS:
        wanted = plain(name)
        assert wanted.losses[0] - wanted.losses[-1] > 0.1, "nothing learned"
        for strategy in STRATEGIES:
            for rank, row in enumerate(rows):
                found = row[strategy, name]
                fine = [n for n in range(NUM_STEPS) if n != POISONED_STEP or strategy not in ("fsdp", "hsdp")]
                for number in fine:
                    assert found.losses[number] == pytest.approx(wanted.losses[number], abs=1e-5), (strategy, rank)
                for key, weight in found.weights.items():
                    torch.testing.assert_close(weight, wanted.weights[key], rtol=0, atol=1e-4, msg=f"{strategy} {key}")
                    assert torch.equal(weight, rows[0][strategy, name].weights[key]), (strategy, rank)


@pytest.mark.long
@pytest.mark.parametrize("run", [run for run in RUNS if run[0] in SHARDED], ids="-".join)
def test_a_rank_holds_its_share_of_the_optimizers_state_and_no_more(rows: Any, run: Any) -> None:
    shares = [row[run].state_share for row in rows]
    assert sum(shares) == pytest.approx(1.0)
    slack = {("padded", "muon"): 1.2, ("fsdp", "muon"): 1.1, ("zero", "muon"): 1.1}.get(run, 1.03)  # of whole matrices
    assert max(shares) <= slack / NUM_RANKS


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_zero_moves_no_more_than_ddp(rows: Any, name: str) -> None:
    """Beside the gradients' and weights' bytes, some numbers about the step. Finds: weights that are sent after the one
    step that is skipped, in which they stay as they were."""
    zero, ddp = (sum(row[strategy, name].sent_bytes for row in rows) for strategy in ("zero", "ddp"))
    assert zero == pytest.approx(ddp * (1 - 0.5 / NUM_STEPS), rel=0.01)


@pytest.mark.long
def test_weights_that_a_rank_holds_are_all_of_them_or_its_share(rows: Any) -> None:
    for run in RUNS:
        whole = rows[0][run].weights
        counted = dict.fromkeys(whole, 0)
        for row in rows:
            for item, weight in row[run].own_weights.items():
                assert torch.equal(weight, whole[item.name].view(-1)[item.start : item.stop])
                counted[item.name] += item.num_elements
        copies = {"ddp": NUM_RANKS, "hsdp": 2}.get(run[0], 1)
        assert counted == {name: copies * weight.numel() for name, weight in whole.items()}


@pytest.mark.long
def test_what_was_not_finite_is_named_with_the_rank_that_brought_it(rows: Any) -> None:
    for run in RUNS:
        for row in rows:
            before, trouble, *after = row[run].trouble
            assert before is None
            assert after == [None] * (NUM_STEPS - 2)
            parameter, ranks = trouble
            assert ranks == [1], run
            assert parameter == POISONED or (run[0] in ("fsdp", "hsdp") and parameter), run


# ---- weights that are still on their way ----


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Any]]:
    calls = {"stale": Call(stale_weights), "alive": Call(alive_while_read), "refused": Call(refused_without)}
    calls |= {"looked at": Call(looked_at), "clamped": Call(clamped)}
    return run_calls(calls, 2)


def stale_weights(world: World) -> dict[str, Any]:
    """A forward on all ranks right after `publish`, which one rank reaches 0.3 s late: what each module read."""
    group, model = world.group, build(MODELS["adamw"], 1, "cpu")
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


def test_no_module_reads_a_weight_that_has_not_arrived(two_ranks: dict[str, list[Any]]) -> None:
    for row in two_ranks["stale"]:
        # The positions' table is no module that is called: it is read after the model's own hook.
        assert row["settled"].keys() - row["read"].keys() == {"embed_positions.weight"}
        for name, weight in row["read"].items():
            assert torch.equal(row["settled"][name], weight), name
            assert not torch.equal(weight, row["before"][name]), f"{name} has not changed: this test shows nothing"
    # On the first rank, long before the last one came, there was something stale to be read.
    row = two_ranks["stale"][0]
    assert any(not torch.equal(row["raw"][name], weight) for name, weight in row["settled"].items())


def test_a_block_waits_for_its_own_weights_only(two_ranks: dict[str, list[Any]]) -> None:
    for row in two_ranks["stale"]:
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


def test_a_sharded_model_is_read_tensor_by_tensor(two_ranks: dict[str, list[Any]]) -> None:
    assert max(two_ranks["alive"]) <= 2, "the one that is read, and the one before"


INPUTS = torch.arange(8.0).view(2, 4) / 8


def two_layers(world: World) -> Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return Replica(model, torch.optim.SGD(model.parameters(), lr=0.5), world, strategy="fsdp", blocks=[model[0]])


def looked_at(world: World) -> list[list[float]]:
    """The losses of three steps: without and with a forward pass between the last backward pass and `finish`."""
    losses = []
    for has_pass in (False, True):
        replica = two_layers(world)
        losses.append([])
        for _ in range(3):
            step = replica.step(INPUTS)
            step.backward(replica.model(INPUTS).square().mean(), weight=1)
            with torch.no_grad():
                if has_pass:
                    replica.model(INPUTS)
            losses[-1].append(step.finish().loss)
    return losses


def test_a_forward_pass_before_finish_leaves_no_old_weights(two_ranks: dict[str, list[Any]]) -> None:
    """Finds gathered weights that the next step takes for current: those of no block stayed gathered."""
    for plain_losses, losses in two_ranks["looked at"]:
        assert losses == plain_losses
        assert plain_losses[2] < plain_losses[1] < plain_losses[0]


def clamped(world: World) -> float:
    """The largest weight after a clamp that follows an evaluation."""
    replica = two_layers(world)
    replica.evaluate(
        lambda: INPUTS, lambda inputs: replica.model(inputs).square().mean(), micro_batches=world.world_size
    )
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.clamp_(-0.01, 0.01)
    return max(float(weight.abs().max()) for weight in replica.sync.full_weights().values())


def test_a_change_of_weights_after_an_evaluation_has_its_effect(two_ranks: dict[str, list[Any]]) -> None:
    assert two_ranks["clamped"] == [pytest.approx(0.01)] * 2


def refused_without(world: World) -> dict[str, str]:
    """What fsdp says where torch has renamed something that is private to it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    said = {}
    for name, owner in (
        ("_fsdp_param_group", _fsdp_state.FSDPState),
        ("post_backward", _fsdp_param_group.FSDPParamGroup),
        ("_unsharded_param", _fsdp_param.FSDPParam.__annotations__),
    ):
        if name == "_fsdp_param_group" and not hasattr(owner, name):
            continue  # torch 2.11 has it in each object, and not in the class
        with pytest.MonkeyPatch.context() as patch:
            (patch.delitem if isinstance(owner, dict) else patch.delattr)(owner, name)
            with pytest.raises(UserError) as refused:
                make_strategy(ParallelConfig(strategy="fsdp"), build(MODELS["adamw"], 0, "cpu"), world.group)
        said[name] = str(refused.value)
    return said


def test_fsdp_refuses_a_torch_that_renamed_what_it_uses(two_ranks: dict[str, list[Any]]) -> None:
    """Finds a private name that is used unchecked: the first two would end in torch's own words, and without the third
    ranks that use different parameters would add up one's gradient and another's."""
    for said in two_ranks["refused"]:
        for name, sentence in said.items():
            assert sentence.startswith(f"strategies fsdp and hsdp do not work with torch {torch.__version__}")
            assert name in sentence
            assert "--parallel.strategy zero" in sentence
