"""One lab at a time: who holds it, what it consists of, and how what a killed one left is found and removed.

/run/paceline-lab/
  lock         flock(2), held by the lab that runs; the kernel drops it however that ends
  state.json   its pid, its hosts, its cgroups; for `paceline lab set`, and for whoever cleans up
  hosts        what the hosts see as /etc/hosts
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.files import replace
from paceline.lab.processors import Controller, remove_groups

FOLDER = Path("/run/paceline-lab")


@dataclass(frozen=True, kw_only=True)
class Living:
    """A host that was made, as this machine sees it."""

    pid: int  # its first process; it holds all namespaces, and all others die with it
    group: str  # the folder of its cgroup; empty: this machine has no controller for shares


@dataclass(kw_only=True)
class State:
    """A lab that runs."""

    pid: int
    switch: int = 0  # the process that holds the bridge's namespace
    groups: str = ""  # the folder above those of the hosts; empty: none
    hosts: dict[str, Living] = field(default_factory=dict)

    def write(self) -> None:
        """Puts it where `paceline lab set` finds it."""
        replace(_path("state.json"), json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls) -> "State | None":
        """Returns what the last lab wrote; None where nothing is left of one, or nothing that can be read."""
        try:
            values = json.loads(_path("state.json").read_text())
            values["hosts"] = {name: Living(**living) for name, living in values["hosts"].items()}
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # another version's has other fields
            return None


def write_names(addresses: dict[str, str]) -> Path:
    """Writes what the hosts are to see as /etc/hosts (name -> address); returns the file."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    # torch's store asks for the name of its clients as IPv6 writes their addresses, and warns where there is none.
    lines += [f"::ffff:{address} {name}.mapped" for name, address in addresses.items()]
    path = _path("hosts")
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@contextmanager
def only_lab() -> Iterator[State]:
    """While it is open this process has the one lab, of which it yields the state; what is on the disk goes with it.

    What an earlier lab left that was killed is removed first. Raises UserError, naming the pid, where one runs.
    """
    lock = _own_lock()
    try:
        _sweep()
        state = State(pid=os.getpid())
        state.write()
        yield state
    finally:
        _sweep()
        shutil.rmtree(FOLDER, ignore_errors=True)  # the lock's file, too: _lock knows
        os.close(lock)


def clean_up() -> list[Path]:
    """Removes what a killed lab left, and returns what that was. Raises UserError, naming the pid, where one runs."""
    lock = _own_lock()
    try:
        return _sweep()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.close(lock)


def running_lab() -> State:
    """Returns the lab that runs. Raises UserError where none does, or not all of its hosts are there yet."""
    lock = _lock()
    state = State.read()
    if lock is not None:
        if os.listdir(FOLDER) == ["lock"]:  # which we have just made; what is more than that a later lab looks at
            shutil.rmtree(FOLDER, ignore_errors=True)
        os.close(lock)
    if lock is None and state is not None and not state.hosts:
        raise UserError(f"the lab (pid {state.pid}) is still being made; say it again when it has shown its hosts")
    if lock is not None or state is None:
        raise UserError("no lab runs; start one: paceline lab --hosts 2 -- train --preset tiny")
    return state


def _own_lock() -> int:
    lock = _lock()
    if lock is None:
        state = State.read()
        raise UserError(
            f"a lab runs already (pid {state.pid if state else 'unknown'}), and there is one at a time; wait for its "
            "end, or stop it with Ctrl-C"
        )
    return lock


def _lock() -> int | None:
    """The lock's open file; None where another process has it."""
    while True:
        FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            descriptor = os.open(_path("lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # a lab that ends removes its folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(_path("lock")).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # it was removed between opening and locking: a lock that nobody else would see


def _sweep() -> list[Path]:
    """Removes what no kernel removes when a process ends: cgroups and files. Namespaces and links went with theirs.

    Returns what is gone by that."""
    files = [path for path in FOLDER.iterdir() if path.name != "lock"]
    groups = _groups() if files else None  # without a file a lab had made no group yet
    found = [groups, *files] if groups is not None and groups.exists() else files
    if groups is not None:
        remove_groups(groups)
    for path in files:
        if path.is_dir() and not path.is_symlink():  # where hosts mounted something, each for itself alone
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    return [path for path in found if not path.exists()]


def _groups() -> Path | None:
    """The folder of the last lab's cgroups: the one it noted; where its note cannot be read, the one we would make."""
    state = State.read()
    if state is not None:
        return Path(state.groups) if state.groups else None
    with contextlib.suppress(UserError, OSError):
        return Controller.find().top
    return None


def _path(name: str) -> Path:
    return FOLDER / name
