"""Measures what a rank computes in a training step, for the predictions of plan/schedule.py."""

import torch

from paceline.model.gpt import build
from paceline.optim.optimizer import make_optimizers
from paceline.tools.plan import work
from paceline.tools.plan.schedule import Job, Stage
from paceline.train.resolve import Settings
from paceline.world.device import product_dtype
from paceline.world.device_clock import DeviceClock
from paceline.world.runtime import World

_ROUNDS = 3  # the fastest counts


def measured_job(world: World, settings: Settings, compute_ms: float, latency_s: float, bytes_per_s: float) -> Job:
    """Returns what the slowest rank computes in a step, and the link. compute_ms: forward and backward of a step as
    given; 0: one micro-batch and an update are measured. Collective."""
    num_micro_batches = settings.plan.passes
    if compute_ms:
        once_s = compute_ms / 1e3 / num_micro_batches
        forward_s, backward_s, update_s = once_s / 3, 2 * once_s / 3, 0.0
    else:
        compute = _fastest(settings, world.device)
        forward_s, backward_s, update_s = (max(column) for column in zip(*world.group.share(compute), strict=True))
    num_hosts = len({peer.host for peer in world.peers})
    return Job(
        stages=_stages(settings, forward_s, backward_s),
        num_micro_batches=num_micro_batches,
        update_s=update_s,
        num_ranks=world.world_size,
        num_hosts=num_hosts if num_hosts > 1 else world.world_size,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        compute_bits=8 * settings.item_bytes,
    )


def _fastest(settings: Settings, device: torch.device) -> list[float]:
    """Returns the seconds of forward, backward and update: one micro-batch."""
    model = build(settings.config.model, 0, device)
    model.compute_dtype = product_dtype(settings.config.train.dtype)
    size = settings.plan.device_batch_size, settings.config.data.seq_len
    tokens = torch.randint(settings.config.model.vocab_size, size, device=device)
    optimizers = make_optimizers(
        settings.config.optim,
        model.named_parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        compute_dtype=model.compute_dtype,
    )
    clock = DeviceClock(device)
    rounds = []
    for _ in range(_ROUNDS):
        stamps = [clock.stamp()]
        loss = model(tokens, tokens) / tokens.numel()
        stamps.append(clock.stamp())
        loss.backward()
        stamps.append(clock.stamp())
        for optimizer in optimizers:
            optimizer.step()
        stamps.append(clock.stamp())
        clock.finish()
        rounds.append([clock.ms(*stamps[i : i + 2]) / 1e3 for i in range(3)])
        model.zero_grad()
    return [min(column) for column in zip(*rounds, strict=True)]


def _stages(settings: Settings, forward_s: float, backward_s: float) -> tuple[Stage, ...]:
    """Divides the times among blocks and head by FLOPs. The loss computes its gradients in forward."""
    config = settings.config.model
    shape = work.Shape(model=config, seq_len=settings.config.data.seq_len)
    units = work.forward_units(shape, 1)
    flops = {part: units[part]["products"] + units[part].get("attention", 0.0) for part in ("block", "head")}
    unit_s = forward_s / (config.n_layer * flops["block"] + flops["head"])
    forward = {"embed": 0.0, **{part: unit_s * count for part, count in flops.items()}}
    backward = {"embed": 0.0, "block": backward_s / config.n_layer, "head": 0.0}
    return work.stages(config, work.PassTimes(forward=forward, backward=backward, num_blocks=config.n_layer))
