"""paceline bench link"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import base_config, parse, with_preset
from paceline.cli.start import find_world, start_without_run
from paceline.config import Config
from paceline.world.env import Environment

_LEAST_BYTES, _LEAST_BUDGET_S = 4096, 5.0


@dataclass(frozen=True, kw_only=True)
class LinkArguments:
    """Measure what crosses between ranks: latency and bandwidth between hosts, the collectives from 1 KiB up with a
    line through their times, and what that makes of a model's all-reduce. Start it as you would start training:
    --nproc, or torchrun on all hosts."""

    preset: str = ""
    """Whose model is meant (demo, where neither this nor --config is given)."""
    config: str = ""
    """A TOML file of [section] field = value."""
    nproc: str = "1"
    """Ranks to start on this machine. Under torchrun leave it out."""
    max_bytes: int = 256 << 20
    """The largest collective."""
    time_budget: float = 60.0
    """Seconds it may take, about. What a slow link does not carry in time is left out, and said."""
    json: str = ""
    """A file for all that was measured."""
    plot: str = ""
    """A file for a plot of bandwidth over size, an .html page; takes plotly (`pip install 'paceline[report]'`)."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(arguments: list[str]) -> int:
    arguments = with_preset(arguments, "demo")
    parsed = parse(LinkArguments, LinkArguments(settings=base_config(arguments)), arguments, "bench link")
    parsed.settings.check()
    _check(parsed)
    env, num_ranks = find_world(parsed.nproc, parsed.settings.parallel)
    if env.is_distributed and env.world_size > 1:
        return _measure(parsed, env)
    if num_ranks == 1:
        raise UserError(
            "bench link measures between ranks, and here is one: `paceline bench link --nproc 2` for two on this "
            "machine, torchrun for several hosts, `paceline lab --hosts 2 --rate 1gbit -- bench link` to try it"
        )
    return start_without_run(num_ranks, ["bench", "link", *arguments], parsed.settings.parallel)


def _check(parsed: LinkArguments) -> None:
    """Raises UserError for what cannot be, before anything is started."""
    if parsed.max_bytes < _LEAST_BYTES:
        raise UserError(f"--max-bytes is {parsed.max_bytes}; two sizes, {_LEAST_BYTES} bytes, are the least for a line")
    if not _LEAST_BUDGET_S <= parsed.time_budget < 1e6:
        raise UserError(f"--time-budget is {parsed.time_budget}; it is at least {_LEAST_BUDGET_S:g} seconds")
    for name, text in (("json", parsed.json), ("plot", parsed.plot)):
        if text and not Path(text).absolute().parent.is_dir():
            raise UserError(f"--{name} {text}: there is no folder {Path(text).absolute().parent}")
    if parsed.plot:
        from paceline.bench.link_plot import check_plot

        check_plot(Path(parsed.plot))


def _measure(parsed: LinkArguments, env: Environment) -> int:
    from paceline.bench.link import measure  # torch from here on: seconds
    from paceline.bench.link_show import show
    from paceline.record.console import Console
    from paceline.world.runtime import open_world

    console = Console(env.rank)
    with open_world(parsed.settings.parallel, env) as world:
        with console.progress(None, transient=True):
            report = measure(
                world,
                parsed.settings,
                max_bytes=parsed.max_bytes,
                budget_s=parsed.time_budget,
                tell=lambda what: console.advance(0, "measuring", what),
            )
        if world.is_main:
            show(report, console)
            if parsed.json:
                Path(parsed.json).write_text(json.dumps(report.as_json(), indent=1) + "\n")
            if parsed.plot:
                from paceline.bench.link_plot import write_plot

                write_plot(report, Path(parsed.plot))
    return 0
