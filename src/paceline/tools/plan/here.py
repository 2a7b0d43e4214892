"""The prediction that `paceline train` prints: of a run on CPUs that were calibrated."""

import itertools
from dataclasses import asdict, replace
from typing import Any

from paceline.base.errors import UserError
from paceline.config import Config
from paceline.record.predicted import Predicted
from paceline.tools.plan.calibrate import link
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device, find_calibration
from paceline.tools.plan.plan import pass_times, plan
from paceline.train.resolve import Settings
from paceline.world.runtime import World

_PARTS = {"fixed": "other"}  # what a plan's parts are called in records, where they differ
_BETWEEN = ("checks", "saves", "evaluations")  # between steps, so not in a step's record
_PROBE_ROUNDS, _PROBE_S = 3, 0.1  # the link is timed until a message takes so long: a second at most, mostly less


def predict_here(settings: Settings, world: World) -> Predicted | None:
    """Returns on rank 0 the step to expect; None without a calibration, on GPUs, or with unequal numbers of ranks on
    the hosts. Collective."""
    by_host = [len(list(ranks)) for _, ranks in itertools.groupby(each.host for each in world.facts)]
    is_known = len(set(by_host)) == 1 and len(by_host) == len({each.host for each in world.facts})
    if not is_known or any(each.device != "cpu" for each in world.facts):
        return None
    own = _calibrated(settings.config, by_host[0], is_across=len(by_host) > 1)
    if len(by_host) > 1:
        found = _across(settings, world, own, by_host[0])
    else:
        found = None if own is None else (Cluster(ranks_per_host=by_host[0]), own)
    if found is None or not world.is_main:
        return None
    cluster, device = found
    try:
        planned = plan(settings.config, cluster, device)
    except UserError:  # what was free at calibration may be too little for this run, which has what it needs
        return None
    part_ms = {_PARTS.get(part, part): 1e3 * s for part, s in planned.parts.items() if part not in _BETWEEN}
    return Predicted(
        part_ms=part_ms,
        tokens=settings.tokens_per_step,
        error_frac=device.error_frac,
        link_gbit=cluster.link_gbit * device.outer_frac,
    )


def _calibrated(config: Config, num_ranks: int, *, is_across: bool) -> Device | None:
    """Returns a rank's device of this host. A config that chose its strategy was calibrated as `auto`."""
    own = {"shared_memory": config.parallel.shared_memory and not is_across}
    tried: list[dict[str, Any]] = [own, own | {"strategy": "auto"}]
    if is_across and num_ranks == 1:  # a rank that exchanges nothing, so any way of exchanging serves
        alone = {"shared_memory": True, "wire": "exact"}
        tried += [alone | {"strategy": name} for name in (config.parallel.strategy, "auto", "ddp")]
    for values in tried:
        if device := find_calibration(config.replace("parallel", **values), num_ranks):
            return replace(device, exchange={}) if "wire" in values else device
    return None


def _across(settings: Settings, world: World, own: Device | None, per_host: int) -> tuple[Cluster, Device] | None:
    """Returns the hosts, each as it was calibrated itself or as one with the same processor was, and the link between
    them, timed now. None: nobody knows some host. Collective."""
    rows = world.group.share_json(None if own is None else asdict(own))
    facts = [(each.kind, each.threads) for each in world.facts]
    known = {fact: row for fact, row in zip(facts, rows, strict=True) if row}
    found = [row or known.get(fact) for fact, row in zip(facts, rows, strict=True)][::per_host]
    devices = [Device(**row) for row in found if row]
    if len(devices) < len(found):
        return None
    latency_s, bytes_per_s = link(world.group, len(found), _PROBE_ROUNDS, _PROBE_S)
    seconds = [pass_times(settings, each, 1).total_s for each in devices]
    device = devices[seconds.index(min(seconds))]
    cluster = Cluster(
        hosts=len(found),
        ranks_per_host=per_host,
        link_gbit=8e-9 * bytes_per_s / device.outer_frac,
        latency_us=1e6 * latency_s,
        speeds=tuple(min(seconds) / each for each in seconds),
    )
    return cluster, device
