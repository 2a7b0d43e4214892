"""paceline plan"""

import dataclasses
import json
import math
import sys
import tempfile
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
from paceline.config import Config, load_run, to_toml
from paceline.record.console import Console
from paceline.record.folder import find
from paceline.tools.plan import devices
from paceline.tools.plan.cluster import Cluster, read
from paceline.tools.plan.devices import stored
from paceline.tools.plan.plan import Plan, plan
from paceline.tools.plan.show import as_json, ranked, show
from paceline.world.config import ParallelConfig
from paceline.world.cores import usable_cores
from paceline.world.env import Environment


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ModelFlags):
    """Predict a run before anything runs: does it fit, how long does it take, what bounds it, what does it cost.

    Takes the options of `train`; without a preset or file it takes the preset demo. Without --cluster it is for this
    machine, and first measures what it does not know of it: about 15 seconds for each number of ranks and each variant,
    and as much again for the shape that model.size auto chooses."""

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
    """Measure small models like the config's on this machine, about 15 seconds for each number of ranks up to that of
    cores; it must do nothing else. Later plans use the result, for any number of blocks and any batch."""


def main(arguments: list[str]) -> int:
    run = value_of("--cluster", arguments)
    if run and Path(run).is_dir():
        config_file = find(Path(run)).config
        load_run(config_file)  # refuses the run of a script, and a file that is not as it was written
        words = with_preset(arguments, str(config_file), "--config")
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
    if parsed.calibrate and not (counts or parsed.cluster):
        counts = sorted({1, usable_cores()})
    clusters = _clusters(parsed, counts)
    configs = list(variants.values())
    if parsed.calibrate:
        env, _ = find_world("1", ParallelConfig())
        return _measure_here(env, configs) if env.is_distributed else _measure(clusters, configs, is_again=True)
    is_here = not (parsed.cluster or parsed.json)
    if is_here and (status := _measure(clusters, configs)):
        return status
    plans, refused = _planned(clusters, variants)
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
    from paceline.tools.plan.from_run import device_of_rank, shaped

    links = {cluster.link_gbit for cluster in clusters if cluster.hosts > 1}
    plans, refused = [], {}
    for cluster in clusters:
        for text, varied in variants.items():
            link = f"{cluster.link_gbit:g} Gbit/s" if len(links) > 1 and cluster.hosts > 1 else ""
            label = " ".join(filter(None, (text, link)))
            try:
                chosen = shaped(cluster, varied)
                plans.append(plan(chosen, cluster, device_of_rank(cluster, chosen), label=label))
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


def _measure(clusters: list[Cluster], configs: list[Config], *, is_again: bool = False) -> int:
    """Measures what plans for these clusters take from this machine and what was not measured yet; is_again: all.
    Returns an exit status. Raises UserError if there is nothing to measure again."""
    from paceline.tools.plan.from_run import to_measure

    done: set[tuple[Path, str]] = set()
    # One at a time: a measurement may change the shape that is chosen, which is another one to measure.
    while todo := [
        (config, count)
        for config, count in to_measure(clusters, configs)
        if devices.entry(config, count) not in done and (is_again or count not in stored(config))
    ]:
        config, count = todo[0]
        find_world(str(count), ParallelConfig())  # refuses more ranks than the memory here holds
        if not done:
            from paceline.tools.doctor.host import say_load  # imports torch: seconds

            say_load(Console(0))
        print(
            f"{'' if is_again else 'nothing was measured for this config on this machine yet: '}measuring "
            f"{units.plural(count, 'rank')} at once, blocks {config.model.n_embd} wide, about 15 seconds; later plans "
            "use it",
            flush=True,
        )
        if status := _calibrate(config, count):
            return status
        done.add(devices.entry(config, count))
    if is_again and not done:
        raise UserError(f"--calibrate measures this machine, and --cluster is of {clusters[0].device}; leave one out")
    return EXIT_DONE


def _calibrate(config: Config, num_ranks: int) -> int:
    """Runs `_measure_here` by so many ranks of this machine; returns an exit status."""
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        return start_without_run(num_ranks, ["plan", "--config", str(file), "--calibrate"], ParallelConfig())


def _measure_here(env: Environment, configs: list[Config]) -> int:
    """Measures small models like the config's as one of a launcher's ranks. Collective."""
    if len(configs) > 1:
        raise UserError("--vary inside a world that a launcher made already; start the command from a plain shell")
    from paceline.tools.plan.calibrate import measure
    from paceline.world.runtime import open_world

    (config,), console = configs, Console(env.rank)
    asked = ParallelConfig(device="cpu", shared_memory=config.parallel.shared_memory, threads=config.parallel.threads)
    with open_world(asked, env) as world, console.progress(None, transient=True):
        if world.device.type != "cpu" or len({peer.host for peer in world.peers}) > 1:
            raise UserError("--calibrate measures one machine's processors; start it once, from a plain shell", "world")
        console.advance(0, "measuring", f"{units.plural(env.world_size, 'rank')} at once")
        device = measure(world, config, console)
    if env.rank == 0:
        path = devices.store(config, env.world_size, device)
        console.say(f"{device.source}; steps may be off by {device.error_frac:.0%}; kept in {path}")
    sys.stdout.flush()
    return EXIT_DONE
