"""Calls the system's tools (`ip`, `tc`, `unshare` ...), and explains their failures."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.base.errors import UserError

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux",
}


def check_machine() -> None:
    """Raises UserError if this is not Linux, not root, or lacks a tool that makes hosts."""
    if sys.platform != "linux":
        raise UserError(
            f"paceline lab makes hosts of Linux namespaces, and this is {sys.platform}; use a Linux machine"
        )
    if os.geteuid() != 0:
        raise UserError(
            f"paceline lab makes network namespaces, which takes root, and this is user {os.geteuid()}; "
            f"try: sudo {sys.executable} -m paceline lab ..."
        )
    for name, package in _PACKAGES.items():
        if shutil.which(name) is None:
            raise UserError(f"paceline lab needs the program `{name}`, which is not here; try: apt install {package}")


def call(command: Sequence[str], purpose: str, stdin: str = "") -> None:
    """Runs a tool. Raises UserError with the purpose and the tool's message if it fails."""
    ended = attempt(command, stdin)
    if ended.returncode != 0:
        raise UserError(refusal(purpose, ended.stderr))


def attempt(command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    # A terminal sends Ctrl-C to its whole foreground: a tool that it ended would look like a failed one.
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, start_new_session=True)


def refusal(purpose: str, words: str) -> str:
    said = "; ".join(line for line in words.splitlines() if line.strip()) or "no word why"
    hint = ""
    if "not permitted" in said or "denied" in said:
        hint = "; in a container this takes more rights than root's: start it with --privileged"
    elif "not supported" in said or "Unknown device type" in said or "Specified qdisc" in said:
        hint = "; this kernel, or a module that is not loaded, lacks it"
    return f"could not make {purpose}: {said}{hint}"


def inside(pid: int, *command: str) -> tuple[str, ...]:
    """Returns the command line that runs a network tool in the network namespace of this process. Raises UserError if
    the process is gone or has our own namespace: a command for a host must never change this machine's network."""
    try:
        theirs = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        raise UserError(f"the process that held this host's network (pid {pid}) is gone") from None
    if theirs == os.readlink("/proc/self/ns/net"):
        raise UserError(f"process {pid} has this machine's own network; it is not a host of a lab")
    return ("nsenter", "--target", str(pid), "--net", *command)


def mounts() -> list[tuple[Path, str, list[str]]]:
    """Returns (mount point, type, options) of all mounts."""
    mounted = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        mounted.append((Path(where), kind, options.split(",")))
    return mounted
