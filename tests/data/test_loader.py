"""The loader: each sequence once an epoch at any world size, exact resumption, and no byte read that is not its own."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from small_data import flat, prepare_small, sequence_ids

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset
from paceline.data.loader import FixedBatches, Loader, MicroBatch, Prefetcher
from paceline.data.mixture import Blend, Sequences
from paceline.data.order import source_seed
from paceline.data.packing import PackedRows, ensure_packing
from paceline.data.plan import BatchPlan
from paceline.data.tokenizer import Tokenizer, bytes_tokenizer

SEQ_LEN = 4
ROW_LEN = 16
NUMBERED = [[i // 256, i % 256] for i in range(130)]  # document i says so: 256, i // 256, i % 256
TEXTS = [[i % 256] * (1 + i * 7 % 23) for i in range(120)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blend")
    prepare_small(folder / "one", NUMBERED, [[9] * 50], shard=100, name="one")
    prepare_small(folder / "two", TEXTS, [[8] * 30], shard=77, name="two")
    prepare_small(folder / "three", [[5] * 200], [[7] * 10], name="three")
    return folder


@pytest.fixture(scope="module")
def one(place: Path) -> Sequences:
    return Blend.open([(place / "one", 1.0)]).training(SEQ_LEN, cache=place)


@pytest.fixture(scope="module")
def several(place: Path) -> dict[str, Sequences]:
    """The kinds of sequences that every law below is held against."""
    mixed = Blend.open([(place / "one", 0.5), (place / "two", 0.3), (place / "three", 0.2)])
    two = Blend.open([(place / "two", 3.0)])
    return {
        "stream": Blend.open([(place / "one", 1.0)]).training(SEQ_LEN, cache=place),
        "bestfit": two.training(ROW_LEN, packing="bestfit", cache=place),
        "mixture": mixed.training(SEQ_LEN, cache=place),
        "bestfit mixture": mixed.training(ROW_LEN, packing="bestfit", cache=place),
    }


def rows(batches: list[MicroBatch]) -> list[tuple[int, ...]]:
    """Each sequence with its last target."""
    return [
        (*tokens, targets[-1])
        for batch in batches
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
    ]


class World:
    """The loaders of all ranks, made when they are first asked."""

    def __init__(self, sequences: Sequences, plan: BatchPlan, seed: int) -> None:
        self.ranks = [Loader(sequences, plan, rank, seed) for rank in range(plan.world_size)]

    def rows(self, step: int) -> list[list[tuple[int, ...]]]:
        """The sequences of each micro-batch of a step, over all ranks in order."""
        return [rows([batch]) for rank in self.ranks for batch in rank.micro_batches(step)]


@settings(max_examples=12)
@given(
    st.sampled_from(["stream", "bestfit", "mixture", "bestfit mixture"]),
    st.integers(1, 30),
    st.integers(1, 8),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_every_sequence_once_an_epoch_whatever_the_worlds(
    several: dict[str, Sequences], kind: str, global_batch: int, device_batch: int, worlds: list[int], seed: int
) -> None:
    """The world size changes at every step, as over resumptions; each epoch of each data set still comes once."""
    sequences = several[kind]
    by_size = {size: World(sequences, BatchPlan(global_batch, device_batch, size), seed) for size in {1, *worlds}}
    seen = []
    for step in range(-(-2 * sum(part.num_sequences for part in sequences.sources) // global_batch)):
        batches = by_size[worlds[step % len(worlds)]].rows(step)
        assert batches == by_size[1].rows(step)
        seen += [row for batch in batches for row in batch]
    sources = sequences.locate(0, np.arange(len(seen)))[:, 0]
    for number, part in enumerate(sequences.sources):
        of_part = [row for row, source in zip(seen, sources.tolist(), strict=True) if source == number]
        whole = Counter(tuple(row) for row in part.read(range(part.num_sequences)).tolist())
        for begin in range(0, len(of_part) - part.num_sequences + 1, part.num_sequences):
            assert Counter(of_part[begin : begin + part.num_sequences]) == whole
        assert not Counter(of_part[: part.num_sequences]) - whole  # also where less than an epoch was seen


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 7)), min_size=1, max_size=4), st.integers(0, 99))
def test_resumed_anywhere_in_other_worlds_the_tokens_are_those_of_one_rank(
    several: dict[str, Sequences], stops: list[tuple[int, int]], seed: int
) -> None:
    """A run that is stopped at random steps and goes on in worlds of 1 to 7, with one loader a rank between stops."""
    sequences = several["mixture"]
    alone = Loader(sequences, BatchPlan(11, 3, 1), 0, seed)
    step = 0
    for number_of_steps, world_size in stops:
        plan = BatchPlan(11, 3, world_size)
        ranks = [Loader(sequences, plan, rank, seed) for rank in range(world_size)]
        for _ in range(min(number_of_steps, 3)):
            found = [row for rank in ranks for row in rows(rank.micro_batches(step))]
            assert found == rows(alone.micro_batches(step))
            positions = [int(i) for rank in ranks for batch in rank.micro_batches(step) for i in batch.positions]
            assert positions == list(range(step * 11, (step + 1) * 11))
            step += 1
        step += number_of_steps


@settings(max_examples=12)
@given(
    st.sampled_from(["stream", "bestfit", "bestfit mixture"]),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_shares_that_change_between_steps_lose_no_sequence(
    several: dict[str, Sequences], kind: str, changes: list[tuple[int, int, int]]
) -> None:
    """Two ranks whose shares and limits change every second step, while the next step is read ahead."""
    sequences, plan = several[kind], BatchPlan(11, 3, 2, (6, 5))
    alone, ranks = Loader(sequences, plan, 0, 5), [Loader(sequences, plan, rank, 5) for rank in range(2)]
    alone.change(0, BatchPlan(11, 3, 1))
    with Prefetcher(ranks[0]) as first, Prefetcher(ranks[1]) as second:
        for index, (own, *limits) in enumerate(changes):
            for step in (2 * index, 2 * index + 1):
                batches = [*first.micro_batches(step), *second.micro_batches(step)]
                assert [row for batch in batches for row in rows([batch])] == rows(alone.micro_batches(step))
                assert sum(len(batch.positions) for batch in batches) == 11
                for rank in ranks:
                    rank.change(2 * index + 2, BatchPlan(11, 1, 2, (own, 11 - own), tuple(limits)))


def test_a_mixture_of_one_has_the_order_of_the_data_set_alone(one: Sequences) -> None:
    """This order never changes: who goes on with a run under a later paceline must see the same data."""
    num_sequences = one.sources[0].num_sequences
    expected = sequence_ids(7, 3 * 11, 11, num_sequences).tolist()
    stream = flat(NUMBERED)
    found = rows(Loader(one, BatchPlan(11, 4, 1), 0, 7).micro_batches(3))
    assert found == [tuple(stream[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN + 1]) for i in expected]
    assert source_seed(7, 0) == 7
    assert len({source_seed(7, number) for number in range(100)}) == 100


def test_sequences_are_located_some_steps_at_once_and_none_is_lost_between(one: Sequences) -> None:
    """4096 sequences at once are two steps of 2000: each border is met, forwards and back."""
    loader = Loader(one, BatchPlan(2000, 2000, 1), 0, 7)
    num_sequences, stream = one.sources[0].num_sequences, flat(NUMBERED)
    for step in (0, 1, 2, 3, 4, 3, 2, 9, 0):
        (batch,) = loader.micro_batches(step)
        ids = sequence_ids(7, step * 2000, 2000, num_sequences)
        assert batch.positions.tolist() == list(range(step * 2000, (step + 1) * 2000))
        assert batch.tokens[:, 0].tolist() == [stream[i * SEQ_LEN] for i in ids.tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_rank_reads_its_own_sequences_and_nothing_else(
    place: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    read: list[tuple[int, int]] = []
    real = os.preadv

    def noting(descriptor: int, buffers: Any, position: int) -> int:
        shard = re.findall(r"train-(\d+).bin", os.readlink(f"/proc/self/fd/{descriptor}"))[0]
        count = real(descriptor, buffers, position)
        read.append((int(shard) * 100 + (position - 1024) // 2, count // 2))
        return count

    sequences = Blend.open([(place / "one", 1.0)]).training(SEQ_LEN, cache=place)
    monkeypatch.setattr(os, "preadv", noting)
    plan = BatchPlan(11, 2, world_size)
    ids = sequence_ids(7, 3 * 11, 11, sequences.sources[0].num_sequences)
    for rank in range(world_size):
        read.clear()
        Loader(sequences, plan, rank, 7).micro_batches(3)
        own = [int(ids[at]) for batch in plan.micro_batches(rank) for at in batch]
        tokens = [token for start, count in read for token in range(start, start + count)]
        assert tokens == [i * SEQ_LEN + k for i in own for k in range(SEQ_LEN + 1)]


def test_shapes_targets_and_positions(one: Sequences) -> None:
    first, second = Loader(one, BatchPlan(5, 3, 1), 0, 0).micro_batches(2)
    for batch, size in ((first, 3), (second, 2)):
        assert batch.tokens.shape == batch.targets.shape == (size, SEQ_LEN)
        assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert batch.targets.is_contiguous()
        assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
        assert batch.documents is None
    assert torch.cat([first.positions, second.positions]).tolist() == [10, 11, 12, 13, 14]


def test_a_rank_may_get_none(one: Sequences) -> None:
    assert Loader(one, BatchPlan(2, 1, 3), 2, 0).micro_batches(0) == []


def test_a_batch_larger_than_an_epoch_runs_through_several(place: Path) -> None:
    sequences = Blend.open([(place / "one", 1.0)]).training(130, cache=place)
    assert sequences.sources[0].num_sequences == 2
    found = rows(Loader(sequences, BatchPlan(7, 7, 1), 0, 0).micro_batches(0))
    assert [len(set(found[i : i + 2])) for i in (0, 2, 4)] == [2, 2, 2]


def test_a_stream_shorter_than_a_sequence_is_refused_at_once(place: Path) -> None:
    blend = Blend.open([(place / "one", 1.0), (place / "three", 1.0)])
    with pytest.raises(UserError, match=r"train split has 201 tokens.*data.seq-len 201"):
        blend.training(201, cache=place)
    with pytest.raises(UserError, match=r"validation split has 11 tokens.*data.seq-len 20"):
        blend.validation(20)
    with pytest.raises(UserError, match=r"train split has 201 tokens.*data.seq-len 201"):
        blend.training(201, packing="bestfit", cache=place)


def test_fixed_sequences_are_spread_over_each_data_set_by_weight(place: Path) -> None:
    fixed = Blend.open([(place / "one", 1.0)]).training(SEQ_LEN, cache=place).fixed(4)
    assert fixed[:, 1].tolist() == [0, 24, 48, 72]  # of 97
    mixed = Blend.open([(place / "one", 0.75), (place / "two", 0.25)]).validation(SEQ_LEN)
    fixed = mixed.fixed(8)  # of 12 and 7
    assert fixed.T.tolist() == [[0] * 6 + [1] * 2, [0, 2, 4, 6, 8, 10, 0, 3]]
    assert len(mixed.fixed(10**6)) == 12 + 7
    with pytest.raises(ValueError):
        mixed.fixed(0)
    batches = FixedBatches(mixed, 8)
    assert len(batches) == 8
    every_third = batches.micro_batch(range(1, 8, 3))
    assert every_third.positions.tolist() == [1, 4, 7]
    assert rows([every_third])[1:] == [(9,) * 5, (8,) * 5]


def test_documents_are_counted_in_each_sequence(place: Path) -> None:
    blend = Blend.open([(place / "one", 1.0)])
    for sequences in (
        blend.training(SEQ_LEN, mask_documents=True, cache=place),
        blend.training(ROW_LEN, mask_documents=True, packing="bestfit", cache=place),
    ):
        (batch,) = Loader(sequences, BatchPlan(9, 9, 1), 0, 0).micro_batches(0)
        assert batch.documents is not None
        assert batch.documents.dtype == torch.int32
        for tokens, documents in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
            assert documents == [tokens[: k + 1].count(256) for k in range(len(tokens))]
    validation = FixedBatches(blend.validation(SEQ_LEN, mask_documents=True), 4).micro_batch(range(4))
    assert validation.documents is not None


def test_rows_of_a_packing_are_beginnings_of_documents(place: Path) -> None:
    """Every row begins with one, has only whole documents but for the last, and no document is in two."""
    dataset = Dataset.open(place / "two")
    sequences = Blend([dataset], [1.0]).training(ROW_LEN, packing="bestfit", cache=place)
    whole = sequences.sources[0].read(range(sequences.sources[0].num_sequences)).tolist()
    left = Counter(tuple(document) for document in TEXTS)
    for row in whole:
        assert len(row) == ROW_LEN + 1
        assert row[0] == 256
        text = "".join(map(chr, row)).split(chr(256))[1:]
        for segment in text:
            found = [d for d in left if d[: len(segment)] == tuple(map(ord, segment)) and left[d]]
            assert found
            left[min(found, key=len)] -= 1


def test_a_packing_is_made_once_and_a_damaged_one_is_refused(place: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(place / "two")
    folder = ensure_packing(dataset, ROW_LEN, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert ensure_packing(dataset, ROW_LEN, tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == stamps
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith(".new")] == []
    assert ensure_packing(dataset, ROW_LEN + 1, tmp_path) != folder
    starts = np.load(folder / "starts.npy")
    for bad in (starts + dataset.train.num_tokens, starts[:1]):
        np.save(folder / "starts.npy", bad)
        with pytest.raises(UserError, match=r"packing .* is damaged"):
            PackedRows(dataset.train, folder, ROW_LEN).read(range(20))
    (folder / "starts.npy").unlink()
    with pytest.raises(UserError, match=r"packing .* can not be read.*delete it"):
        PackedRows(dataset.train, folder, ROW_LEN)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can not be kept in .*file/packings: Not a directory"):
        ensure_packing(dataset, ROW_LEN, tmp_path / "file")
    with pytest.raises(UserError, match=r"can not be kept in .*: File name too long"):  # as if not to be entered
        ensure_packing(dataset, ROW_LEN, tmp_path / ("x" * 300))


def test_what_only_our_own_data_knows(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "val.bin")
    blend = Blend.open([(tmp_path, 1.0)], 50257)
    assert rows(Loader(blend.training(9, cache=tmp_path), BatchPlan(2, 2, 1), 0, 0).micro_batches(0))
    with pytest.raises(UserError, match=r"data.packing bestfit"):
        blend.training(9, packing="bestfit", cache=tmp_path)
    for ask in (blend.validation, lambda *a, **k: blend.training(*a, cache=tmp_path, **k)):
        with pytest.raises(UserError, match=r"data.mask-documents needs to know"):
            ask(9, mask_documents=True)


def test_data_sets_of_different_tokenizers_are_not_mixed(place: Path, tmp_path: Path) -> None:
    other = Tokenizer(bytes_tokenizer().json + "\n")
    prepare_small(tmp_path / "other", TEXTS, tokenizer=other)
    shas = rf"one was made with .*{bytes_tokenizer().sha256[:16]}, .*other with .*{other.sha256[:16]}"
    with pytest.raises(UserError, match=shas):
        Blend.open([(place / "one", 0.5), (tmp_path / "other", 0.5)])
    for name, size in (("a", 100), ("b", 100)):
        (tmp_path / name).mkdir()
        np.arange(size, dtype=np.uint16).tofile(tmp_path / name / "train.bin")
        np.arange(size, dtype=np.uint16).tofile(tmp_path / name / "val.bin")
    Blend.open([(tmp_path / "a", 0.5), (tmp_path / "b", 0.5)], 100)
    with pytest.raises(UserError, match=r"made with .*, .*a with an unknown tokenizer: .*document-token-id 256"):
        Blend.open([(place / "one", 0.5), (tmp_path / "a", 0.5)], 257)


def test_a_blend_is_named_and_identified_by_all_its_parts(place: Path) -> None:
    one, two = Dataset.open(place / "one"), Dataset.open(place / "two")
    assert Blend([one], [5.0]).fingerprint == one.fingerprint
    assert Blend([one], [5.0]).name == "one"
    blend = Blend([one, two], [1.0, 3.0])
    assert blend.name == "one 25% + two 75%"
    assert blend.num_tokens == (
        one.train.num_tokens + two.train.num_tokens,
        one.validation.num_tokens + two.validation.num_tokens,
    )
    others = [Blend([one, two], [1.0, 2.0]), Blend([two, one], [3.0, 1.0])]
    assert blend.fingerprint == Blend.open([(place / "one", 1.0), (place / "two", 3.0)]).fingerprint
    assert blend.fingerprint not in [other.fingerprint for other in others]
    first = blend.first
    assert (first.vocab_size, first.end_of_text, first.tokenizer().sha256) == (257, 256, bytes_tokenizer().sha256)


def batches_of_step_1234(config: object, env: object, place: Path) -> list[Any]:
    blend = Blend.open([(place / name, 1.0) for name in ("one", "two")])
    loader = Loader(blend.training(SEQ_LEN, cache=place), BatchPlan(9, 2, 2), 1, 5)
    return [batch.tokens.tolist() for batch in loader.micro_batches(1234)]


def test_another_process_gives_the_same_batches(place: Path) -> None:
    """The order hangs on nothing of the process: no hash seed, no global generator."""
    torch.manual_seed(1)
    assert run_ranks(batches_of_step_1234, 1, place, opened=False) == [batches_of_step_1234(None, None, place)]


@pytest.mark.parametrize("world_size", [1, 8, 64])
def test_a_rank_reads_as_many_bytes_in_any_world(place: Path, world_size: int) -> None:
    """Finds a loader that reads the sequences of other ranks, too. CPU times are measured by bench/loader.py."""
    blend = Blend.open([(place / "one", 1.0)])
    loader = Loader(blend.training(SEQ_LEN, cache=place), BatchPlan(2 * world_size, 2, world_size), world_size // 2, 7)
    for step in range(20):
        loader.micro_batches(step)
    assert sum(dataset.train.bytes_read for dataset in blend.datasets) == 20 * 2 * 2 * (SEQ_LEN + 1)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_only_cuda_copies_while_the_caller_goes_on(one: Sequences, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On MPS the copy would read memory that was freed."""
    (batch,) = Loader(one, BatchPlan(3, 3, 1), 0, 0).micro_batches(0)
    asked: list[bool] = []

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        asked.append(non_blocking)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    batch.to(torch.device(kind))
    assert asked == [kind == "cuda"] * 3
