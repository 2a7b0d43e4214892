"""The loader: each sequence once an epoch at any world size, exact resumption, and no byte read that is not its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data.dataset import TokenStream
from paceline.data.loader import Loader, fixed_sequences, read_sequences
from paceline.data.order import sequence_ids
from paceline.data.plan import BatchPlan
from paceline.data.shard import Shard, SplitWriter

SEQ_LEN = 4


class CountingStream(TokenStream):
    """Remembers what was read."""

    def __init__(self, stream: TokenStream) -> None:
        super().__init__(stream.split, stream.shards, stream.vocab_size)
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        self.reads.append((start, count))
        return super().read(start, count)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """Token i is i, so a window's first token says which sequence it is."""
    folder = tmp_path_factory.mktemp("stream")
    writer = SplitWriter(folder, "train", vocab_size=1000, end_of_text=0, shard_tokens=100)
    writer.write(range(390))
    record = writer.finish(0)
    return TokenStream("train", [Shard.open(folder / shard.file) for shard in record.shards], 1000)


def step_sequences(stream: TokenStream, step: int, plan: BatchPlan, seed: int) -> list[list[int]]:
    """Ids of the sequences of each micro-batch of the step, over all ranks in order."""
    return [
        (batch.tokens[:, 0] // SEQ_LEN).tolist()
        for rank in range(plan.world_size)
        for batch in Loader(stream, plan, rank, seed, SEQ_LEN).micro_batches(step)
    ]


@given(st.integers(1, 30), st.integers(1, 8), st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_window_once_an_epoch_whatever_the_worlds(
    stream: TokenStream, global_batch_size: int, device_batch_size: int, worlds: list[int], seed: int
) -> None:
    """The world size changes at every step, as over resumptions; each epoch's windows still come once."""
    num_sequences = stream.num_sequences(SEQ_LEN)
    seen = []
    for step in range(2 * -(-num_sequences // global_batch_size)):
        plan = BatchPlan(global_batch_size, device_batch_size, worlds[step % len(worlds)])
        batches = step_sequences(stream, step, plan, seed)
        assert batches == step_sequences(stream, step, BatchPlan(global_batch_size, device_batch_size, 1), seed)
        seen += [sequence for batch in batches for sequence in batch]
    for epoch in (0, 1):
        assert sorted(seen[epoch * num_sequences : (epoch + 1) * num_sequences]) == list(range(num_sequences))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_rank_reads_its_own_sequences_and_nothing_else(stream: TokenStream, world_size: int) -> None:
    plan = BatchPlan(11, 2, world_size)
    ids = sequence_ids(7, 3 * 11, 11, stream.num_sequences(SEQ_LEN))
    for rank in range(world_size):
        counting = CountingStream(stream)
        Loader(counting, plan, rank, 7, SEQ_LEN).micro_batches(3)
        own = [int(ids[place]) for batch in plan.micro_batches(rank) for place in batch]
        assert counting.reads == [(sequence * SEQ_LEN, SEQ_LEN + 1) for sequence in own]


def test_shapes_targets_and_positions(stream: TokenStream) -> None:
    first, second = Loader(stream, BatchPlan(5, 3, 1), 0, 0, SEQ_LEN).micro_batches(2)
    for batch, size in ((first, 3), (second, 2)):
        assert batch.tokens.shape == batch.targets.shape == (size, SEQ_LEN)
        assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert batch.targets.is_contiguous()
        assert torch.equal(batch.targets, batch.tokens + 1)
    assert torch.cat([first.positions, second.positions]).tolist() == [10, 11, 12, 13, 14]


def test_a_rank_may_get_none(stream: TokenStream) -> None:
    assert Loader(stream, BatchPlan(2, 1, 3), 2, 0, SEQ_LEN).micro_batches(0) == []


def test_a_batch_larger_than_an_epoch_runs_through_several(stream: TokenStream) -> None:
    (batch,) = Loader(stream, BatchPlan(7, 7, 1), 0, 0, 130).micro_batches(0)  # 2 sequences in the stream
    assert [len(set(batch.tokens[i : i + 2, 0].tolist())) for i in (0, 2, 4)] == [2, 2, 2]


def test_a_stream_shorter_than_a_sequence_is_refused_at_once(stream: TokenStream) -> None:
    with pytest.raises(UserError, match=r"train split has 390 tokens.*data.seq-len 390"):
        Loader(stream, BatchPlan(1, 1, 1), 0, 0, 390)
    with pytest.raises(UserError, match="seq-len 400"):
        fixed_sequences(stream, 400, 5)


def test_fixed_sequences_are_spread_over_the_stream(stream: TokenStream) -> None:
    assert fixed_sequences(stream, SEQ_LEN, 4).tolist() == [0, 24, 48, 72]  # of 97
    assert fixed_sequences(stream, SEQ_LEN, 10**6).tolist() == list(range(97))
    with pytest.raises(ValueError):
        fixed_sequences(stream, SEQ_LEN, 0)
    tokens, targets = read_sequences(stream, [96, 0], SEQ_LEN)
    assert tokens.tolist() == [[384, 385, 386, 387], [0, 1, 2, 3]]
    assert torch.equal(targets, tokens + 1)


def test_another_process_gives_the_same_batches(stream: TokenStream) -> None:
    """The order hangs on nothing of the process: no hash seed, no global generator."""
    folder = Path(stream.shards[0].path).parent
    code = f"""
from pathlib import Path
from paceline.data.dataset import TokenStream
from paceline.data.loader import Loader
from paceline.data.plan import BatchPlan
from paceline.data.shard import Shard
stream = TokenStream("train", [Shard.open(path) for path in sorted(Path({str(folder)!r}).glob("*.bin"))], 1000)
print([batch.tokens.tolist() for batch in Loader(stream, BatchPlan(9, 2, 2), 1, 5, 4).micro_batches(1234)])
"""
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    torch.manual_seed(1)
    here = [batch.tokens.tolist() for batch in Loader(stream, BatchPlan(9, 2, 2), 1, 5, SEQ_LEN).micro_batches(1234)]
    assert there.strip() == str(here)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_device(stream: TokenStream) -> None:
    plan = BatchPlan(6, 3, 1)
    there = Loader(stream, plan, 0, 0, SEQ_LEN, "cuda").micro_batches(5)
    for batch, expected in zip(there, Loader(stream, plan, 0, 0, SEQ_LEN).micro_batches(5), strict=True):
        assert batch.tokens.is_cuda
        assert batch.positions.is_cuda
        assert torch.equal(batch.tokens.cpu(), expected.tokens)
        assert torch.equal(batch.targets.cpu(), expected.targets)
