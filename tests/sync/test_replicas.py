"""Proof that replicas are equal: one flipped bit on one rank is found, and named as far as votes allow."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from paceline.base.errors import RunError
from paceline.sync.replicas import broadcast_parameters, digests, overall, require_equal
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


def on_ranks(world: World) -> dict[str, Any]:
    net = net_of(world.rank)
    before = overall(net)
    broadcast_parameters(net, world.group)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    require_equal(net, world.group, 3)
    refusals = {}
    for name, rank in (("0.weight", 1), ("2.bias", 0), ("1.weight", world.world_size - 1)):
        parameter = dict(net.named_parameters())[name]
        if world.rank == rank:
            flip(parameter, 5, 2)
        try:
            require_equal(net, world.group, 7)
        except RunError as error:
            refusals[name] = (str(error), error.reach)
        if world.rank == rank:
            flip(parameter, 5, 2)
    require_equal(net, world.group, 8)
    return {"before": before, "after": overall(net), "state": state, "refusals": refusals}


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"world-{size}")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, request.param)


def test_broadcast_gives_all_ranks_rank_0s_parameters_and_buffers(rows: list[dict[str, Any]]) -> None:
    assert len({row["before"] for row in rows}) == len(rows)
    assert {row["after"] for row in rows} == {rows[0]["before"]}
    wanted = net_of(0).state_dict()
    for row in rows:
        assert all(torch.equal(row["state"][name], tensor) for name, tensor in wanted.items())


def test_one_flipped_bit_on_one_rank_is_refused_on_every_rank(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(row["refusals"]) == {"0.weight", "2.bias", "1.weight"}
        for name, (message, reach) in row["refusals"].items():
            assert f"at step 7: {name} has 2 different values over {len(rows)} ranks" in message
            assert reach == "world"


def test_the_odd_rank_is_named_by_majority_and_nobody_where_there_is_none(rows: list[dict[str, Any]]) -> None:
    guilty = {"0.weight": 1, "2.bias": 0, "1.weight": len(rows) - 1}
    for row in rows:
        for name, (message, _) in row["refusals"].items():
            said = f"rank {guilty[name]} differs" if len(rows) == 3 else "there is no majority"
            assert said in message


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_any_parameter_changes_the_digests(data: st.DataObject) -> None:
    net = net_of(0)
    before, before_overall = digests(net), overall(net)
    name, parameter = data.draw(st.sampled_from(list(net.named_parameters())))
    flip(parameter, data.draw(st.integers(0, parameter.nbytes - 1)), data.draw(st.integers(0, 7)))
    after = digests(net)
    assert {n for n in before if before[n] != after[n]} == {name}
    assert overall(net) != before_overall


def test_the_digest_tells_the_same_bytes_under_another_name_and_keeps_63_bits() -> None:
    some, others = nn.ParameterDict({"a": torch.ones(2)}), nn.ParameterDict({"b": torch.ones(2)})
    assert overall(some) != overall(others)
    assert all(0 <= digest < 2**63 for digest in digests(net_of(0)).values())


def test_a_world_of_one_is_always_equal_to_itself() -> None:
    require_equal(net_of(0), LocalGroup(torch.device("cpu")), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_any_dtype_and_layout_have_a_digest(dtype: torch.dtype) -> None:
    net = nn.ParameterDict({"a": torch.randn(3, 4).to(dtype), "t": torch.randn(3, 4).to(dtype).t()})
    assert set(digests(net)) == {"a", "t"}


def test_a_parameter_without_dims_has_a_digest() -> None:
    assert digests(nn.ParameterDict({"scale": torch.tensor(1.0)}))
