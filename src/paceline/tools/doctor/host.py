"""The checks of one host alone: processor, memory, limits, names, environment. `notes` has what hosts compare."""

import os
import platform
import re
import resource
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline import __version__
from paceline.base import units
from paceline.base.cores import physical_cores
from paceline.base.errors import nearest
from paceline.config import Config
from paceline.record.console import Console
from paceline.tools.doctor.finding import Verdict, failure, ok, warning
from paceline.world import torch_version
from paceline.world.cores import cgroup_quota, free_memory, usable_cores
from paceline.world.device import choose_threads
from paceline.world.env import check_interface, interface_of, interfaces_text, is_loopback, transfer_address

_QUIET_S = 0.5
_BUSY_FRAC = 0.25  # of the usable cores
_LEAST_FREE_BYTES = 1 << 30
_LEAST_SHM_BYTES = 512 << 20
_MANY_FILES = 65536
_FILES_BASE, _FILES_A_RANK = 256, 8  # descriptors: of the libraries and data; of the connections to another rank


@dataclass(kw_only=True)
class Place:
    """This host's part of the job."""

    host: str
    config: Config
    has_config: bool  # else `config` has the defaults, which nobody asked for
    out: Path
    num_ranks: int  # of this host
    world_size: int
    num_hosts: int = 1
    address: str = ""  # at which the other hosts reach this one; empty: it is alone
    notes: dict[str, Any] = field(default_factory=dict)
    """What this host tells the others."""

    @property
    def interface(self) -> str:
        """The interface that ranks are to use; empty: Gloo and NCCL choose."""
        return self.config.parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def versions(place: Place) -> Iterator[Verdict]:
    by_name = {"paceline": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    if torch.cuda.is_available():
        by_name["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    place.notes["versions"] = by_name
    seen = ", ".join(f"{name} {version}" for name, version in by_name.items())
    seen += f"; tested with torch {torch_version.tested_text()}"
    if torch_version.is_tested():
        yield ok(seen)
    else:
        fix = f"pip install 'torch=={torch_version.TESTED[-1]}.*', or try this one: paceline verify --nproc 2"
        yield warning(f"{seen}, not with this one", fix)
    torch_version.check_private_names()


def cores(place: Place) -> Iterator[Verdict]:
    usable, machine, quota = usable_cores(), psutil.cpu_count(logical=False) or usable_cores(), cgroup_quota()
    threads, reason = choose_threads(place.config.parallel.threads, place.num_ranks)
    allowed = len(physical_cores()) or machine
    seen = f"{usable} of {machine} cores; ranks: {place.num_ranks}, threads of each: {threads}"
    if quota < min(allowed, machine):
        fix = f"docker run --cpus {machine}, or systemd's CPUQuota={machine}00%"
        yield warning(f"{seen}; the cgroup grants the time of {quota:.2g}", fix)
    elif allowed < machine:
        yield warning(f"{seen}; the affinity mask allows {allowed}", f"taskset -c 0-{machine - 1} paceline ...")
    if place.num_ranks > usable:
        yield warning(f"{seen}: ranks take turns", f"--nproc {usable}")
    elif reason == "OMP_NUM_THREADS" and threads * place.num_ranks < usable:
        yield warning(f"{seen}, by OMP_NUM_THREADS: cores stay idle", "unset OMP_NUM_THREADS")
    elif usable == machine:
        yield ok(seen)


def load(place: Place) -> Iterator[Verdict]:
    """Measures while the doctors of other hosts on this machine do: asleep."""
    seen, is_busy = measured_load()
    yield warning(seen, "wait until it ends, or stop it if it is yours") if is_busy else ok(seen)


def measured_load() -> tuple[str, bool]:
    """Returns what else computes on this machine while this program sleeps for _QUIET_S, and whether it is much."""
    before = _processor_seconds()
    psutil.cpu_percent()
    time.sleep(_QUIET_S)
    busy = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    seen = f"{busy:.1f} cores busy with other work"
    if busy <= _BUSY_FRAC * usable_cores():
        return seen, False
    top = busiest(before, _processor_seconds())
    return f"{seen}: {'; '.join(map(described, top)) or 'of other containers'}", True


def busiest(before: dict[int, float], after: dict[int, float]) -> list[int]:
    """Returns the two processes, at most, that computed most; before, after: pid -> seconds, _QUIET_S apart."""
    took = {pid: seconds - before[pid] for pid, seconds in after.items() if pid in before}
    return [pid for pid in sorted(took, key=lambda pid: -took[pid])[:2] if took[pid] > 0.1 * _QUIET_S]


def say_load(console: Console) -> None:
    """Warns before a measurement if the machine is busy."""
    seen, is_busy = measured_load()
    if is_busy:
        console.say(f"{seen}. These measurements are of a busy machine; repeat them when it is quiet", style="yellow")


def described(pid: int) -> str:
    """Returns pid, owner and command line of a process, as far as this user may see them."""
    try:
        with (process := psutil.Process(pid)).oneshot():
            command = " ".join(" ".join(process.cmdline()).split()) or process.name()
            return f"pid {pid} of {process.username()}: {textwrap.shorten(command, 80, placeholder=' ...')}"
    except psutil.Error:  # it has ended
        return f"pid {pid}"


def _processor_seconds() -> dict[int, float]:
    """Returns pid -> seconds of processor time so far."""
    processes = [process.info for process in psutil.process_iter(["pid", "cpu_times"])]
    return {each["pid"]: sum(each["cpu_times"][:2]) for each in processes if each["cpu_times"]}


def memory(place: Place) -> Iterator[Verdict]:
    free, swap = free_memory(), psutil.swap_memory()
    seen = f"{units.size(free)} free of {units.size(psutil.virtual_memory().total)}, swap used: {units.size(swap.used)}"
    if free < _LEAST_FREE_BYTES * place.num_ranks:
        yield warning(
            f"{seen}; little for {place.num_ranks} ranks", "end other programs; ps aux --sort=-rss shows them"
        )
    elif swap.used > 0.1 * psutil.virtual_memory().total:
        yield warning(f"{seen}: steps wait for the disk", "end other programs, then: swapoff -a && swapon -a")
    else:
        yield ok(seen)


def shared_memory(place: Place) -> Iterator[Verdict]:
    """NCCL and workers of loaders exchange data there; containers have 64 MiB of it."""
    if sys.platform != "linux":
        return
    free = shutil.disk_usage("/dev/shm").free
    seen = f"/dev/shm has {units.size(free)} free"
    if free < _LEAST_SHM_BYTES:
        yield warning(seen, "mount -o remount,size=8G /dev/shm, or docker run --shm-size 8g")
    else:
        yield ok(seen)


def limits(place: Place) -> Iterator[Verdict]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_BASE + _FILES_A_RANK * place.world_size
    if files < needed:
        enough = most if needed <= most < _MANY_FILES else max(_MANY_FILES, needed)
        can = most == resource.RLIM_INFINITY or most >= needed
        fix = f"ulimit -n {enough}" if can else f"nofile {enough} in /etc/security/limits.conf, then log in again"
        yield failure(f"{files} open files, and {place.world_size} ranks need about {needed}", fix)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    seen = "unlimited" if locked == resource.RLIM_INFINITY else units.size(locked)
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        yield warning(f"locked memory: {seen}, and InfiniBand locks its buffers", "ulimit -l unlimited")
    elif files >= needed:
        yield ok(f"{files} open files, {seen} of locked memory")


def interface(place: Place) -> Iterator[Verdict]:
    """Finds the address at which ranks will listen, by the rules of Gloo and NCCL."""
    named = os.environ.get("NCCL_SOCKET_IFNAME", "")
    known = psutil.net_if_addrs()
    if named and named[0] not in "^=" and not any(each.startswith(tuple(named.split(","))) for each in known):
        yield failure(
            f"NCCL_SOCKET_IFNAME is '{named}', which fits no interface{nearest(named, known)}: {', '.join(known)}",
            "unset NCCL_SOCKET_IFNAME",
        )
    check_interface(place.config.parallel.interface)
    check_interface(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], "GLOO_SOCKET_IFNAME")
    address = place.notes["listens"] = transfer_address(place.interface)
    way = f"by {place.interface}" if place.interface else f"by the host's name {socket.gethostname()}"
    seen = f"ranks listen at {address} {way}; there is {interfaces_text()}"
    if place.num_hosts > 1 and is_loopback(address):
        yield failure(
            f"{seen}: other hosts do not reach {address}",
            f"--parallel.interface {name}"
            if (name := _interface_to_others(place.address))
            else "give --hosts the addresses by which the hosts reach each other; 127.0.0.1 is each one's own",
        )
    else:
        yield ok(seen)


def _interface_to_others(address: str) -> str:
    """Returns the interface of this address of the host; empty if there is none that others can reach."""
    return "" if not address or is_loopback(address) else interface_of(address)


# By beginning of the name: what it does, and the values that make runs slow or wrong.
_VARIABLES = (
    ("CUDA_VISIBLE_DEVICES", "hides all other GPUs from ranks", r"^$|^-1"),
    ("PACELINE_SHARE_GPU", "lets ranks share a GPU, for tests: slow", "1"),
    ("CUDA_LAUNCH_BLOCKING", "waits for each kernel: slow", "1"),
    ("NCCL_(P2P|SHM|IB)_DISABLE", "takes a fast way between GPUs away from NCCL", "1"),
    ("NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME", "names the interface of ranks", None),
    ("NCCL_DEBUG$", "lets NCCL print what it does", None),
    ("NCCL_", "changes NCCL", None),
    ("GLOO_DEVICE_TRANSPORT", "asks for a transport that torch's builds lack", "TCP_TLS"),
    ("GLOO_", "changes Gloo", None),
    ("OMP_|KMP_|MKL_|GOMP_", "sets threads of a rank, or where they run", None),
    ("TORCH_DISTRIBUTED_DEBUG", "checks each collective: slow", "DETAIL"),
    ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "lets torchrun start ranks again", None),
    ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "lets files that torch loads run code", "1|y|yes|true"),
    ("TORCH_|PYTORCH_", "changes torch", None),
    ("(http|https|all)_proxy", "downloads go through it, ranks do not", None),
)
_OF_IMAGES = re.compile(r".*_(VERSION|HOME|PATH|DIR)$")  # containers say what is in them by such names
_SECRET = re.compile(r"^(\w+://)?.*@")  # user and password of a proxy, which curl takes without http://, too


def environment(place: Place) -> Iterator[Verdict]:
    variables = place.notes["variables"] = {}
    for name, text in sorted(os.environ.items()):
        value = _SECRET.sub(r"\1...@", text)
        for pattern, what, wrong in _VARIABLES:
            if re.match(pattern, name, re.IGNORECASE) and not _OF_IMAGES.match(name):
                variables[name] = value
                if wrong and re.fullmatch(wrong, value, re.IGNORECASE):
                    yield warning(f"{name}={value} {what}", f"unset {name}")
                else:
                    yield ok(f"{name}={value} {what}")
                break


ALONE: dict[str, Callable[[Place], Iterator[Verdict]]] = {
    "versions": versions,
    "cores": cores,
    "memory": memory,
    "/dev/shm": shared_memory,
    "limits": limits,
    "interface": interface,
    "environment": environment,
}
