"""Whether a config fits the ranks of all hosts: batch, memory, network."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.base import units
from paceline.config import Config
from paceline.model import cost
from paceline.tools.doctor.finding import Verdict, failure, ok, warning
from paceline.tools.plan.schedule import num_shards
from paceline.tools.plan.work import memory_bytes
from paceline.train.resolve import Settings, link_bytes, resolve
from paceline.world.env import check_size
from paceline.world.facts import RankFacts

_MOST_OF_FREE = 0.8
_MOST_SEND_S = 1.0


def fits(config: Config, notes: Sequence[Mapping[str, Any]], slowest_bytes_per_s: float) -> Iterator[Verdict]:
    """Judges the config on the ranks that the hosts' notes describe. slowest: of the links; 0: there is none."""
    facts = [RankFacts(**rank) for note in notes for rank in note.get("ranks", [])]
    if not facts:
        return
    model = config.model_of_data(next((note["vocab_size"] for note in notes if "vocab_size" in note), 0))
    config.parallel.check_num_ranks(len(facts))
    check_size(len(facts), config.parallel.expect_ranks)
    on_cpus = len(notes) == 1 < len(facts) and all(each.device == "cpu" for each in facts)
    facts = [replace(each, shares_memory=config.parallel.shared_memory and on_cpus) for each in facts]
    settings = resolve(config, model.vocab_size, facts)
    plan, strategy = settings.plan, settings.config.parallel.strategy
    size = (
        f"{units.count(cost.num_parameters(model).total)} parameters; {plan.global_batch_size} sequences of "
        f"{config.data.seq_len} tokens a step on {len(facts)} ranks, in micro-batches of {plan.device_batch_size}; "
        f"{strategy}, {settings.config.train.dtype}; "
    )
    if plan.num_micro_batches(len(facts) - 1) == 0:  # ranks after the first ones have the fewest
        least, micro = len(facts), max(1, plan.global_batch_size // len(facts))
        fewer = plan.global_batch_size < least
        fix = f"--train.global-batch-size {least}" if fewer else f"--train.device-batch-size {micro}"
        yield warning(f"{size}ranks are left without work", fix)
    level, seen, fix = _memory(settings, facts)
    yield level, size + seen, fix
    if slowest_bytes_per_s:
        yield _network(settings, facts, sum(bool(note.get("ranks")) for note in notes), slowest_bytes_per_s)


def _memory(settings: Settings, facts: Sequence[RankFacts]) -> Verdict:
    """Judges by what `paceline plan` predicts of the rank that has the least memory."""
    least, micro = min(facts, key=lambda rank: rank.free_bytes), settings.plan.device_batch_size
    per_host = sum(rank.host == least.host for rank in facts)
    shards = num_shards(settings.config.parallel.strategy, len(facts), per_host)

    def needed(size: int) -> dict[str, float]:
        plan = replace(settings.plan, device_batch_size=size, limits=())
        return memory_bytes(replace(settings, plan=plan), least, len(facts), shards)

    def total_of(size: int) -> float:
        return sum(needed(size).values())

    total = total_of(micro)
    seen = (
        f"a rank takes {units.size(total)}, {units.size(needed(micro)['activations'])} of them activations; "
        f"{least.host} has {units.size(least.free_bytes)} for one"
    )
    if total <= _MOST_OF_FREE * least.free_bytes:
        return ok(seen)
    if total <= least.free_bytes:
        return warning(f"{seen}: little room", f"--train.device-batch-size {max(1, micro // 2)}")
    if size := bisect.bisect_right(range(1, micro), least.free_bytes, key=total_of):  # how many sizes fit: the largest
        return failure(seen, f"--train.device-batch-size {size}")
    return failure(seen, "a smaller model, more ranks with --parallel.strategy fsdp, or fewer ranks a host")


def _network(settings: Settings, facts: Sequence[RankFacts], num_hosts: int, bytes_per_s: float) -> Verdict:
    """Judges by the bytes that a host sends in a step with the config's strategy and wire."""
    parallel, by_gloo = settings.config.parallel, facts[0].backend == "gloo"
    num_bytes = link_bytes(settings, len(facts), num_hosts, by_gloo=by_gloo)
    seconds = num_bytes / bytes_per_s
    seen = (
        f"each host sends {units.size(num_bytes)} a step with {parallel.strategy}, wire {parallel.wire}: "
        f"{units.duration(seconds)} over the slowest link"
    )
    if seconds > _MOST_SEND_S:
        return warning(seen, f"--train.global-batch-size {4 * settings.plan.global_batch_size}: fewer, longer steps")
    return ok(seen)
