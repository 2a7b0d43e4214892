"""One lab of a name at a time: its lock, its parts, and the removal of what a killed lab left.

/run/paceline-lab/
  lock         flock(2), held by the running lab; the kernel releases it
  state.json   its pid, hosts and cgroups; for `paceline lab set` and for cleaning up
  hosts        the hosts' /etc/hosts
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
from paceline.tools.lab.processors import NAME, Controller, remove_groups

FOLDER = Path("/run", NAME)


@dataclass(kw_only=True)
class State:
    pid: int
    switch: int = 0  # the process that holds the bridge's namespace
    groups: str = ""  # folder of the hosts' cgroups; empty: none
    hosts: dict[str, int] = field(default_factory=dict)  # the first process of each, which holds its namespaces

    def write(self) -> None:
        replace(_path("state.json"), json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls) -> "State | None":
        """Returns what the last lab wrote; None if there is nothing, or it cannot be read."""
        try:
            return cls(**json.loads(_path("state.json").read_text()))
        except (OSError, ValueError, TypeError):  # another version has other fields
            return None


def write_names(addresses: dict[str, str]) -> Path:
    """Writes the hosts' /etc/hosts (name -> address); returns the file."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    # torch's store looks up its clients' addresses in IPv6 form, and warns if one has no name.
    lines += [f"::ffff:{address} {name}.mapped" for name, address in addresses.items()]
    path = _path("hosts")
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@contextmanager
def only_lab() -> Iterator[State]:
    """Yields the state of the only lab, locked by this process; removes its files at the end. First removes what a
    killed lab left. Raises UserError, naming the pid, if a lab is running."""
    lock = _own_lock()
    try:
        _sweep()
        state = State(pid=os.getpid())
        state.write()
        yield state
    finally:
        _sweep()
        shutil.rmtree(FOLDER, ignore_errors=True)  # with the lock file: _lock handles that
        os.close(lock)


def clean_up() -> list[Path]:
    """Removes what a killed lab left, and returns it. Raises UserError, naming the pid, if a lab is running."""
    lock = _own_lock()
    try:
        return _sweep()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.close(lock)


def running_lab() -> State:
    """Returns the running lab. Raises UserError if there is none, or it has not made all hosts yet."""
    lock = _lock()
    state = State.read()
    if lock is not None:
        if os.listdir(FOLDER) == ["lock"]:  # made by us just now; a later lab removes other files
            shutil.rmtree(FOLDER, ignore_errors=True)
        os.close(lock)
        raise UserError("no lab runs; start one: paceline lab --hosts 2 -- train --preset tiny")
    if state is None or not state.hosts:
        pid = state.pid if state else "unknown"
        raise UserError(f"the lab (pid {pid}) is still being made; try again when it has shown its hosts")
    return state


def _own_lock() -> int:
    lock = _lock()
    if lock is None:
        state = State.read()
        raise UserError(
            f"a lab runs already (pid {state.pid if state else 'unknown'}), and there is one at a time; wait for its "
            "end, stop it with Ctrl-C, or give this one a name: PACELINE_LAB=2 paceline lab ..."
        )
    return lock


def _lock() -> int | None:
    while True:
        try:
            FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(_path("lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # a lab removes its folder when it ends
        except OSError as error:
            raise UserError(
                f"cannot make {FOLDER}, where a lab keeps its state: {error.strerror}; make {FOLDER.parent} writable"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(_path("lock")).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # removed between opening and locking: nobody else would see this lock


def _sweep() -> list[Path]:
    """Removes cgroups and files, and returns them. The kernel has removed namespaces and links with their processes."""
    files = [path for path in FOLDER.iterdir() if path.name != "lock"]
    groups = _groups() if files else None  # without files a lab had made no group yet
    paths = [groups, *files] if groups is not None and groups.exists() else files
    if groups is not None:
        remove_groups(groups)
    for path in files:
        if path.is_dir() and not path.is_symlink():  # mount points of hosts
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    return [path for path in paths if not path.exists()]


def _groups() -> Path | None:
    """Returns the folder of the last lab's cgroups: as recorded; if that cannot be read, the default one."""
    state = State.read()
    if state is not None:
        return Path(state.groups) if state.groups else None
    with contextlib.suppress(UserError, OSError):
        return Controller.find().top
    return None


def _path(name: str) -> Path:
    return FOLDER / name
