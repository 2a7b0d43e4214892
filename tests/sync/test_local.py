"""Strategy local against its definition, written down again for one process; and what a run with it keeps."""

import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import whole_runs
from program import losses, run, steps, val_loss
from ranks import Call, run_calls, run_ranks
from torch import nn

from paceline.base.errors import PacelineError, UserError
from paceline.config import Config
from paceline.replica.batch import Batch
from paceline.replica.checkpoints import Checkpoints, load_weights
from paceline.replica.replica import Replica
from paceline.sync.replicas import overall
from paceline.sync.wire import wire_bits
from paceline.tools.view.follow import Views
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World

POISONED, MAX_NORM = 6, 0.3
# By sync_every and wire; 32: of 26 weights, so some steps send nothing.
NUM_STEPS = {
    (1, "exact"): 12,
    (4, "exact"): 16,
    (17, "exact"): 40,
    (32, "exact"): 40,
    (4, "int8"): 16,
    (17, "int2"): 40,
}
LEVELS = {"int8": 127, "int2": 1}
RESUMED: dict[int, Any] = {4: "exact", 17: "int2"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def inner(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.8)


def rows_of(step: int, rank: int) -> torch.Tensor:
    """What a rank sees in a step: none, or up to four rows; a row that is not a number on rank 0 in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randn((step + 3 * rank) % 5, 3, dtype=torch.float64, generator=generator)
    return found * math.nan if (step, rank) == (POISONED, 0) else found


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x), x.sum(1, keepdim=True))


def trained(world: World, sync_every: int, wire: Any) -> dict[str, Any]:
    net = network()
    replica = Replica(net, inner(net), world, strategy="local", sync_every=sync_every, wire=wire)
    skipped, anchors = [], []
    for number in range(NUM_STEPS[sync_every, wire]):
        x = rows_of(number, world.rank)
        step = replica.step(Batch([x] if len(x) else []))
        for micro_batch in step:
            step.backward(loss_of(net, micro_batch), weight=len(micro_batch))
        result = step.finish(max_norm=MAX_NORM)
        skipped += [number] if result.skipped else []
        anchors.append(overall(replica.state_dict()))
    own, shared = overall(dict(net.named_parameters())), overall(replica.state_dict())
    with replica.sync.shared_weights():
        assert overall(dict(net.named_parameters())) == shared
    assert shared != own or not len(x)  # a rank without rows in the last step may have the anchor's weights
    before = flat(net)
    replica.merge()
    assert overall(dict(net.named_parameters())) == overall(replica.state_dict())
    return {"own": before, "skipped": skipped, "anchors": anchors, "merged": flat(net)}


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def make_updates(nets: list[nn.Module], optimizers: list[torch.optim.Optimizer], batches: list[torch.Tensor]) -> bool:
    """Returns whether there was an update: the gradients are finite."""
    norms = []
    for net, x in zip(nets, batches, strict=True):
        net.zero_grad()
        (loss_of(net, x) if len(x) else 0.0 * sum(p.sum() for p in net.parameters())).backward()
        norms.append(sum(p.grad.square().sum() for p in net.parameters()))
    norm = (sum(norms) / len(nets)).sqrt()
    is_finite = bool(norm.isfinite())
    if is_finite:
        for net, optimizer, x in zip(nets, optimizers, batches, strict=True):
            for parameter in net.parameters():
                parameter.grad *= min(1.0, MAX_NORM / norm)
            if len(x):  # else momentum alone would move its weights
                optimizer.step()
    return is_finite


def decoded(change: torch.Tensor, wire: str) -> torch.Tensor:
    """What a message of fewer than 256 numbers says: multiples of one scale."""
    if wire == "exact" or not len(change):
        return change
    values = change.float()
    scale = (values.abs().max() / LEVELS[wire]).clamp(min=1e-30)
    return ((values * (1 / scale)).round() * scale).to(change.dtype)


def reference(num_ranks: int, sync_every: int, wire: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns each rank's own weights after the last step, and the average at the end: the definition, for one rank
    after the other, on flat vectors, without the strategy's code."""
    nets = [network() for _ in range(num_ranks)]
    optimizers = [inner(net) for net in nets]
    anchor = flat(nets[0])
    momentum = torch.zeros_like(anchor)
    excess = torch.zeros(num_ranks, len(anchor), dtype=anchor.dtype)
    borders = [round(len(anchor) * part / sync_every) for part in range(sync_every + 1)]
    weight = torch.zeros(sync_every, num_ranks)  # rows seen since the fragment's last exchange
    sent: list[torch.Tensor] = []
    num_updates = 0

    def exchange(part: int, vectors: list[torch.Tensor], sent: list[torch.Tensor], is_last: bool = False) -> None:
        cut = slice(borders[part], borders[part + 1])
        share = weight[part].double() if weight[part].any() else torch.ones(num_ranks)
        changes = [s * (vector[cut] - anchor[cut]) for s, vector in zip(share / share.sum(), sent, strict=True)]
        change = torch.zeros_like(anchor[cut])
        for rank, own in enumerate(changes):
            message = decoded(own - excess[rank, cut], wire)
            if wire == "int2":
                excess[rank, cut] = message - (own - excess[rank, cut])
            change += message
        if sync_every > 16 and not is_last:
            momentum[cut] = 0.6 * momentum[cut] + change
            change = 0.7 * (change + 0.6 * momentum[cut])
        anchor[cut] += change
        for vector, before in zip(vectors, sent, strict=True):
            vector[cut] += anchor[cut] - before[cut]
        weight[part] = 0

    for number in range(NUM_STEPS[sync_every, wire]):
        batches = [rows_of(number, rank) for rank in range(num_ranks)]
        is_finite = make_updates(nets, optimizers, batches)
        vectors = [flat(net) for net in nets]
        if sent:
            exchange(num_updates % sync_every, vectors, sent)
        # A step without an update is no step of a round.
        weight += torch.tensor([len(x) * is_finite for x in batches])
        num_updates += is_finite
        sent = [vector.clone() for vector in vectors] * is_finite
        for net, vector in zip(nets, vectors, strict=True):
            nn.utils.vector_to_parameters(vector, net.parameters())
    own = [vector.clone() for vector in vectors]
    for part in range(sync_every):
        exchange(part, vectors, own, is_last=True)
    return own, vectors[0]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """What the functions of this file return on each of three ranks."""
    calls: dict[Any, Call] = {case: Call(trained, *case) for case in NUM_STEPS}
    folder = tmp_path_factory.mktemp("ranks")
    calls |= {f"resumed {each}": Call(resumed, folder / str(each), each, wire) for each, wire in RESUMED.items()}
    calls |= {"excess": Call(excess, folder / "17" / "anew", 17, RESUMED[17]), "dropped": Call(dropped)}
    for case in ((4, "exact"), (17, "int2")):
        for how in ("merged", "not merged", "other weights"):
            calls[f"anew {case} {how}"] = Call(made_anew, *case, how)
    calls["no weight"] = Call(resumed_after_no_weight, folder / "no weight")
    return run_calls(calls, 3) | {"excess of two": run_ranks(excess, 2, folder / "17" / "anew", 17, RESUMED[17])}


@pytest.mark.parametrize("case", NUM_STEPS)
def test_ranks_train_as_the_definition_says(three_ranks: dict[Any, list[Any]], case: tuple[int, str]) -> None:
    found = three_ranks[case]
    own, merged = reference(3, *case)
    atol = 1e-12 if case[1] == "exact" else 1e-6  # messages are made in float32
    assert [each["skipped"] for each in found] == [[POISONED]] * 3, "all ranks skip the step"
    assert len({tuple(each["anchors"]) for each in found}) == 1, "the anchor has the same bits after every step"
    assert len(set(found[0]["anchors"])) > NUM_STEPS[case] / 2
    for mine, wanted in zip(found, own, strict=True):
        torch.testing.assert_close(mine["own"], wanted, rtol=0, atol=atol)
        torch.testing.assert_close(mine["merged"], merged, rtol=0, atol=atol)
    assert all(torch.equal(each["merged"], found[0]["merged"]) for each in found)
    assert not torch.equal(found[0]["own"], found[1]["own"])


def dropped(world: World) -> list[list[float]]:
    net = network()
    replica = Replica(net, inner(net), world, strategy="local", sync_every=4)
    found = []
    for is_dropped in (False, True):
        step = replica.step(Batch([torch.ones(2 + world.rank, 3, dtype=torch.float64)]))
        for x in step:
            step.backward(loss_of(net, x), weight=len(x))
        if is_dropped:
            replica._drop_open_step()  # as the next loop does after an exception
        else:
            step.finish()
        found.append(replica.sync.private_state()[1][f"/progress@{world.rank}"])
    return found


def test_a_step_that_an_exception_ended_has_no_weight_in_the_average(three_ranks: dict[Any, list[Any]]) -> None:
    for rank, (before, after) in enumerate(three_ranks["dropped"]):
        assert before == [1.0, *[2.0 + rank, 9.0] * 4]
        assert after == [1.0, *before[1:3], 0.0, 0.0, *before[5:]], "only the fragment under way is exchanged"


def steps_made(replica: Replica, num_steps: int) -> None:
    for _ in range(num_steps):
        x = rows_of(replica.num_steps + POISONED + 1, replica.world.rank)
        replica.train(Batch([x] if len(x) else []), lambda x: (loss_of(replica.model, x), float(len(x))))


def resumed(world: World, folder: Path, sync_every: int, wire: Any) -> list[str]:
    """Digests of this rank's own weights after some steps amid a round: never saved, saved, of the last ones made again
    in the same script, and by a new one."""
    found = []
    for how in ("never saved", "saved", "again", "anew") if sync_every == 4 else ("never saved", "anew"):
        net = network()
        replica = Replica(net, inner(net), world, strategy="local", sync_every=sync_every, wire=wire)
        checkpoints = Checkpoints(folder / how, net=replica)
        steps_made(replica, sync_every + 5)  # so far that momentum of exchanges has an effect
        if how != "never saved":
            checkpoints.save()
        if how == "again":
            steps_made(replica, 2)
            checkpoints.restore()
        if how == "anew":
            checkpoints.finish()
            net = network()
            replica = Replica(net, inner(net), world, strategy="local", sync_every=sync_every, wire=wire)
            Checkpoints(folder / how, net=replica).restore()
        steps_made(replica, 3)
        found.append(overall(dict(net.named_parameters())))
    return found


@pytest.mark.parametrize("sync_every", RESUMED)
def test_a_resume_amid_a_round_is_bit_exact_and_saves_change_nothing(
    three_ranks: dict[Any, list[Any]], sync_every: int
) -> None:
    """Finds: an exchange under way when a script restores that still moves the weights."""
    digests = three_ranks[f"resumed {sync_every}"]
    assert [len(set(each)) for each in digests] == [1, 1, 1]
    assert len({each[0] for each in digests}) == 3, "each rank has weights of its own"


def resumed_after_no_weight(world: World, folder: Path) -> list[str]:
    """Digests of this rank's own weights, after a step in which nothing had weight and some more: with a resume by a
    new script in between, and without."""
    digests = []
    for is_resumed in (False, True):
        net = network()
        replica = Replica(net, inner(net), world, strategy="local", sync_every=17)
        steps_made(replica, 22)
        replica.train(Batch([rows_of(3, 0)]), lambda x, net=net: (loss_of(net, x), 0.0))  # type: ignore[misc]
        if is_resumed:
            checkpoints = Checkpoints(folder, net=replica)
            checkpoints.save()
            checkpoints.finish()
            net = network()
            replica = Replica(net, inner(net), world, strategy="local", sync_every=17)
            Checkpoints(folder, net=replica).restore()
        steps_made(replica, 3)
        digests.append(overall(dict(net.named_parameters())))
    return digests


def test_a_resume_after_a_step_without_weight_is_bit_exact(three_ranks: dict[Any, list[Any]]) -> None:
    """The fragment that had been merged was sent again, and momentum moved the anchor once more."""
    assert [len(set(each)) for each in three_ranks["no weight"]] == [1, 1, 1]


def made_anew(world: World, sync_every: int, wire: Any, how: str) -> tuple[bool, str]:
    """Of a second replica of the model: whether it warns of unequal weights, and the digest of those it starts with."""
    net = network()
    optimizer = inner(net)
    replica = Replica(net, optimizer, world, strategy="local", sync_every=sync_every, wire=wire)
    steps_made(replica, 5)
    if how == "merged":
        replica.merge()
    if how == "other weights":
        net.load_state_dict(network().state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Replica(net, optimizer, world)
    return any("weights differ" in str(each.message) for each in said), overall(dict(net.named_parameters()))


@pytest.mark.parametrize("case", [(4, "exact"), (17, "int2")])
def test_a_replica_made_anew_starts_with_what_all_ranks_learned(
    three_ranks: dict[Any, list[Any]], case: tuple[int, str]
) -> None:
    """It started with rank 0's weights. Weights that the script has put there since are no rank's."""
    merged = three_ranks[f"anew {case} merged"]
    assert merged == [(False, merged[0][1])] * 3
    assert three_ranks[f"anew {case} not merged"] == merged
    assert three_ranks[f"anew {case} other weights"] == [(False, overall(dict(network().named_parameters())))] * 3


def excess(world: World, folder: Path, sync_every: int, wire: Any) -> torch.Tensor:
    """What this rank's messages had too much, after a restore."""
    net = network()
    replica = Replica(net, inner(net), world, strategy="local", sync_every=sync_every, wire=wire)
    Checkpoints(folder, net=replica).restore()
    tensors, _ = replica.sync.private_state()
    return torch.cat([tensor for item, tensor in tensors.items() if item.name.endswith(f"/wire.excess@{world.rank}")])


def test_another_world_subtracts_all_that_messages_had_too_much(three_ranks: dict[Any, list[Any]]) -> None:
    before, after = sum(three_ranks["excess"]), sum(three_ranks["excess of two"])
    assert before.abs().max() > 1e-3
    torch.testing.assert_close(after, before)


# ---- whole runs ----

STEPS, ROUND, MIDDLE = 16, 4, 10  # steps of a run, of a round, and one amid a round


def tiny(**changes: Any) -> Config:
    """A run with local steps: rank 0 has two thirds of the tokens."""
    local = {"parallel__strategy": "local", "parallel__sync_every": ROUND, "parallel__shares": "4,2"}
    fixed = {
        "train__steps": STEPS,
        "train__global_batch_size": 6,
        "parallel__check_every": 1,
        "optim__name": "muon",
        "checkpoint__every": 0,
    }
    return whole_runs.tiny(**fixed | local | changes)


def make_all(_: ParallelConfig, env: Environment, base: Path) -> list[str]:
    """Makes the runs of two ranks. Returns what the one with a flipped bit ended with, on this rank."""

    def made(name: str, resume: bool = False, **changes: Any) -> None:
        assert train(Request(tiny(**changes), base / name, resume=resume), env) in (0, 75)

    made("straight")
    made("coded", parallel__wire="int4")
    made("middle", train__stop_at_step=MIDDLE)
    made("last", train__stop_at_step=STEPS)
    made("last", resume=True)
    os.environ["PACELINE_FAULTS"] = f"rank=1 step={MIDDLE} kind=flip"
    with pytest.raises(PacelineError) as raised:
        made("flipped")
    del os.environ["PACELINE_FAULTS"]
    return [str(raised.value)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    base = tmp_path_factory.mktemp("local")
    return base, run_ranks(make_all, 2, base, opened=False)


def end(folder: Path) -> dict[str, Any]:
    return whole_runs.events(folder, "end")[-1]


@pytest.mark.long
def test_a_run_that_was_stopped_in_its_last_step_has_saved_the_average(made) -> None:
    folder = made[0] / "last"
    assert end(folder)["digest"] == end(made[0] / "straight")["digest"] == overall(load_weights(folder))


def end_at_once(_: ParallelConfig, env: Environment, folder: Path) -> None:
    config = tiny(parallel__wire="int4", train__steps=3)
    assert train(Request(tiny(parallel__wire="int4", train__stop_at_step=3), folder), env) == 75
    for _ in range(2):
        assert train(Request(config, folder, resume=True), env) == 0


@pytest.mark.long
def test_a_run_that_ends_where_it_was_restored_has_saved_the_average_that_it_shows(tmp_path: Path) -> None:
    """And a resume of what has ended averages nothing: messages of int4 had too much, and would move the weights."""
    folder = tmp_path / "run"
    run_ranks(end_at_once, 2, folder, opened=False)
    digests = [event["digest"] for event in whole_runs.events(folder, "end")]
    assert digests[1:] == [overall(load_weights(folder))] * 2
    assert list(whole_runs.evaluations(folder)) == [3]


@pytest.mark.long
def test_a_step_sends_its_part_of_the_weights(made) -> None:
    num_bytes = 4 * sum(tensor.numel() for tensor in load_weights(made[0] / "straight").values())
    sent = [row["comm_bytes"] for row in steps(made[0] / "straight")]
    num_small = 2000  # numbers about the step
    for first in range(0, STEPS - ROUND, ROUND):
        assert num_bytes <= sum(sent[first : first + ROUND]) <= num_bytes + ROUND * num_small  # 2 (n-1)/n is 1


@pytest.mark.long
def test_a_step_sends_the_coded_bytes_that_are_foretold(made) -> None:
    num_elements = sum(tensor.numel() for tensor in load_weights(made[0] / "coded").values())
    bits = wire_bits("local", "int4", 32, sync_every=ROUND)
    foretold = ROUND * bits.bytes_sent(2, num_elements, 0, 0)
    sent = [row["comm_bytes"] for row in steps(made[0] / "coded")]
    assert foretold <= sum(sent[:ROUND]) <= foretold + ROUND * (2000 + 256)  # numbers about the step, the last block


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_world_goes_on_from_the_average(made, tmp_path: Path, num_ranks: int) -> None:
    folder = Path(shutil.copytree(made[0] / "middle", tmp_path / "run"))
    flags = ("--parallel.shares", "equal", "--train.stop-at-step", "0")
    said = run("resume", str(folder), "--nproc", str(num_ranks), *flags).require().out
    assert ("ANOTHER ALGORITHM" in said) == (num_ranks > 1)
    ((_, view),) = Views(folder).update()
    assert "another algorithm" in view.warning
    before, after = losses(made[0] / "straight"), losses(folder)
    assert before[:MIDDLE] == after[:MIDDLE]
    furthest = max(abs(x - y) for x, y in zip(before, after, strict=True))
    assert 0 < furthest < 0.5 * (before[0] - before[-1])
    assert abs(val_loss(folder) - val_loss(made[0] / "straight")) < 0.1


@pytest.mark.long
def test_a_flipped_bit_of_what_all_ranks_share_ends_the_run(made) -> None:
    assert all("replicas are not equal at step" in said for (said,) in made[1]), made[1]


def test_a_world_of_one_has_no_rounds(tmp_path: Path) -> None:
    for strategy, sync_every in (("local", ROUND), ("ddp", 0)):
        alone = {"parallel__sync_every": sync_every, "parallel__shares": "equal", "train__steps": 3}
        config = tiny(parallel__strategy=strategy, **alone)
        assert whole_runs.status_of(tmp_path / strategy, config) == 0
    assert losses(tmp_path / "local") == losses(tmp_path / "ddp")
    assert end(tmp_path / "local")["state_digests"] == end(tmp_path / "ddp")["state_digests"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__sync_every": 0}, "--parallel.strategy local --parallel.sync-every 8"),
        ({"parallel__strategy": "ddp"}, "leave sync-every out"),
        (
            {"parallel__strategy": "zero", "parallel__sync_every": 0, "parallel__wire": "int2"},
            "use --parallel.wire int4, or",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(**changes)
