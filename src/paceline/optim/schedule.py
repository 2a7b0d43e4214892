"""The learning rate as a pure function of a run's progress."""

import math

from paceline.optim.config import OptimConfig


def lr_factor(config: OptimConfig, step: int, progress: float) -> float:
    """Returns the factor on the peak learning rate for update number `step` (from 0).

    progress: the share of the horizon that has passed, in [0, 1], in steps or in seconds of the time budget; equal on
    all ranks. Warm-up always counts in steps, and multiplies the rest. wsd decays linearly (1 - sqrt is slightly better
    at long horizons: Hägele et al., arXiv 2405.18392).
    """
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    progress = min(1.0, max(0.0, progress))
    low = config.min_lr_frac
    if config.schedule == "cosine":
        decay = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
    else:
        left = min(1.0, (1 - progress) / config.decay_frac) if config.decay_frac > 0 else 1.0
        decay = low + (1 - low) * left
    return warmup * decay
