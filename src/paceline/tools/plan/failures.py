"""What failures cost: goodput, and how often to save. Failures come at random, at a constant rate (Daly, "A higher
order estimate of the optimum checkpoint interval", Future Generation Computer Systems 22, 2006)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failures:
    """A job that any failure stops. Times in seconds."""

    between_s: float  # mean time between failures of the job
    save_s: float  # of training that a save takes
    restart_s: float  # until the steps continue

    def goodput_frac(self, interval_s: float) -> float:
        """Returns the share of time that makes progress, with a save after every interval_s of it (equation 20)."""
        lost = self.restart_s / self.between_s
        exponent = (interval_s + self.save_s) / self.between_s
        if lost + exponent > 700:  # e^x overflows: no interval ever ends
            return 0.0
        return interval_s / (self.between_s * math.exp(lost) * math.expm1(exponent))

    @property
    def best_interval_s(self) -> float:
        """Returns Young's interval with Daly's correction (equation 37)."""
        if self.save_s >= 2 * self.between_s:
            return self.between_s
        ratio = self.save_s / (2 * self.between_s)
        return math.sqrt(2 * self.save_s * self.between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save_s
