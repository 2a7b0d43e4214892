"""Every strategy in every kind of world with every number format: each row trains, or is refused with one message."""

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from checks import check, worst
from machine import Failed, Machine, Run, torchrun
from several import require_one_message

STRATEGIES = ("ddp", "naive", "zero", "fsdp", "hsdp", "local")
DTYPES = ("float32", "bfloat16", "float16", "float8")
SHORT = (
    *("--preset", "tiny", "--train.steps", "6", "--optim.warmup-steps", "2", "--train.sample-tokens", "0"),
    *("--train.eval-every", "-1", "--checkpoint.every", "0"),
)
# The largest difference of a loss to those of one process in float32, uncompiled. `local` is another algorithm.
MOST = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2, "float8": 2e-1}
MOST_OF_LOCAL = 2e-1


class Row(NamedTuple):
    ranks: int  # 0: one process without a launcher
    is_compiled: bool
    strategy: str
    dtype: str

    @property
    def flags(self) -> tuple[str, ...]:
        rounds = ("--parallel.sync-every", "2") if self.strategy == "local" else ()
        compiled = ("--train.compile",) if self.is_compiled else ("--train.no-compile",)
        return ("--parallel.strategy", self.strategy, *rounds, "--train.dtype", self.dtype, *compiled)

    @property
    def most(self) -> float:
        """The largest difference that is right."""
        is_local = self.strategy == "local" and self.ranks > 1
        return max(MOST[self.dtype], MOST_OF_LOCAL if is_local else 0.0)


def refusal(row: Row, *, has_float8: bool) -> str:
    """Returns words of the message with which a row is refused; empty if it trains. hsdp on one host trains: it is as
    fsdp there, and without a launcher each strategy has one rank."""
    return "no float8 units" if row.dtype == "float8" and not has_float8 else ""


def rows_of(ranks: int, is_compiled: bool, *, is_rehearsal: bool) -> Iterator[Row]:
    """Yields the rows of a world. A rehearsal, on a few cores, makes every strategy in float32, every format with one
    of them, and one compiled row."""
    for strategy in STRATEGIES:
        for dtype in DTYPES:
            is_cheap = (
                (strategy, dtype) == ("fsdp", "float32") if is_compiled else strategy == "zero" or dtype == DTYPES[0]
            )
            if is_cheap or not is_rehearsal:
                yield Row(ranks, is_compiled, strategy, dtype)


def result_of(machine: Machine, row: Row, single: Run, *, has_float8: bool) -> str:
    """Returns what became of a row, as text. Raises Failed."""
    refused_with = refusal(row, has_float8=has_float8)
    folder = machine.folder(f"table-{row.strategy}-{row.dtype}")
    launcher = torchrun(row.ranks) if row.ranks else ()
    words = ("-m", "paceline", "train", "--out", str(folder), *SHORT, "--parallel.device", machine.device, *row.flags)
    ends_with = 0 if not refused_with else 1 if row.ranks else 2  # torchrun has one status for all errors
    run = machine.execute(folder, [sys.executable, *launcher, *words], ends_with=ends_with)
    if refused_with:
        require_one_message(run, refused_with)
        return "refused"
    gap = worst(single, run)
    if not gap <= row.most:
        raise Failed(f"{gap:.1e} > {row.most:g}")
    return f"{gap:.0e}"


def table(machine: Machine, ranks: int, is_compiled: bool) -> str:
    """Returns a line for each strategy, with a cell for each number format: the largest difference of a loss."""
    is_rehearsal = machine.device != "cuda"
    has_float8 = not is_rehearsal and torch.cuda.get_device_capability() >= (8, 9)
    single = machine.train(*SHORT, "--train.dtype", "float32", "--train.no-compile")
    lines = {strategy: [strategy.ljust(6)] for strategy in STRATEGIES}
    failures = []
    for row in rows_of(ranks, is_compiled, is_rehearsal=is_rehearsal):
        if time.monotonic() > machine.deadline:
            failures.append(f"no time was left for {row.strategy} {row.dtype} and what follows")
            break
        try:
            cell = result_of(machine, row, single, has_float8=has_float8)
        except Failed as failure:
            cell = "FAILED"
            failures.append(f"{row.strategy} {row.dtype}: {failure}")
        lines[row.strategy].append(f"{row.dtype} {cell}")
    shown = ["  ".join(cells) for cells in lines.values() if len(cells) > 1]
    if is_rehearsal:
        shown.append("a rehearsal: some of the rows only")
    if failures:
        raise Failed("\n".join([*shown, *failures]))
    return "\n".join(shown)


for number in (0, 1, 2, 4):
    for compiled in (False, True):
        where = f"torchrun {number}" if number else "alone"
        how = "compiled" if compiled else "eager"
        check(f"table of strategies and number formats: {where}, {how}", max(1, number), 900 if compiled else 500)(
            partial(table, ranks=number, is_compiled=compiled)
        )
