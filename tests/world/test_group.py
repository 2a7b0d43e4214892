"""The one door to the other ranks: every verb against numpy, at several worlds, and alike for a world of one."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from paceline.world.group import Group, LocalGroup
from paceline.world.runtime import World

OPS = {"sum": np.sum, "min": np.min, "max": np.max}
SHAPES = [(1,), (7,), (3, 5), (1000,), (0,)]
DTYPES = ["float32", "float64", "int64"]
TEXTS = ["", "a", "déjà vu — 漢字 🚲", "line\nbreak", "x" * 5000]
INTEGERS = [2**53 + 1, -(2**63), 2**63 - 1, 0]
JSON = {"text": "漢字 🚲", "list": [1, 2.5, None, True], "empty": {}, "big": 2**53 + 1, "nested": {"a": [[]]}}


def contribution(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a rank brings: whole numbers, so that sums are exact in any order."""
    generator = np.random.default_rng([rank, *shape])
    return generator.integers(-1000, 1000, shape).astype(dtype)


def exercise(group: Group) -> dict[str, Any]:
    """Every verb once or more; what this rank saw."""
    saw: dict[str, Any] = {"rank": group.rank, "size": group.size}
    for shape in SHAPES:
        for dtype in DTYPES:
            for op in OPS:
                tensor = torch.from_numpy(contribution(group.rank, shape, dtype))
                group.all_reduce(tensor, op)  # type: ignore[arg-type]
                saw["all_reduce", shape, dtype, op] = tensor.numpy()
    for source in range(group.size):
        tensor = torch.from_numpy(contribution(group.rank, (11,), "float32"))
        group.broadcast(tensor, source)
        saw["broadcast", source] = tensor.numpy()
        saw["json", source] = group.broadcast_json({**JSON, "from": source} if group.rank == source else "no", source)
    saw["share"] = group.share([group.rank + 0.1, float("inf"), -0.0])
    saw["share nothing"] = group.share([])
    saw["integers"] = group.share_integers([value // (group.rank + 1) for value in INTEGERS])
    saw["texts"] = [group.share_text(f"{text}{group.rank}" if group.rank % 2 else text) for text in TEXTS]
    several = [torch.full((50,), float(group.rank + i), dtype=torch.float32) for i in range(4)]
    for transfer in [group.start_all_reduce(tensor) for tensor in several]:  # all under way at once
        transfer.wait()
    saw["several"] = [float(tensor[0]) for tensor in several]
    group.barrier()
    return saw


def timing(group: Group) -> dict[str, Any]:
    """What the group counted of three collectives of known size."""
    group.take_transfers()
    before = time.perf_counter()
    group.all_reduce(torch.ones(1000))
    group.broadcast(torch.ones(10, dtype=torch.float64))
    group.share([1.0, 2.0])
    after = time.perf_counter()
    group.barrier()
    transfers = group.take_transfers()
    return {
        "bytes": [transfer.num_bytes for transfer in transfers],
        "ordered": all(before <= t.start <= t.end <= after for t in transfers),  # type: ignore[operator]
        "forgotten": group.take_transfers() == [],
    }


def slow_peer(group: Group) -> float:
    """Milliseconds an all-reduce took in which rank 1 came 200 ms late."""
    group.barrier()
    group.take_transfers()
    if group.rank == 1:
        time.sleep(0.2)
    transfer = group.start_all_reduce(torch.ones(10))
    transfer.wait()
    return 0.0 if transfer.end is None else (transfer.end - transfer.start) * 1e3  # type: ignore[operator]


def on_ranks(world: World) -> tuple[dict[str, Any], dict[str, Any], float]:
    return exercise(world.group), timing(world.group), slow_peer(world.group)


@pytest.fixture(scope="module", params=["local", 1, 2, 3], ids=lambda size: f"world-{size}")
def answers(request: pytest.FixtureRequest) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    if request.param == "local":
        group = LocalGroup(torch.device("cpu"))
        return [(exercise(group), timing(group), slow_peer(group))]
    return run_ranks(on_ranks, request.param)


def test_ranks_are_numbered_in_order(answers: list[Any]) -> None:
    assert [(saw["rank"], saw["size"]) for saw, _, _ in answers] == [(r, len(answers)) for r in range(len(answers))]


def test_all_reduce_gives_every_rank_what_numpy_gives(answers: list[Any]) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            brought = np.stack([contribution(rank, shape, dtype) for rank in range(len(answers))])
            for op, reduce in OPS.items():
                for saw, _, _ in answers:
                    seen = saw["all_reduce", shape, dtype, op]
                    assert seen.dtype == dtype
                    np.testing.assert_array_equal(seen, reduce(brought, axis=0))


def test_broadcast_gives_every_rank_the_sources(answers: list[Any]) -> None:
    for source in range(len(answers)):
        for saw, _, _ in answers:
            np.testing.assert_array_equal(saw["broadcast", source], contribution(source, (11,), "float32"))


def test_broadcast_json_gives_every_rank_the_sources_value(answers: list[Any]) -> None:
    for source in range(len(answers)):
        for saw, _, _ in answers:
            assert saw["json", source] == {**JSON, "from": source}


def test_share_gives_every_rank_all_values_in_float64(answers: list[Any]) -> None:
    for saw, _, _ in answers:
        assert saw["share"] == [[rank + 0.1, float("inf"), -0.0] for rank in range(len(answers))]
        assert saw["share nothing"] == [[] for _ in answers]


def test_shared_integers_are_exact_beyond_what_a_float_holds(answers: list[Any]) -> None:
    for saw, _, _ in answers:
        assert saw["integers"] == [[value // (rank + 1) for value in INTEGERS] for rank in range(len(answers))]


def test_share_text_gives_every_rank_all_texts_of_any_length_and_script(answers: list[Any]) -> None:
    for saw, _, _ in answers:
        for text, seen in zip(TEXTS, saw["texts"], strict=True):
            assert seen == [f"{text}{rank}" if rank % 2 else text for rank in range(len(answers))]


def test_several_all_reduces_may_be_under_way_at_once(answers: list[Any]) -> None:
    ranks = range(len(answers))
    for saw, _, _ in answers:
        assert saw["several"] == [float(sum(rank + i for rank in ranks)) for i in range(4)]


def test_every_transfer_is_counted_once_with_its_bytes_and_times(answers: list[Any], request: Any) -> None:
    is_local = "local" in request.node.name
    for _, counted, _ in answers:
        assert counted["bytes"] == ([] if is_local else [4000, 80, 16])
        assert counted["ordered"]
        assert counted["forgotten"]


def test_the_time_of_an_all_reduce_is_from_its_start_to_its_end(answers: list[Any], request: Any) -> None:
    if len(answers) == 1:
        pytest.skip("nobody to wait for")
    waited_ms = [ms for _, _, ms in answers]
    assert 150 < waited_ms[0] < 2000  # it started at once and ended when rank 1 had come
    assert waited_ms[1] < 150


def test_a_local_transfer_can_be_waited_for_and_moves_nothing() -> None:
    tensor = torch.arange(5.0)
    LocalGroup(torch.device("cpu")).start_all_reduce(tensor).wait()
    assert torch.equal(tensor, torch.arange(5.0))
