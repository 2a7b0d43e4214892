"""The one door to the other ranks: every verb against numpy, at several worlds, and alike for a world of one."""

import contextlib
import functools
import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from program import Program
from ranks import Call, RanksFailed, run_calls, run_ranks
from torch.distributed import TCPStore

from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.ownership import borders
from paceline.world import group as group_file
from paceline.world.device_clock import DeviceClock
from paceline.world.errors import lost_peers_named
from paceline.world.group import DistributedGroup, Group, LocalGroup, Traffic, Transfer, from_rank_0
from paceline.world.runtime import World

OPS = {"sum": np.sum, "max": np.max}
SHAPES = [(1,), (3, 5), (1000,), (0,)]
DTYPES = ["float32", "float64", "int64"]
REDUCED = [*((shape, "float32", "sum") for shape in SHAPES), *itertools.product([(7,)], DTYPES, OPS)]
TEXTS = ["", "a", "déjà vu — 漢字 🚲", "line\nbreak", "x" * 5000, "of a path that is not UTF-8: \udce9"]
INTEGERS = [2**53 + 1, -(2**63), 2**63 - 1, 0]
JSON = {"text": "漢字 🚲", "list": [1, 2.5, None, True], "empty": {}, "big": 2**53 + 1, "nested": {"a": [[]]}}


# Elements of a flat tensor of which each rank has a part.
PARTED = [*itertools.product((1000, 7, 2, 0), ["float32"]), (7, "int64")]


def borders_for(num_elements: int, size: int) -> list[list[int]]:
    """Even parts, uneven ones, empty ones; all at the first rank, all at the last."""
    weights = ([1] * size, list(range(1, size + 1)), [rank % 2 for rank in range(size)], [1], [*[0] * (size - 1), 1])
    return [borders(num_elements, (*weight, *[0] * (size - len(weight)))) for weight in weights]


def contribution(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a rank brings: whole numbers, so that sums are exact in any order."""
    return drawn(rank, shape).astype(dtype)


@functools.cache
def drawn(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).integers(-1000, 1000, shape)


def exercise(group: Group) -> dict[str, Any]:
    """Every verb once or more; what this rank saw."""
    saw: dict[str, Any] = {"rank": group.rank, "size": group.size}
    for shape, dtype, op in REDUCED:
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
    several = [group.zeros(50, torch.zeros(1)).fill_(group.rank + i) for i in range(4)]
    for transfer in [group.start_all_reduce(tensor) for tensor in several]:  # all under way at once
        transfer.wait()
    saw["several"] = [float(tensor[0]) for tensor in several]
    saw["parts"] = [(n, dtype, *parted(group, n, dtype)) for n, dtype in PARTED]
    saw["parts under way"] = under_way(group)
    saw["messages"] = messages(group)
    group.barrier()
    return saw


def parted(group: Group, num_elements: int, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By borders: this rank's part after a reduce-scatter, and the whole after an all-gather."""
    scattered, gathered = [], []
    for edges in borders_for(num_elements, group.size):
        mine = slice(edges[group.rank], edges[group.rank + 1])
        brought = torch.from_numpy(contribution(group.rank, (num_elements,), dtype))
        flat = group.zeros(num_elements, brought).copy_(brought)
        group.start_reduce_scatter(flat, edges).wait()
        scattered.append(flat[mine].numpy().copy())
        flat[: mine.start] = flat[mine.stop :] = 77  # so that what is found there afterwards has arrived
        group.start_all_gather(flat, edges).wait()
        gathered.append(flat.numpy())
    return scattered, gathered


def ones(group: Group, num_elements: int) -> torch.Tensor:
    """A tensor as a strategy's bucket has it."""
    return group.zeros(num_elements, torch.zeros(1)).fill_(1)


def under_way(group: Group) -> list[list[float]]:
    """Reduce-scatters, all-gathers and all-reduces begun together, in turn, and waited for from last to first."""
    flats = [group.zeros(12_000, torch.zeros(1)).fill_(group.rank + 10 * i) for i in range(9)]
    edges = borders(12_000, [1] * group.size)
    begin = (
        lambda flat: group.start_reduce_scatter(flat, edges),
        lambda flat: group.start_all_gather(flat, edges),
        group.start_all_reduce,
    )
    transfers = [start(flat) for start, flat in zip(itertools.cycle(begin), flats, strict=False)]
    for transfer in reversed(transfers):
        transfer.wait()
        transfer.wait()  # a second time is nothing
    mine = slice(edges[group.rank], edges[group.rank + 1])
    return [(flat if i % 3 else flat[mine]).unique().tolist() for i, flat in enumerate(flats)]


def messages(group: Group) -> dict[str, Any]:
    """What came to this rank: from one rank to another, between two both ways at once, between all at once, several
    under way; and what a message to itself is answered with."""
    saw: dict[str, Any] = {}
    for first, second in itertools.permutations(range(group.size), 2):
        there, both = torch.full((5,), -1.0), torch.full((300_000,), -1.0)
        mine = torch.from_numpy(contribution(group.rank, (300_000,), "float32"))
        if group.rank == first:
            group.start_messages({second: mine[:5]}, {}).wait()
            group.start_messages({second: mine}, {second: both}).wait()
        if group.rank == second:
            group.start_messages({}, {first: there}).wait()
            group.start_messages({first: mine}, {first: both}).wait()
        saw["one", first, second] = there.numpy()
        if group.rank in (first, second):
            other = first + second - group.rank
            saw["both", first, second] = np.array_equal(both, contribution(other, (300_000,), "float32"))
    others = [rank for rank in range(group.size) if rank != group.rank]
    rounds = [{rank: torch.full((7,), -1.0) for rank in others} for _ in range(3)]
    sent = [{rank: torch.full((7,), group.rank + 10.0 * i) for rank in others} for i in range(3)]
    transfers = [group.start_messages(out, received) for out, received in zip(sent, rounds, strict=True)]
    for transfer in transfers:
        transfer.wait()
        transfer.wait()  # a second time is nothing
    arrived = {rank: torch.full((7,), -1.0) for rank in others}
    parts = {rank: torch.full((7,), 10.0 * group.rank + rank) for rank in others}
    saw["exchange"] = []
    group.start_messages(
        parts, arrived, lambda: saw["exchange"].extend(x.mean().item() for x in arrived.values())
    ).wait()
    saw["all"] = [{rank: tensor.unique().tolist() for rank, tensor in received.items()} for received in rounds]
    for sends, receives in (({group.rank: torch.ones(1)}, {}), ({}, {group.rank: torch.ones(1)})):
        with pytest.raises(ValueError, match=f"rank {group.rank}"):
            group.start_messages(sends, receives)
    return saw


def timing(group: Group) -> dict[str, Any]:
    """What the group counted of collectives of known size."""
    edges = borders(1200, range(1, group.size + 1))
    ring = [(group.rank + step) % group.size for step in (1, -1)] if group.size > 1 else []
    flat = ones(group, 1200)
    verbs: list[Callable[[], object]] = [
        lambda: group.all_reduce(flat),
        lambda: group.start_reduce_scatter(flat, edges).wait(),
        lambda: group.start_all_gather(flat, edges).wait(),
        lambda: group.broadcast(torch.ones(10, dtype=torch.float64)),
        lambda: group.share([1.0, 2.0]),
        lambda: group.start_messages(
            {to: torch.ones(25) for to in ring[:1]}, {source: torch.ones(25) for source in ring[1:]}
        ).wait(),
        lambda: group.start_messages(
            {to: torch.ones(25) for to in ring[:1]}, {source: torch.ones(25) for source in ring[1:]}, lambda: None
        ).wait(),
        group.barrier,
    ]
    group.take_traffic()
    found = []
    for verb in verbs:
        before = time.perf_counter()
        verb()
        found.append((before, group.take_traffic(), time.perf_counter()))
    return {
        "bytes": [traffic.num_bytes for _, traffic, _ in found],
        "waits": sum(len(traffic.waits) for _, traffic, _ in found),
        "ordered": all(
            before <= start <= end <= after  # type: ignore[operator]
            for before, traffic, after in found
            for start, end in [*traffic.waits, *((t.start, t.end) for t in traffic.transfers)]
        ),
        "forgotten": group.take_traffic() == Traffic(),
    }


def slow_peer(group: Group) -> dict[str, Any]:
    """Rank 1 begins collectives after rank 0 has computed on for 50 ms, and has then waited for 50 ms. Of each: whether
    it was under way when rank 0 began to wait; the milliseconds that it took, and that this rank stood still.
    """
    found: dict[str, Any] = {}
    if group.size == 1:
        return found
    edges, flat = borders(10, [1] * group.size), ones(group, 10)

    def let_rank_1_begin(turn: Path) -> None:
        while not group.waiting_for:
            time.sleep(0.001)
        time.sleep(0.05)
        turn.touch()

    for name, begin in (
        ("all-reduce", lambda: group.start_all_reduce(flat)),
        ("reduce-scatter", lambda: group.start_reduce_scatter(flat, edges)),
        ("all-gather", lambda: group.start_all_gather(flat, edges)),
    ):
        turn = Path(f"{name}.turn")
        group.barrier()
        group.take_traffic()
        while group.rank == 1 and not turn.exists():
            time.sleep(0.001)
        transfer = begin()
        over = group.take_traffic().transfers  # on the last rank that comes it may be over at once
        if group.rank == 0:
            time.sleep(0.05)
            threading.Thread(target=let_rank_1_begin, args=(turn,)).start()
        transfer.wait()
        traffic = group.take_traffic()
        (took_ms,) = [(t.end - t.start) * 1e3 for t in over + traffic.transfers]  # type: ignore[operator]
        waited_ms = sum(end - start for start, end in traffic.waits) * 1e3  # type: ignore[operator]
        found[name] = not over, took_ms, waited_ms
    return found


Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def on_ranks(world: World) -> Row:
    return exercise(world.group), timing(world.group), slow_peer(world.group)


def on_staged_ranks(world: World) -> Row:
    """Every second rank sends through host memory, as one on a GPU does; its tensors are the CPU's here."""
    group = DistributedGroup(world.device, 30.0, [""] * world.world_size, is_staged=world.rank % 2 == 0)
    return exercise(group), timing(group), slow_peer(group)


def on_hosts(world: World, hosts: str) -> Row:
    group = DistributedGroup(world.device, 30.0, hosts)
    return exercise(group), timing(group), slow_peer(group)


HOSTS = ["abab", "aaab"]  # each rank's host
_WORLDS = ["local", "staged", 1, 3, "abab", *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4, "aaab"))]


@pytest.fixture(scope="module", params=_WORLDS, ids=lambda size: f"world-{size}")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    with contextlib.chdir(tmp_path_factory.mktemp("turns")):
        if request.param == "local":
            group = LocalGroup(torch.device("cpu"))
            return [(exercise(group), timing(group), slow_peer(group))]
        if request.param == "staged":
            return run_ranks(on_staged_ranks, 3)
        if request.param in HOSTS:
            return run_ranks(on_hosts, len(request.param), request.param)
        return run_ranks(on_ranks, request.param)


def test_ranks_are_numbered_in_order(answers: list[Any]) -> None:
    assert [(saw["rank"], saw["size"]) for saw, _, _ in answers] == [(r, len(answers)) for r in range(len(answers))]


def test_all_reduce_gives_every_rank_what_numpy_gives(answers: list[Any]) -> None:
    for shape, dtype, op in REDUCED:
        brought = np.stack([contribution(rank, shape, dtype) for rank in range(len(answers))])
        for saw, _, _ in answers:
            seen = saw["all_reduce", shape, dtype, op]
            assert seen.dtype == dtype
            np.testing.assert_array_equal(seen, OPS[op](brought, axis=0))


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


def test_a_reduce_scatter_gives_each_rank_its_part_of_what_numpy_sums(answers: list[Any]) -> None:
    for rank, (saw, _, _) in enumerate(answers):
        for num_elements, dtype, scattered, _ in saw["parts"]:
            whole = sum(contribution(source, (num_elements,), dtype) for source in range(len(answers)))
            for edges, part in zip(borders_for(num_elements, len(answers)), scattered, strict=True):
                assert part.dtype == dtype
                np.testing.assert_array_equal(part, whole[edges[rank] : edges[rank + 1]])


def test_an_all_gather_gives_every_rank_every_part(answers: list[Any]) -> None:
    for saw, _, _ in answers:
        for num_elements, dtype, _, gathered in saw["parts"]:
            whole = sum(contribution(source, (num_elements,), dtype) for source in range(len(answers)))
            for found in gathered:
                np.testing.assert_array_equal(found, whole)


def test_collectives_of_all_kinds_may_be_under_way_at_once(answers: list[Any]) -> None:
    ranks = range(len(answers))
    for saw, _, _ in answers:
        for i, found in enumerate(saw["parts under way"]):
            brought = [float(rank + 10 * i) for rank in ranks]
            assert found == (brought if i % 3 == 1 else [sum(brought)])


def test_messages_reach_the_rank_they_are_for_and_no_other(answers: list[Any]) -> None:
    for rank, (saw, _, _) in enumerate(answers):
        for first, second in itertools.permutations(range(len(answers)), 2):
            nothing = np.full(5, -1.0)
            sent = contribution(first, (300_000,), "float32")[:5]
            np.testing.assert_array_equal(saw["messages"]["one", first, second], sent if rank == second else nothing)
            assert rank not in (first, second) or saw["messages"]["both", first, second]
        others = [other for other in range(len(answers)) if other != rank]
        assert saw["messages"]["all"] == [{other: [other + 10.0 * i] for other in others} for i in range(3)]
        assert saw["messages"]["exchange"] == [10.0 * other + rank for other in others]


def test_every_transfer_is_counted_once_with_the_bytes_this_rank_sends_and_its_times(
    answers: list[Any], request: Any
) -> None:
    is_local = "local" in request.node.name
    n = len(answers)
    edges = borders(1200, range(1, n + 1))
    for rank, (_, counted, _) in enumerate(answers):
        own = 4 * (edges[rank + 1] - edges[rank])
        sent = [2 * 4800 * (n - 1) / n, 4800 - own, own * (n - 1), 80 * (n - 1), 16 * (n - 1), *[100 * (n > 1)] * 2]
        if request.node.callspec.params["answers"] in HOSTS:  # by speakers; the sums below hold
            sent[1:3] = counted["bytes"][1:3]
        assert counted["bytes"] == ([0] * 8 if is_local else pytest.approx([*sent, 0]))
        assert counted["waits"] == (0 if is_local else 8)  # these and the barrier
        assert counted["ordered"]
        assert counted["forgotten"]
    if not is_local:  # all ranks together: a reduce-scatter and an all-gather move what an all-reduce does
        reduced, scattered, gathered = (sum(counted["bytes"][i] for _, counted, _ in answers) for i in range(3))
        assert scattered + gathered == pytest.approx(reduced)


@pytest.mark.parametrize("verb", ["all-reduce", "reduce-scatter", "all-gather"])
def test_a_collective_takes_from_its_start_to_its_end_and_a_rank_waits_for_what_it_does_not_hide(
    verb: str, answers: list[Any]
) -> None:
    if len(answers) == 1:
        pytest.skip("nobody to wait for")
    is_under_way, took_ms, waited_ms = answers[0][2][verb]
    assert is_under_way
    assert waited_ms > 10  # 50, less what a busy machine is late
    assert took_ms > waited_ms + 10, "the rest was hidden"


def lonely(world: World, verb: str) -> None:
    """Rank 1 never comes; rank 0 gives up."""
    world.group.set_timeout(1.0)
    if world.rank == 1:
        time.sleep(3)
    flat = torch.ones(10)
    if verb == "messages":
        world.group.start_messages({}, {1: flat}).wait()
    else:
        world.group.start_all_gather(flat, [0, 5, 10]).wait()


@pytest.mark.parametrize(("verb", "what"), [("messages", "messages between ranks"), ("all-gather", "an all-gather")])
def test_a_timeout_set_later_is_the_one_in_force(verb: str, what: str) -> None:
    """Not the 30 s of the group. test_shared.py has that of an all-reduce."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lonely, 2, verb)
    assert f"PeerLost: rank 0 lost the other ranks during {what}" in caught.value.outcomes[0].said


def test_a_local_transfer_can_be_waited_for_and_moves_nothing() -> None:
    tensor = torch.arange(5.0)
    group = LocalGroup(torch.device("cpu"))
    group.start_all_reduce(tensor).wait()
    group.start_reduce_scatter(tensor, [0, 5]).wait()
    group.start_all_gather(tensor, [0, 5]).wait()
    group.set_timeout(1)
    assert torch.equal(tensor, torch.arange(5.0))


COLLECTIVES = {
    *(name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "batch_"))),
    *("barrier", "monitored_barrier", "isend", "irecv", "send", "recv", "new_group"),
}


def test_one_file_calls_torchs_collectives() -> None:
    """Mutation: a `dist.barrier()` in process_group.py. fsdp makes torch's own group for ranks of several hosts."""
    package = Path(group_file.__file__).parent.parent
    callers = {
        (str(file.relative_to(package)), name)
        for file in package.rglob("*.py")
        for name in re.findall(r"\bdist\.(\w+)", file.read_text())
        if name in COLLECTIVES
    }
    assert {file for file, _ in callers} == {"world/group.py"}, callers


# ---- what goes wrong ----

FAILS = """
import os, signal, sys, time
import torch
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import open_world

with open_world(ParallelConfig(device="cpu", threads=1, timeout_s=250.0), detect()) as world:
    world.group.barrier()
    if world.rank == 1:
        signal.pause()
    world.group.start_reduce_scatter(torch.ones(1 << 16), [0, 1 << 15, 1 << 16])
    time.sleep(0.2)  # the thread that ends transfers stands in its wait by now
    sys.exit(3)
"""


def test_a_rank_that_fails_with_a_reduce_scatter_under_way_ends_at_once(tmp_path: Path) -> None:
    """By Python's own exit, which joins threads that are not daemons. Finds: one that waits for the other rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    (tmp_path / "fails.py").write_text(FAILS)
    command = (sys.executable, str(tmp_path / "fails.py"))
    with (
        Program(command=command, env={**world, "RANK": "0"}) as fails,
        Program(command=command, env={**world, "RANK": "1"}) as other,
    ):
        fails.wait(100).require(3)
        assert other.process.poll() is None


def runs_out_of_memory(world: World) -> None:
    if world.rank == 1:
        time.sleep(1)  # and is told by rank 0's end
        world.group.barrier()
    # Gloo needs no memory for an all-reduce in place; an all-gather of texts makes room for what comes.
    with world.group._waiting("an all-gather"):  # type: ignore[attr-defined]
        torch.empty(1 << 60)


def test_an_error_of_this_rank_s_own_is_not_told_as_another_s() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(runs_out_of_memory, 2)
    own, other = (outcome.said for outcome in caught.value.outcomes)
    assert "DefaultCPUAllocator: can't allocate memory" in own
    assert "PeerLost" not in own
    assert "PeerLost: rank 1 lost the other ranks during a barrier: Connection closed by peer" in other


def exchanges_and_meets(world: World) -> list[str]:
    """What is over when a barrier returns."""
    seen: list[str] = []

    def end() -> None:
        time.sleep(0.3)
        seen.append("an exchange")

    world.group.start_messages({}, {}, end)
    world.group.barrier()
    return [*seen]  # as it is now: the results of all calls are sent at the end


def policies(world: World) -> list[int]:
    tasks = Path("/proc/self/task").glob("*/comm")
    return [os.sched_getscheduler(int(task.parent.name)) for task in tasks if task.read_text().startswith("gloo")]


@pytest.mark.parametrize("says", ["Cuda failure 2 'out of memory'", "Cuda failure 214 'uncorrectable ECC error'"])
def test_a_failing_gpu_under_nccl_is_no_lost_peer(says: str) -> None:
    text = f"NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call failed.\n{says}"
    with pytest.raises(dist.DistBackendError, match=says), lost_peers_named(0, "an all-reduce"):
        raise dist.DistBackendError(text)


class Refused(UserError):
    """A class of its own, which all ranks know."""


def ask_rank_0(group: Group) -> list[Any]:
    """What each rank gets of rank 0's answers, and of its errors."""

    def refuse(kind: type[PacelineError]) -> None:
        raise kind(f"said on rank {group.rank}")

    found: list[Any] = [from_rank_0(group, lambda: {"rank": group.rank, "of": [1, 2.5, None]})]
    for kind in (UserError, RunError, Refused):
        try:
            from_rank_0(group, partial(refuse, kind))
        except PacelineError as error:
            found.append((type(error).__name__, str(error), error.reach, error.exit_status))
    found.append(from_rank_0(group, lambda: "and on"))
    return found


def ask_rank_0_among_ranks(world: World) -> list[Any]:
    return ask_rank_0(world.group)


def frees_what_it_has_reduced(world: World) -> bool:
    tensor = torch.ones(1000)
    world.group.all_reduce(tensor)
    gone, deadline = weakref.ref(tensor), time.monotonic() + 10.0
    del tensor
    while gone() is not None and time.monotonic() < deadline:  # Gloo's thread has it a moment longer
        time.sleep(0.01)
    return gone() is None


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[Any]]:
    calls = (exchanges_and_meets, policies, ask_rank_0_among_ranks, frees_what_it_has_reduced)
    return run_calls({call.__name__: Call(call) for call in calls}, 2)


def test_a_barrier_ends_the_exchanges_before_it(on_two_ranks: dict[str, list[Any]]) -> None:
    """So a rank that leaves after it, and closes its connections, breaks no transfer."""
    assert on_two_ranks["exchanges_and_meets"] == [["an exchange"]] * 2


def test_what_was_reduced_is_freed(on_two_ranks: dict[str, list[Any]]) -> None:
    """Finds: a script without a Replica whose `world.sum` of a tensor costs that tensor's memory at each call."""
    assert on_two_ranks["frees_what_it_has_reduced"] == [True, True]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="Gloo's thread that receives has no name in torch 2.11 and 2.12")
def test_the_threads_of_gloo_do_not_interrupt_compute(on_two_ranks: dict[str, list[Any]]) -> None:
    for found in on_two_ranks["policies"]:
        assert os.SCHED_BATCH in found  # others carry the meetings of ranks that share memory, of 16 bytes


def test_what_rank_0_finds_or_refuses_all_ranks_learn(on_two_ranks: dict[str, list[Any]]) -> None:
    said = "said on rank 0"
    expected = [
        {"rank": 0, "of": [1, 2.5, None]},
        ("UserError", said, "world", 2),
        ("RunError", said, "world", 1),
        ("Refused", said, "world", 2),
        "and on",
    ]
    assert [*on_two_ranks["ask_rank_0_among_ranks"], ask_rank_0(LocalGroup(torch.device("cpu")))] == [expected] * 3


def rank_0_fails_to_ask(world: World) -> None:
    from_rank_0(world.group, lambda: Path("/nowhere/at/all").read_text())


def test_what_nobody_foresaw_on_rank_0_ends_it_there() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank_0_fails_to_ask, 2)
    own, other = (outcome.said for outcome in caught.value.outcomes)
    assert "FileNotFoundError" in own
    assert "PeerLost: rank 1 lost the other ranks during a broadcast" in other


def test_what_nobody_asks_for_is_not_kept_for_ever() -> None:
    """A script without a Replica takes no traffic: each call kept 275 bytes."""
    traffic = Traffic()
    limit = traffic.transfers.maxlen
    assert limit is not None
    traffic.transfers.extend([Transfer(DeviceClock(torch.device("cpu")))] * (limit + 1))
    assert len(traffic.transfers) == limit == traffic.waits.maxlen
