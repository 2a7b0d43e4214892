"""paceline bench loader"""

import json
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import parse
from paceline.data.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """Measure the data path: tokens/s of one rank, and what a sequence costs a rank of larger worlds (simulated)."""

    batch: int = 8
    """Sequences in a micro-batch."""
    steps: int = 500
    """Micro-batches of a round."""
    vocab_size: int = 0
    """Where the data does not tell it (GPT-2's: 50257)."""
    json: bool = False
    """One JSON object instead of a table."""
    data: Annotated[DataConfig, tyro.conf.arg(name="data")] = field(default_factory=lambda: DataConfig(seq_len=1024))


def main(arguments: list[str]) -> int:
    parsed = parse(LoaderArguments, LoaderArguments(), arguments, "bench loader")
    for name, value in (("batch", parsed.batch), ("steps", parsed.steps)):
        if value < 1:
            raise UserError(f"--{name} is {value}; it is at least 1")
    from paceline.data.cache import inspect_data

    inspect_data(parsed.data, parsed.vocab_size)
    import torch  # from here on: seconds

    from paceline.bench.loader import LoaderReport, measure
    from paceline.config import Config
    from paceline.model.config import ModelConfig
    from paceline.record.console import Console, table
    from paceline.train.feed import open_feed

    console = Console(0)
    torch.set_num_threads(1)
    say = _aside if parsed.json else console.say
    config = Config(data=parsed.data, model=ModelConfig(vocab_size=parsed.vocab_size))
    with console.reading() as reading:
        feed = open_feed(config, reading)
    report: LoaderReport = measure(feed.blend, feed.training, batch=parsed.batch, steps=parsed.steps, say=say)
    if parsed.json:
        print(json.dumps(report.as_json()))
        return 0
    rate = report.rate
    console.say(
        f"\n{report.data}: {rate.tokens_per_s / 1e6:.1f}M tokens/s in one thread, {rate.us_per_batch:.0f} us for "
        f"{report.batch} sequences of {report.seq_len}, {rate.mb_per_s:.0f} MB/s read\n"
    )
    columns = ["world size", "CPU us a sequence", "bytes", "drawing all: CPU us", "bytes"]
    rows = [
        [
            f"{row.world_size}",
            f"{row.cpu_us_per_sequence:.2f}",
            f"{row.bytes_per_sequence:.0f}",
            f"{row.drawn_cpu_us_per_sequence:.1f}",
            f"{row.drawn_bytes_per_sequence:.0f}",
        ]
        for row in report.worlds
    ]
    console.say(table("What a sequence costs its rank, and a wrapper that draws all and keeps its own", columns, rows))
    return 0


def _aside(text: str) -> None:
    """A line for a person while standard output is for a program."""
    print(text, file=sys.stderr)
