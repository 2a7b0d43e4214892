"""Two ranks of one thread: against twice one rank of one thread, and against torch's DistributedDataParallel.

6 layers x 384 wide, T=256, micro-batches of 8. At accumulation 4 the gradients travel once in four micro-steps; at
accumulation 1 in each. The three sides run in turn. The fair ideal is two ranks at once without any communication
(`alone, both cores busy`): two independent processes, since cores that share a memory bus slow each other.
"""

import argparse
import re
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from side import TWO_RANKS, median_ms, run, run_paceline, show, show_header

MICRO_BATCH, SEQ_LEN = 8, 256


def paceline_rate(out: Path, ranks: int, micro_steps: int, steps: int) -> float:
    """Returns tokens/s of `ranks` ranks of one thread."""
    batch = MICRO_BATCH * micro_steps * ranks
    flags = [
        *("--model.arch", "gpt2", "--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384"),
        *("--data.seq-len", str(SEQ_LEN), "--train.global-batch-size", str(batch), "--parallel.threads", "1"),
        *("--train.device-batch-size", str(MICRO_BATCH), "--train.steps", str(steps), "--nproc", str(ranks)),
        *("--train.eval-every", "-1", "--train.sample-tokens", "0", "--parallel.check-every", "0"),
    ]
    return batch * SEQ_LEN / median_ms(run_paceline(out, flags)) * 1e3


def ddp_rate(micro_steps: int, steps: int) -> float:
    """Returns tokens/s of two ranks of plain DistributedDataParallel."""
    script = str(Path(__file__).parent / "plain_ddp.py")
    # The same allocator settings as paceline's, so that what differs is the synchronisation.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
    said = run([*TWO_RANKS, script, str(steps), str(MICRO_BATCH), str(micro_steps)], environment)
    times = [float(ms) for ms in re.findall(r"step_ms ([\d.]+)", said)]
    return 2 * MICRO_BATCH * micro_steps * SEQ_LEN / statistics.median(times[3:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    show_header()
    for micro_steps, steps in ((4, 8), (1, 20)):
        rates: dict[str, list[float]] = {"one": [], "two": [], "ddp": [], "alone": []}
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
            for i in range(options.rounds):
                root = Path(scratch) / str(i)
                rates["one"].append(paceline_rate(root / "one", 1, micro_steps, steps))
                rates["two"].append(paceline_rate(root / "two", 2, micro_steps, steps))
                rates["ddp"].append(ddp_rate(micro_steps, steps))
                both = [pool.submit(paceline_rate, root / name, 1, micro_steps, steps) for name in ("a", "b")]
                rates["alone"].append(sum(future.result() for future in both))
        print(f"accumulation {micro_steps}")
        for name, label in (
            ("one", "one rank of one thread"),
            ("two", "two ranks of one thread"),
            ("ddp", "two ranks, torch DistributedDataParallel"),
            ("alone", "alone, both cores busy: two processes, no communication"),
        ):
            show("  " + label, rates[name], "tokens/s")
        for label, other, factor in (
            ("of twice one rank", "one", 2),
            ("of two processes without communication", "alone", 1),
            ("of DistributedDataParallel", "ddp", 1),
        ):
            ratios = [100 * a / (factor * b) for a, b in zip(rates["two"], rates[other], strict=True)]
            show("  two ranks: per cent " + label, ratios, "%")


if __name__ == "__main__":
    main()
