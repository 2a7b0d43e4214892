"""The learning rate as a pure function of where a run is."""

import math

from paceline.optim.config import OptimConfig


def lr_factor(config: OptimConfig, step: int, progress: float) -> float:
    """Returns the share of the peak learning rate for the update that `step` counts (from 0).

    progress is the share of the horizon gone before it, in [0, 1]: steps over steps, or seconds over the time budget,
    agreed by all ranks. Warm-up counts in steps in either case. The cosine runs over what lies behind the warm-up as
    far as progress tells; wsd decays linearly (Hägele et al., arXiv 2405.18392, find 1 - sqrt slightly better at long
    horizons; linear is what people expect).
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
