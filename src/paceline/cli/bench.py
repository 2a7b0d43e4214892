"""paceline bench link | scaling"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.base.errors import UserError
from paceline.cli.flags import ModelFlags, base_config, check_files, parse, run_verb, variant, with_preset
from paceline.cli.start import MOST_RANKS, find_world, start_without_run
from paceline.record.console import Console
from paceline.tools.bench.runs import only_steps
from paceline.tools.lab.hosts import MOST_HOSTS, lay_out, read_rate
from paceline.tools.lab.system import check_machine

_USAGE = """paceline bench link [--nproc N]         latency and bandwidth between ranks, and a model's all-reduce time
paceline bench scaling [--preset NAME]  tokens/s and efficiency from one process to several hosts

`--help` after it shows its options.
"""
_LEAST_BYTES, _LEAST_BUDGET_S = 4096, 5.0


def main(arguments: list[str]) -> int:
    return run_verb("bench", {"link": _link, "scaling": _scaling}, arguments, _USAGE)


# ---- the network ----


@dataclass(frozen=True, kw_only=True)
class LinkArguments(ModelFlags):
    """Measure the network between ranks: latency and bandwidth between hosts, the collectives from 1 KiB up with a
    fitted line, and the resulting all-reduce time of a model. Then predict a training step for each way of exchanging,
    and say which is fast enough. Start it like training: --nproc, or torchrun on all hosts. Without a preset
    or file it takes the preset demo."""

    nproc: str = "1"
    """Ranks to start on this machine. Under torchrun leave it out."""
    json: str = ""
    """A file for all measurements."""
    max_bytes: int = 256 << 20
    """The largest collective."""
    time_budget: float = 60.0
    """Approximate time limit in seconds. Sizes that a slow link cannot carry in time are left out, and listed."""
    compute_ms: float = 0.0
    """Milliseconds of a step's forward and backward on a rank, for the predictions of a step; 0: measured."""


def _link(arguments: list[str]) -> int:
    arguments = with_preset(arguments, "demo")
    parsed = parse(LinkArguments, LinkArguments(settings=base_config(arguments)), arguments, "bench link")
    config = parsed.settings
    config.check()
    if parsed.max_bytes < _LEAST_BYTES:
        raise UserError(f"--max-bytes is {parsed.max_bytes}; two sizes, {_LEAST_BYTES} bytes, are the least for a line")
    if not _LEAST_BUDGET_S <= parsed.time_budget < 1e6:
        raise UserError(f"--time-budget is {parsed.time_budget}; it is at least {_LEAST_BUDGET_S:g} seconds")
    if not 0 <= parsed.compute_ms < 1e9:
        raise UserError(f"--compute-ms is {parsed.compute_ms}; give the milliseconds of a step, or 0 to measure them")
    env, num_ranks = find_world(parsed.nproc, config.parallel)
    if env.rank == 0:
        check_files(json=parsed.json)
    if num_ranks > 1:
        return start_without_run(num_ranks, ["bench", "link", *arguments], config.parallel)
    if env.world_size == 1:
        raise UserError(
            "bench link measures between ranks, and here is one: `paceline bench link --nproc 2` for two on this "
            "machine, torchrun for several hosts, `paceline lab --hosts 2 --rate 1gbit -- bench link` to try it"
        )
    from paceline.tools.bench import link, link_show  # imports torch: seconds
    from paceline.world.runtime import open_world

    console = Console(env.rank)
    with open_world(config.parallel, env) as world, console.progress(None, transient=True):
        report = link.measure(
            world,
            config,
            max_bytes=parsed.max_bytes,
            budget_s=parsed.time_budget,
            compute_ms=parsed.compute_ms,
            say=lambda what: console.advance(0, "measuring", what),
        )
    if env.rank == 0:
        link_show.show(report, console)
        if parsed.json:
            Path(parsed.json).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
    return 0


# ---- scaling ----


@dataclass(frozen=True, kw_only=True)
class ScalingArguments(ModelFlags):
    """Measure what more ranks and a second host bring: tokens/s against the ideal of as many single ranks, where the
    rest goes, and where the curve bends. It trains some steps in each world, for some minutes; the machine must do
    nothing else. Without a preset or file it takes the preset demo. Of the options of `train` it ignores those
    for evaluation, checkpoints, samples and the interface."""

    kind: Literal["strong", "weak", "both"] = "both"
    """strong: the ranks share the batch of a step; weak: each rank has as much as a single one."""
    max_ranks: int = 0
    """Ranks of the largest world here; 0: one per core, at most 4; with --parallel.device cuda one per GPU."""
    hosts: int = 2
    """Hosts of a lab, the last rows of the table (Linux, root); 0: none. Ranks on several GPUs have none."""
    rate: str = "1gbit"
    """Rate of the lab's links; several give a row each: 1gbit,100mbit,unlimited."""
    cpu: str = ""
    """Measure hosts of unequal speed instead (Linux, root): the share of a core of each host of a lab, 1.0,0.35. Each
    host alone, then all as one world with equal shares of the batch, shares auto, and --parallel.shares as given."""
    compare: tuple[str, ...] = ()
    """Measure variants of the run on --hosts hosts of a lab instead (Linux, root), one rank each, against hosts that
    exchange nothing: --compare parallel.strategy=ddp "parallel.strategy=zero train.layered-micro-batches=4"."""
    steps: int = 12
    """Steps of each run; the first three are left out."""
    rounds: int = 3
    """How often each world is measured; medians are shown."""
    json: str = ""
    """A file for all measurements."""
    markdown: str = ""
    """A file for the tables as Markdown."""


def _scaling(arguments: list[str]) -> int:
    arguments = with_preset(arguments, "demo")
    parsed = parse(ScalingArguments, ScalingArguments(settings=base_config(arguments)), arguments, "bench scaling")
    rates = tuple(rate.strip() for rate in parsed.rate.split(","))
    _check_scaling(parsed, rates)
    from paceline.data.cache import inspect_data

    config = only_steps(parsed.settings, parsed.steps)
    config.check()
    inspect_data(config.data, config.model.vocab_size)
    from paceline.tools.bench import scaling, scaling_rows, scaling_show, worlds  # imports torch: seconds
    from paceline.tools.doctor.host import say_load

    how_often: dict[str, Any] = {"steps": parsed.steps, "rounds": parsed.rounds}
    if parsed.cpu or parsed.compare:
        variants = {text: variant(text, config, "bench scaling") for text in parsed.compare}
        shares = _check_lab(parsed)
        num_hosts = len(shares) or parsed.hosts
        setup = worlds.setup_of_variants(config, variants, hosts=num_hosts, cpu=shares, rates=rates, **how_often)
    else:
        kinds: tuple[worlds.Kind, ...] = ("strong", "weak") if parsed.kind == "both" else (parsed.kind,)
        setup = worlds.setup_here(
            config, kinds, max_ranks=parsed.max_ranks, hosts=parsed.hosts, rates=rates, **how_often
        )
    console = Console(0)
    say_load(console)
    measured = scaling.measure(setup, console)
    tables = scaling_rows.tabulate(setup, measured)
    for remark in scaling_show.remarks(setup, tables):
        console.say(remark, style="bold")
    for kind, rows in tables.items():
        console.say(scaling_show.terminal_table(setup, kind, rows))
    console.say(scaling_show.LEGEND + "\n", style="dim")
    shapes = {"json": scaling_show.as_json, "markdown": scaling_show.markdown}  # first the one that has all numbers
    for name, shape in shapes.items():
        if path := getattr(parsed, name):
            Path(path).write_text(shape(setup, measured), encoding="utf-8")
    return 0


def _check_lab(parsed: ScalingArguments) -> tuple[str, ...]:
    """Returns the share of a core of each host, as --cpu names them. Raises UserError if this machine is too small for
    such a lab, or makes none."""
    check_machine()
    shares = tuple(share.strip() for share in parsed.cpu.split(",")) if parsed.cpu else ()
    layout = lay_out(len(shares) or parsed.hosts, 1, parsed.rate, ",".join(shares))
    if layout.is_crowded:
        raise UserError(
            f"{f'--cpu {parsed.cpu}' if parsed.cpu else f'--hosts {parsed.hosts}'} takes more than the "
            f"{layout.num_cores} cores here: together the hosts would be slower than each alone; give "
            f"{'smaller shares of a core' if parsed.cpu else 'fewer'}"
        )
    return shares


def _check_scaling(parsed: ScalingArguments, rates: tuple[str, ...]) -> None:
    for name, least in (("steps", 5), ("rounds", 1), ("max-ranks", 0), ("hosts", 0)):  # 3 of warm-up, 2 to measure
        value, most = getattr(parsed, name.replace("-", "_")), MOST_HOSTS if name == "hosts" else MOST_RANKS
        if not least <= value <= most:
            raise UserError(f"--{name} is {value}; it lies between {least} and {most}")
    check_files(json=parsed.json, markdown=parsed.markdown)
    if parsed.hosts == 1:
        raise UserError("--hosts is 1; a lab has 2 or more, and 0 leaves it out")
    if parsed.settings.parallel.device == "mps":
        raise UserError("--parallel.device is mps, which serves one process, so there is nothing to scale; use cpu")
    if "RANK" in os.environ:
        raise UserError("bench scaling starts its worlds itself; start it once, from a plain shell")
    if parsed.cpu or parsed.compare:
        _check_compare(parsed, rates)
    for rate in rates:
        read_rate(rate)


def _check_compare(parsed: ScalingArguments, rates: tuple[str, ...]) -> None:
    flag, other = "--cpu" if parsed.cpu else "--compare", ScalingArguments()
    without = ("kind", "max_ranks", *(["hosts"] if parsed.cpu else []))
    changed = [name for name in without if getattr(parsed, name) != getattr(other, name)]
    if changed:
        raise UserError(
            f"--{changed[0].replace('_', '-')} has no effect with {flag}, which measures one rank on each host "
            "of a lab; leave it out"
        )
    if len(rates) > 1:
        raise UserError(f"--rate is {parsed.rate}; with {flag} give one rate, that of all links")
    if parsed.cpu and ("," not in parsed.cpu or "unlimited" in parsed.cpu):
        raise UserError(f"--cpu is {parsed.cpu}; give the share of a core of each of at least two hosts, as 1.0,0.35")
    if not parsed.hosts:
        raise UserError("--hosts is 0, and --compare measures hosts of a lab; give 2 or more")
