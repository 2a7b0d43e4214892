"""zero with integers on the wire: replicas stay equal to the bit, training as without, and state that survives."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Call, run_calls, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.replica.batch import Batch
from paceline.replica.checkpoints import Checkpoints
from paceline.replica.replica import Replica
from paceline.sync.layout import block_of
from paceline.sync.replicas import overall
from paceline.world.runtime import World

WIDTH, VOCABULARY, NUM_STEPS = 96, 40, 6
CASES = [("bf16", "adamw"), ("int8", "muon"), ("int4", "adamw")]
SAVED = CASES[1:]  # with bf16 a message leaves nothing out
SCALE = 4 / WIDTH  # bytes an element: blocks are rows here
BYTES = {"exact": 8, "bf16": 6, "int8": 1.5 + 2 * SCALE, "int4": 1 + 2 * SCALE}  # a gradient's and a weight's


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        return cross_entropy(self.head(x + self.down(self.up(x).relu())).flatten(0, 1), tokens[:, 1:].flatten())


def made(world: World, wire: Any, optimizer: str) -> Replica:
    net = Net()
    matrices = [net.up.weight, net.down.weight] if optimizer == "muon" else []
    rest = [p for p in net.parameters() if not any(p is matrix for matrix in matrices)]
    chosen: list[Any] = [torch.optim.AdamW(rest, lr=3e-3)]
    chosen += [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    return Replica(net, chosen, world, strategy="zero", wire=wire, bucket_mb=0.1)


def trained(replica: Replica, num_steps: int, poisoned: int = -1, scale: float = 1.0) -> list[Any]:
    """Makes steps, of which every third has no micro-batch on rank 1. Returns losses; None for skipped steps."""
    return [loss for loss, _ in results(replica, num_steps, poisoned, scale)]


def results(replica: Replica, num_steps: int, poisoned: int, scale: float) -> Iterator[tuple[float | None, float]]:
    """Yields the loss and the bytes sent."""
    rank, size = replica.world.rank, replica.world.world_size
    for _ in range(num_steps):
        number = replica.num_steps
        rows = torch.randint(0, 7, (6, 9), generator=torch.Generator().manual_seed(number)) ** 2 % VOCABULARY
        takers = [0] if number % 3 == 2 else list(range(size))
        mine = rows[takers.index(rank) :: len(takers)] if rank in takers else rows[:0]
        replica.scaler.scale = scale
        step = replica.step(Batch([mine] if len(mine) else []), total=6.0)
        for tokens in step:
            loss = replica.model(tokens)
            step.backward(loss * float("nan") if number == poisoned and rank == 0 else loss, weight=len(tokens))
        result = step.finish(max_norm=1.0)
        yield None if result.skipped else result.loss, result.times.comm_bytes


def replica_digest(replica: Replica) -> str:
    replica.wait_for_params()
    return overall({name: parameter.detach() for name, parameter in replica.model.named_parameters()})


def wire_state(replica: Replica) -> dict[Any, torch.Tensor]:
    return {item: tensor.clone() for item, tensor in replica.sync.private_state()[0].items()}


@dataclass
class Seen:
    """By one rank."""

    losses: list[float | None]
    digests: list[str]  # of the replica, after each step
    exact: str  # of the masters
    sent_bytes: float


def on_ranks(world: World) -> dict[Any, Seen]:
    found = {}
    for wire, optimizer in [*CASES, ("exact", "adamw"), ("exact", "muon")]:
        replica = made(world, wire, optimizer)
        losses, digests, sent_bytes = [], [], 0.0
        world.group.take_traffic()  # of making this replica, and of ending the one before
        for loss, num_bytes in results(replica, NUM_STEPS, -1, 1.0):
            losses.append(loss)
            digests.append(replica_digest(replica))
            sent_bytes += num_bytes
        found[wire, optimizer] = Seen(losses, digests, overall(replica.state_dict()), sent_bytes)
        replica.release()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Any]]:
    """What the functions of this file return on each of two ranks."""
    calls = {each.__name__: Call(each) for each in (on_ranks, dropped, scaled, unscaled, skipping)}
    calls |= {f"saving {wire}": Call(saving, folder / wire, wire, optimizer) for wire, optimizer in SAVED}
    calls |= {f"resuming {wire}": Call(resuming, folder / wire, wire, optimizer) for wire, optimizer in SAVED}
    calls["resuming as exact"] = Call(resuming, folder / "int8", "exact", "muon")
    return run_calls(calls | {"after_local": Call(after_local, folder / "local")}, 2)


@pytest.mark.parametrize(("wire", "optimizer"), CASES)
def test_replicas_are_equal_after_every_step_and_learn_as_without_rounding(
    ranks: dict[str, list[Any]], wire: str, optimizer: str
) -> None:
    rows = ranks["on_ranks"]
    exact = rows[0]["exact", optimizer]
    num_elements = sum(p.numel() for p in Net().parameters())
    saved_bytes = NUM_STEPS * (BYTES["exact"] - BYTES[wire]) * num_elements * (len(rows) - 1)
    saved = sum(row["exact", optimizer].sent_bytes - row[wire, optimizer].sent_bytes for row in rows)
    assert saved == pytest.approx(saved_bytes, rel=0.01)
    for row in rows:
        seen = row[wire, optimizer]
        assert seen.digests == rows[0][wire, optimizer].digests
        assert len(set(seen.digests)) == NUM_STEPS
        assert seen.exact == rows[0][wire, optimizer].exact
        assert seen.losses == rows[0][wire, optimizer].losses
        assert seen.losses == pytest.approx(exact.losses, rel=0.03)
        assert seen.losses[-1] < 0.9 * seen.losses[0]
        assert seen.exact != exact.exact


def skipping(world: World) -> Any:
    replica = made(world, "int8", "adamw")
    trained(replica, 2)
    before, digest, exact = wire_state(replica), replica_digest(replica), overall(replica.state_dict())
    assert trained(replica, 1, poisoned=2) == [None]
    assert all(tensor.equal(before[item]) for item, tensor in wire_state(replica).items())
    assert (replica_digest(replica), overall(replica.state_dict())) == (digest, exact)
    return trained(replica, 2)


def test_a_skipped_step_changes_neither_weights_nor_what_messages_left_out(ranks: dict[str, list[Any]]) -> None:
    first, second = ranks["skipping"]
    assert first == second


def scaled(world: World) -> tuple[list[float], str]:
    replica = made(world, "int4", "adamw")
    losses = trained(replica, 2, scale=1024.0) + trained(replica, 2, scale=64.0)
    return losses, overall(replica.state_dict())


def unscaled(world: World) -> tuple[list[float], str]:
    replica = made(world, "int4", "adamw")
    return trained(replica, 4), overall(replica.state_dict())


def dropped(world: World) -> list[bool]:
    replica = made(world, "int4", "adamw")
    trained(replica, 3)
    before = wire_state(replica)
    step = replica.step(Batch([torch.full((2, 9), 3)]), total=6.0)
    for tokens in step:
        step.backward(replica.model(tokens))
    replica._drop_open_step()  # as the next loop does after an exception
    return [torch.equal(tensor, before[item]) for item, tensor in wire_state(replica).items()]


def test_a_step_that_an_exception_ended_changes_neither(ranks: dict[str, list[Any]]) -> None:
    assert all(map(all, ranks["dropped"]))


def test_what_messages_left_out_follows_the_loss_scale(ranks: dict[str, list[Any]]) -> None:
    """Scales are powers of two, so nothing rounds differently."""
    assert ranks["scaled"] == ranks["unscaled"]


def saving(world: World, folder: Path, wire: str, optimizer: str) -> Any:
    replica = made(world, wire, optimizer)
    trained(replica, 3)
    checkpoints = Checkpoints(folder, net=replica)
    checkpoints.save()
    kept = wire_state(replica)
    checkpoints.finish()
    return kept, trained(replica, 3), overall(replica.state_dict()), replica_digest(replica)


def resuming(world: World, folder: Path, wire: str, optimizer: str) -> Any:
    replica = made(world, wire, optimizer)
    assert Checkpoints(folder, net=replica).restore()
    kept = wire_state(replica)
    return kept, trained(replica, 3), overall(replica.state_dict()), replica_digest(replica)


def left_out(rows: list[Any]) -> dict[str, torch.Tensor]:
    """By parameter: the sum over ranks of what their messages had too much."""
    sums: dict[str, torch.Tensor] = {}
    for kept, *_ in rows:
        for item, tensor in kept.items():
            name, _, key = item.name.partition("/")
            if key.startswith("wire.excess"):
                sums[name] = sums.get(name, 0) + tensor
    return sums


@pytest.mark.parametrize("wire", [wire for wire, _ in SAVED])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: dict[str, list[Any]], wire: str) -> None:
    for (kept, *after), (restored, *again) in zip(ranks[f"saving {wire}"], ranks[f"resuming {wire}"], strict=True):
        assert again == after
        assert kept.keys() == restored.keys()
        assert all(tensor.equal(restored[item]) for item, tensor in kept.items())


def after_local(world: World, folder: Path) -> tuple[float, dict[str, float]]:
    """Returns what messages of strategy local had too much, and what those of zero have after a restore from it."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    local = Replica(net, optimizer, world, strategy="local", wire="int4", sync_every=2)
    trained(local, 4)
    checkpoints = Checkpoints(folder, net=local)
    checkpoints.save()
    checkpoints.finish()
    left = sum(float(kept.abs().sum()) for item, kept in wire_state(local).items() if "wire.excess" in item.name)
    zero = made(world, "int4", "adamw")
    assert Checkpoints(folder, net=zero).restore()
    restored = {item.name: kept for item, kept in wire_state(zero).items() if "wire.excess" in item.name}
    return left, {name: float(kept.abs().max()) for name, kept in restored.items()}


def test_gradients_begin_without_what_messages_of_weights_had_too_much(ranks: dict[str, list[Any]]) -> None:
    """Finds: what local's messages of weights had too much is subtracted from zero's gradients, once for each rank."""
    for left, restored in ranks["after_local"]:
        assert left > 0
        assert restored
        assert set(restored.values()) == {0.0}


def resuming_each(world: World, folder: Path) -> dict[str, Any]:
    return {wire: resuming(world, folder / wire, wire, optimizer) for wire, optimizer in SAVED}


@pytest.mark.long
def test_another_world_goes_on_nearly_and_sends_what_messages_left_out(
    ranks: dict[str, list[Any]], folder: Path
) -> None:
    """The sum over ranks of what was left out is kept to the bit. An exact wire goes on from it, too."""
    other = run_ranks(resuming_each, 3, folder)
    for wire, _ in SAVED:
        before, after = ranks[f"saving {wire}"], [found[wire] for found in other]
        assert after[0][1] == pytest.approx(before[0][1], rel=0.03)
        sums = left_out(after)
        assert sums.keys() == left_out(before).keys()
        assert all(sums[name].equal(tensor) for name, tensor in left_out(before).items())
    assert ranks["resuming as exact"][0][1] == pytest.approx(ranks["saving int8"][0][1], rel=0.03)


def test_a_block_lies_in_a_row() -> None:
    assert block_of([torch.Size([1152, 384]), torch.Size([384, 1536]), torch.Size([384])]) == 192
    assert block_of([torch.Size([50304, 768])]) == 256
    assert block_of([torch.Size([10, 3, 5, 5]), torch.Size([10])]) == 128  # no divisor is large enough
    assert block_of([torch.Size([0, 64]), torch.Size([])]) == 128
