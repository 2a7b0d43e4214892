"""Which sequences each step reads, and which samples `paceline.share` gives to each rank, as commit 3c0a85c did: pure
functions of the seed, the sizes and the step, on any processor.

Not recorded: the orders of a user's own samplers (WeightedRandomSampler and others), whose seeds were not used.

Finds "the second epoch has the order of the first, as recorded" in tests/mutations.py.
"""

import hashlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import golden
import numpy as np
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.loader import FixedBatches, Loader, MicroBatch
from paceline.data.mixture import Blend, Sequences
from paceline.data.order import ids_at
from paceline.data.plan import BatchPlan
from paceline.replica.share import Share, share
from paceline.world.runtime import World

FILE = "orders.json"
WORLDS = (1, 2, 3)


def digest_of(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


# ---- permutations ----


def permutations() -> dict[str, Any]:
    """The first ids of an epoch, those where the next epoch begins, and a digest of 2,000 over both."""
    found = {}
    for seed, size in itertools.product((0, 1337, 2**31 + 7), (1, 2, 3, 10, 1000, 10**9, 2**40 + 1)):
        starts = {"first": 0, "next epoch": max(0, size - 3)}
        ids = {name: ids_at(seed, np.arange(start, start + 12), size).tolist() for name, start in starts.items()}
        many = [ids_at(seed, np.arange(start, start + 1000), size) for start in starts.values()]
        found[f"seed {seed} size {size}"] = ids | {"digest": digest_of(*many)}
    return found


# ---- steps of the trainer ----

DATA: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "stream": ({"trained": 1.0}, {}),
    "bytes": ({"bytes": 1.0}, {}),
    "bestfit": ({"trained": 1.0}, {"packing": "bestfit"}),
    "masked": ({"again": 1.0}, {"mask_documents": True}),
    "mixture": ({"trained": 3.0, "again": 1.0}, {}),
    "bestfit mixture": ({"again": 0.5, "trained": 0.3}, {"packing": "bestfit", "mask_documents": True}),
}
SEQ_LEN, BATCH, STEPS = 32, 23, 40  # of the data sets that have 289 sequences or more, steps 13 and 40 begin an epoch


def of_training() -> dict[str, Any]:
    found = {}
    for (name, (weights, how)), seed in itertools.product(DATA.items(), (0, 1337)):
        blend = Blend.open([(golden.SHARDS / folder, weight) for folder, weight in weights.items()])
        with tempfile.TemporaryDirectory() as cache:
            sequences = blend.training(SEQ_LEN, cache=Path(cache), **how)
            places = sequences.locate(seed, np.arange(8, dtype=np.int64))
            found[f"{name}, seed {seed}"] = {
                "num_sequences": [part.num_sequences for part in sequences.sources],
                "first [data set, sequence]": places.tolist(),
                "steps": of_steps(sequences, seed),
                "evaluation": digest_of(*tensors(FixedBatches(blend.validation(SEQ_LEN), 9).micro_batch(range(9)))),
            }
    return found


def of_steps(sequences: Sequences, seed: int) -> list[str]:
    """Returns a digest of each step's tokens, targets, positions and documents: alike in all worlds, here of three."""
    plan = BatchPlan(BATCH, 4, 3, (2, 21, 0))  # others: data/test_loader.py
    loaders = [Loader(sequences, plan, rank, seed) for rank in range(plan.world_size)]
    return [
        digest_of(*tensors(MicroBatch.joined([batch for one in loaders for batch in one.micro_batches(step)])))
        for step in range(STEPS)
    ]


def tensors(batch: MicroBatch) -> list[torch.Tensor]:
    documents = [] if batch.documents is None else [batch.documents]
    return [batch.tokens, batch.targets, batch.positions, *documents]


def dealt() -> dict[str, Any]:
    """The positions of a step's sequences that each rank computes, as [first, behind the last] of each micro-batch."""
    plans = {f"12 by 5 on {world}": BatchPlan(12, 5, world) for world in (1, 2, 3, 4)}
    plans["12 by 5 as 9, 3"] = BatchPlan(12, 5, 2, (9, 3))
    plans["12 by 5 as 0, 11, 1"] = BatchPlan(12, 5, 3, (0, 11, 1))
    return {
        name: [[[part.start, part.stop] for part in plan.micro_batches(rank)] for rank in range(plan.world_size)]
        for name, plan in plans.items()
    }


# ---- samples of a script ----

NUMBERS = TensorDataset(torch.arange(19))


def sources(world: World) -> dict[str, Share]:
    def loader(**settings: Any) -> DataLoader[Any]:
        return DataLoader(NUMBERS, batch_size=6, **settings)

    own = torch.Generator().manual_seed(5)
    return {
        "in order": share(loader(), world),
        "in order, micro-batches of 2": share(loader(drop_last=True), world, micro_batch_size=2),
        "shuffled": share(loader(shuffle=True), world),
        "shuffled, two workers": share(loader(shuffle=True, num_workers=2, multiprocessing_context="fork"), world),
        "shuffled by a generator": share(
            loader(shuffle=True, generator=own, drop_last=True), world, micro_batch_size=2
        ),
        "a data set": share(NUMBERS, world, batch_size=6, micro_batch_size=2, seed=7),
        "a data set in order": share(NUMBERS, world, batch_size=6, shuffle=False, drop_last=True),
    }


def of_ranks(world: World) -> dict[str, Any]:
    """Returns source -> [pass][step][rank] -> samples, on all ranks."""
    found = {}
    torch.manual_seed(3)
    for name, source in sources(world).items():
        drawn = [[[row for (part,) in batch.draw() for row in part.tolist()] for batch in source] for _ in range(2)]
        by_rank = world.group.share_json(drawn)
        found[name] = [[list(ranks) for ranks in zip(*steps, strict=True)] for steps in zip(*by_rank, strict=True)]
    return found


def of_share() -> dict[str, Any]:
    return {f"world of {world}": run_ranks(of_ranks, world)[0] for world in WORLDS}


# ---- recorded ----


def computed() -> dict[str, Any]:
    found = {"permutations": permutations(), "steps": of_training(), "dealt": dealt()}
    return found | {f"share, {world}": samples for world, samples in of_share().items()}


def record() -> None:
    golden.store(FILE, computed())


def test_orders_are_those_recorded() -> None:
    recorded, now = golden.load(FILE), computed()
    assert recorded.keys() == now.keys()
    for table, before in recorded.items():
        for name, value in before.items():
            assert now[table][name] == value, f"{table}: {name}"
        assert before.keys() == now[table].keys()
