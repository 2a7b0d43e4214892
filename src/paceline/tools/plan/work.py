"""What a micro-batch computes, counted by kind of work, and the seconds that a device takes for it.

seconds = sum over kinds of units x the device's seconds a unit, for each stage of the model. It is a roofline with sums
instead of maxima: a stage is a sequence of operations that each wait for arithmetic or for memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.model import cost
from paceline.model.config import ModelConfig
from paceline.sync.wire import CODINGS, bits_on_wire
from paceline.tools.plan.schedule import Stage
from paceline.train.resolve import Settings, fixed_bytes, sequence_bytes
from paceline.world.config import SHARDS_WEIGHTS
from paceline.world.facts import RankFacts

# The kinds of work, with what a plan calls them where it says what takes most of a step.
KINDS = {
    "products": "matrix products",  # FLOPs of the linear layers
    "attention": "attention",  # FLOPs, counted without a causal mask
    "scores": "attention",  # probabilities that are kept
    "bytes": "memory traffic",  # bytes of activations, written and read again
    "logits": "loss",  # logits
    "weights": "casting weights",  # weights that are cast, or that get a gradient
    "calls": "kernel starts",  # blocks, embeddings and losses
    # Of a device that was measured with this very shape, which has no other rates: tokens.
    "embed tokens": "embedding",
    "block tokens": "computing blocks",
    "head tokens": "head and loss",
}
Units = dict[str, float]
Rates = Mapping[str, float]  # seconds a unit, by kind


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model with resolved sizes, and how it computes."""

    model: ModelConfig
    seq_len: int
    compute_bytes: int = 2  # of an element of the compute dtype
    keeps_scores: bool = False  # as with bfloat16 on a CPU
    checkpoint: bool = False  # blocks are computed again in backward


def forward_units(shape: Shape, tokens: int) -> dict[str, Units]:
    """Returns the work of a micro-batch's forward pass by part: embed, one block, head. The loss computes its gradients
    in forward."""
    model, width = shape.model, shape.model.n_embd
    counts = cost.num_parameters(model)
    head = model.vocab_size * width
    block = (counts.matmul - head) / model.n_layer
    kept = cost.activation_bytes(model, shape.seq_len, compute_bytes=shape.compute_bytes)
    ends = cost.activation_bytes(
        ModelConfig(**{**vars(model), "n_layer": 0}), shape.seq_len, compute_bytes=shape.compute_bytes
    )
    return {
        "embed": {"bytes": 8.0 * width * tokens, "calls": 1.0, "embed tokens": float(tokens)},
        "block": {
            "products": 2 * block * tokens,
            "attention": 4.0 * width * shape.seq_len * tokens,
            "scores": float(shape.keeps_scores) * model.n_head * shape.seq_len * tokens,
            "bytes": 2.0 * tokens * (kept - ends) / model.n_layer,
            "weights": block,
            "calls": 1.0,
            "block tokens": float(tokens),
        },
        "head": {
            "products": 6.0 * head * tokens,
            "bytes": 2.0 * ends * tokens,
            "logits": float(model.vocab_size * tokens),
            "weights": float(head),
            "calls": 1.0,
            "head tokens": float(tokens),
        },
    }


def backward_units(shape: Shape, tokens: int) -> dict[str, Units]:
    """Returns the work of its backward pass, in the units of forward: a rate of backward holds both gradients."""
    forward, model = forward_units(shape, tokens), shape.model
    embedding = float(model.vocab_size * model.n_embd)
    return {
        "embed": {**forward["embed"], "weights": embedding},
        "block": forward["block"],
        "head": {"bytes": 8.0 * tokens * model.n_embd, "weights": embedding, "calls": 1.0},
    }


def seconds(units: Units, rates: Rates) -> float:
    return sum(amount * rates.get(kind, 0.0) for kind, amount in units.items())


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of a micro-batch by part: embed, one block, head."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    num_blocks: int

    @property
    def forward_s(self) -> float:
        """Of the whole model."""
        return sum(self.forward.values()) + (self.num_blocks - 1) * self.forward["block"]

    @property
    def backward_s(self) -> float:
        return sum(self.backward.values()) + (self.num_blocks - 1) * self.backward["block"]

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def pass_times(shape: Shape, tokens: int, forward: Rates, backward: Rates) -> PassTimes:
    first = {part: seconds(units, forward) for part, units in forward_units(shape, tokens).items()}
    second = {part: seconds(units, backward) for part, units in backward_units(shape, tokens).items()}
    if shape.checkpoint:
        second["block"] += first["block"]
    return PassTimes(forward=first, backward=second, num_blocks=shape.model.n_layer)


def stages(model: ModelConfig, times: PassTimes) -> tuple[Stage, ...]:
    sizes = cost.parameter_sizes(model)
    parts = [("embed", sizes.embed), *[("block", sizes.block)] * times.num_blocks, ("head", sizes.head)]
    return tuple(  # backward finishes a stage's last parameters first
        Stage(times.forward[part], times.backward[part], elements[::-1], part == "embed") for part, elements in parts
    )


# ---- the update ----

_NEWTON_SCHULZ_STEPS = 5  # of Muon's orthogonalisation, in optim/muon.py


def update_units(model: ModelConfig, optimizer: str) -> Units:
    """Returns the work of an update of all weights: elements, and FLOPs of Muon's products; for a device that was
    measured with this shape blocks, and what is not in blocks."""
    counts = cost.num_parameters(model)
    units = {"elements": float(counts.total), "blocks": float(model.n_layer), "ends": 1.0}
    if optimizer == "muon":
        units["products"] = float(_NEWTON_SCHULZ_STEPS * model.n_layer * sum(map(_polar_flops, _matrices(model))))
    return units


def _matrices(model: ModelConfig) -> list[tuple[int, int]]:
    width, kv, hidden = model.n_embd, model.num_kv_heads * model.head_dim, model.hidden
    mlp = [(hidden, width)] * (3 if model.arch == "llama" else 2)
    return [(width, width), (width, width), (kv, width), (kv, width), *mlp]


def _polar_flops(matrix: tuple[int, int]) -> int:
    """FLOPs of a step: X X^T, its square, and their product with X."""
    short, long = sorted(matrix)
    return 4 * short * short * long + 2 * short**3


# ---- memory ----


# What training loads and begins beside the interpreter and torch, and for messages to other ranks; torch's
# `fully_shard`; the saver's thread, beside the chunk of a file that it reads back. On a GPU the driver's context.
PROGRAM_BYTES, MESSAGING_BYTES, SHARDING_BYTES = {"cpu": 55e6, "cuda": 1.5e9}, 7e6, 72e6
_SAVER_BYTES, _SAVER_CHUNK_BYTES = 8e6, 8 << 20
# torch allocates CPU tensors aligned to 64 bytes. For that glibc looks for more bytes than it then uses, so a freed
# tensor's hole is too small for the next one of its size (sourceware.org/bugzilla/14581), and the heap grows. As a
# share of what passes allocate, with one and with several micro-batches, by mallinfo2 (docs/LOG.md): gradients that
# are added up, zero's messages and fsdp's gathers make more holes.
_HOLES_FRAC = {"ddp": (0.34, 0.42), "zero": (0.34, 0.46), "fsdp": (0.45, 0.62)}


def memory_bytes(settings: Settings, rank: RankFacts, num_ranks: int, num_shards: int) -> dict[str, float]:
    """Returns bytes by kind, of a rank with full micro-batches. num_shards: ranks that divide the optimizer's state."""
    config, model = settings.config, settings.config.model
    counts = cost.num_parameters(model)
    strategy, total = config.parallel.strategy, float(counts.total)
    part, on_cpu, is_alone = 1 / num_shards, rank.device == "cpu", num_ranks == 1
    shards_weights = strategy in SHARDS_WEIGHTS and not is_alone
    whole = part if shards_weights else 1.0
    block = (counts.matmul - model.vocab_size * model.n_embd) / model.n_layer
    moments = 8 * total - (4 * model.n_layer * block if config.optim.name == "muon" else 0)
    together = min(config.train.layered_micro_batches, settings.plan.passes)
    sequences = max(map(len, settings.plan.micro_batches(0)), default=0)
    activations = together * (sequences * sequence_bytes(config, rank) + fixed_bytes(config))
    temporaries = _temporaries_bytes(settings, rank, sequences)
    gathered = 2 * 4 * block if shards_weights else 0.0  # weights of two blocks
    if shards_weights and on_cpu:
        gathered += 4 * total * (settings.plan.passes > 1)  # gradients are added up whole until the last micro-batch
    written = min(part, whole, 1 / num_ranks if strategy == "ddp" else 1.0)  # of the state, by this rank
    is_coded = strategy == "zero" and CODINGS[config.parallel.wire].weight_bits < 32 and not is_alone
    replica = 4 * total * part if is_coded else 0.0
    snapshot = (4 * total + moments) * written + replica
    program = PROGRAM_BYTES[rank.device]
    if on_cpu:
        program += MESSAGING_BYTES * (not is_alone) + SHARDING_BYTES * shards_weights
        program += _SAVER_BYTES + min(_SAVER_CHUNK_BYTES, moments * written)
    holes_frac = _HOLES_FRAC.get(strategy, _HOLES_FRAC["ddp"])[settings.plan.passes > 1]
    return {
        "weights": 4 * total * whole,
        "gradients": 0.0 if shards_weights and on_cpu else 4 * total * whole,
        "optimizer": moments * part,
        "activations": activations,
        "temporaries": temporaries,
        "buffers": gathered + _buffer_bytes(settings, rank, num_ranks, part),
        "holes": holes_frac * (activations + temporaries + gathered) if on_cpu else 0.0,
        # A save copies what this rank writes, and training continues. A GPU's copy is in the host's memory.
        "snapshot": snapshot if on_cpu else 0.0,
        "program": program,
    }


def _temporaries_bytes(settings: Settings, rank: RankFacts, sequences: int) -> float:
    """Returns what the loss, or the backward pass of one block, needs beside what forward keeps."""
    config, model, compute_bytes = settings.config, settings.config.model, settings.item_bytes
    if rank.device == "cpu":
        tokens = sequences * config.data.seq_len
        gradients = 6 * model.n_embd + compute_bytes * model.hidden  # of the stream, also as computed; in the MLP
        return max(float(cost.loss_bytes_cpu(model, tokens, compute_bytes)), float(tokens * gradients))
    loss = float(cost.loss_bytes(model, compute_bytes))
    kept = sequence_bytes(config, rank) - sequence_bytes(config.replace("model", n_layer=0), rank)
    return loss if config.train.activation_checkpoint else loss + kept / model.n_layer * sequences


def _buffer_bytes(settings: Settings, rank: RankFacts, num_ranks: int, part: float) -> float:
    """Returns what a strategy keeps to exchange gradients and weights."""
    parallel, model = settings.config.parallel, settings.config.model
    strategy, counts, coding = parallel.strategy, cost.num_parameters(model), CODINGS[parallel.wire]
    total = float(counts.total)
    if num_ranks == 1:
        return 0.0
    if strategy in SHARDS_WEIGHTS:
        matrices = counts.matmul - model.vocab_size * model.n_embd
        owned = 8 * matrices * part if settings.config.optim.name == "muon" else 0.0  # owners' weights, gradients
        return owned + (4 * total if rank.device == "cpu" else 0.0)  # the allocator keeps what was gathered
    if strategy == "local":  # the anchor and its momentum, and what messages had too much
        return (12 if coding.keeps_excess else 8) * total
    if coding.weight_bits < 32:
        # This rank's exact part; messages from and to the others; with int4 what they left out, of two steps.
        excess = 8 if coding.keeps_excess else 0
        return total * (4 * part + 2 * bits_on_wire(coding.bits) / 8 * (1 - part) + excess)
    if rank.shares_memory and strategy in ("ddp", "zero") and parallel.wire == "exact":
        return 4 * total * (1 - 1 / num_ranks) * (2 if strategy == "zero" else 1)  # the other ranks', which it maps
    if strategy == "zero" and settings.item_bytes == 2:
        return 4 * total * part + min(2 * total, 40 << 20)  # exact masters beside rounded weights; messages
    return 0.0
