"""Proof that replicas are equal: one flipped bit on one rank is found, and named as far as votes allow."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from paceline.replica.mistakes import digest_of
from paceline.sync.replicas import Difference, broadcast, differences, digests, overall
from paceline.world.group import LocalGroup
from paceline.world.runtime import World


def net_of(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator)
        else:
            tensor.fill_(seed)
    return net


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    view = tensor.data.view(-1).view(torch.uint8)
    view[element] ^= 1 << bit


def tensors_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


ORDER = list(tensors_of(net_of(0)))
GUILTY = {"0.weight": 1, "2.bias": 0, "1.weight": -1}  # parameter -> the rank on which a bit flips


def on_ranks(world: World) -> dict[str, Any]:
    net = net_of(world.rank)
    tensors = tensors_of(net)
    before = overall(tensors)
    broadcast([*net.parameters(), *net.buffers()], world.group)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found: dict[str, list[Difference]] = {"equal": differences(tensors, world.group)}
    for name, rank in GUILTY.items():
        if world.rank == rank % world.world_size:
            flip(tensors[name], 5, 2)
        found[name] = differences(tensors, world.group)
        if world.rank == rank % world.world_size:
            flip(tensors[name], 5, 2)
    for name, rank in GUILTY.items():  # all three at once
        if world.rank == rank % world.world_size:
            flip(tensors[name], 5, 2)
    found["all"] = differences(tensors, world.group)
    flip(tensors["0.bias"], world.rank, 7)  # another bit on each rank: nobody has a majority
    found["none alike"] = differences({"0.bias": tensors["0.bias"]}, world.group)
    holders = [(0,), tuple(range(1, world.world_size))]  # rank 0 shares its tensors with nobody
    found["apart"] = differences({"0.bias": tensors["0.bias"]}, world.group, holders=holders)
    after = overall({name: tensor for name, tensor in state.items() if name in tensors})
    return {"before": before, "after": after, "state": state, "found": found}


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"world-{size}")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, request.param)


def test_broadcast_gives_all_ranks_rank_0s_parameters_and_buffers(rows: list[dict[str, Any]]) -> None:
    assert len({row["before"] for row in rows}) == len(rows)
    assert {row["after"] for row in rows} == {rows[0]["before"]}
    wanted = net_of(0).state_dict()
    for row in rows:
        assert all(torch.equal(row["state"][name], tensor) for name, tensor in wanted.items())


def test_one_flipped_bit_on_one_rank_is_found_by_every_rank_and_named_by_majority(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["found"]["equal"] == []
        for name, rank in GUILTY.items():
            (difference,) = row["found"][name]
            assert (difference.name, difference.num_values) == (name, 2)
            odd = rank % len(rows)
            if len(rows) == 3:
                assert difference.minority == (odd,)
                assert str(difference) == f"{name} has 2 different values (rank {odd} differs)"
            else:
                assert difference.minority == ()
                assert str(difference) == f"{name} has 2 different values (no value has a majority)"
        assert [difference.name for difference in row["found"]["all"]] == [n for n in ORDER if n in GUILTY]
        (none_alike,) = row["found"]["none alike"]
        assert (none_alike.num_values, none_alike.minority) == (len(rows), ())
        assert [difference.num_values for difference in row["found"]["apart"]] == ([2] if len(rows) == 3 else [])
    assert all(row["found"] == rows[0]["found"] for row in rows)


@given(data=st.data())
def test_any_flipped_bit_of_any_tensor_changes_its_digest_alone(data: st.DataObject) -> None:
    tensors = tensors_of(net_of(0))
    tensors["odd length and place"] = torch.arange(8.0)[1:]
    before = digests(tensors)
    name = data.draw(st.sampled_from(list(tensors)))
    flip(tensors[name], data.draw(st.integers(0, tensors[name].nbytes - 1)), data.draw(st.integers(0, 7)))
    after = digests(tensors)
    assert {n for n in before if before[n] != after[n]} == {name}


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 1024), (1, 2047), (5, 2048)], ids=["row", "column", "", "rest"])
def test_changes_that_cancel_each_other_are_seen(one: int, other: int) -> None:
    """Neither the sum of all words nor their exclusive or changes."""
    words = torch.arange(2100)
    before = digests({"": words.view(torch.float32)})
    for delta in (1, -(2**63)):
        changed = words.clone()
        changed[one] += delta
        changed[other] -= delta
        assert digests({"": changed.view(torch.float32)}) != before
    changed = words.clone()
    changed[[one, other]] = words[[other, one]]
    assert digests({"": changed.view(torch.float32)}) != before


def test_the_overall_digest_is_of_names_and_bytes_and_any_digest_keeps_63_bits() -> None:
    tensors = tensors_of(net_of(0))
    assert overall(tensors) == overall(dict(reversed(tensors.items())))
    assert overall({"a": torch.ones(2)}) != overall({"b": torch.ones(2)})
    assert digests({}) == {}
    assert all(0 <= digest < 2**63 for digest in digests(tensors).values())


def test_a_world_of_one_is_always_equal_to_itself() -> None:
    assert differences(tensors_of(net_of(0)), LocalGroup(torch.device("cpu"))) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3, 5), (3, 4), (0,)])
def test_tensors_of_any_number_format_shape_and_layout_have_a_digest(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(math.prod(shape) + 1).to(dtype)[1:].view(shape)  # as a bucket's view, at an odd place
    found = digests({"a": tensor, "t": tensor.t() if tensor.ndim == 2 else tensor})
    assert set(found) == {"a", "t"}
    if tensor.numel():
        assert digests({"a": tensor.clone()})["a"] == found["a"], "of equal bytes, wherever they are"
        tensor.view(-1)[-1:] += 1
        assert digests({"a": tensor})["a"] != found["a"]


def test_a_conjugated_view_has_the_digest_of_its_values() -> None:
    """Finds: a first micro-batch, or a buffer, that torch conjugates lazily ends in torch's error."""
    view = torch.complex(torch.arange(15.0), torch.ones(15)).view(3, 5).conj()
    values = view.resolve_conj()
    assert view.is_conj()
    assert digests({"a": view}) == digests({"a": values})
    assert overall({"a": view}) == overall({"a": values})
    assert digest_of([view]) == digest_of([values])
    broadcast([view], LocalGroup(torch.device("cpu")))
    assert view.equal(values)
