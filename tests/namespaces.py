"""Two hosts on one machine: network namespaces joined by a cable, each with its own name and interface."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NEW_NET, _NEW_MOUNTS, _NEW_NAME = 0x40000000, 0x00020000, 0x04000000  # <linux/sched.h>
_BIND, _DETACH, _FOR_ITSELF = 4096, 2, 1 << 19 | 16384  # <linux/mount.h>: MS_SLAVE | MS_REC


class Unavailable(Exception):
    """This machine makes no network namespaces."""


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    """A network namespace with a name of its own."""

    name: str
    interface: str
    address: str

    def inside(self, *command: str) -> tuple[str, ...]:
        """Returns the command line that runs a command on this host, under its host name."""
        script = f'hostname {self.name} && exec "$0" "$@"'
        return ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", script, *command)

    def enter(self) -> None:
        """Moves this process, of one thread, there, as `inside` does: its network, /sys and /etc/hosts, its name."""
        libc = ctypes.CDLL(None, use_errno=True)

        def call(name: str, *arguments: object) -> None:
            if getattr(libc, name)(*arguments):
                raise OSError(ctypes.get_errno(), f"{name} {arguments}")

        with open(f"/run/netns/{self.name}") as network:
            call("setns", network.fileno(), _NEW_NET)
        call("unshare", _NEW_MOUNTS | _NEW_NAME)
        call("mount", b"none", b"/", None, _FOR_ITSELF, None)
        call("umount2", b"/sys", _DETACH)
        call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
        call("mount", f"/etc/netns/{self.name}/hosts".encode(), b"/etc/hosts", None, _BIND, None)
        socket.sethostname(self.name)

    def received_bytes(self) -> int:
        path = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        return int(sh("ip", "netns", "exec", self.name, "cat", path))

    def cable(self, state: str) -> None:
        """Pulls the cable out ("down") or puts it back ("up")."""
        sh("ip", "-n", self.name, "link", "set", self.interface, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Yields the hosts, and removes them. Raises Unavailable."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        raise Unavailable("two hosts as network namespaces take root, `ip` and `unshare`")
    tag = uuid.uuid4().hex[:6]
    hosts = [Host(f"pl{tag}{x}", f"ve{tag}{x}", f"10.77.0.{i}") for i, x in enumerate("ab", start=1)]
    resolvers = [Path("/etc/netns") / host.name for host in hosts]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        try:
            for host in hosts:
                sh("ip", "netns", "add", host.name)
            sh("ip", "link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"this machine makes no network namespaces: {error.stderr.strip()}") from None
        for host, resolver in zip(hosts, resolvers, strict=True):
            resolver.mkdir(parents=True)
            (resolver / "hosts").write_text(names)  # `ip netns exec` lays it over /etc/hosts
            sh("ip", "link", "set", host.interface, "netns", host.name)
            inside = ("ip", "-n", host.name)
            sh(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            sh(*inside, "link", "set", host.interface, "up")
            sh(*inside, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host, resolver in zip(hosts, resolvers, strict=True):
            shutil.rmtree(resolver, ignore_errors=True)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", host.interface], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()
