"""The prediction that `paceline train` prints: of a run on this machine, if its layers were measured."""

from collections.abc import Sequence

from paceline.base.errors import UserError
from paceline.record.predicted import Predicted
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import find_calibration
from paceline.tools.plan.plan import plan
from paceline.train.resolve import Settings
from paceline.world.facts import RankFacts

_PARTS = {"fixed": "other"}  # what a plan's parts are called in records, where they differ
_BETWEEN = ("checks", "saves", "evaluations")  # between steps, so not in a step's record


def predict_here(settings: Settings, facts: Sequence[RankFacts]) -> Predicted | None:
    """Returns the step to expect; None without a calibration, on GPUs, or on several hosts."""
    is_here = {(each.host, each.device) for each in facts} == {(facts[0].host, "cpu")}
    known = find_calibration(settings.config) if is_here else None
    if known is None:
        return None
    try:
        found = plan(settings.config, Cluster(ranks_per_host=len(facts)), known.device(len(facts)))
    except UserError:  # what was free at calibration may be too little for this run, which has what it needs
        return None
    part_ms = {_PARTS.get(part, part): 1e3 * s for part, s in found.parts.items() if part not in _BETWEEN}
    return Predicted(part_ms=part_ms, tokens=settings.tokens_per_step, error_frac=found.device.error_frac)
