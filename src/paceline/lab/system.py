"""The system's own tools (`ip`, `tc`, `unshare` ...), and what is missing where one of them says no."""

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
    """Raises UserError where this is not Linux, not root, or a tool that makes hosts is not installed."""
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
    """Runs a tool to its end. Raises UserError with its own words and what it was for, where it fails."""
    ended = attempt(command, stdin)
    if ended.returncode != 0:
        raise UserError(refusal(purpose, ended.stderr))


def attempt(command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a tool to its end, and returns how that was."""
    # A terminal sends Ctrl-C to all of its foreground: a tool that it ended would look like one that failed.
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, start_new_session=True)


def refusal(purpose: str, words: str) -> str:
    """One message of what could not be made, what the tool said, and what to look at."""
    said = "; ".join(line for line in words.splitlines() if line.strip()) or "no word why"
    hint = ""
    if "not permitted" in said or "denied" in said:
        hint = "; in a container this takes more rights than root's: start it with --privileged"
    elif "not supported" in said or "Unknown device type" in said or "Specified qdisc" in said:
        hint = "; this kernel, or a module that is not loaded, lacks it"
    return f"could not make {purpose}: {said}{hint}"


def inside(pid: int, *command: str) -> tuple[str, ...]:
    """Returns the command line that runs a network tool in the network namespace of this process.

    Raises UserError where the process is gone or has the namespace of this one: a command meant for a host must never
    change this machine's own network.
    """
    try:
        theirs = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        raise UserError(f"the process that held this host's network (pid {pid}) is gone") from None
    if theirs == os.readlink("/proc/self/ns/net"):
        raise UserError(f"process {pid} has this machine's own network; it is no host of a lab")
    return ("nsenter", "--target", str(pid), "--net", *command)


def mounts() -> list[tuple[Path, str, list[str]]]:
    """Returns (where, type, options) of everything that is mounted here."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        found.append((Path(where), kind, options.split(",")))
    return found
