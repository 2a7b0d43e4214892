"""paceline bench scaling"""

import importlib.util
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import base_config, parse, with_preset
from paceline.config import Config

if TYPE_CHECKING:
    from paceline.bench.scaling import Setup

_LEAST_STEPS = 5  # three of warm-up, and two to be measured
_MOST_RANKS = 1024
_USUAL_RANKS = 4
_RATE = re.compile(r"unlimited|[0-9.]+ ?[kmg]?bit", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ScalingArguments:
    """Measure what more ranks and a second host bring: tokens/s against the ideal of as many single ranks, where the
    rest goes, and where the curve bends. It trains for some steps in each world; some minutes on a machine that does
    nothing else. Of the options of `train`, those of what is no step (evaluation, checkpoints, samples) and of the
    interface count for nothing here."""

    preset: str = ""
    """The model, data and batch to train with (demo, where neither this nor --config is given)."""
    config: str = ""
    """A TOML file of [section] field = value."""
    kind: Literal["strong", "weak", "both"] = "both"
    """strong: the batch of a step is divided by the ranks; weak: each rank has as much as one alone."""
    max_ranks: int = 0
    """Ranks of the largest world on this machine; 0: one a core, at most 4. With --parallel.device cuda one a GPU."""
    hosts: int = 2
    """Hosts of a lab, the last rows of the table (Linux, root); 0: none."""
    rate: str = "1gbit"
    """Of the lab's links; several, a row each: 1gbit,100mbit,unlimited."""
    steps: int = 12
    """Of each run; the first three are left out."""
    rounds: int = 3
    """How often each world takes its turn; medians are shown."""
    json: str = ""
    """A file for all figures."""
    markdown: str = ""
    """A file for the tables as Markdown."""
    plot: str = ""
    """An .html file for a plot with the ideal line; it needs plotly."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(arguments: list[str]) -> int:
    arguments = with_preset(arguments, "demo")
    parsed = parse(ScalingArguments, ScalingArguments(settings=base_config(arguments)), arguments, "bench scaling")
    _check(parsed)
    config = parsed.settings.replace("train", steps=parsed.steps, tokens=0, tokens_per_param=0.0, time_budget=0.0)
    config = config.replace("train", eval_every=-1).replace("checkpoint", keep_best=False)
    config.check()
    from paceline.data.cache import inspect_data

    inspect_data(config.data, config.model.vocab_size)
    setup = _setup(parsed, config)
    from paceline.bench import scaling, scaling_show
    from paceline.record.console import Console

    console = Console(0)
    found = scaling.measure(setup, console, _machine())
    for kind in setup.kinds:
        console.say(scaling_show.terminal_table(found, kind))
    console.say(scaling_show.LEGEND + "\n", style="dim")
    shapes = {"markdown": scaling_show.markdown, "json": scaling_show.as_json, "plot": scaling_show.plot_html}
    for name, shape in shapes.items():
        if path := getattr(parsed, name):
            Path(path).write_text(shape(found))
    for remark in scaling_show.remarks(found):
        console.say(remark, style="bold")
    return 0


def _setup(parsed: ScalingArguments, config: Config) -> "Setup":
    """What is to be measured on this machine. Raises UserError where it has not the devices or the batch for it."""
    import torch  # from here on: seconds

    from paceline.bench.scaling import Setup, physical_cores
    from paceline.world.cores import usable_cores
    from paceline.world.device import choose_device

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = config.parallel.device
    is_cuda = wanted == "cuda" or (wanted == "auto" and num_gpus > 1)
    cores = usable_cores()
    most = parsed.max_ranks or (max(1, num_gpus) if is_cuda else min(cores, _USUAL_RANKS))
    if is_cuda:
        choose_device("cuda", most - 1, most, most)
    setup = Setup(
        config=config,
        kinds=("strong", "weak") if parsed.kind == "both" else (parsed.kind,),
        counts=_counts(most),
        cores=() if is_cuda else physical_cores(cores),
        threads=config.parallel.threads or max(1, cores // most),
        device="cuda" if is_cuda else "cpu",
        has_gpu=not is_cuda and wanted == "auto" and num_gpus > 0,
        hosts=0 if is_cuda else parsed.hosts,
        host_ranks=max(1, most // parsed.hosts) if parsed.hosts else 1,
        rates=tuple(rate.strip() for rate in parsed.rate.split(",")),
        steps=parsed.steps,
        rounds=parsed.rounds,
    )
    _check_batch(setup.batch, max(most, setup.hosts * setup.host_ranks), parsed.kind)
    return setup


def _check(parsed: ScalingArguments) -> None:
    """Raises UserError for what cannot be, before anything is imported or run."""
    for name, value, least in (
        ("steps", parsed.steps, _LEAST_STEPS),
        ("rounds", parsed.rounds, 1),
        ("max-ranks", parsed.max_ranks, 0),
        ("hosts", parsed.hosts, 0),
    ):
        if value < least or value > _MOST_RANKS:
            raise UserError(f"--{name} is {value}; it lies between {least} and {_MOST_RANKS}")
    _check_files(parsed)
    if parsed.hosts == 1:
        raise UserError("--hosts is 1; a lab has 2 or more, and 0 leaves it out")
    if parsed.settings.parallel.device == "mps":
        raise UserError("--parallel.device is mps, which serves one process, so there is nothing to scale; use cpu")
    if "RANK" in os.environ:
        raise UserError("bench scaling starts its worlds itself; start it once, from a plain shell")
    for rate in parsed.rate.split(","):
        if not _RATE.fullmatch(rate.strip()):
            raise UserError(f"--rate has '{rate}'; a rate is as in 1gbit, 100mbit, unlimited")


def _check_files(parsed: ScalingArguments) -> None:
    for name in ("json", "markdown", "plot"):
        path = Path(getattr(parsed, name))
        if getattr(parsed, name) and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"--{name} is {path}; name a file in a folder that is there")
    if parsed.plot and not parsed.plot.endswith(".html"):
        raise UserError(f"--plot is {parsed.plot}; it makes a page, so the name ends in .html")
    if parsed.plot and importlib.util.find_spec("plotly") is None:
        raise UserError("--plot needs plotly, which is not installed: pip install 'paceline[report]'")


def _check_batch(batch: int, most: int, kind: str) -> None:
    if kind != "weak" and batch < most:
        raise UserError(
            f"a step has {batch} sequences (--train.global-batch-size), too few for {most} ranks; give at least one "
            "to each, or measure --kind weak alone"
        )


def _counts(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, and then powers of two, up to the largest, which is there in any case."""
    return tuple(n for n in range(1, most + 1) if n <= _USUAL_RANKS or n & (n - 1) == 0 or n == most)


def _machine() -> str:
    """The processor, its cores and torch, for people who read the table elsewhere."""
    import platform

    import torch

    from paceline.world.cores import usable_cores

    cores, info = usable_cores(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{[*names, platform.machine()][0]}, {cores} core{'s'[: cores > 1]}, torch {torch.__version__}"
