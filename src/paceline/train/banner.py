"""The summary of all settings at the start of a run, and suggested commands at its end."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.base import units
from paceline.base.units import plural
from paceline.config import Config
from paceline.data.plan import BatchPlan
from paceline.model import cost
from paceline.model.layers import attends_by_document
from paceline.optim.config import RULES
from paceline.record.balance import listed
from paceline.record.console import Console, facts, table
from paceline.train.data import TrainingData
from paceline.train.progress import Progress
from paceline.train.resolve import Settings, link_bytes
from paceline.world.device import product_dtype
from paceline.world.facts import RankFacts
from paceline.world.peaks import Peak
from paceline.world.runtime import World

_HOST_COLUMNS = ["host", "ranks", "device", "processor", "instructions", "rounding", "threads", "free a rank", "dtype"]


def start(
    console: Console, world: World, settings: Settings, data: TrainingData, peak: Peak, folder: str, is_new: bool
) -> None:
    """Prints the world, the model, the data, the batch sizes, and each automatic choice with its flag. is_new: nothing
    was saved yet."""
    config, plan = settings.config, settings.plan
    model, optim, wire = config.model, config.optim, config.parallel.wire
    parameters = cost.num_parameters(model)
    num_ranks = plural(world.world_size, "rank")
    rows = {
        "world": f"{num_ranks} on {_devices(world)}, {world.backend_text}, {plural(world.threads, 'thread')} a rank",
        "model": f"{model.arch}, {model.n_layer} layers x {model.n_embd}, {units.count(parameters.total)} parameters "
        f"({units.count(parameters.non_embedding)} outside embeddings), "
        f"{units.count(cost.flops_per_token(model, config.data.seq_len))}FLOP a token",
        "data": _data_text(data, world.device, settings),
        "batch": f"{_shares_text(config, plan)} of up to {plan.device_batch_size} sequences = "
        f"{plan.global_batch_size} sequences = {units.count(settings.tokens_per_step)} tokens a step",
        "optimizer": f"{RULES[optim.name]}, lr {settings.lr:.3g} ({optim.schedule}, "
        f"{optim.warmup_steps} warm-up steps), weight decay {settings.weight_decay:.3g}, "
        + (f"gradient clipped at {optim.grad_clip:g}" if optim.grad_clip else "gradient not clipped"),
        "gradients": f"{_strategy_text(config, plan)}; {_checks_text(config)}",
        **({"wire": f"{wire}: what ranks send is rounded (docs/NUMERICS.md)"} if wire != "exact" else {}),
        **_link(world, settings),
        "horizon": _horizon_text(settings, data),
        "checkpoints": _saves_text(settings, is_new),
        "MFU is of": f"{units.count(peak.flops_per_s)}FLOP/s a rank ({peak.source})"
        if peak.flops_per_s
        else f"nothing known ({peak.source})",
        "run folder": folder,
    }
    chosen = [("chosen", f"{choice.what}: {choice.why}  [{choice.flag}]") for choice in settings.choices]
    console.say(facts([*rows.items(), *chosen]))
    if hosts := _hosts(world.facts):
        console.say(table("Hosts differ", _HOST_COLUMNS, hosts))
    console.say()
    if warning := _imbalance(plan):
        console.say(f"{warning}\n", style="yellow")


def start_again(console: Console, world: World, settings: Settings, folder: str) -> None:
    """Prints only what may have changed, when the launcher has restarted the ranks."""
    console.say(
        f"{plural(world.world_size, 'rank')} on {_devices(world)}, {world.backend_text}; "
        f"{settings.plan.global_batch_size} sequences a step; run folder {folder}"
    )


def _devices(world: World) -> str:
    return " and ".join(sorted({each.device for each in world.facts}))


def _hosts(all_facts: Sequence[RankFacts]) -> list[list[str]]:
    """Returns a row for each host, or part of it, with facts of its own; none if all hosts are alike."""
    ranks_by: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for rank, each in enumerate(all_facts):
        what = each.device, each.processor, each.instructions, each.rounding, str(each.threads), each.dtype
        ranks_by.setdefault(what, {}).setdefault(each.host, []).append(rank)
    if len(ranks_by) == 1:
        return []
    return [
        [
            host,
            units.listed(ranks, 16),
            *what[:5],
            units.size(min(all_facts[r].free_bytes for r in ranks)),
            what[5],
        ]
        for what, by_host in ranks_by.items()
        for host, ranks in by_host.items()
    ]


def _data_text(data: TrainingData, device: torch.device, settings: Settings) -> str:
    trained, validated = map(units.count, data.blend.num_tokens)
    vocab_size = data.blend.first.vocab_size
    text = f"{data.blend.name}: {trained} tokens to train on, {validated} to validate, vocabulary {vocab_size}"
    if data.cropped_frac is not None:
        text += f"; documents packed by best fit, {data.cropped_frac:.1%} of tokens cropped"
    config = settings.config
    if not config.data.mask_documents:
        return text
    is_skipped = attends_by_document(device, product_dtype(config.train.dtype), config.model.head_dim)
    return f"{text}; attention stays inside documents, by {'flash attention of each' if is_skipped else 'a mask'}"


def _shares_text(config: Config, plan: BatchPlan) -> str:
    if plan.shares:
        rule = "by measured speed, at first" if config.parallel.shares == "auto" else "by rank,"
        return f"{rule} {listed(plan.shares)} sequences in micro-batches"
    counts = sorted({plan.num_micro_batches(rank) for rank in range(plan.world_size)})
    micro_steps = plural(counts[0], "micro-step") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} micro-steps"
    return f"{plural(plan.world_size, 'rank')} x {micro_steps}"


def _strategy_text(config: Config, plan: BatchPlan) -> str:
    parallel, together = config.parallel, min(config.train.layered_micro_batches, plan.passes)
    if parallel.strategy == "local" and plan.world_size > 1:
        return (
            "local steps: ANOTHER ALGORITHM, whose loss depends on the number of ranks. Each rank updates its own "
            f"weights; in each step the ranks average 1/{parallel.sync_every} of them"
        )
    when = f"during the last micro-steps, up to {together} block by block" if together > 1 else "on the last micro-step"
    return f"{parallel.strategy}, summed over ranks {when}"


def _link(world: World, settings: Settings) -> dict[str, str]:
    """Returns what the link between hosts carries, as a row; none on one host."""
    parallel, hosts = settings.config.parallel, len({each.host for each in world.facts})
    if hosts == 1:
        return {}
    num_bytes = link_bytes(settings, world.world_size, hosts, by_gloo=world.backend == "gloo")
    text = f"{units.size(num_bytes)} a step from each host with {parallel.strategy}, wire {parallel.wire}"
    return {"link": f"{text}; paceline bench link predicts the time of other ways"}


def _checks_text(config: Config) -> str:
    if not config.parallel.check_every:
        return "replicas not compared"
    if config.parallel.strategy == "fsdp":
        return "replicas not compared: each rank has weights of its own"
    if config.parallel.strategy == "hsdp":
        return f"hosts compared every {config.parallel.check_every} steps"
    return f"replicas compared every {config.parallel.check_every} steps"


def _horizon_text(settings: Settings, data: TrainingData) -> str:
    if settings.num_steps is None:
        time_budget = units.duration(settings.config.train.time_budget)
        most = f" or {units.count(settings.most_tokens)} tokens, if sooner" if settings.most_tokens else ""
        return f"{time_budget} of training{most}; the learning rate follows the clock"
    num_tokens = settings.num_steps * settings.tokens_per_step
    read_most, epoch_tokens = data.blend.read_most(data.training)
    num_epochs = num_tokens / max(1, epoch_tokens)
    epochs = f"{num_epochs:.1f} epochs" if num_epochs >= 1 else f"{num_epochs:.2%} of an epoch"
    text = f"{settings.num_steps} steps = {units.count(num_tokens)} tokens"
    if len(data.blend.datasets) == 1:
        return f"{text} = {epochs} of this data"
    return f"{text}; {read_most.name} is read most: {epochs} of it"


def _saves_text(settings: Settings, is_new: bool) -> str:
    saves = settings.config.checkpoint
    when = "at the end only"
    if saves.every:
        when = f"every {saves.every} steps, and at the end"
        if is_new and saves.every < (settings.num_steps or math.inf):
            when += f"; the first at step {saves.every}"
    elif saves.every_s:
        first = units.duration(saves.every_s)
        when = f"every {first} of training, and at the end; the first after {first}"
    return f"{when}; the newest {saves.keep} stay" + (f", here and at {saves.to}" if saves.to else "")


def _imbalance(plan: BatchPlan) -> str:
    """Returns a warning, with a better micro-batch size, if unequal parts of the batch make ranks wait a tenth of the
    time or more; else an empty string. Shares by speed, or as given, are no mistake."""
    if plan.shares:
        return ""
    loads = plan.num_sequences()
    waiting_frac = 1 - sum(loads) / len(loads) / max(loads)
    if waiting_frac < 0.1:
        return ""

    def largest_load(size: int) -> int:
        return max(replace(plan, device_batch_size=size).num_sequences())

    better = min(range(plan.device_batch_size, 0, -1), key=lambda size: (largest_load(size), -size))
    text = (
        f"ranks have unequal parts of the batch: rank 0 computes {max(loads)} sequences of a step, rank "
        f"{len(loads) - 1} {min(loads)}, and waiting takes {waiting_frac:.0%} of all ranks' time"
    )
    if largest_load(better) < max(loads):
        text += f"; --train.device-batch-size {better} would divide it better"
    return text


def next_commands(
    console: Console, settings: Settings, data: TrainingData, progress: Progress, folder: str, finished: bool
) -> None:
    """Prints commands that work with this run: one without a tokenizer cannot be sampled, and one whose tokenizer has
    no token that begins a document needs a prompt."""
    config, folder = settings.config, shlex.quote(folder)
    console.say("\nTry next:")
    if not finished:
        console.say(f"  paceline resume {folder}")
    if data.blend.first.tokenizer_json is not None:
        needs_prompt = data.blend.first.tokenizer().end_of_text is None
        prompt = (config.train.sample_prompt.strip().splitlines() or ["TEXT" if needs_prompt else ""])[0]
        console.say(f"  paceline sample {folder}" + (f" --prompt {shlex.quote(prompt)}" if prompt else ""))
    console.say(f"  paceline report {folder}   # one page of plots")
    if finished and config.train.time_budget and progress.elapsed_s < config.train.time_budget:
        console.say(
            f"It ended before its time, after {config.train.max_epochs:g} passes over the data: more text would lower "
            "the loss, more passes (--train.max-epochs) hardly"
        )
    elif finished and config.train.time_budget:
        console.say(f"  paceline resume {folder} --train.time-budget {2 * config.train.time_budget:g}   # continue")
    elif finished and config.train.steps:
        console.say(f"  paceline resume {folder} --train.steps {2 * config.train.steps}   # continue")
