"""Every automatic choice of a run, made in one place, each with the flag that overrides it."""

import math
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from paceline.base import units
from paceline.config import Config
from paceline.data.blend import Blend
from paceline.data.plan import BatchPlan
from paceline.model import cost
from paceline.model.config import ModelConfig
from paceline.optim.config import require_some_left, scaled_with_batch
from paceline.world.device import choose_dtype
from paceline.world.runtime import World

# A micro-batch of about this many tokens keeps a CPU's caches and a core's matmul units busy; larger ones gain
# nothing there. On a GPU memory decides.
_CPU_MICRO_BATCH_TOKENS = 4096
_MEMORY_SHARE = 0.6  # of what is free; the rest is workspace, fragmentation, and the optimizer's temporaries


@dataclass(frozen=True)
class Choice:
    """One decision that the user did not make."""

    what: str
    why: str
    flag: str


@dataclass(frozen=True)
class Settings:
    """What the run will do, with nothing left open. `config` has the choices in it that define the curve."""

    config: Config
    plan: BatchPlan
    dtype: torch.dtype
    num_steps: int | None  # None: the horizon is wall time
    lr: float
    weight_decay: float
    choices: tuple[Choice, ...]


def resolve_model(config: Config, blend: Blend) -> ModelConfig:
    """Returns the model's config with vocabulary and positions taken from the data.

    A vocabulary that is too small for the data was refused when the data was opened.
    """
    resolved = config.replace(
        "model",
        vocab_size=config.model.vocab_size or blend.vocab_size,
        n_positions=config.model.n_positions or config.data.seq_len,
    )
    resolved.check()
    return resolved.model


def resolve(config: Config, blend: Blend, world: World) -> Settings:
    """Returns the settings that all ranks come to by themselves: they depend on nothing that differs between ranks.

    Raises UserError, alike on all, where weight decay would take away more than there is.

    (The micro-batch may depend on the memory of rank 0's device; the caller makes ranks agree on the config first.)
    """
    choices = _choices_of(world, config)
    config = config.replace("model", **vars(resolve_model(config, blend)))
    dtype, why = choose_dtype(config.train.dtype, world.device)
    if config.train.dtype == "auto":
        choices.append(Choice(f"{_name(dtype)} matrix work", why, "--train.dtype"))
    if config.parallel.strategy == "auto":
        config = config.replace("parallel", strategy=_strategy(config, world, choices))
    batch = _global_batch(config, choices)
    tokens_per_step = batch * config.data.seq_len
    num_steps = _num_steps(config, tokens_per_step)
    micro = config.train.device_batch_size or _micro_batch(config, batch, world, dtype, choices)
    lr, decay = config.optim.lr, config.optim.weight_decay
    if config.optim.scale_with_batch:
        lr, decay = scaled_with_batch(config.optim, tokens_per_step, num_steps and num_steps * tokens_per_step)
        choices.append(
            Choice(
                f"lr {config.optim.lr:g} -> {lr:.3g}, weight decay {config.optim.weight_decay:g} -> {decay:.3g}",
                f"batch {units.count(tokens_per_step)} tokens, "
                f"reference {units.count(config.optim.reference_batch_tokens)}",
                "--optim.no-scale-with-batch",
            )
        )
        require_some_left(lr, decay)
    config = config.replace("train", global_batch_size=batch, global_batch_tokens=0, dtype=_name(dtype))
    return Settings(
        config=config,
        plan=BatchPlan(batch, min(micro, batch), world.world_size),
        dtype=dtype,
        num_steps=num_steps,
        lr=lr,
        weight_decay=decay,
        choices=tuple(choices),
    )


def _choices_of(world: World, config: Config) -> list[Choice]:
    """What opening the world decided."""
    found = []
    if config.parallel.device == "auto":
        why = {"cuda": "a GPU for each local rank", "mps": "an Apple GPU", "cpu": "no GPU for each local rank"}
        found.append(Choice(world.device.type, why[world.device.type], "--parallel.device"))
    if not config.parallel.threads:
        threads = "1 thread" if world.threads == 1 else f"{world.threads} threads"
        found.append(Choice(f"{threads} a rank", world.threads_reason, "--parallel.threads"))
    return found


def _global_batch(config: Config, choices: list[Choice]) -> int:
    """Sequences in a step: given, or from the horizon by a power law."""
    train, seq_len = config.train, config.data.seq_len
    if train.global_batch_size:
        return train.global_batch_size
    if train.global_batch_tokens:
        return max(1, round(train.global_batch_tokens / seq_len))
    # Power Lines (arXiv 2505.13738): the best batch grows as tokens^0.383; anchored at GPT-2 124M's practice of half
    # a million tokens for ten billion. Without a horizon in tokens, Chinchilla's 20 a parameter stand in for it.
    parameters = cost.num_parameters(config.model).non_embedding
    horizon = train.tokens or int((train.tokens_per_param or 20) * parameters)
    tokens = 2**19 * (horizon / 1e10) ** 0.383
    batch = 2 ** max(0, round(math.log2(tokens / seq_len)))
    choices.append(
        Choice(f"{batch} sequences a step", f"{units.count(horizon)} tokens of training", "--train.global-batch-size")
    )
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


def _micro_batch(config: Config, batch: int, world: World, dtype: torch.dtype, choices: list[Choice]) -> int:
    """Sequences in a micro-batch: the largest that fits and splits a rank's share into equal parts."""
    seq_len = config.data.seq_len
    if world.device.type == "cuda":
        free = min(row[0] for row in world.group.share([float(torch.cuda.mem_get_info(world.device)[0])]))
        state = _state_bytes(config, world.world_size)[config.parallel.strategy]
        per_sequence = seq_len * cost.activation_bytes(
            config.model, seq_len, compute_bytes=dtype.itemsize, checkpoint=config.train.activation_checkpoint
        )
        largest, why = int((free * _MEMORY_SHARE - state) / per_sequence), f"{units.size(free)} free on the GPU"
    else:
        largest, why = _CPU_MICRO_BATCH_TOKENS // seq_len, f"about {_CPU_MICRO_BATCH_TOKENS} tokens fill a CPU"
    share = math.ceil(batch / world.world_size)
    micro_steps = math.ceil(share / max(1, largest))
    micro = math.ceil(share / micro_steps)
    choices.append(Choice(f"micro-batches of {micro}", why, "--train.device-batch-size"))
    return micro


def _strategy(config: Config, world: World, choices: list[Choice]) -> Literal["ddp", "zero", "fsdp"]:
    """By memory: the simplest that fits on the rank that has the least. Collective where there is a world."""
    needed = _state_bytes(config, world.world_size)
    free = min(row[0] for row in world.group.share([_free_bytes(world)]))
    fits = [name for name, num_bytes in needed.items() if num_bytes <= free * _MEMORY_SHARE]
    room = f"{units.size(free)} free a rank"
    chosen: Literal["ddp", "zero", "fsdp"]
    if world.world_size == 1:
        chosen, why = "ddp", "one rank"
    elif config.optim.name == "muon":
        chosen, why = "zero", "Muon's update is dealt out over the ranks"
    elif "ddp" in fits:
        chosen, why = "ddp", f"weights, gradients and state take {units.size(needed['ddp'])} of {room}"
    elif "zero" in fits:
        chosen, why = "zero", f"ddp would take {units.size(needed['ddp'])} of {room}, a share of the state fits"
    else:
        chosen, why = "fsdp", f"even with shared state {units.size(needed['zero'])} would not fit in {room}"
    choices.append(Choice(f"strategy {chosen}", why, "--parallel.strategy"))
    return chosen


def _state_bytes(config: Config, world_size: int) -> dict[str, float]:
    """Bytes a rank by strategy: 4 each for weight and gradient, 8 of optimizer state (Muon's matrices have 4)."""
    total = cost.num_parameters(config.model).total
    shared = (8 + 8 / world_size) * total
    return {"ddp": 16 * total, "naive": 16 * total, "zero": shared, "fsdp": 16 * total / world_size}


def _free_bytes(world: World) -> float:
    """Memory that this rank may fill: of its GPU, or its part of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[0])
    return psutil.virtual_memory().available / world.local_world_size


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
