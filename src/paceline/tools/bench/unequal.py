"""`paceline bench scaling --cpu 1.0,0.35`: measures what hosts of unequal speed reach together.

The hosts are those of a lab, each with its share of a core. In every round the same steps of the same batch run on
each host alone, in a world of one, and on all hosts as one world: with equal shares of the batch, with shares by speed
(auto), and with the shares that the config names. The tokens/s of the hosts alone add up to the ideal.
"""

import json
import os
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.table

from paceline import __version__
from paceline.base.errors import RunError
from paceline.config import Config, to_toml
from paceline.record.balance import speeds
from paceline.record.console import Console, table
from paceline.tools.bench import runs
from paceline.tools.bench.scaling import WARM_UP_STEPS
from paceline.tools.bench.scaling_show import command_line, machine, markdown_table, medians_of

_ADAPTING_STEPS = 40  # left out of a run with shares by speed: two changes, each after some 18 measured steps
COLUMNS = ["world", "tokens/s", "of the sum", "sequences", "idle, %", "step ms"]
LEGEND = (
    "of the sum: of the tokens/s of all hosts, each alone with the same batch. sequences and idle: by rank; a rank is "
    "idle while it waits for other ranks or for the network."
)


@dataclass(frozen=True, kw_only=True)
class World:
    """A world to measure."""

    label: str
    cpu: str  # shares of a core of its hosts, as for `paceline lab`
    shares: str  # parallel.shares

    @property
    def num_hosts(self) -> int:
        return self.cpu.count(",") + 1

    @property
    def adapting_steps(self) -> int:
        """Steps of a run that are left out besides the warm-up."""
        return _ADAPTING_STEPS if self.shares == "auto" else 0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All worlds to measure."""

    config: Config
    hosts: tuple[str, ...]  # their names in the lab
    cpu: tuple[str, ...]  # by host
    rate: str
    steps: int
    rounds: int

    @property
    def alone(self) -> list[World]:
        """Each host in a world of its own, to which all else is compared."""
        return [
            World(label=f"host {name} alone, {share} of a core", cpu=share, shares="equal")
            for name, share in zip(self.hosts, self.cpu, strict=True)
        ]

    @property
    def together(self) -> list[World]:
        """All hosts in one world."""
        shares = dict.fromkeys(("equal", "auto", self.config.parallel.shares))
        return [World(label=f"all, shares {value}", cpu=",".join(self.cpu), shares=value) for value in shares]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a world after its warm-up; lists are by rank."""

    tokens_per_s: float
    step_ms: float
    sequences: tuple[int, ...]  # in the last step
    idle_frac: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Row(Sample):
    """One world: medians over the rounds, sequences of the last."""

    label: str
    sum_frac: float  # of the tokens/s of all hosts alone, in the same round
    rounds_tokens_per_s: tuple[float, ...]


def measure(setup: Setup, console: Console) -> list[Row]:
    """Returns a row for each world; takes minutes. Raises RunError, with its message, if a run fails."""
    todo = [*setup.alone, *setup.together]
    samples: dict[World, list[Sample]] = {world: [] for world in todo}
    with runs.tidy(), console.progress(None, transient=True):
        for world in runs.in_turn(todo, setup.rounds, console, lambda world: world.label):
            try:
                samples[world].append(_train(setup, world))
            except runs.Failed as error:
                raise RunError(f"{world.label}: {error}") from None
    sums = [
        sum(one.tokens_per_s for one in alone) for alone in zip(*map(samples.__getitem__, setup.alone), strict=True)
    ]
    return [_row(world, samples[world], sums) for world in todo]


def _train(setup: Setup, world: World) -> Sample:
    """Trains on the hosts of one world."""
    config = runs.only_steps(setup.config, setup.steps + world.adapting_steps)
    config = config.replace("parallel", shares=world.shares, device="cpu", check_every=0, interface="", expect_ranks=0)
    lab = ("lab", "--hosts", str(world.num_hosts), "--cpu", world.cpu, "--rate", setup.rate)
    with tempfile.TemporaryDirectory(prefix="paceline-scaling-") as scratch:
        folder = Path(scratch)
        (folder / "config.toml").write_text(to_toml(config))
        train = ("train", "--config", str(folder / "config.toml"), "--out", str(folder / "run"))
        command = ([*runs.PACELINE, *lab, "--", *train], runs.environment_of_one(os.environ))
        runs.run_at_once([command], folder, end_by=signal.SIGTERM)
        rows = runs.training_rows(folder / "run")[WARM_UP_STEPS + world.adapting_steps :]
    if not rows:
        raise runs.Failed("it left too few steps in metrics.jsonl")
    return sample_of(rows, sum(rows[-1]["rank_sequences"]) * config.data.seq_len)


def sample_of(rows: Sequence[dict[str, Any]], tokens: int) -> Sample:
    """Returns the medians of these rows of metrics.jsonl, and the mean idle time. tokens: of a step."""
    step_ms = statistics.median(row["step_ms"] for row in rows)
    balance = speeds(rows)
    assert balance is not None
    return Sample(
        tokens_per_s=1e3 * tokens / step_ms,
        step_ms=step_ms,
        sequences=tuple(rows[-1]["rank_sequences"]),
        idle_frac=tuple(balance.idle_frac),
    )


def _row(world: World, samples: Sequence[Sample], sums: Sequence[float]) -> Row:
    return Row(
        label=world.label,
        tokens_per_s=statistics.median(one.tokens_per_s for one in samples),
        rounds_tokens_per_s=tuple(one.tokens_per_s for one in samples),
        # Ratios within a round, since a machine's speed may drift; then their median.
        sum_frac=statistics.median(one.tokens_per_s / total for one, total in zip(samples, sums, strict=True)),
        sequences=samples[-1].sequences,
        idle_frac=tuple(map(statistics.median, zip(*(one.idle_frac for one in samples), strict=True))),
        step_ms=statistics.median(one.step_ms for one in samples),
    )


# ---- tables, JSON ----


def terminal_table(setup: Setup, rows: Sequence[Row]) -> rich.table.Table:
    return table(_title(setup, rows), COLUMNS, list(map(_cells, rows)))


def _title(setup: Setup, rows: Sequence[Row]) -> str:
    shares = ", ".join(setup.cpu)
    return f"Unequal hosts: {shares} of a core, links of {setup.rate}, {sum(rows[0].sequences)} sequences a step"


def _cells(row: Row) -> list[str]:
    idle = ", ".join(f"{100 * frac:.0f}" for frac in row.idle_frac) if len(row.idle_frac) > 1 else ""
    sequences = ", ".join(map(str, row.sequences))
    return [row.label, f"{row.tokens_per_s:,.0f}", f"{row.sum_frac:.1%}", sequences, idle, f"{row.step_ms:.1f}"]


def markdown(setup: Setup, rows: Sequence[Row]) -> str:
    """Returns the table, and how to reproduce the measurement."""
    return "\n".join(
        [
            f"**{_title(setup, rows)}**",
            "",
            *markdown_table(COLUMNS, list(map(_cells, rows))),
            "",
            f"{machine()}; {medians_of(setup.rounds, setup.steps)}: `{command_line()}`",
            "",
        ]
    )


def as_json(setup: Setup, rows: Sequence[Row]) -> str:
    """Returns all results, with units in the names."""
    made = {
        "command": command_line(),
        "version": __version__,
        "machine": machine(),
        "cpu": setup.cpu,
        "rate": setup.rate,
        "rounds": setup.rounds,
        "steps": setup.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "config": asdict(setup.config),
        "rows": list(map(asdict, rows)),
    }
    return json.dumps(made, indent=1) + "\n"
