"""paceline learn ring"""

import math
from dataclasses import dataclass

from paceline.base.errors import UserError, nearest
from paceline.cli.flags import parse
from paceline.cli.start import find_world, start_without_run, without
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment, detect

_LESSONS = ("ring",)
_USAGE = """paceline learn ring [--ranks N]     a ring all-reduce, step by step, between real processes

`--help` after it shows its options. The pages to read beside it are in docs/learn.
"""
_MOST_RANKS = 8  # as many columns as a screen has room for
_MOST_ELEMENTS, _MOST_DELAY_S = 1000, 60.0


@dataclass(frozen=True, kw_only=True)
class RingArguments:
    """Watch a ring all-reduce: processes that each have a gradient send chunks of it to their neighbour until all have
    the sum. Each step is shown with what every rank then has; at the end stand the bytes each sent, and the time, both
    beside those of the library's all-reduce. Under torchrun its ranks take part."""

    ranks: int = 3
    """Processes to start on this machine, 1 to 8. Under torchrun leave it out."""
    elements: int = 6
    """Values in each rank's vector; they need not divide by the ranks."""
    delay: float | None = None
    """Seconds to wait at each step, for who reads along; 1.5 on a terminal, else 0, where not given."""
    plain: bool = False
    """Plain lines on a terminal, too: no colours, nothing moves."""
    interface: str = ""
    """Network interface (a name from `ip link`); empty: the backend's to choose, loopback for ranks started here."""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    lesson, rest = arguments[0], arguments[1:]
    if lesson not in _LESSONS:
        raise UserError(f"there is no `paceline learn {lesson}`{nearest(lesson, _LESSONS)}; there is ring")
    return _ring(rest)


def _ring(arguments: list[str]) -> int:
    parsed = parse(RingArguments, RingArguments(), arguments, "learn ring")
    env = detect()
    _check(parsed, arguments, env)
    parallel = ParallelConfig(interface=parsed.interface)
    env, num_ranks = find_world("1" if env.is_distributed else str(parsed.ranks), parallel)
    if num_ranks == 1:
        return _take_part(parsed, parallel, env)
    return start_without_run(num_ranks, ["learn", "ring", *without(arguments, "--ranks")], parallel)


def _check(parsed: RingArguments, arguments: list[str], env: Environment) -> None:
    """Raises UserError for what cannot be, before anything is started."""
    if env.is_distributed and any(argument.split("=", 1)[0] == "--ranks" for argument in arguments):
        raise UserError(
            f"--ranks {parsed.ranks} inside a world that a launcher made already; give the number to it alone"
        )
    num_ranks = env.world_size if env.is_distributed else parsed.ranks
    if not 1 <= num_ranks <= _MOST_RANKS:
        raise UserError(f"{num_ranks} ranks; the lesson takes 1 to {_MOST_RANKS} (--ranks), as many as a table shows")
    if not 1 <= parsed.elements <= _MOST_ELEMENTS:
        raise UserError(f"--elements is {parsed.elements}; it lies between 1 and {_MOST_ELEMENTS}")
    if parsed.delay is not None and not (math.isfinite(parsed.delay) and 0 <= parsed.delay <= _MOST_DELAY_S):
        raise UserError(f"--delay is {parsed.delay}; it lies between 0 and {_MOST_DELAY_S:g} seconds")


def _take_part(parsed: RingArguments, parallel: ParallelConfig, env: Environment) -> int:
    from paceline.learn.ring_lesson import teach  # torch from here on: seconds
    from paceline.learn.ring_show import Screen
    from paceline.world.runtime import open_world

    with open_world(parallel, env) as world:
        teach(world, parsed.elements, Screen(world.rank, plain=parsed.plain, delay_s=parsed.delay))
    return 0
