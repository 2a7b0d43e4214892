"""paceline learn ring"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from paceline.base.errors import UserError
from paceline.cli.flags import parse, run_verb, without
from paceline.cli.start import find_world, start_without_run
from paceline.world.config import ParallelConfig
from paceline.world.env import detect

_USAGE = """paceline learn ring [--ranks N]     a ring all-reduce, step by step, between real processes

`--help` after it shows its options. The pages to read beside it are in docs/learn.
"""


@dataclass(frozen=True, kw_only=True)
class RingArguments:
    """Watch a ring all-reduce: processes that each have a gradient send chunks of it to their neighbour until all have
    the sum. Each step shows what every rank has; the end shows bytes and time, beside those of the library's
    all-reduce. Under torchrun its ranks take part."""

    ranks: int = 3
    """Processes to start on this machine, 1 to 8. Under torchrun leave it out."""
    elements: int = 6
    """Values in each rank's vector; the number of ranks need not divide it."""
    delay: float | None = None
    """Seconds to wait at each step, for reading along; if not given, 1.5 on a terminal, else 0."""
    plain: bool = False
    """Plain lines also on a terminal: no colours, no animation."""
    interface: str = ""
    """Network interface (a name from `ip link`); empty: the backend chooses; loopback for ranks started here."""


def main(arguments: list[str]) -> int:
    return run_verb("learn", {"ring": _ring}, arguments, _USAGE)


def _ring(arguments: list[str]) -> int:
    parsed = parse(RingArguments, RingArguments(), arguments, "learn ring")
    env = detect()
    if env.is_distributed and without(arguments, "--ranks") != arguments:
        raise UserError(
            f"--ranks {parsed.ranks} inside a world that a launcher made already; give the number to it alone"
        )
    num_ranks = env.world_size if env.is_distributed else parsed.ranks
    if not 1 <= num_ranks <= 8:  # as many columns as fit on a screen
        raise UserError(f"{num_ranks} ranks; the lesson takes 1 to 8 (--ranks), as many as a table shows")
    if not 1 <= parsed.elements <= 1000:
        raise UserError(f"--elements is {parsed.elements}; it lies between 1 and 1000")
    if parsed.delay is not None and not 0 <= parsed.delay <= 60:
        raise UserError(f"--delay is {parsed.delay}; it lies between 0 and 60 seconds")
    parallel = ParallelConfig(interface=parsed.interface)
    env, num_ranks = find_world("1" if env.is_distributed else str(parsed.ranks), parallel)
    if num_ranks > 1:
        return start_without_run(num_ranks, ["learn", "ring", *without(arguments, "--ranks")], parallel)
    from paceline.world.runtime import open_world  # imports torch: seconds

    lesson = _example("ring")
    with open_world(parallel, env) as world:
        lesson.teach(world, parsed.elements, plain=parsed.plain, delay_s=parsed.delay)
    return 0


def _example(name: str) -> ModuleType:
    """Returns examples/NAME.py: in the repository, or beside this package when it is installed (setup.py)."""
    package = Path(__file__).parents[1]
    path = next(each for folder in (package, package.parents[1]) if (each := folder / f"examples/{name}.py").exists())
    spec = importlib.util.spec_from_file_location(f"paceline.examples.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
