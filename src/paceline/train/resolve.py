"""All automatic choices of a run, each with the flag that overrides it. Imports no torch: `plan` answers at once."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.base import units
from paceline.base.errors import RunError, UserError
from paceline.config import MOST_SEQUENCES, Config
from paceline.data.plan import BatchPlan, in_proportion
from paceline.model import cost
from paceline.model.config import FLOAT8_MULTIPLE
from paceline.optim.config import require_some_left, require_usual_decay, scaled_with_batch
from paceline.sync.wire import CODINGS, wire_bits
from paceline.train.progress import Progress
from paceline.train.size import sized
from paceline.world.facts import RankFacts, check_strategy, sends_gpu_memory_by_gloo, unequal_kinds

_CPU_MICRO_BATCH_TOKENS = 4096  # keeps a CPU busy; more gain nothing
_LARGE_VOCAB, _VOCAB_MULTIPLE = 8192, 64
_MEMORY_SHARE = 0.6  # of free memory; the rest is for workspace, fragmentation, and the optimizer's temporaries


@dataclass(frozen=True)
class Choice:
    what: str
    why: str
    flag: str


@dataclass(frozen=True)
class Settings:
    """A run's settings, all resolved. `config` includes the choices that define the curve."""

    config: Config
    plan: BatchPlan
    num_steps: int | None  # None: the horizon is a time
    lr: float
    weight_decay: float
    choices: tuple[Choice, ...]
    most_tokens: float = 0.0  # within train.time-budget; 0: no limit

    def share_done(self, progress: Progress) -> float:
        """The share of the horizon that is done, the same on all ranks: elapsed_s is rank 0's."""
        if self.num_steps is not None:
            return progress.step / self.num_steps
        by_data = progress.tokens / self.most_tokens if self.most_tokens else 0.0
        return max(by_data, progress.elapsed_s / self.config.train.time_budget)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of a matrix product's result."""
        return item_bytes(self.config.train.dtype)

    @property
    def tokens_per_step(self) -> int:
        return self.plan.global_batch_size * self.config.data.seq_len


def resolve(
    config: Config, vocab_size: int, facts: Sequence[RankFacts], flops_per_s: float = 0.0, data_tokens: int = 0
) -> Settings:
    """Returns the settings: a pure function of the config, the data's vocabulary and tokens of an epoch, all ranks'
    facts and the FLOP/s that they reach together in training (0: not known), so the same on all. Raises UserError if
    weight decay would remove too much of a weight, or if the ranks' processors cannot use the given strategy
    together."""
    choices = _device_choices(config, facts[0])
    if config.model.size == "auto":
        config, what, why = sized(config, vocab_size, flops_per_s, len(facts), data_tokens)
        choices.append(Choice(what, why, "--model.size given"))
    config = config.replace(
        "model",
        vocab_size=config.model.vocab_size or _vocab_size(vocab_size, choices),
        n_positions=config.model.n_positions or config.data.seq_len,
    )
    config.model.check()
    config = config.replace("train", dtype=chosen_dtype(config, facts, choices))
    config = config.replace("parallel", strategy=_strategy(config, facts, choices))
    choices += _memory_choice(config, facts)
    try:
        config.check()  # also what was chosen
    except UserError as error:
        error.reach = "world"
        raise
    config = config.batch_in_sequences()
    config = config.replace("train", global_batch_size=_global_batch(config, choices))
    batch = config.train.global_batch_size
    if batch > MOST_SEQUENCES:
        raise UserError(
            f"a step would have {batch} sequences; it has at most {MOST_SEQUENCES}: give a smaller batch by "
            "--train.global-batch-size",
            reach="world",
        )
    tokens_per_step = batch * config.data.seq_len
    num_steps = _num_steps(config, tokens_per_step)
    plan = _plan(config, facts, choices)
    _require_memory(config, plan, facts)
    lr, decay = _rate(config, tokens_per_step, num_steps, choices)
    return Settings(config, plan, num_steps, lr, decay, tuple(choices), config.train.max_epochs * data_tokens)


def _device_choices(config: Config, first: RankFacts) -> list[Choice]:
    """Choices that rank 0 made when it opened the world; the banner shows other hosts' where they differ."""
    choices = []
    if config.parallel.device == "auto":
        why = {"cuda": "a GPU for each local rank", "mps": "an Apple GPU", "cpu": "no GPU for each local rank"}
        choices.append(Choice(first.device, why[first.device], "--parallel.device"))
    if not config.parallel.threads:
        threads = "1 thread" if first.threads == 1 else f"{first.threads} threads"
        choices.append(Choice(f"{threads} a rank", first.threads_reason, "--parallel.threads"))
    return choices


def _vocab_size(of_data: int, choices: list[Choice]) -> int:
    """The model's vocabulary: the data's; a large one rounded up, because the head is a quarter of a small model's work
    and GPUs are slow at sides like GPT-2's 50,257. The model learns not to use the rest."""
    size = -(-of_data // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE if of_data >= _LARGE_VOCAB else of_data
    if size > of_data:
        why = f"{of_data} of the data, rounded up to a multiple of {_VOCAB_MULTIPLE}"
        choices.append(Choice(f"vocabulary of {size}", why, "--model.vocab-size"))
    return size


def item_bytes(name: str) -> int:
    """Bytes of a number that a product of matrices of this dtype gives; float8's are bfloat16."""
    return 4 if name == "float32" else 2


def _check_float8(config: Config, facts: Sequence[RankFacts]) -> None:
    model, advice = config.model, "use --train.dtype bfloat16"
    for rank, each in enumerate(facts):
        if each.why_no_float8:
            raise UserError(
                f"train.dtype is float8, and rank {rank} computes on {each.processor}: {each.why_no_float8}; {advice}",
                reach="world",
            )
    sizes = {"model.n-embd": model.n_embd, "the MLP's width": model.hidden, "data.seq-len": config.data.seq_len}
    sizes["the width of all keys"] = model.num_kv_heads * model.head_dim
    for name, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            raise UserError(
                f"train.dtype is float8, whose products need multiples of {FLOAT8_MULTIPLE}, and {name} is {size}; "
                f"{advice}",
                reach="world",
            )


def chosen_dtype(config: Config, facts: Sequence[RankFacts], choices: list[Choice]) -> str:
    """The dtype of matrix products: as given, else that of all ranks' devices; float32 if they differ."""
    if config.train.dtype == "float8":
        _check_float8(config, facts)
    if config.train.dtype != "auto":
        return config.train.dtype
    formats = sorted({each.dtype for each in facts})
    name, why = facts[0].dtype, facts[0].dtype_reason
    if len(formats) > 1:
        name, why = "float32", f"ranks have units for {' and '.join(formats)}"
    choices.append(Choice(f"{name} matrix work", why, "--train.dtype"))
    return name


def _rate(config: Config, tokens_per_step: int, num_steps: int | None, choices: list[Choice]) -> tuple[float, float]:
    optim = config.optim
    if not optim.scale_with_batch:
        return optim.lr, optim.weight_decay
    lr, decay = scaled_with_batch(optim, tokens_per_step, num_steps and num_steps * tokens_per_step)
    require_some_left(optim, lr, decay)
    require_usual_decay(optim, lr, decay)
    choices.append(
        Choice(
            f"lr {optim.lr:g} -> {lr:.3g}, weight decay {optim.weight_decay:g} -> {decay:.3g}",
            f"batch {units.count(tokens_per_step)} tokens, reference {units.count(optim.reference_batch_tokens)}",
            "--optim.no-scale-with-batch",
        )
    )
    return lr, decay


def _global_batch(config: Config, choices: list[Choice]) -> int:
    train, seq_len = config.train, config.data.seq_len
    if train.global_batch_size:
        return train.global_batch_size
    # Power Lines (arXiv 2505.13738): the best batch grows as tokens^0.383; the factor makes it GPT-2 124M's 2^19 tokens
    # at a horizon of 1e10. Without a horizon in tokens: 20 a parameter (Chinchilla).
    parameters = cost.num_parameters(config.model).non_embedding
    horizon = train.tokens or max(1, int((train.tokens_per_param or 20) * parameters))
    tokens = 2**19 * (horizon / 1e10) ** 0.383
    batch = max(train.device_batch_size, 2 ** max(0, round(math.log2(tokens / seq_len))))
    is_given = train.tokens or train.tokens_per_param
    tokens_text = f"{units.count(horizon)} tokens"
    why = f"{tokens_text} of training" if is_given else f"best for {tokens_text}, 20 a parameter"
    choices.append(Choice(f"{batch} sequences a step", why, "--train.global-batch-size"))
    return int(batch)


def _num_steps(config: Config, tokens_per_step: int) -> int | None:
    train = config.train
    if train.time_budget:
        return None
    if train.steps:
        return train.steps
    parameters = cost.num_parameters(config.model).non_embedding
    tokens = train.tokens or train.tokens_per_param * parameters
    return max(1, math.ceil(tokens / tokens_per_step))


def _plan(config: Config, facts: Sequence[RankFacts], choices: list[Choice]) -> BatchPlan:
    """The plan of the first step. Equal shares have equal micro-batches: as given, or the largest that fit on all ranks
    and divide a rank's share equally. Otherwise a rank's micro-batches are limited by its own memory."""
    train, world_size = config.train, len(facts)
    batch, asked = train.global_batch_size, train.device_batch_size
    sizes = {each: largest_micro_batch(config, each, world_size) for each in set(facts)}
    by_rank = [sizes[each] for each in facts]
    limits = [min(asked or largest, batch) for largest, _ in by_rank]
    size, why = min(by_rank)
    if config.parallel.shares != "equal":
        if not asked:
            choices.append(Choice(f"micro-batches of up to {max(limits)}", why, "--train.device-batch-size"))
        shares = config.parallel.fixed_shares() or in_proportion(batch, [1] * world_size)
        return BatchPlan(batch, max(limits), world_size, shares, tuple(limits))
    if asked:
        return BatchPlan(batch, asked, world_size)
    share = math.ceil(batch / world_size)
    micro = math.ceil(share / math.ceil(share / size))
    choices.append(Choice(f"micro-batches of {micro}", why, "--train.device-batch-size"))
    return BatchPlan(batch, micro, world_size)


def largest_micro_batch(config: Config, rank: RankFacts, world_size: int) -> tuple[int, str]:
    """The most sequences in a micro-batch of this rank, and why."""
    train, seq_len = config.train, config.data.seq_len
    if rank.device != "cuda":
        return max(1, _CPU_MICRO_BATCH_TOKENS // seq_len), f"about {_CPU_MICRO_BATCH_TOKENS} tokens fill a device"
    each = _room(config, rank, world_size) / train.layered_micro_batches - fixed_bytes(config)
    fits = int(each / sequence_bytes(config, rank))
    return max(1, fits), f"{units.size(rank.free_bytes)} free on the GPU"


def _require_memory(config: Config, plan: BatchPlan, facts: Sequence[RankFacts]) -> None:
    """Raises UserError if a rank cannot keep the activations of as many micro-batches as are layered."""
    layered = config.train.layered_micro_batches
    if layered == 1:
        return
    for rank, each in enumerate(facts):
        most = layered if config.parallel.shares == "auto" else min(layered, plan.num_micro_batches(rank))
        sequences = plan.limits[rank] if plan.limits else plan.device_batch_size
        one = sequences * sequence_bytes(config, each) + fixed_bytes(config)
        room = _room(config, each, len(facts))
        if most > 1 and most * one > room:
            raise UserError(
                f"train.layered-micro-batches is {layered}, and {most} micro-batches of {sequences} sequences keep "
                f"{units.size(most * one)} of activations; rank {rank} has {units.size(max(0.0, room))} for that: "
                f"give --train.layered-micro-batches {max(1, int(room / one))}, or --train.activation-checkpoint",
                reach="world",
            )


def _room(config: Config, rank: RankFacts, world_size: int) -> float:
    state = state_bytes(config, world_size, rank.num_gpus, on_cpu=rank.device == "cpu")
    itemsize = item_bytes(config.train.dtype)
    head = 4 * config.model.vocab_size * config.model.n_embd  # its float32 gradient is in fixed_bytes, too
    loss = cost.loss_bytes(config.model, itemsize) - head if rank.device == "cuda" else 0
    return rank.free_bytes * _MEMORY_SHARE - state - loss


def fixed_bytes(config: Config) -> int:
    """Bytes that a micro-batch of any size keeps: the output layer's gradient from its loss until backward, and the
    blocks' weights in the compute dtype."""
    model, train = config.model, config.train
    head = model.vocab_size * model.n_embd
    cast_bytes = 0 if train.dtype == "float32" or train.activation_checkpoint else 2  # an element
    return 4 * head + cast_bytes * (cost.num_parameters(model).matmul - head)


def sequence_bytes(config: Config, rank: RankFacts) -> float:
    train, seq_len = config.train, config.data.seq_len
    return seq_len * cost.activation_bytes(
        config.model,
        seq_len,
        compute_bytes=item_bytes(config.train.dtype),
        checkpoint=train.activation_checkpoint,
        keeps_scores=rank.device == "cpu" and train.dtype == "bfloat16",
    )


def _strategy(config: Config, facts: Sequence[RankFacts], choices: list[Choice]) -> str:
    """The strategy: as given, or the simplest that keeps replicas equal and fits into the memory of all ranks."""
    check_strategy(config.parallel.strategy, facts, config.parallel.wire)
    if config.parallel.strategy != "auto":
        return config.parallel.strategy
    on_cpu = any(each.device == "cpu" for each in facts)
    needed = {
        name: state_bytes(config.replace("parallel", strategy=name), len(facts), on_cpu=on_cpu)
        for name in ("ddp", "zero")
    }
    kinds = unequal_kinds(facts)
    free = min(each.free_bytes for each in facts)
    room = f"{units.size(free)} free a rank"
    if config.parallel.wire != "exact":
        chosen, why = "zero", f"wire {config.parallel.wire} needs it"
    elif len(facts) == 1:
        chosen, why = "ddp", "one rank"
    elif not kinds and config.optim.name != "muon" and needed["ddp"] <= free * _MEMORY_SHARE:
        chosen, why = "ddp", f"with ddp a rank needs {units.size(needed['ddp'])} of {room}"
    elif needed["zero"] <= free * _MEMORY_SHARE or sends_gpu_memory_by_gloo(facts):
        chosen, why = "zero", f"ddp would take {units.size(needed['ddp'])} of {room}, a share of the state fits"
        why = "Muon's update is divided over the ranks" if config.optim.name == "muon" else why
        why = f"processors round differently: {kinds}" if kinds else why
    else:
        chosen, why = "fsdp", f"even with shared state {units.size(needed['zero'])} would not fit in {room}"
    choices.append(Choice(f"strategy {chosen}", why, "--parallel.strategy"))
    return chosen


def _memory_choice(config: Config, facts: Sequence[RankFacts]) -> list[Choice]:
    """Whether CPU ranks of one host share memory, which they did when they opened the world, if they can."""
    parallel, kinds = config.parallel, {(each.host, each.device) for each in facts}
    is_asked = parallel.shared_memory and parallel.wire == "exact" and parallel.strategy in ("ddp", "zero")
    if not is_asked or len(facts) == 1 or kinds != {(facts[0].host, "cpu")}:
        return []
    where, why = "in shared memory", "all ranks compute on CPUs of one host"
    if not facts[0].shares_memory:
        where, why = "over sockets", "this system does not let a rank map another rank's memory"
    return [Choice(f"gradients added {where}", why, "--parallel.no-shared-memory")]


def link_bytes(settings: Settings, world_size: int, num_hosts: int, *, by_gloo: bool) -> float:
    """Returns what a host sends to others in a step."""
    config, model = settings.config, settings.config.model
    counts = cost.num_parameters(model)
    sent = wire_bits(
        config.parallel.strategy,
        config.parallel.wire,
        8 * settings.item_bytes,
        sync_every=config.parallel.sync_every or 1,
        ranks_per_host=world_size / num_hosts,
        passes=settings.plan.passes,
        by_gloo=by_gloo,
    )
    # NCCL gathers fsdp's weights in a ring of all ranks. Else those of a host add up first, and send as one.
    is_ring = config.parallel.strategy == "fsdp" and not by_gloo
    num_embedding = counts.total - counts.non_embedding
    num_ends = num_embedding + (0 if model.tied else model.vocab_size * model.n_embd)
    return sent.bytes_sent(world_size if is_ring else num_hosts, counts.total, num_embedding, num_ends)


def state_bytes(config: Config, world_size: int, per_host: int = 0, *, on_cpu: bool) -> float:
    """Bytes a rank: 4 each for weight and gradient, 8 of optimizer state (4 for Muon's matrices), 8 of local's anchor
    and its momentum, 4 of what its messages in few bits had too much; with Muon the owners of fsdp have weights and
    gradients once more. On a CPU each save copies the weights and the state that this rank writes, and keeps that
    memory. per_host: ranks of a host; 0: all are on one."""
    total = cost.num_parameters(config.model).total
    parts = (20 if config.optim.name == "muon" else 16) * total
    copied = 12 * total if on_cpu else 0
    match config.parallel.strategy:
        case "ddp":
            return 16 * total + copied / world_size
        case "zero":
            return (8 + 8 / world_size) * total + copied / world_size
        case "fsdp":
            return (parts + copied) / world_size
        case "hsdp":
            return (parts + copied) / (per_host or world_size)
        case "local":
            return (28 if CODINGS[config.parallel.wire].keeps_excess else 24) * total + copied
        case _:  # each rank has all, and rank 0 writes it
            return 16 * total + copied


def out_of_memory(error: BaseException, settings: Settings, rank: RankFacts) -> RunError:
    """Returns the error of this rank, with the flags that need less memory for the same losses, the cheapest first."""
    config, plan = settings.config, settings.plan
    largest = largest_micro_batch(config, rank, plan.world_size)[0]
    # Where ranks have shares of their own, the plan's size is that of the rank with the most memory.
    now = config.train.device_batch_size or min(plan.device_batch_size, largest)
    least = min(now // 2, largest)
    flags = [f"--train.device-batch-size {least}"] if least else []
    if not config.train.activation_checkpoint:
        flags.append("--train.activation-checkpoint")
    smaller = {"ddp": "zero", "naive": "zero", "zero": "fsdp"}.get(config.parallel.strategy)
    if plan.world_size > 1 and smaller:
        with contextlib.suppress(UserError):  # another setting rules it out
            config.replace("parallel", strategy=smaller).check()
            flags.append(f"--parallel.strategy {smaller}")
    advice = f"needs less, for the same losses: {', '.join(flags)}" if flags else "needs a smaller model, or more ranks"
    told = str(error).split(". ")[:2]  # how much was asked for, and how large the GPU is
    return RunError(f"{'. '.join(told)}. This {advice}")
