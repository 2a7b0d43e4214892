"""paceline sample"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base.errors import UserError, require_at_least
from paceline.cli.flags import parse
from paceline.config import load_run
from paceline.record import folder as run_folder
from paceline.record.output import printable


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Write text from a run's newest complete checkpoint, also while the run trains. Control characters are escaped."""

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """The run folder."""
    prompt: str = ""
    """Text to continue; empty: the beginning of a document."""
    tokens: int = 256
    """Tokens to write."""
    temperature: float = 0.8
    """Randomness of the choice; 0: always the likeliest token."""
    top_k: int = 50
    """Choose among this many of the likeliest tokens; 0: among all."""
    seed: int = 0
    """Seed of the random choices."""
    step: int = -1
    """The checkpoint of this step; -1: the newest complete one."""


def main(arguments: list[str]) -> int:
    parsed = parse(SampleArguments, SampleArguments(run=""), arguments, "sample")
    if not parsed.run:
        raise UserError("name the run folder: paceline sample RUN [options]")
    require_at_least(parsed, "--", tokens=0, temperature=0, top_k=0, step=-1)
    if 0 < parsed.temperature < 1e-6:  # logits divided by it would become infinite
        raise UserError(f"--temperature is {parsed.temperature}; give at least 1e-6, or 0 for the likeliest token")
    if abs(parsed.seed) >= 1 << 63:
        raise UserError(f"--seed is {parsed.seed}; it must be less than 2^63")
    run = run_folder.find(Path(parsed.run))
    config = load_run(run.config)
    if not run.tokenizer.exists():
        raise UserError(f"{run.path} has no tokenizer.json: its data came without one, so ids cannot become text")
    import torch

    from paceline.checkpoint import load
    from paceline.data.tokenizer import Tokenizer
    from paceline.model import generate, gpt
    from paceline.train.initial import require_fit

    weights, problems = load.read_weights(run.checkpoints, parsed.step if parsed.step >= 0 else None)
    for problem in problems:
        print(f"passed over a damaged checkpoint: {problem}", file=sys.stderr)
    require_fit(parsed.run, config.model, weights)
    tokenizer = Tokenizer.load(run.tokenizer)
    model = gpt.with_weights(config.model, weights).eval()
    prompt = tokenizer.prompt(parsed.prompt)
    if not prompt:
        raise UserError("this tokenizer has no token that begins a document; give a --prompt to continue")
    generator = torch.Generator().manual_seed(parsed.seed)
    ids = generate.generate(
        model,
        prompt,
        parsed.tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k or None,
        generator=generator,
        stop=tokenizer.end_of_text,
    )
    print(printable(parsed.prompt + tokenizer.decode(list(ids))))
    return 0
