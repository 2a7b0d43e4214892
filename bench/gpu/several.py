"""What is checked with several ranks: one a GPU, several on each, or on the CPU in a rehearsal."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from checks import FLOAT32, LONG, TINY, check, same, within, worst
from machine import STOPPED, Failed, Machine, Run, torchrun

RESUMABLE = (*FLOAT32, "--train.stop-at-step", "20")


def gaps(gap_of: dict[str, float], most: float) -> str:
    """Returns the largest differences of losses by name; raises Failed if one is too large."""
    return within(max(gap_of.values()), most, ", ".join(f"{name} {gap:.1e}" for name, gap in gap_of.items()))


# ---- the same curve ----


@check("every strategy on all GPUs has the losses of one", 2, 400)
def strategies(machine: Machine) -> str:
    """Every strategy with both optimizers; the tiny batch of 12 leaves some of 5 or more ranks with less."""
    gap_of = {}
    for strategy in ("ddp", "naive", "zero", "fsdp"):
        for optimizer in ("adamw", "muon"):
            flags = (*FLOAT32, "--optim.name", optimizer)
            sharing = ("--parallel.strategy", strategy, "--parallel.check-every", "1")
            run = machine.train(*flags, *sharing, ranks=machine.num_ranks)
            gap_of[f"{strategy} {optimizer}"] = worst(machine.train(*flags), run)
    return gaps(gap_of, 1e-3)


@check("ranks with unequal parts, and some with none, give the losses of one GPU", 2, 150)
def uneven(machine: Machine) -> str:
    gap_of = {}
    for shares in ("0,12", "3,9", "auto"):
        of_others = ",0" * (machine.num_ranks - 2) if "," in shares else ""
        flags = ("--parallel.strategy", "zero", "--parallel.shares", shares + of_others)
        gap_of[shares] = worst(machine.train(*FLOAT32), machine.train(*FLOAT32, *flags, ranks=machine.num_ranks))
    return gaps(gap_of, 1e-3)


@check("compiled blocks on all GPUs, 1024 tokens, have the eager losses of one", 2, 400)
def compiled_ranks(machine: Machine) -> str:
    gap_of = {}
    for strategy in ("zero", "fsdp"):
        run = machine.train(*LONG, "--parallel.strategy", strategy, "--train.compile", ranks=machine.num_ranks)
        gap_of[strategy] = worst(machine.train(*LONG), run)
    return gaps(gap_of, 2e-2)


@check("a step that is not finite on rank 1 is skipped by all, float16", 2)
def not_finite_on_one(machine: Machine) -> str:
    fault = {"PACELINE_FAULTS": "rank=1 step=9 kind=nan"}
    run = machine.train(*TINY, "--train.dtype", "float16", ranks=machine.num_ranks, env=fault)
    skipped = [event["step"] for event in run.events("skipped step")]
    if 9 not in skipped or not run.losses[-1] < run.losses[0]:
        raise Failed(f"skipped steps: {skipped}, losses {run.losses}")
    return f"steps {skipped} skipped, last loss {run.losses[-1]:.3f}"


@check("torch's DistributedDataParallel beside it has the same losses", 2)
def beside_ddp(machine: Machine) -> str:
    script = Path(__file__).with_name("beside_ddp.py")
    command = [sys.executable, *torchrun(machine.num_ranks), str(script), machine.device]
    [line] = [each for each in machine.execute(machine.root, command).said.splitlines() if each.startswith("{")]
    result = json.loads(line)
    return within(result["difference"], 1e-4, f"{result['backend']}, last loss {result['last_loss']:.5f}")


# ---- two launchers ----


def two_launchers(
    machine: Machine, folder: Path, *words: str, each: int = 1, first: str = "", second: str = "", ends_with: int = 0
) -> Run:
    """Runs paceline under two launchers of as many ranks each, as on two hosts. first, second: what each command begins
    with. The status is the first one's, of torchrun: 1 for any error, and for a run that can be continued."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = shlex.join([sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(each)])
    here = f"--master-addr 127.0.0.1 --master-port {port} -m paceline {shlex.join(words)}"
    one, other = (f"{before} {host} --node-rank {rank} {here}" for rank, before in enumerate((first, second)))
    return machine.execute(folder, ["sh", "-c", f"{other} & {one} && wait $!"], ends_with=ends_with)


def as_another_host() -> str:
    """Returns the beginning of a command that gives it another host name; empty where that needs more rights."""
    if shutil.which("unshare") and not subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        return "NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo unshare --uts sh -c 'hostname second && exec \"$@\"' sh"
    return ""


def different_gpus(machine: Machine, each: int) -> list[str]:
    """Returns the beginnings of two commands that show each launcher GPUs of its own: both count their ranks from 0.
    Empty where there are too few: the ranks share them, or compute on the CPU."""
    if machine.num_gpus < machine.num_ranks:
        return ["", ""]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(machine.num_gpus)]
    return [f"CUDA_VISIBLE_DEVICES={','.join(part)}" for part in (gpus[:each], gpus[each : 2 * each])]


def on_two_hosts(machine: Machine, strategy: str) -> str:
    """Two launchers, each of half of the ranks; the second one's host has another name where that is possible."""
    folder, host = machine.folder(f"hosts-{strategy}"), as_another_host()
    words = ("train", "--out", str(folder), *FLOAT32, "--parallel.device", machine.device)
    each = machine.num_ranks // 2
    first, second = different_gpus(machine, each)
    words = (*words, "--parallel.strategy", strategy)
    run = two_launchers(machine, folder, *words, each=each, first=first, second=f"{second} {host}")
    how = "two host names" if host else "one host name, so hsdp is as fsdp"
    return within(worst(machine.train(*FLOAT32), run), 1e-3, f"2 launchers of {each}, {how}")


check("two launchers with zero have the losses of one GPU", 2)(lambda machine: on_two_hosts(machine, "zero"))
check("two launchers with hsdp have the losses of one GPU", 4)(lambda machine: on_two_hosts(machine, "hsdp"))


@check("a GPU and a CPU train together over Gloo with the losses of one", limit_s=300)
def mixed(machine: Machine) -> str:
    """Two launchers, as on two hosts; the second sees no GPU. The last run is stopped, and resumed by both."""
    gap_of, hidden = {}, "CUDA_VISIBLE_DEVICES="
    for name, flags in {
        "auto": (),
        "zero": ("--parallel.strategy", "zero"),
        "uneven": ("--parallel.shares", "11,1"),
        "auto, resumed": ("--parallel.shares", "auto"),
    }.items():
        folder = machine.folder("mixed")
        words = ("train", "--out", str(folder), *FLOAT32, "--parallel.backend", "gloo", *flags)
        if name.endswith("resumed"):
            stop = ("--train.stop-at-step", "20")
            two_launchers(machine, folder, *words, *stop, second=hidden, ends_with=1)
            words = ("resume", str(folder))
        gap_of[name] = worst(machine.train(*FLOAT32), two_launchers(machine, folder, *words, second=hidden))
    return gaps(gap_of, 1e-3)


# ---- Gloo with few bits ----


@check("local steps and few bits over Gloo have the CPU's losses", 2, 400)
def wires(machine: Machine) -> str:
    """A rehearsal compares ranks that share memory with those that send over sockets. The losses also stay near those
    of exact messages."""
    gap_of, far = {}, {}
    steps = ("--train.steps", "12", "--optim.warmup-steps", "4", "--train.eval-every", "-1")
    local = ("--parallel.strategy", "local", "--parallel.sync-every", "4")
    zero = ("--parallel.strategy", "zero")
    for flags, names in ((local, ("exact", "bf16", "int8", "int4", "int2")), (zero, ("exact", "bf16", "int8", "int4"))):
        exact = None
        for wire in names:
            way = (*FLOAT32, *steps, *flags, "--parallel.wire", wire, "--parallel.backend", "gloo")
            of_cpu = machine.train(*way, "--parallel.device", "cpu", ranks=machine.num_ranks)
            exact = exact or of_cpu
            beside = () if machine.device == "cuda" else ("--parallel.no-shared-memory",)
            run = machine.train(*way, *beside, ranks=machine.num_ranks)
            gap_of[f"{flags[1]} {wire}"] = worst(of_cpu, run)
            far[f"{flags[1]} {wire}"] = worst(exact, run)
    shown = ", ".join(f"{name} {gap:.0e}" for name, gap in far.items())
    if not 0 < max(far.values()) <= 0.1:
        raise Failed(f"from exact messages: {shown}")
    # Rounding to few bits makes the difference of two devices larger.
    return within(max(gap_of.values()), 1e-2, f"from exact messages: {shown}")


@check("what cannot be sent, or divided, is refused with one message", 2)
def refused(machine: Machine) -> str:
    cases = {
        "parallel.wire int8 works with strategies zero and local": ("fsdp", "--parallel.wire", "int8"),
        "parallel.wire int2 is for local steps": ("zero", "--parallel.wire", "int2"),
        "local steps need both": ("local",),
    }
    if machine.device == "cuda":
        cases["NCCL adds gradients as they are"] = ("zero", "--parallel.wire", "int8")
        cases["which backend gloo cannot"] = ("fsdp", "--parallel.backend", "gloo")
    for message, (strategy, *flags) in cases.items():
        sharing = ("--parallel.strategy", strategy, *flags)
        run = machine.train(*FLOAT32, *sharing, ranks=machine.num_ranks, ends_with=2)
        require_one_message(run, message)
    return f"{len(cases)} refused"


def require_one_message(run: Run, message: str) -> None:
    """Raises Failed unless the command ended with this message alone."""
    if message not in run.said or run.said.count("error: ") != 1:
        raise Failed(f"not refused with one message that has '{message}': {run.said[-800:]}")


# ---- what ends a run, and what comes after ----


@check("a run on all GPUs resumes bit for bit, zero and fsdp", 2, 240)
def resumed_ranks(machine: Machine) -> str:
    digests = []
    for strategy in ("zero", "fsdp"):
        sharing = ("--parallel.strategy", strategy)
        whole = machine.train(*FLOAT32, *sharing, ranks=machine.num_ranks)
        stopped = machine.train(*RESUMABLE, *sharing, ranks=machine.num_ranks, ends_with=STOPPED)
        digests.append(f"{strategy} {same(whole, machine.resume(stopped, ranks=machine.num_ranks))}")
    return ", ".join(digests)


@check("SIGTERM: the run ends with 75, and nothing of it is lost", 2, 150)
def terminated(machine: Machine) -> str:
    """From step 6 on each step takes longer, so that the signal comes before the end."""
    flags, folder = (*FLOAT32, "--parallel.strategy", "zero"), machine.folder("terminated")
    slow = {"PACELINE_FAULTS": "rank=0 step=6 phase=forward kind=sleep seconds=0.3 times=40"}
    words = ("train", "--out", str(folder), *flags, "--parallel.device", machine.device)
    ranks = ("--nproc", str(machine.num_ranks))
    rows, command = folder / "metrics.jsonl", [sys.executable, "-m", "paceline", *words, *ranks]
    run = machine.execute(
        folder,
        command,
        env=slow,
        ends_with=STOPPED,
        stop_when=lambda: rows.exists() and len(rows.read_text().splitlines()) > 8,
    )
    at, whole = run.steps[-1]["step"], machine.train(*flags, ranks=machine.num_ranks)
    after = machine.resume(run, ranks=machine.num_ranks)
    if [row["step"] for row in after.steps] != [row["step"] for row in whole.steps]:
        raise Failed(f"stopped at step {at}; the rows have steps {[row['step'] for row in after.steps]}")
    return f"stopped at step {at} of {whole.steps[-1]['step']}, resumed: {same(whole, after)}"


@check("a run of all GPUs resumes on one, and back", 2, 150)
def other_world(machine: Machine) -> str:
    flags = (*FLOAT32, "--parallel.strategy", "zero")
    gap_of_each = []
    for before, after in ((machine.num_ranks, 1), (1, machine.num_ranks)):
        stopped = machine.train(*flags, "--train.stop-at-step", "20", ranks=before, ends_with=STOPPED)
        gap_of_each.append(worst(machine.train(*FLOAT32), machine.resume(stopped, ranks=after)))
    return within(max(gap_of_each), 1e-3)


@check("kill -9 of a rank: the others end, and a restart gives the same bits", 2, 150)
def killed(machine: Machine) -> str:
    flags = (*FLOAT32, "--checkpoint.every", "5", "--max-restarts", "1")
    fault = {"PACELINE_FAULTS": "rank=1 step=12 phase=backward kind=kill"}
    run = machine.train(*flags, ranks=machine.num_ranks, env=fault)
    whole = machine.train(*FLOAT32, ranks=machine.num_ranks)
    return f"{same(whole, run)}, {run.seconds - whole.seconds:+.1f} s"


def stuck(machine: Machine, fault: str) -> str:
    """A rank that does not answer is named, and the command ends by itself."""
    timeouts = ("--parallel.timeout-s", "30", "--parallel.step-timeout-s", "6")
    faults = {"PACELINE_FAULTS": f"rank=1 step=12 phase=forward {fault}"}
    run = machine.train(*FLOAT32, *timeouts, ranks=machine.num_ranks, env=faults, ends_with=1)
    if [1] not in [event["ranks"] for event in run.events("hang")]:
        raise Failed(f"rank 1 is not named: {run.events('hang')} {run.said[-800:]}")
    return f"named and ended after {run.seconds:.0f} s"


check("SIGSTOP of a rank: it is named, the run ends", 2, 120)(lambda machine: stuck(machine, "kind=stop"))
check("a rank that sleeps: it is named, the run ends", 2, 120)(lambda m: stuck(m, "kind=sleep seconds=100"))


@check("a slow rank is named as a straggler", 2)
def straggler(machine: Machine) -> str:
    fault = "rank=1 step=6 phase=forward kind=sleep seconds=0.2 times=40"
    run = machine.train(*FLOAT32, ranks=machine.num_ranks, env={"PACELINE_FAULTS": fault})
    named = [(event["rank"], event["since_step"]) for event in run.events("straggler")]
    if not named or {rank for rank, _ in named} != {1}:
        raise Failed(f"named: {named}")
    return f"rank 1, since step {named[0][1]}"


@check("a collective's cost, by paceline bench link", 2, 150, is_alone=True)
def link(machine: Machine) -> str:
    path = machine.folder("link").with_suffix(".json")
    flags = ("--nproc", str(machine.num_ranks), "--parallel.device", machine.device, "--time-budget", "20")
    machine.paceline(machine.root, "bench", "link", "--preset", "tiny", *flags, "--json", str(path))
    lines = []
    for measured in json.loads(path.read_text())["collectives"]:
        largest = measured["times"][-1]
        lines.append(
            f"{measured['name']} {largest['bus_bytes_per_s'] / 1e9:.2f} GB/s at {largest['num_bytes'] >> 20} MiB"
        )
    return ", ".join(lines)


# ---- worlds of this machine ----


@check("paceline bench scaling: one process, several, two hosts of the lab, the GPU", limit_s=400, is_alone=True)
def scaling(machine: Machine) -> str:
    """Its table; with a GPU its row is beside those of the CPU's ranks. The lab's hosts are network namespaces."""
    can_have_hosts = os.geteuid() == 0 and shutil.which("unshare") is not None
    can_have_hosts = can_have_hosts and not subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode
    path = machine.folder("scaling").with_suffix(".json")
    most = min(4, machine.num_gpus if machine.num_gpus > 1 else max(2, machine.num_ranks))  # of the CPU beside one GPU
    few = ("--kind", "strong", "--steps", "6", "--rounds", "1", "--max-ranks", str(most))
    lab = ("--hosts", "2" if can_have_hosts else "0", "--rate", "unlimited")
    flags = ("--preset", "tiny", "--train.dtype", "float32", "--json", str(path))
    machine.paceline(machine.root, "bench", "scaling", *flags, *few, *lab)
    rows = [
        f"{row['label']}: {row['tokens_per_s']:,.0f} tokens/s, all-reduce {row['comm_ms']:.1f} ms"
        for row in json.loads(path.read_text())["rows"]
    ]
    return "\n".join(rows if can_have_hosts else [*rows, "two hosts: they need root and network namespaces"])
