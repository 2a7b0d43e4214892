"""paceline plan"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.base import units
from paceline.base.errors import EXIT_DONE, UserError, require_at_least
from paceline.cli.flags import (
    ModelFlags,
    base_config,
    parse,
    value_of,
    variant,
    with_preset,
)
from paceline.cli.start import find_world, start_without_run
from paceline.config import Config
from paceline.record.console import Console
from paceline.record.folder import find
from paceline.tools.plan import devices
from paceline.tools.plan.cluster import Cluster, read
from paceline.tools.plan.devices import stored
from paceline.tools.plan.plan import Plan, plan
from paceline.tools.plan.show import as_json, ranked, show
from paceline.world.config import ParallelConfig
from paceline.world.cores import usable_cores


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ModelFlags):
    """Predict a run before anything runs: does it fit, how long does it take, what bounds it, what does it cost.

    Takes the options of `train`; without a preset or file it takes the preset demo. Without --cluster it is for this
    machine, and first measures it if it does not know the config: about 15 seconds for each number of ranks."""

    cluster: str = ""
    """A TOML file: device = "H100", hosts = 2, ranks_per_host = 8, link_gbit = 3200 and more (docs/guide/plan.md).
    Or NAME.json: what `paceline doctor --json` printed on these hosts, which have this machine's processor. Or a run's
    folder: the machines that it ran on, as it measured them; its config is the default."""
    ranks: str = ""
    """Several numbers of ranks, each a row of a table: 1,8,64. On this machine without --cluster: 1,2."""
    vary: tuple[str, ...] = ()
    """Variants of the run, each a row: --vary parallel.strategy=ddp "parallel.strategy=zero parallel.wire=int8"."""
    link_gbit: str = ""
    """Rates of the link between hosts, each a row: 10,100,400. Without it the cluster's."""
    price: float = 0.0
    """For a device and an hour, in any currency; 0: the cluster's."""
    json: bool = False
    """One JSON object with all numbers, instead of tables."""
    explain: bool = False
    """Every number with its formula and inputs."""
    calibrate: bool = False
    """Measure small models like the config's on this machine, about 15 seconds for each number of ranks; it must do
    nothing else. Later plans use the result, for any number of blocks and any batch."""


def main(arguments: list[str]) -> int:
    run = value_of("--cluster", arguments)
    if run and Path(run).is_dir():
        words = with_preset(arguments, str(find(Path(run)).config), "--config")
    else:
        words = with_preset(arguments, "demo")
    parsed = parse(PlanArguments, PlanArguments(settings=base_config(words)), words, "plan")
    require_at_least(parsed, "--", price=0)
    if parsed.calibrate and (shown := [f"--{name}" for name in ("json", "explain") if getattr(parsed, name)]):
        raise UserError(f"{units.listed(shown)} show a plan, and --calibrate only measures: plan afterwards")
    config = parsed.settings
    config.check()
    counts = _counts(parsed.ranks)
    variants = {text: variant(text, config, "plan") for text in parsed.vary} or {"": config}
    if parsed.calibrate:
        clusters = _clusters(parsed, counts)
        if any(cluster.hosts > 1 for cluster in clusters):  # whose ranks share no memory
            variants = {text: each.replace("parallel", shared_memory=False) for text, each in variants.items()}
        is_given = bool(counts or parsed.cluster)
        at_once = {cluster.ranks_per_host for cluster in clusters} if is_given else {1, usable_cores()}
        return _calibrate(arguments, list(variants.values()), sorted(at_once))
    is_here = not (parsed.cluster or parsed.json)
    if is_here and (status := _measure_unknown(arguments, list(variants.values()), counts)):
        return status
    plans, refused = _planned(_clusters(parsed, counts), variants)
    if parsed.json:
        reasons = [{"label": label, "why": str(error)} for label, error in refused.items()]
        print(json.dumps({"plans": [as_json(plan) for plan in ranked(plans)], "refused": reasons}))
    else:
        console = Console(0)
        show(plans, console, explain=parsed.explain)
        for label, error in refused.items():
            console.say(f"left out: {label}: {error}", style="yellow")
    return EXIT_DONE


def _planned(clusters: list[Cluster], variants: Mapping[str, Config]) -> tuple[list[Plan], dict[str, UserError]]:
    """Returns the plans, and by label those that a start of the run would refuse. Raises UserError if it would refuse
    all of them."""
    from paceline.tools.plan.from_run import device_of_rank

    links = {cluster.link_gbit for cluster in clusters if cluster.hosts > 1}
    plans, refused = [], {}
    for cluster in clusters:
        for text, varied in variants.items():
            link = f"{cluster.link_gbit:g} Gbit/s" if len(links) > 1 and cluster.hosts > 1 else ""
            label = " ".join(filter(None, (text, link)))
            try:
                plans.append(plan(varied, cluster, device_of_rank(cluster, varied), label=label))
            except UserError as error:
                refused[f"{label or 'the run'} on {units.plural(cluster.num_ranks, 'rank')}"] = error
    if not plans:
        raise next(iter(refused.values()))
    return plans, refused


def _rates(text: str) -> list[float]:
    """Returns the rates of links that are given."""
    try:
        rates = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise UserError(f"--link-gbit is '{text}'; give rates in Gbit/s, such as 10,100")
    return rates


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 1 <= int(part) <= 1 << 20 for part in parts):
        raise UserError(f"--ranks is '{text}'; give numbers of ranks, such as 1,8,64")
    return list(map(int, parts))


def _clusters(parsed: PlanArguments, counts: list[int]) -> list[Cluster]:
    from paceline.tools.plan.from_run import read_run

    if parsed.cluster:
        path = Path(parsed.cluster)
        cluster = read_run(path).cluster if path.is_dir() else read(path)
        linked = [dataclasses.replace(cluster, link_gbit=rate) for rate in _rates(parsed.link_gbit)] or [cluster]
        clusters = [each.of_ranks(count) for count in counts for each in linked] or linked
    else:
        clusters = [Cluster(ranks_per_host=count) for count in counts or [1]]
    if parsed.link_gbit and all(each.hosts == 1 for each in clusters):
        raise UserError("--link-gbit is for links between hosts, and there is one host; describe more by --cluster")
    chosen = [
        dataclasses.replace(
            each,
            link_gbit=each.link_gbit if each.hosts > 1 else 0.0,  # one row for a single host, whatever the links are
            price=parsed.price or each.price,
        )
        for each in clusters
    ]
    return list(dict.fromkeys(chosen))


def _measure_unknown(arguments: list[str], configs: list[Config], counts: list[int]) -> int:
    """Calibrates this machine, unless each config has been measured here. Returns an exit status."""
    unknown = [config for config in configs if not stored(config)]
    if not unknown:
        return EXIT_DONE
    at_once = sorted(count for count in {*counts, 1} if count <= usable_cores())
    print(
        "nothing was measured for this config on this machine yet: measuring "
        f"{units.listed([units.plural(count, 'rank') for count in at_once])} at once, about 15 seconds each; later "
        "plans use it",
        flush=True,
    )
    words = [word for word in arguments if word not in ("--explain", "--no-calibrate")]
    return _calibrate([*words, "--calibrate"], unknown, at_once)


def _calibrate(arguments: list[str], configs: list[Config], counts: list[int]) -> int:
    """Measures small models like these with each number of ranks at once. Raises UserError if they need more than one
    kind of world."""
    worlds = {
        ParallelConfig(device="cpu", shared_memory=each.shared_memory, threads=each.threads)
        for each in (config.parallel for config in configs)
    }
    if len(worlds) > 1:
        raise UserError(
            "--calibrate measures all variants in one world, and --vary has several values of parallel.threads or "
            "parallel.shared-memory; calibrate once with each of them"
        )
    env, _ = find_world("1", ParallelConfig())
    if not env.is_distributed:
        for count in counts:
            find_world(str(count), ParallelConfig())  # refuses more ranks than the memory here holds
        from paceline.tools.doctor.host import say_load

        say_load(Console(0))
        for count in counts:
            if status := start_without_run(count, ["plan", *arguments], ParallelConfig()):
                return status
        return EXIT_DONE
    from paceline.tools.plan.calibrate import measure
    from paceline.world.runtime import open_world

    console = Console(env.rank)
    with open_world(worlds.pop(), env) as world, console.progress(None, transient=True):
        if world.device.type != "cpu" or len({peer.host for peer in world.peers}) > 1:
            raise UserError("--calibrate measures one machine's processors; start it once, from a plain shell", "world")
        console.advance(0, "measuring", f"{env.world_size} ranks at once")
        measured = [measure(world, config, console) for config in configs]
    for config, device in zip(configs, measured, strict=True):
        if env.rank == 0:
            path = devices.store(config, env.world_size, device)
            console.say(f"{device.source}; steps may be off by {device.error_frac:.0%}; kept in {path}")
    sys.stdout.flush()
    return EXIT_DONE
