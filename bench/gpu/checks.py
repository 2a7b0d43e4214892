"""What is checked on a machine with GPUs. Each check returns its figure, or raises Failed."""

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from machine import STOPPED, Failed, Machine, Run, Skipped, torchrun

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--preset", "tiny", "--train.sample-tokens", "0", "--checkpoint.every", "0")
FLOAT32 = (*TINY, "--train.dtype", "float32")
BFLOAT16 = (*TINY, "--train.dtype", "bfloat16")
# Long sequences, where attention's kernels are those of real training; full batches, so that ranks have several.
LONG = (
    *BFLOAT16,
    *("--data.seq-len", "1024", "--train.steps", "12", "--train.global-batch-size", "8"),
    *("--train.device-batch-size", "2", "--optim.warmup-steps", "4"),
)
WIDE = ("--model.n-embd", "2048", "--model.n-head", "16", "--train.compile", "--train.global-batch-size", "96")
FLOAT8 = ("--train.dtype", "float8")
SPEED = (
    *("--train.steps", "14", "--optim.warmup-steps", "10", "--train.sample-tokens", "0", "--train.eval-every", "-1"),
    *("--checkpoint.every", "0"),
)


@dataclass(frozen=True)
class Check:
    """One check: it needs `gpus` of them, and ends within `limit_s`."""

    name: str
    run: Callable[[Machine], str]
    gpus: int = 1
    limit_s: float = 90.0
    is_alone: bool = False  # made with nothing beside it


CHECKS: list[Check] = []


def check(
    name: str, gpus: int = 1, limit_s: float = 90.0, *, is_alone: bool = False
) -> Callable[[Callable[[Machine], str]], None]:
    """gpus: of several, as many ranks on fewer GPUs do, except for speed."""
    return lambda run: CHECKS.append(Check(name, run, gpus, limit_s, is_alone))


def worst(one: Run, other: Run) -> float:
    """Returns the largest difference of losses at the same step."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def within(figure: float, most: float, text: str = "") -> str:
    """Returns the figure as text; raises Failed if it is too large."""
    shown = f"{figure:.1e} (limit {most:g}){', ' if text else ''}{text}"
    if not figure <= most:  # so that NaN fails
        raise Failed(shown)
    return shown


def same(one: Run, other: Run) -> str:
    if one.digest != other.digest:
        raise Failed(
            f"digests of the weights {one.digest} and {other.digest}, losses up to {worst(one, other):.1e} apart"
        )
    return f"digest {one.digest}"


# ---- one GPU: the same curve ----


@check("float32 on the GPU has the CPU's losses")
def curve_of_the_cpu(machine: Machine) -> str:
    cpu = ("--parallel.device", "cpu", "--parallel.threads", "2")
    return within(worst(machine.train(*FLOAT32), machine.train(*FLOAT32, *cpu)), 1e-3)


@check("other number formats and options end near float32", limit_s=240)
def near_float32(machine: Machine) -> str:
    gap_of, single = {}, machine.train(*FLOAT32)
    for name, flags in {
        "bfloat16": ("--train.dtype", "bfloat16"),
        "float16": ("--train.dtype", "float16"),
        "activation checkpoints": ("--train.dtype", "bfloat16", "--train.activation-checkpoint"),
        "Muon": ("--train.dtype", "bfloat16", "--optim.name", "muon"),
    }.items():
        gap_of[name] = machine.train(*TINY, *flags).losses[-1] - single.losses[-1]
    shown = ", ".join(f"{name} {gap:+.4f}" for name, gap in gap_of.items())
    if any(not gap <= 0.1 for gap in gap_of.values()):
        raise Failed(shown)
    return shown


@check("compiled blocks give the eager losses, with dropout, documents apart, checkpoints and evaluation", limit_s=240)
def compiled(machine: Machine) -> str:
    flags = ("--model.dropout", "0.1", "--data.mask-documents", "--train.activation-checkpoint")
    eager, fast = (machine.train(*LONG, *flags, *more) for more in ((), ("--train.compile",)))
    return within(worst(eager, fast), 2e-2, f"validation {eager.val_loss - fast.val_loss:+.1e}")


@check("20 steps and a resume give the bits of 40 steps")
def resume(machine: Machine) -> str:
    stopped = machine.train(*FLOAT32, "--train.stop-at-step", "20", ends_with=STOPPED)
    return same(machine.train(*FLOAT32), machine.resume(stopped))


@check("and so with sequences of 1024 in bfloat16, compiled", limit_s=240)
def resume_long(machine: Machine) -> str:
    flags = (*LONG, "--train.compile")
    stopped = machine.train(*flags, "--train.stop-at-step", "6", ends_with=STOPPED)
    return same(machine.train(*flags), machine.resume(stopped))


@check("saving every second step changes nothing")
def saving(machine: Machine) -> str:
    often = machine.train(*FLOAT32, "--checkpoint.every", "2")
    longest = max(row["step_ms"] for row in often.steps[4:])
    return (
        f"{same(machine.train(*FLOAT32), often)}, longest step {longest:.1f} ms, median {often.median('step_ms'):.1f}"
    )


@check("a process group of one rank, as under torchrun, gives the same losses with each strategy", limit_s=240)
def group_of_one(machine: Machine) -> str:
    """Its collectives are NCCL's, with their buckets, streams and waits."""
    launcher = (*torchrun(1), "-m", "paceline", "train")
    single, gap_of = machine.train(*FLOAT32), {}
    for strategy in ("ddp", "zero", "fsdp", "naive"):
        folder = machine.folder("grouped")
        command = [sys.executable, *launcher, "--out", str(folder), *FLOAT32, "--parallel.device", machine.device]
        gap_of[strategy] = worst(single, machine.execute(folder, [*command, "--parallel.strategy", strategy]))
    return within(max(gap_of.values()), 1e-4, ", ".join(f"{name} {gap:.1e}" for name, gap in gap_of.items()))


@check("no unordered access of two streams, by torch's CUDA sanitizer")
def sanitizer(machine: Machine) -> str:
    if machine.device != "cuda":
        raise Skipped("needs a GPU; nothing to rehearse")
    flags = ("--train.steps", "2", "--optim.warmup-steps", "1", "--train.eval-every", "-1")
    for strategy in ("ddp", "zero"):
        said = machine.train(*FLOAT32, *flags, "--parallel.strategy", strategy, env={"TORCH_CUDA_SANITIZER": "1"}).said
        if "CSAN" in said or "data race" in said:
            raise Failed(said[-1500:])
    return "2 steps with ddp and zero"


@check("a gradient that is not finite is skipped")
def not_finite(machine: Machine) -> str:
    run = machine.train(*TINY, "--train.dtype", "float16", env={"PACELINE_FAULTS": "rank=0 step=9 kind=nan"})
    skipped = [event["step"] for event in run.events("skipped step")]
    if 9 not in skipped or not math.isfinite(run.losses[-1]):
        raise Failed(f"skipped steps: {skipped}, last loss {run.losses[-1]}")
    return f"steps {skipped} skipped, last loss {run.losses[-1]:.3f}"


EXAMPLES = {  # by the words before the numbers that a script prints
    ("toy/after.py",): "loss",
    ("gpt/after.py",): "training|validation",
    ("gan/train.py", "--steps", "60"): "discriminator|generator",
    ("images/train.py", "--no-augment", "--images", "600", "--batch-size", "20", "--epochs", "1"): "loss|accuracy",
    ("finetune/train.py", "--steps", "20"): "loss",
}


_PROGRESS = re.compile(r"^step \d+/.*$", re.MULTILINE)  # of a run: it comes by the clock


def script(machine: Machine, words: str, name: str, arguments: Sequence[str]) -> str:
    """An example on a CPU, on a GPU, and under torchrun on all GPUs."""
    said = []
    for hidden, before in (({"CUDA_VISIBLE_DEVICES": ""}, ()), ({}, ()), ({}, torchrun(machine.num_ranks))):
        folder = machine.folder(name.split("/")[0])
        folder.mkdir()
        command = [sys.executable, *before, str(ROOT / "examples" / name), *arguments]
        env = {"STEPS": "16", "EVAL_EVERY": "4", "OMP_NUM_THREADS": "4", **hidden}
        said.append(_PROGRESS.sub("", machine.execute(folder, command, env=env, cwd=folder).said))
    # Two networks against each other make rounding larger, so the first losses are compared.
    of_cpu, *of_gpu = ([float(number) for number in re.findall(rf"(?:{words}) ([\d.]+)", text)][:40] for text in said)
    if not of_cpu or any(len(losses) != len(of_cpu) for losses in of_gpu):
        raise Failed(said[-1][-600:])
    worst_of_all = max(abs(a - b) for losses in of_gpu for a, b in zip(of_cpu, losses, strict=True))
    return within(worst_of_all, 2e-3, f"on {machine.num_ranks} ranks, too")


for (name, *arguments), words in EXAMPLES.items():
    check(f"the Python API: examples/{name} has the CPU's losses")(
        partial(script, words=words, name=name, arguments=arguments)
    )


@check("the Python API: the guide's blocks run in turn")
def guide(machine: Machine) -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from blocks import run_blocks

    folder = machine.root / "guide"
    folder.mkdir()
    preamble = ROOT / "tests" / "readme" / "preambles" / "your-model.py"
    said = run_blocks(ROOT / "docs" / "guide" / "your-model.md", folder, preamble)
    return f"{len(said.splitlines())} lines printed"


@check("two runs with train.deterministic have the same bits, gpt2-124m compiled", limit_s=240, is_alone=True)
def deterministic(machine: Machine) -> str:
    preset = "gpt2-124m" if machine.device == "cuda" else "tiny"
    flags = ("--preset", preset, *SPEED, "--train.compile", "--train.deterministic")
    one, other = (machine.train(*flags, env={"REPEAT": repeat}) for repeat in "12")
    return f"{same(one, other)}, {one.median('tokens_per_s'):,.0f} tokens/s"


# ---- speed ----


def speed(machine: Machine, preset: str, *flags: str, ranks: int = 1, profile: bool = False) -> str:
    """Returns tokens/s, MFU and the parts of a step. A rehearsal runs the tiny preset."""
    if machine.device != "cuda" and "--model.n-embd" in flags:
        raise Skipped("a CPU takes minutes for a step of 2,048 wide, and has no float8 units")
    preset = preset if machine.device == "cuda" else "tiny"
    traced = ("--train.profile", "12") if profile else ()
    run = machine.train("--preset", preset, *SPEED, *flags, *traced, ranks=ranks)
    mfu = run.median("mfu")
    parts = ", ".join(
        f"{name} {run.median(f'{name}_ms'):.1f}" for name in ("forward", "backward", "optim", "exposed_comm", "data")
    )
    return f"{run.median('tokens_per_s'):,.0f} tokens/s, MFU {100 * mfu:.1f}%, ms: {parts}{kernels(run)}"


def kernels(run: Run) -> str:
    """Returns the share of a step's GPU time by kind of kernel, from its trace; empty without one."""
    traces = list((run.folder / "profile").glob("*"))
    if not traces:
        return ""
    text = traces[0].read_bytes()
    if traces[0].suffix == ".gz":
        import gzip

        text = gzip.decompress(text)
    times = dict.fromkeys(("products", "attention", "collectives", "other"), 0.0)
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") == "kernel":
            name = event["name"].lower()
            kind = (
                "collectives" if "nccl" in name
                else "attention" if re.search("flash|fmha|attention", name)
                else "products" if re.search("gemm|cutlass|nvjet|matmul", name)
                else "other"
            )  # fmt: skip
            times[kind] += event["dur"]
    total = sum(times.values())
    return "; kernels: " + ", ".join(f"{kind} {us / total:.0%}" for kind, us in times.items()) if total else ""


check("speed, gpt2-124m compiled", limit_s=200, is_alone=True)(
    lambda m: speed(m, "gpt2-124m", "--train.compile", profile=True)
)
check("speed, gpt2-124m eager", limit_s=150, is_alone=True)(lambda m: speed(m, "gpt2-124m", "--train.no-compile"))
check("speed, gpt2-124m-modern compiled", limit_s=200, is_alone=True)(
    lambda m: speed(m, "gpt2-124m-modern", "--train.compile")
)
check("speed, 2048 wide in bfloat16", limit_s=200, is_alone=True)(lambda m: speed(m, "gpt2-124m", *WIDE))
check("speed, 2048 wide in float8", limit_s=200, is_alone=True)(lambda m: speed(m, "gpt2-124m", *WIDE, *FLOAT8))
check("speed, gpt2-124m on all GPUs", 2, 200, is_alone=True)(
    lambda m: speed(m, "gpt2-124m", "--train.compile", ranks=m.num_ranks)
)
check("speed, gpt2-124m-modern on all GPUs", 2, 200, is_alone=True)(
    lambda m: speed(m, "gpt2-124m-modern", "--train.compile", ranks=m.num_ranks)
)


@check("memory: the chosen micro-batch fits, and leaves little unused", limit_s=200, is_alone=True)
def memory(machine: Machine) -> str:
    if machine.device != "cuda":
        raise Skipped("needs a GPU; nothing to rehearse")
    with most_memory() as seen:
        machine.train("--preset", "gpt2-124m", *SPEED, "--train.compile", "--train.seed", "1")
    total = torch.cuda.get_device_properties(0).total_memory / 2**20
    if max(seen) < 0.3 * total:
        raise Failed(f"the most in use was {max(seen):,.0f} of {total:,.0f} MiB")
    return f"the most in use was {max(seen):,.0f} of {total:,.0f} MiB"


@contextmanager
def most_memory() -> Iterator[list[float]]:
    """Yields a list that a thread fills with the MiB in use on the first GPU, twice a second."""
    seen, is_over = [0.0], threading.Event()

    def look() -> None:
        command = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
        while not is_over.wait(0.5):
            seen.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
