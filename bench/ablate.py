"""What a change of the recipe brings: the same text, size and seed with and without it, in pairs.

    python bench/texts.py /tmp/texts
    python bench/ablate.py --out ablate.jsonl --texts /tmp/texts/*.txt --sizes 2x128 4x256 --seeds 5 --steps 300 \\
        --base=--train.global-batch-size=8 --change "momentum 0.9: --optim.momentum 0.9" \\
        --table docs/log/ablations.md

A change is flags, or a patch of src/ for what has no flag (bench/ablations has those that were screened), or both:

    --change "NorMuon, slower: bench/ablations/normuon.patch --optim.lr 4e-3"

Each run is `paceline train --preset fast` on one rank with one thread, with fixed layers and width and the vocabulary
that the preset takes for so much text, for equally many steps (equal tokens; `--jobs N` of them at the same time) or
equal seconds (`--seconds`, one at a time, on a machine that does nothing else). A line is appended to --out after each
run, and what is there is not run again, so it may be stopped and started. Then it prints, and appends to --table, the
mean difference of the validation loss in bits per byte from the preset over all pairs of a size, with a 95% interval
(Student's t, pairs as they are: texts differ more than seeds), and that of each text.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from side import evaluations, run, run_paceline

from paceline.base.cores import cpu_name
from paceline.data.config import vocabulary_for
from paceline.data.shard import read_index
from paceline.tools.bench.runs import PACELINE

BASE = "preset"  # the change that changes nothing
ROOT = Path(__file__).parents[1]
# Student's t: 97.5% of the distribution lie below, by degrees of freedom; beyond 30 it is 2.
T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093}


@dataclass(frozen=True)
class Change:
    """What a run has that the preset has not."""

    flags: tuple[str, ...] = ()
    patch: Path | None = None  # of the repository's src/

    def source(self, folder: Path) -> Path:
        """Returns the folder to import paceline from; a patched copy is made in `folder`, which is new. Ends this
        process if the patch does not fit."""
        if self.patch is None:
            return ROOT / "src"
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        run(["patch", "--strip=1", "--fuzz=0", f"--directory={folder}", f"--input={self.patch.resolve()}"])
        return folder / "src"


@dataclass(frozen=True)
class Run:
    """A run, by what tells it from the others, and what came of it."""

    text: str
    size: str  # LAYERSxWIDTH
    seed: int
    change: str
    horizon: str  # what all runs of a table share: `300 steps of 150000 bytes, vocabulary 512`, and flags
    bits_per_byte: float = math.nan
    passes: float = math.nan
    steps: int = 0

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        return self.text, self.size, self.seed, self.change, self.horizon


def prepared(text: Path, folder: Path, num_bytes: int) -> tuple[Path, int]:
    """Returns the data set of a text's first bytes (0: of all), and its number of training tokens."""
    part = folder / f"{text.stem}.txt"
    part.write_bytes(text.read_bytes()[: num_bytes or None])
    out = folder / text.stem
    tokenizer = f"train:{vocabulary_for(part.stat().st_size)}"
    run([*PACELINE, "data", "prepare", str(part), "--tokenizer", tokenizer, "--out", str(out)])
    index = read_index(out)
    return out, index.splits["train"].tokens


def trained(wanted: Run, data: Path, num_tokens: int, source: Path, flags: Sequence[str]) -> Run:
    """Returns the run with its validation loss at the end. source: the folder with the package."""
    layers, _, width = wanted.size.partition("x")
    shape = [f"--model.n-layer={layers}", f"--model.n-embd={width}", f"--model.n-head={int(width) // 64}"]
    fixed = ["--parallel.threads=1", "--checkpoint.every=0", "--train.sample-tokens=0", "--log.every=50"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = ["--preset", "fast", f"--data.path={data}", f"--train.seed={wanted.seed}", *shape, *fixed]
        paths = filter(None, (str(source), os.environ.get("PYTHONPATH")))
        run_paceline(out, [*command, *flags], {"PYTHONPATH": os.pathsep.join(paths)})
        last = evaluations(out)[-1]
    result = {"bits_per_byte": last["val_bpb"], "passes": last["tokens"] / num_tokens, "steps": last["step"]}
    return Run(**{**asdict(wanted), **result})


def table(runs: Iterable[Run], sizes: Sequence[str], changes: Sequence[str], horizon: str) -> list[str]:
    """Returns the lines of a Markdown table: a row for each change and size."""
    by_key = {run.key: run for run in runs}
    texts = sorted({run.text for run in by_key.values()})
    lines = [
        f"| change ({horizon}) | size | pairs | difference | 95% | " + " | ".join(texts) + " |",
        "| --- | --- | --- | --- | --- |" + " --- |" * len(texts),
    ]
    for change, size in itertools.product(changes, sizes):
        pairs = {
            (text, seed): changed.bits_per_byte / by_key[text, size, seed, BASE, horizon].bits_per_byte - 1
            for (text, of_size, seed, name, of_horizon), changed in by_key.items()
            if (of_size, name, of_horizon) == (size, change, horizon) and (text, size, seed, BASE, horizon) in by_key
        }
        if not pairs:
            continue
        by_text = [[value for (of, _), value in pairs.items() if of == text] for text in texts]
        means = [f"{100 * statistics.mean(values):+.2f}%" if values else "" for values in by_text]
        mean, half = interval(list(pairs.values()))
        limits = f"{100 * (mean - half):+.2f} to {100 * (mean + half):+.2f}%" if math.isfinite(half) else ""
        lines.append(
            f"| {change} | {size} | {len(pairs)} | {100 * mean:+.2f}% | {limits} | " + " | ".join(means) + " |"
        )
    return lines


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and half the length of its 95% interval; infinite for one value."""
    mean, degrees = statistics.mean(values), len(values) - 1
    if not degrees:
        return mean, math.inf
    quantile = next((t for known, t in sorted(T.items(), reverse=True) if known <= degrees), T[1])
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def runs_of(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def read_change(text: str) -> tuple[str, Change]:
    """Returns the name and the change of `NAME: [PATCH] [FLAGS]`."""
    name, colon, rest = text.partition(": ")
    first, *flags = rest.split() or [""]
    if not colon or not first or name == BASE:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME: [PATCH] [FLAGS], with another name than {BASE}")
    if not first.endswith(".patch"):
        return name, Change((first, *flags))
    if not Path(first).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no file {first}")
    return name, Change(tuple(flags), Path(first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", default=["2x128"], metavar="LAYERSxWIDTH")
    parser.add_argument("--seeds", type=int, default=2)
    horizons = parser.add_mutually_exclusive_group(required=True)
    horizons.add_argument("--steps", type=int)
    horizons.add_argument("--seconds", type=float)
    parser.add_argument("--change", type=read_change, action="append", default=[], metavar="NAME: [PATCH] [FLAGS]")
    parser.add_argument("--bytes", type=int, default=0, help="of each text, from its beginning; 0: all")
    parser.add_argument("--base", default="", help="flags of all runs: --base=--train.global-batch-size=8")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; with --steps only")
    parser.add_argument("--table", type=Path, help="a Markdown file to which the table is appended")
    options = parser.parse_args()
    if options.seconds and options.jobs > 1:
        parser.error("--jobs with --seconds: runs that share cores train less in the same time")
    horizon = f"{options.steps} steps" if options.steps else f"{options.seconds:g} s"
    horizon += f" of {options.bytes} bytes, vocabulary {vocabulary_for(options.bytes)}" if options.bytes else ""
    horizon += f", {options.base}" if options.base else ""
    flag = f"--train.steps={options.steps}" if options.steps else f"--train.time-budget={options.seconds}"
    changes = {BASE: Change(), **dict(options.change)}
    done = {result.key for result in runs_of(options.out)}
    seeds = range(1, options.seeds + 1)
    names = [text.stem for text in options.texts]
    all_runs = [
        Run(text, size, seed, change, horizon)
        for seed, text, size, change in itertools.product(seeds, names, options.sizes, changes)
    ]
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(options.jobs) as pool,
        options.out.open("a") as file,
    ):
        data = {text.stem: prepared(text, Path(scratch), options.bytes) for text in options.texts}
        sources = {
            name: change.source(Path(scratch) / f"change-{number}")
            for number, (name, change) in enumerate(changes.items())
        }

        def train(wanted: Run) -> Run:
            flags = [flag, *options.base.split(), *changes[wanted.change].flags]
            return trained(wanted, *data[wanted.text], sources[wanted.change], flags)

        for result in pool.map(train, [wanted for wanted in all_runs if wanted.key not in done]):
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            told = f"{result.bits_per_byte:.4f} bits per byte after {result.passes:.1f} passes"
            print(f"{result.text} {result.size} seed {result.seed} {result.change}: {told}", flush=True)
    lines = table(runs_of(options.out), options.sizes, list(changes)[1:], horizon)
    print("\n".join(lines))
    if options.table:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        head = f"\n{date.today()}, {commit}, {cpu_name()}: `{' '.join(sys.argv[1:])}`\n\n"
        with options.table.open("a") as file:
            file.write(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
