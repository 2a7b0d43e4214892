"""Two ranks of one thread: against twice one rank of one thread, and against torch's DistributedDataParallel.

6 layers x 384 wide, T=256, micro-batches of 8. At accumulation 4 the gradients travel once in four micro-steps; at
accumulation 1 in each. The sides run in turn. The fair ideal is two ranks at once without any communication
(`alone, both cores busy`): two independent processes, since cores that share a memory bus slow each other. Ranks that
hold equal weights cannot reach it: each of their steps takes as long as the slower of the two (`each step as long as
the slower one's`, the steps of the same two processes in pairs).
"""

import argparse
import re
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from side import TWO_RANKS, run, run_paceline, show, show_header

MICRO_BATCH, SEQ_LEN = 8, 256
WARM_UP = 3  # steps


def paceline_ms(out: Path, ranks: int, micro_steps: int, steps: int) -> list[float]:
    """Returns milliseconds by step, after the warm-up, of `ranks` ranks of one thread."""
    batch = MICRO_BATCH * micro_steps * ranks
    flags = [
        *("--model.arch", "gpt2", "--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384"),
        *("--data.seq-len", str(SEQ_LEN), "--train.global-batch-size", str(batch), "--parallel.threads", "1"),
        *("--train.device-batch-size", str(MICRO_BATCH), "--train.steps", str(steps), "--nproc", str(ranks)),
        *("--train.eval-every", "-1", "--train.sample-tokens", "0", "--parallel.check-every", "0"),
    ]
    return [row["step_ms"] for row in run_paceline(out, flags)[WARM_UP:]]


def ddp_ms(micro_steps: int, steps: int) -> list[float]:
    """The same of two ranks of plain DistributedDataParallel."""
    script = str(Path(__file__).parent / "plain_ddp.py")
    # The same allocator settings as paceline's, so that what differs is the synchronisation.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
    said = run([*TWO_RANKS, script, str(steps), str(MICRO_BATCH), str(micro_steps)], environment)
    return [float(ms) for ms in re.findall(r"step_ms ([\d.]+)", said)][WARM_UP:]


def rate(micro_batches: int, step_ms: Iterable[float]) -> float:
    """Returns tokens/s of steps of so many micro-batches, over all ranks."""
    return micro_batches * MICRO_BATCH * SEQ_LEN / statistics.median(step_ms) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    show_header()
    for micro_steps, steps in ((4, 8), (1, 20)):
        rates: dict[str, list[float]] = {"one": [], "two": [], "ddp": [], "alone": [], "paired": []}
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
            for i in range(options.rounds):
                root = Path(scratch) / str(i)
                rates["one"].append(rate(micro_steps, paceline_ms(root / "one", 1, micro_steps, steps)))
                rates["two"].append(rate(2 * micro_steps, paceline_ms(root / "two", 2, micro_steps, steps)))
                rates["ddp"].append(rate(2 * micro_steps, ddp_ms(micro_steps, steps)))
                both = [pool.submit(paceline_ms, root / name, 1, micro_steps, steps) for name in ("a", "b")]
                a, b = (future.result() for future in both)
                rates["alone"].append(rate(micro_steps, a) + rate(micro_steps, b))
                rates["paired"].append(rate(2 * micro_steps, map(max, a, b)))
        print(f"accumulation {micro_steps}")
        for name, label in (
            ("one", "one rank of one thread"),
            ("two", "two ranks of one thread"),
            ("ddp", "two ranks, torch DistributedDataParallel"),
            ("alone", "alone, both cores busy: two processes, no communication"),
            ("paired", "the same, each step as long as the slower one's"),
        ):
            show("  " + label, rates[name], "tokens/s")
        for label, other, factor in (
            ("of twice one rank", "one", 2),
            ("of two processes without communication", "alone", 1),
            ("of these, each step as long as the slower one's", "paired", 1),
            ("of DistributedDataParallel", "ddp", 1),
        ):
            ratios = [100 * a / (factor * b) for a, b in zip(rates["two"], rates[other], strict=True)]
            show("  two ranks: per cent " + label, ratios, "%")


if __name__ == "__main__":
    main()
