"""Loss scaling for float16, whose gradients underflow below 6e-8 (Micikevicius et al., arXiv 1710.03740, section 3.2).

torch.amp.GradScaler looks for infinities in one rank's gradients. Here the all-reduced sums are checked, so all ranks
skip a step, and change the scale, together.
"""

from dataclasses import dataclass

import torch

_START = 2.0**16
_GROW_AFTER = 2000  # finite steps in a row


@dataclass
class LossScaler:
    """A power of two that multiplies the loss; fixed at 1 if the dtype needs none."""

    scale: float = 1.0
    num_finite: int = 0
    is_dynamic: bool = False

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> "LossScaler":
        return cls(scale=_START, is_dynamic=True) if dtype == torch.float16 else cls()

    def observe(self, skipped: bool) -> None:
        """Halves the scale after a gradient that is not finite, doubles it after 2000 finite ones in a row."""
        if not self.is_dynamic:
            return
        if skipped:
            self.scale, self.num_finite = max(1.0, self.scale / 2), 0
            return
        self.num_finite += 1
        if self.num_finite == _GROW_AFTER:
            self.scale, self.num_finite = self.scale * 2, 0
