"""Prefetching: the same batches in any order of steps, errors at their own step, and no thread left behind."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_data import prepare_small

from paceline.base.errors import UserError
from paceline.data.loader import Loader, MicroBatch, Prefetcher
from paceline.data.mixture import Blend, Sequences
from paceline.data.plan import BatchPlan

PLAN = BatchPlan(7, 3, 2)


@pytest.fixture(autouse=True)
def _leaves_no_thread_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = prepare_small(tmp_path_factory.mktemp("prefetch") / "data", [[i % 256] * 11 for i in range(60)], shard=100)
    return Blend.open([(folder, 1.0)]).training(8, cache=folder)


class NotingLoader(Loader):
    """Notes what was made and by which thread; steps in `failing` fail, `slow` ones wait."""

    failing: frozenset[int] = frozenset()
    gate: threading.Event | None = None

    def host_batches(self, step: int) -> list[MicroBatch]:
        made.append((step, threading.current_thread().name))
        if step in self.failing:
            raise UserError(f"step {step} can not be read")
        if self.gate is not None:
            self.gate.wait(60)
        return super().host_batches(step)


made: list[tuple[int, str]] = []


@pytest.fixture
def loader(sequences: Sequences) -> NotingLoader:
    made.clear()
    return NotingLoader(sequences, PLAN, 0, 3)


def same(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) and torch.equal(a.positions, b.positions)
        for a, b in zip(one, other, strict=True)
    )


@given(st.lists(st.integers(0, 30), max_size=12))
def test_the_same_batches_in_any_order_of_steps(sequences: Sequences, steps: list[int]) -> None:
    plain = Loader(sequences, PLAN, 1, 3)
    with Prefetcher(Loader(sequences, PLAN, 1, 3)) as prefetcher:
        for step in steps:
            assert same(prefetcher.micro_batches(step), plain.micro_batches(step))


def until(condition: "object") -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_next_step_is_made_ahead_by_the_one_thread_and_no_further(loader: NotingLoader) -> None:
    with Prefetcher(loader) as prefetcher:
        assert made == []  # nobody said yet where the run goes on
        prefetcher.micro_batches(5)
        until(lambda: len(made) == 2)
        time.sleep(0.05)
        assert [step for step, _ in made] == [5, 6]
        prefetcher.micro_batches(6)
        until(lambda: len(made) == 3)
        assert [step for step, _ in made] == [5, 6, 7]
        assert {name for _, name in made} == {"prefetch_0"}


def test_an_error_comes_with_its_own_step(loader: NotingLoader) -> None:
    loader.failing = frozenset({4, 9})
    with Prefetcher(loader) as prefetcher:
        prefetcher.micro_batches(3)
        until(lambda: len(made) == 2)
        with pytest.raises(UserError, match="step 4 can not be read"):
            prefetcher.micro_batches(4)
        assert len(prefetcher.micro_batches(5)) == 2
        with pytest.raises(UserError, match="step 4 can not be read"):
            prefetcher.micro_batches(4)
        prefetcher.micro_batches(8)  # 9 fails in the thread, and is never asked for


def test_closing_waits_for_the_step_at_work_and_drops_what_waits(loader: NotingLoader) -> None:
    loader.gate = threading.Event()
    prefetcher = Prefetcher(loader)
    caller = threading.Thread(target=prefetcher.micro_batches, args=(0,))
    caller.start()
    until(lambda: len(made) == 1 and len(prefetcher._pending) == 1)
    threading.Timer(0.05, loader.gate.set).start()
    prefetcher.close()
    caller.join()
    assert [step for step, _ in made] == [0]
    prefetcher.close()
    with pytest.raises(RuntimeError):
        prefetcher.micro_batches(1)


def test_an_error_in_the_with_closes_as_well(loader: NotingLoader) -> None:
    loader.failing = frozenset({1})
    with pytest.raises(UserError), Prefetcher(loader) as prefetcher:
        prefetcher.micro_batches(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_in_the_thread_and_copied_by_the_caller(sequences: Sequences) -> None:
    plain = Loader(sequences, PLAN, 0, 3)
    assert all(batch.tokens.is_pinned() for batch in Loader(sequences, PLAN, 0, 3, "cuda").host_batches(0))
    with Prefetcher(Loader(sequences, PLAN, 0, 3, "cuda")) as prefetcher:
        for step in range(20):
            there = prefetcher.micro_batches(step)
            assert all(batch.tokens.is_cuda and batch.positions.is_cuda for batch in there)
            assert all(
                torch.equal(a.tokens.cpu(), b.tokens) and torch.equal(a.targets.cpu(), b.targets)
                for a, b in zip(there, plain.micro_batches(step), strict=True)
            )
