"""A step as planned before the run, and whether the run kept to it."""

from dataclasses import dataclass

from paceline.record.summary import Totals

_SLOWER = 1.2  # than predicted: worth a word
_LEAST_STEPS = 5  # behind a mean that is compared


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The step that `paceline plan` expects on these machines."""

    part_ms: dict[str, float]  # of rank 0; the parts of StepRow.parts
    tokens: int  # in a step
    error_frac: float  # by how much it may be off
    link_gbit: float = 0.0  # of a host, each way, as timed just now; 0: one host

    @property
    def step_ms(self) -> float:
        return sum(self.part_ms.values())

    def announcement(self) -> str:
        """Returns the prediction, as text."""
        shown = ", ".join(f"{part} {ms:.0f}" for part, ms in self.part_ms.items() if ms >= 0.5)
        text = f"predicted: {self.step_ms:.0f} ms a step ({shown}), {1e3 * self.tokens / self.step_ms:,.0f} tokens/s"
        return f"{text}, over a link of {self.link_gbit:.3g} Gbit/s, timed now" if self.link_gbit else text

    def remark(self, totals: Totals) -> str:
        """Returns that the run was slower than predicted, and in which part; empty if it was not."""
        step_ms = totals.mean("step_ms")
        if totals.num_steps < _LEAST_STEPS or step_ms < _SLOWER * self.step_ms:
            return ""
        measured = {part: ms[0] for part, ms in totals.mean_parts().items()}
        worst = max(measured, key=lambda part: measured[part] - self.part_ms.get(part, 0.0))
        return (
            f"a step took {step_ms:.0f} ms, {step_ms / self.step_ms - 1:.0%} more than predicted ({self.step_ms:.0f} "
            f"ms), most of it in {worst}: {measured[worst]:.0f} ms instead of {self.part_ms.get(worst, 0.0):.0f}"
        )
