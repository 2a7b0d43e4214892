"""Settings of the update."""

import math
from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import UserError, require_at_least

OptimizerName = Literal["adamw", "muon"]
RULES: dict[OptimizerName, str] = {"adamw": "AdamW", "muon": "Muon for matrices, AdamW for the rest"}
_USUAL_DECAY = 0.05  # of a weight in a step; usual are 1e-5 to 1e-3


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Update rule, learning rate, schedule."""

    name: OptimizerName = "adamw"
    """adamw: AdamW for all; muon: Muon for the layers' matrices, AdamW for embeddings, head and vectors."""
    lr: float = 6e-4
    """Peak learning rate. Muon's update is scaled to AdamW's size, so one rate serves both."""
    embedding_lr_ratio: float = 1.0
    """Rate of the embeddings (of tokens, positions and neighbours) as a multiple of lr. A token's row has a gradient
    only in steps with that token, so short runs gain by a larger one. An untied output layer keeps lr."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors (norms, biases) are not decayed."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the square root of the second moment."""
    momentum: float = 0.95
    """Muon: decay of its momentum."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """cosine: decay to the minimum over the whole horizon; wsd: warm-up, stable, decay over the last part."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay_frac: float = 0.2
    """wsd: the share of the horizon in which the rate falls."""
    min_lr_frac: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    scale_with_batch: bool = False
    """Scale lr by sqrt(B / reference-batch-tokens), and weight decay so that its effective epochs stay the same."""
    reference_batch_tokens: int = 524288
    """Tokens in a step for which lr and weight-decay were tuned."""
    reference_tokens: int = 10_000_000_000
    """Tokens of training for which weight-decay was tuned."""

    def check(self) -> None:
        """Raises UserError naming the first field with an impossible value, as the user types it."""
        require_at_least(self, "optim.", lr=0.0, embedding_lr_ratio=0.0, weight_decay=0.0)
        require_at_least(self, "optim.", eps=0.0, grad_clip=0.0, warmup_steps=0)
        require_at_least(self, "optim.", reference_batch_tokens=1, reference_tokens=1)
        for name in ("beta1", "beta2", "momentum", "decay_frac", "min_lr_frac"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UserError(f"optim.{name.replace('_', '-')} is {value}; it must be between 0.0 and 1.0")
            if value == 1.0 and name in ("beta1", "beta2", "momentum"):
                raise UserError(f"optim.{name} is 1.0, with which no gradient counts; it must be below 1")
        if self.eps == 0.0:
            raise UserError("optim.eps is 0.0, with which a weight whose gradient is 0 becomes NaN; it must be above 0")
        if not self.scale_with_batch:
            require_some_left(self, self.lr, self.weight_decay)


def require_some_left(config: OptimConfig, lr: float, weight_decay: float) -> None:
    """Raises UserError if decay removes a weight in one step, as when a short run has settings of a long one. lr,
    weight_decay: as scaled."""
    ratio = max(1.0, config.embedding_lr_ratio)  # embeddings are decayed, too
    if lr * ratio * weight_decay >= 1.0:
        at_fault = "lr (1e-4 to 1e-2 is usual)" if lr >= 1.0 else "weight-decay"
        more = ""
        if lr * weight_decay < 1.0:
            at_fault = "embedding-lr-ratio"
            more = f" times embedding-lr-ratio {ratio:g}"
        unscaled = ", or give --optim.no-scale-with-batch" if config.scale_with_batch else ""
        raise UserError(
            f"learning rate {lr:.3g}{more} times weight decay {weight_decay:.3g} is at least 1, which removes all of "
            f"a weight in each step; lower --optim.{at_fault}{unscaled}",
            reach="world",
        )


def require_usual_decay(config: OptimConfig, lr: float, weight_decay: float) -> None:
    """Raises UserError if scaling alone makes decay take more than 5% of a weight in a step: the run is too far from
    the one that the settings were tuned for."""
    if config.lr * config.weight_decay <= _USUAL_DECAY < lr * weight_decay:
        raise UserError(
            f"optim.scale-with-batch makes weight decay {config.weight_decay:g} {weight_decay:.3g}, which with "
            f"learning rate {lr:.3g} removes {lr * weight_decay:.0%} of a weight in each step: this run is far from "
            f"the {config.reference_tokens:,} tokens in steps of {config.reference_batch_tokens:,} that the settings "
            "are for. Give --optim.reference-tokens and --optim.reference-batch-tokens of the run that they were tuned "
            "for, or --optim.no-scale-with-batch",
            reach="world",
        )


def scaled_with_batch(config: OptimConfig, batch_tokens: int, total_tokens: float | None) -> tuple[float, float]:
    """Returns (lr, weight decay) for another batch and horizon than those they were tuned for.

    The rate follows sqrt(B / B_ref), which suits optimizers that divide by a noisy second moment (Malladi et al.,
    arXiv 2205.10287). The decay keeps B / (lr * decay * D), the averaging time of weights in epochs (Wang and
    Aitchison, arXiv 2405.13698; Bergsma et al., arXiv 2505.13738): decay * sqrt(B / B_ref) * D_ref / D. If the horizon
    is unknown (wall time), D is D_ref.
    """
    ratio = math.sqrt(batch_tokens / config.reference_batch_tokens)
    horizon = config.reference_tokens / total_tokens if total_tokens else 1.0
    return config.lr * ratio, config.weight_decay * ratio * horizon
