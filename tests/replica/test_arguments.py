"""What a script gives to a replica, to its loops and to its checkpoints has an effect or is refused, and comes back."""

import math
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from paceline.base.errors import UserError
from paceline.replica.batch import Batch, moved
from paceline.replica.checkpoints import Checkpoints, load_weights
from paceline.replica.generators import ScriptState
from paceline.replica.joining import join
from paceline.replica.replica import Replica
from paceline.replica.share import share
from paceline.sync.replicas import overall
from paceline.world.config import ParallelConfig
from paceline.world.runtime import World

DATA = TensorDataset(torch.arange(32.0).view(8, 4) / 32, torch.ones(8, 1))


def made(world: World, optimizer: Any = torch.optim.SGD, **settings: Any) -> Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    return Replica(model, optimizer(model.parameters(), lr=0.1), world, **settings)


def train(replica: Replica, source: Any, steps: int, **sharing: Any) -> list[float]:
    found = replica.steps(source, max_steps=replica.num_steps + steps, **sharing)
    return [replica.train(step, lambda x, y: mse_loss(replica.model(x), y)).loss for step in found]


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


# ---- in one process ----


def test_a_wrong_setting_is_refused(world: World) -> None:
    with pytest.raises(UserError, match=r"wire is 'bfloat16'; it is one of exact, bf16"):
        made(world, wire="bfloat16")
    with pytest.raises(UserError, match="bucket-mb"):
        made(world, bucket_mb=float("nan"))


def test_whole_numbers_may_be_of_numpy_and_others_are_refused(world: World) -> None:
    """Finds: TypeErrors of JSON; a seed of numpy that orders the samples otherwise than the same number of Python."""
    four, two = np.int64(4), np.int64(2)
    orders = [train(made(world), DATA, 3, batch_size=size, seed=seed) for size, seed in ((4, 2), (four, two))]
    assert orders[0] == orders[1]
    sizes = {"batch_size": four, "micro_batch_size": two}
    assert len(list(share(lambda lane, _: iter(range(lane, 8, 4)), world, **sizes))) == 2
    assert next(iter(share(lambda: torch.ones(1), world, micro_batches=two))).passes == 2
    for name in ("batch_size", "micro_batch_size", "seed"):
        with pytest.raises(UserError, match=rf"{name} is 4\.5; it is a whole number"):
            share(DATA, world, **{"batch_size": 4, name: 4.5})


def test_arguments_beside_a_source_that_was_shared_are_refused(world: World) -> None:
    replica = made(world)
    shared = share(DATA, world, batch_size=4)
    with pytest.raises(UserError, match=r"max_step goes to paceline\.share"):
        train(replica, shared, 1, max_step=5)
    train(replica, DATA, 1, batch_size=4)
    with pytest.raises(UserError, match=r"shared with other arguments before: \{'batch_size': 4\}"):
        train(replica, DATA, 1, batch_size=2)
    train(replica, DATA, 1, batch_size=4)
    with pytest.raises(UserError, match="micro_batch_size=4, and a function draws complete micro-batches"):
        share(lambda: DATA[0], world, micro_batches=2, micro_batch_size=4)
    with pytest.raises(UserError, match='shares is 3; it is "auto", or one number'):
        share(DATA, world, batch_size=4, shares=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="save_every was given 0 steps"):
        Checkpoints.save_every(None, 0)  # type: ignore[arg-type]


def test_a_stream_is_evaluated(world: World) -> None:
    replica = made(world)
    whole = replica.evaluate(DATA, lambda x, y: mse_loss(replica.model(x), y), batch_size=4)
    assert replica.evaluate(Rows(), lambda x, y: mse_loss(replica.model(x), y), batch_size=4) == pytest.approx(whole)


def test_a_mean_over_no_items_changes_no_loss(world: World) -> None:
    """All labels of the second micro-batch are masked: torch's mean over none is not a number."""
    model = nn.Linear(4, 3)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    labels = torch.tensor([0, 2, -100, -100])

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        return cross_entropy(model(x), y), int((y >= 0).sum())

    expected = cross_entropy(model(DATA.tensors[0][:2]), labels[:2]).item()
    halves = [(DATA.tensors[0][first : first + 2], labels[first : first + 2]) for first in (0, 2)]
    rows = TensorDataset(DATA.tensors[0][:4], labels)
    assert replica.evaluate(rows, loss_of, batch_size=2) == pytest.approx(expected)
    assert replica.train(Batch(halves), loss_of).loss == pytest.approx(expected)


def test_an_only_micro_batch_that_a_script_draws_itself_weighs_its_rows(world: World) -> None:
    replica = made(world)
    for batch in share(DATA.tensors[0], world, batch_size=8):
        step = replica.step(batch)
        (x,) = batch.draw()
        step.backward(replica.model(x).mean())
        assert step.finish().weight == 8


def test_means_of_one_micro_batch_have_one_weight(world: World) -> None:
    replica = made(world)
    step = replica.step(Batch([DATA.tensors[0]]))
    for x in step:
        step.backward(replica.model(x).mean(), weight=3, more=True)
        with pytest.raises(UserError, match=r"losses of weights 3\.0 and 8\.0"):
            step.backward(replica.model(x).mean(), weight=8)
        step.backward(replica.model(x).mean(), weight=3)
    step.finish()


def test_sums_of_one_micro_batch_have_one_weight(world: World) -> None:
    """The second count was used for both: a loss of (a + b) / 40."""
    replica = made(world)
    step = replica.step(Batch([DATA.tensors[0]]))
    for x in step:
        step.backward(replica.model(x).sum(), weight=10, is_sum=True, more=True)
        with pytest.raises(
            UserError, match=r"weights 10\.0 and 40\.0, .* or make one backward of a / num_a \+ b / num_b"
        ):
            step.backward(replica.model(x).sum(), weight=40, is_sum=True)
        step.backward(replica.model(x).sum(), weight=10, is_sum=True)
    step.finish()


STEP_CASES: dict[str, tuple[Callable[[Replica], Any], str]] = {  # an argument that had no effect -> what is said now
    "max_norm": (lambda r: one(r, max_norm=-1.0), r"max_norm is -1\.0; it is the norm to clip to, at least 0"),
    "max_norm none": (lambda r: one(r, max_norm=None), "max_norm is None; it is the norm to clip to"),
    "max_norm nan": (lambda r: one(r, max_norm=math.nan), "max_norm is nan; it is the norm to clip to"),
    "is_sum": (lambda r: r.step(X).backward(r.model(X).sum(), is_sum=True), "is_sum=True without weight="),
    "max_steps": (lambda r: next(r.steps(DATA, batch_size=4, max_steps=-1)), "max_steps is -1; it is a total"),
    "epochs": (lambda r: next(r.steps(DATA, batch_size=4, epochs=-1)), "epochs is -1; it is a total"),
    "third value": (
        lambda r: r.train(X, lambda x: (r.model(x).mean(), 8, 3)),
        r"not 3 values such as \(loss, logits\)",
    ),
    "logits": (
        lambda r: r.train(X, lambda x: (r.model(x).mean(), r.model(x))),
        r"a tuple that is not \(mean loss, weight\)",
    ),
    "batches": (
        lambda r: r.train([(X, X), (X, X)], lambda x, y: mse_loss(r.model(x), y)),
        r"called with \(list\): missing a required argument: 'y'.*paceline\.Batch",
    ),
    "count": (lambda r: Batch([X, X.clone()], count=3), "count is 3, and there are 2 micro-batches"),
    "rows": (lambda r: Batch([X, X.clone()], rows=[range(8)]), "rows has 1 ranges, and there are 2 micro-batches"),
    "passes": (lambda r: Batch([X, X.clone()], passes=1), "passes is 1, the most of any rank, and this rank has 2"),
    "function": (lambda r: Batch(lambda: [X]), "does not know how many micro-batches that draws: give rows= or count="),
    "read_as": (
        lambda r: made(r.world, read_as={"typo": torch.bfloat16}),
        "read_as names typo, which is not a parameter of the model",
    ),
    "rounded": (
        lambda r: made(r.world, rounded_gradients=["0.weight"]),
        "rounded_gradients names 0.weight, which read_as does not",
    ),
    "blocks": (
        lambda r: made(r.world, blocks=[nn.Linear(4, 4)]),
        "blocks has Linear, and the model has no such module",
    ),
    "criterion": (lambda r: Replica(r.model, sgd(r.model, nn.Linear(2, 2)), r.world), "put both into one nn.Module"),
    "more": (lambda r: rounded(r).backward(r.model(X).sum(), more=True), "leave rounded_gradients out"),
}
X = DATA.tensors[0]


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def one(replica: Replica, **settings: Any) -> None:
    step = replica.step(X)
    step.backward(replica.model(X).mean())
    step.finish(**settings)


def rounded(replica: Replica) -> Any:
    names = ["0.weight", "1.weight"]
    other = Replica(
        replica.model,
        replica.optimizers,
        replica.world,
        strategy="zero",
        read_as=dict.fromkeys(names, torch.bfloat16),
        rounded_gradients=names[:1],
    )
    return other.step(Batch([X], passes=1))


@pytest.mark.parametrize("name", STEP_CASES)
def test_an_argument_is_used_or_refused(world: World, name: str) -> None:
    act, message = STEP_CASES[name]
    with pytest.raises(UserError, match=message):
        act(made(world))


def test_a_list_of_samples_is_one_argument(world: World) -> None:
    """collate_fn=list: it was unpacked, and `takes 1 positional argument but 2 were given`."""
    replica = made(world)
    samples = [DATA[0], DATA[1]]
    expected = replica.model(X[:2]).mean().item()
    found = replica.train(Batch([samples]), lambda rows: torch.stack([replica.model(x) for x, _ in rows]).mean())
    assert found.loss == pytest.approx(expected)


class Fields(dict[str, Any]):
    """As HF's and PyG's batches: an attribute is a key."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_a_dict_arrives_as_what_it_was(world: World) -> None:
    """It arrived as a plain dict; one whose __getattr__ looks for a key ended in KeyError: 'to'."""
    batch = Fields(x=torch.ones(2), inner={"y": torch.ones(1)})
    there = moved(batch, torch.device("meta"))
    assert type(there) is Fields
    assert there.x.device.type == there.inner["y"].device.type == "meta"
    assert batch.x.device.type == "cpu"


def test_settings_of_a_replica_are_not_given_to_join() -> None:
    with pytest.raises(UserError, match=r"join was given strategy, bucket_mb, which has no effect there"):
        join(ParallelConfig(strategy="zero", bucket_mb=4.0))


def test_a_total_is_what_the_weights_add_up_to(world: World) -> None:
    replica = made(world)
    step = replica.step(DATA.tensors[0], total=len(DATA))
    step.backward(replica.model(DATA.tensors[0]).mean())
    before = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    with pytest.raises(UserError, match=rf"total= is {len(DATA)} on rank 0, and the weights .* add up to 1 "):
        step.finish()
    assert all(torch.equal(tensor, before[name]) for name, tensor in replica.state_dict().items())


def test_what_has_no_effect_or_no_end_is_refused(world: World) -> None:
    replica = made(world)
    for total in (0, -1.0, float("nan")):
        with pytest.raises(UserError, match=f"total is {total}; it is the weight of the global batch"):
            replica.step(DATA.tensors[0], total=total)
    with pytest.raises(UserError, match="epochs= has no effect: give max_steps="):
        next(replica.steps(lambda: DATA[:2], micro_batches=2, epochs=1))


def test_evaluations_read_the_same_samples_each_time_and_some_at_least(world: World) -> None:
    epochs = []

    def lane(number: int, num_lanes: int, epoch: int) -> Iterator[Any]:
        epochs.append(epoch)
        yield torch.rand(4)

    replica = made(world)
    first, second = (replica.evaluate(lane, lambda x: replica.model(x).mean(), batch_size=2) for _ in range(2))
    assert first == second
    assert epochs == [0] * 4
    with pytest.raises(UserError, match="an evaluation got no sample"):
        replica.evaluate(lambda lane, num_lanes: iter(()), lambda x: replica.model(x).mean(), batch_size=2)


def test_gradients_of_two_replicas_are_not_on_their_way_at_once(world: World) -> None:
    """A rank without a micro-batch sends each one's in `finish`."""
    first, second = made(world), made(world)
    one, other = (replica.step(DATA.tensors[0]) for replica in (first, second))
    one.backward(first.model(DATA.tensors[0]).mean())
    with pytest.raises(UserError, match=r"test_arguments.py:\d+: .*send gradients in different orders"):
        other.backward(second.model(DATA.tensors[0]).mean())
    one.finish()
    other.backward(second.model(DATA.tensors[0]).mean())
    other.finish()


def test_two_losses_of_one_forward_pass_are_refused_with_what_to_write(world: World) -> None:
    replica = made(world)
    step = replica.step(DATA.tensors[0])
    found = replica.model(DATA.tensors[0])
    step.backward(found.mean(), more=True)
    with pytest.raises(UserError, match="add up the losses of one forward pass"):
        step.backward(found.square().mean())


def test_sums_of_losses_in_bfloat16_are_added_exactly(world: World) -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    step = replica.step(Batch([torch.full((1, 1), number, dtype=torch.bfloat16) for number in (256.0, 1.0)]))
    for x in step:
        step.backward(model(x).sum(), weight=1, is_sum=True)
    assert step.finish().loss == 128.5


@pytest.mark.parametrize("max_steps", [1, 5])
def test_a_signal_after_the_last_step_of_a_loop_ends_the_next_loop(world: World, max_steps: int) -> None:
    """Also of a loop that the script leaves by `break`."""
    replica = made(world)
    for step in replica.steps(DATA, batch_size=4, max_steps=max_steps, stop_on_signals=True):
        replica.train(step, lambda x, y: mse_loss(replica.model(x), y))
        signal.raise_signal(signal.SIGUSR1)
        if max_steps > 1:
            break
    try:
        assert replica.stop_reason is None
        assert len(train(replica, DATA, 3, batch_size=4, stop_on_signals=True)) == 1
        assert replica.stop_reason == "SIGUSR1 on rank 0"
    finally:
        assert replica.stop is not None
        replica.stop.__exit__(None, None, None)


def test_a_stop_of_any_replica_is_saved(world: World, tmp_path: Path) -> None:
    first, second = made(world), made(world)
    checkpoints = Checkpoints(tmp_path, first=first, second=second)
    train(first, DATA, 1, batch_size=4)
    assert not checkpoints.save_every(1000)
    second.stop_reason = "SIGTERM on rank 0"
    assert checkpoints.save_every(1000)
    checkpoints.finish()


def test_a_buffer_that_cannot_be_compared_is_refused_by_name(world: World) -> None:
    """It was a NotImplementedError of torch's, about its bytes."""
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(UserError, match=r"the buffer graph is of layout torch\.sparse_coo, .* or make it dense"):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)


def test_what_was_made_under_inference_mode_is_refused_by_name(world: World) -> None:
    """Finds: an error of torch about a version counter, at the end of the first step."""
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("basis", torch.ones(2))
    with pytest.raises(UserError, match=r"basis was made under torch\.inference_mode.* or register its clone\(\)"):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)


def test_an_attribute_that_is_not_a_number_has_not_changed() -> None:
    """Each resume accused the data set of a change."""

    class Data:
        def __init__(self) -> None:
            self.limit, self.rows = math.nan, 3

    data = Data()
    state = ScriptState(data)
    assert state.changed() == []
    data.rows = 4
    assert state.changed() == ["rows"]


def test_earlier_replicas_are_released_in_the_order_of_their_numbers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release may be collective, and the order of a set differs between ranks."""
    earlier = [made(world) for _ in range(8)]
    numbers: list[int] = []
    release = Replica.release
    monkeypatch.setattr(Replica, "release", lambda each: (numbers.append(each.number), release(each)))
    model = nn.ModuleList([each.model for each in earlier])
    Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    assert numbers == [each.number for each in earlier]


def test_an_evaluation_wants_one_number_a_name(world: World) -> None:
    replica = made(world)
    losses = lambda x, y: mse_loss(replica.model(x), y, reduction="none")  # noqa: E731
    with pytest.raises(UserError, match=r"gave a tensor, of shape \[4, 1\]: return one number, such as its mean"):
        replica.evaluate(DATA, losses, batch_size=4)
    with pytest.raises(UserError, match=r"gave loss, of shape \[4, 1\]: return one number"):
        replica.evaluate(DATA, lambda x, y: {"loss": losses(x, y)}, batch_size=4)
    with pytest.raises(UserError, match=r"gave its loss as a NoneType: return one number, such as its mean"):
        replica.evaluate(DATA, lambda x, y: None, batch_size=4)


def test_a_mean_is_over_the_micro_batches_that_have_its_name(world: World) -> None:
    """Finds: what the last, smaller batch lacks is divided by that batch, too."""
    rows = torch.arange(10.0)
    means = made(world).evaluate(rows, lambda x: {"all": 1.0} | ({"some": 2.0} if len(x) == 4 else {}), batch_size=4)
    assert means == {"all": 1.0, "some": 2.0}


def test_a_nested_tensor_is_a_micro_batch(world: World) -> None:
    """Finds: an error of torch, which asks to file an issue, about the shape that a nested tensor has not."""
    model = nn.Linear(3, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    loss_of = lambda x: sum(model(each).mean() for each in x.unbind()) / 2  # noqa: E731
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        nested = torch.nested.nested_tensor(rows)
    assert replica.train(nested, loss_of).weight == 1.0


def test_what_cannot_be_stored_is_refused_at_the_save(world: World, tmp_path: Path) -> None:
    replica = made(world)
    replica.model.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UserError, match=r"turns is of torch\.complex64, and cannot be kept"):
        Checkpoints(tmp_path, net=replica).save()


def test_a_loss_scale_is_restored_to_the_dtype_that_has_one(world: World, tmp_path: Path) -> None:
    plain = made(world)
    Checkpoints(tmp_path / "plain", net=plain).save()
    scaled = made(world, dtype="float16")
    Checkpoints(tmp_path / "plain", net=scaled).restore()
    assert scaled.scaler.scale == 2.0**16
    scaled.scaler.scale, scaled.scaler.num_finite = 8.0, 7
    Checkpoints(tmp_path / "scaled", net=scaled).save()
    again = made(world, dtype="float16")
    Checkpoints(tmp_path / "scaled", net=again).restore()
    assert (again.scaler.scale, again.scaler.num_finite) == (8.0, 7)
    plain = made(world)
    Checkpoints(tmp_path / "scaled", net=plain).restore()
    assert plain.scaler.scale == 1.0


def test_a_position_that_no_loop_has_taken_yet_is_saved_again(world: World, tmp_path: Path) -> None:
    others = TensorDataset(DATA.tensors[0] * 2, DATA.tensors[1])
    replica = made(world)
    train(replica, DATA, 1, batch_size=2)
    train(replica, others, 1, batch_size=2)
    Checkpoints(tmp_path, net=replica).save()
    expected = train(replica, others, 1, batch_size=2)
    for _ in range(2):  # the second time from a save of a script that has used no loader since
        replica = made(world)
        checkpoints = Checkpoints(tmp_path, net=replica)
        checkpoints.restore()
        replica.num_steps += 1
        checkpoints.save()
    replica = made(world)
    Checkpoints(tmp_path, net=replica).restore()
    replica.steps(DATA, batch_size=2, max_steps=0)
    list(replica.steps(DATA, batch_size=2, max_steps=0))
    assert train(replica, others, 1, batch_size=2) == expected


def test_a_step_is_replaced_when_the_new_save_of_it_is_complete(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, or a kill, leaves the one before."""
    replica, numbers = made(world), {"a": 1}
    checkpoints = Checkpoints(tmp_path, net=replica, numbers=numbers)
    checkpoints.save()
    checkpoints.finish()
    numbers["a"] = 2
    with monkeypatch.context() as patched:
        patched.setattr("paceline.checkpoint.publish.put_in_place", _full)
        checkpoints.save()
        checkpoints._finish_save()
    numbers["a"] = 3
    assert checkpoints.restore() == 0
    assert numbers == {"a": 1}
    numbers["a"] = 4
    checkpoints.save()
    checkpoints.finish()
    numbers.clear()
    checkpoints.restore()
    assert numbers == {"a": 4}


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_packed_sequences_and_sparse_tensors(world: World) -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    there = moved((packed, torch.ones(1)), torch.device("meta"))
    assert there[0].data.device.type == "meta"
    assert there[0].batch_sizes.device.type == "cpu"
    adjacency = torch.eye(8).to_sparse()
    replica = made(world)
    assert replica.train((DATA.tensors[0], adjacency), lambda x, a: replica.model(torch.sparse.mm(a, x)).mean()).loss


# ---- on ranks ----


def lane(number: int, num_lanes: int) -> Iterator[torch.Tensor]:
    """Samples through a small buffer, in an order of the global generators."""
    held = list(range(number, 40, num_lanes))
    while held:
        place = random.randrange(min(3, len(held)))
        yield torch.tensor([held.pop(place) + float(np.random.rand()) + float(torch.rand(()))])


def drawn(world: World, stop: int = 6) -> list[list[float]]:
    """The batches of six steps, with a resume after `stop` of them."""
    found: list[list[float]] = []
    batches = share(lane, world, batch_size=4)
    steps = iter(batches)
    for _ in range(6):
        if len(found) == stop:
            state, batches = batches.state_dict(), share(lane, world, batch_size=4)
            batches.load_state_dict(state)
            steps = iter(batches)
        rows = [float(row) for part in next(steps).draw() for row in part]
        found.append([row for each in world.group.share_json(rows) for row in each])
        random.random()  # the script draws, too
    return found


class Arrays(IterableDataset[Any]):
    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> Iterator[Any]:
        return iter([self._value] * 4)


def on_two_ranks(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"lanes": drawn(world), "lanes resumed": drawn(world, 2)}
    for value in (np.full(3, world.rank), bytes([world.rank])):
        with pytest.raises(UserError, match="gives other samples"):
            list(share(Arrays(value), world, batch_size=2, collate_fn=list))

    # Losses that overflow both ways, and a total that one rank got wrong.
    replica = made(world)
    step = replica.step(Batch([DATA.tensors[0]]))
    step.backward(replica.model(DATA.tensors[0]).mean() + (math.inf if world.is_main else -math.inf))
    assert math.isnan(step.finish().loss)
    assert math.isnan(world.mean(math.inf if world.is_main else -math.inf))
    step = replica.step(DATA.tensors[0], total=16 if world.is_main else 8)
    step.backward(replica.model(DATA.tensors[0]).mean(), weight=8)
    with pytest.raises(UserError, match=r"total= is 8 on rank 1, and the weights given to step.backward add up to 16 "):
        step.finish()
    replica._drop_open_step()

    # The optimizer's state of another strategy: some ranks have whole parameters of it.
    for strategy in ("zero", "local"):
        sync_every = 2 if strategy == "local" else 0
        replica = made(world, torch.optim.Adam, strategy=strategy, sync_every=sync_every, bucket_mb=1e-4)
        train(replica, DATA, 2, batch_size=4)
        replica.merge()
        replica = Replica(replica.model, replica.optimizers, world, strategy="ddp")
        train(replica, DATA, 2, batch_size=4)
        found[f"after {strategy}"] = overall(dict(replica.model.named_parameters()))

    # A second replica shards its state, the first does not.
    first = made(world)
    second = made(world, torch.optim.Adafactor, strategy="zero")
    train(second, DATA, 1, batch_size=4)
    checkpoints = Checkpoints(f"{folder}/two", first=first, second=second)
    checkpoints.save()
    checkpoints.finish()

    # With fsdp, weights that a script changed after a save of the same step.
    replica = made(world, strategy="fsdp", blocks=())
    checkpoints = Checkpoints(f"{folder}/fsdp", net=replica)
    checkpoints.save()
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.add_(1)
    checkpoints.save()
    checkpoints.finish()
    found["fsdp"] = {name: tensor.tolist() for name, tensor in replica.state_dict().items()}
    return found


def test_on_two_ranks(world: World, tmp_path: Path) -> None:
    one, other = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert one == other
    assert one["lanes"] == one["lanes resumed"] == drawn(world) == drawn(world, 2)
    assert {name: tensor.tolist() for name, tensor in load_weights(tmp_path / "fsdp").items()} == one["fsdp"]
