"""Two hosts with a real sshd each, and keys made for them: OpenSSH's, as root, on network namespaces.

Python on a host imports torch for its launcher and for each rank: 3 s of a core each. With `--python` and `warm_python`
the agent is a fork of the server of ranks.py instead, with the namespaces, streams and environment that sshd gave it,
and so are the command that it becomes and its ranks.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import namespaces
from program import MARK, be_forked
from ranks import FORKS

SSHD = "/usr/sbin/sshd"
_SSHD_CONFIG = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PidFile none
SetEnv HOME={folder}
AcceptEnv PACELINE_TEST_MARK
"""
_SSH_CONFIG = """\
Host a closed stranger
  HostName {addresses[0]}
Host b locked
  HostName {addresses[1]}
Host closed
  Port 1
Host locked
  IdentityFile {folder}/stranger
Host * !locked
  IdentityFile {folder}/user
Host *
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking yes
  SendEnv PACELINE_TEST_MARK
Host a b locked
  HostKeyAlias known
"""
_AGENT = "paceline.launch.agent"
# Sends what it is to the server of agents, waits, and ends as the agent ended.
_WARM_PYTHON = """\
#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1:3] != ["-m", "{agent}"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{address}")
    request = [os.getpid(), sys.argv[1:], dict(os.environ), os.getcwd()]
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    status = int(server.recv(16) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
_NAMESPACES = ("net", "uts", "mnt")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class SshHosts:
    """Hosts a and b. ssh's config has three more names: closed (no sshd at its port), locked (another user key is
    offered), stranger (its host key is unknown)."""

    hosts: list[namespaces.Host]
    folder: Path
    servers: dict[str, int]  # host -> pid of its sshd

    @property
    def disk(self) -> Path:
        """A folder that is another one on each host, for what ssh starts."""
        return self.folder / "disk"

    def disk_of(self, number: int) -> Path:
        """What host `number` has there."""
        return self.folder / f"disk-{'ab'[number]}"

    def pids(self, number: int) -> list[int]:
        """What runs on this host, without its sshd."""
        here = namespaces.sh("ip", "netns", "pids", self.hosts[number].name).split()
        return [int(pid) for pid in here if int(pid) not in self.servers.values()]

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder}/ssh_config"

    @property
    def warm_python(self) -> str:
        return str(self.folder / "python")


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Yields the hosts, and removes them. Raises namespaces.Unavailable."""
    if not Path(SSHD).exists() or shutil.which("ssh-keygen") is None:
        raise namespaces.Unavailable("hosts by ssh take sshd (Debian: openssh-server)")
    with namespaces.two_hosts() as hosts, contextlib.ExitStack() as stack:
        for name in ("user", "host", "stranger"):
            namespaces.sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}")
        (folder / "known").write_text(f"known {(folder / 'host.pub').read_text()}")
        addresses = [host.address for host in hosts]
        (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder, addresses=addresses))
        Path("/run/sshd").mkdir(exist_ok=True)
        found = SshHosts(hosts, folder, {})
        stack.enter_context(_server_of_agents(found))
        found.disk.mkdir()
        for number, host in enumerate(hosts):
            found.disk_of(number).mkdir()
            sshd = f"{SSHD} -D -f {folder}/sshd_config -E {folder}/{host.name}.log"
            mount = f"mount --bind {found.disk_of(number)} {found.disk}"  # in the mounts of this host alone
            server = subprocess.Popen(host.inside("sh", "-c", f"{mount} && exec {sshd}"))
            found.servers[host.name] = server.pid
            stack.callback(server.wait)
            stack.callback(server.terminate)
        for name in "ab":
            _wait_for(hosts[0].inside(*found.ssh.split(), name, "true"))
        yield found


@contextlib.contextmanager
def _server_of_agents(pair: SshHosts) -> Iterator[None]:
    address, script = str(pair.folder / "agents"), Path(pair.warm_python)
    script.write_text(_WARM_PYTHON.format(python=sys.executable, agent=_AGENT, address=address))
    script.chmod(0o755)
    server = FORKS.Process(target=_serve_agents, args=(address,))
    server.start()
    try:
        yield
    finally:
        server.terminate()
        server.join()


def _serve_agents(address: str) -> None:
    """Forks a process for each request, which waits for the agent. Ends with the server of ranks, if nobody ends it."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(0.1)
        waiting: list[BaseProcess] = []
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                waiting.append(_FORK.Process(target=_wait_for_agent, args=(connection,)))
                waiting[-1].start()
                connection.close()
            waiting = [process for process in waiting if process.exitcode is None]


def _wait_for_agent(connection: socket.socket) -> None:
    message, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    agent = _FORK.Process(target=_be_an_agent, args=(*json.loads(message), streams))
    agent.start()
    for stream in streams:
        os.close(stream)
    agent.join()
    with contextlib.suppress(OSError):  # who waits for it was killed
        connection.send(str(agent.exitcode).encode())


def _be_an_agent(caller: int, words: list[str], env: dict[str, str], cwd: str, streams: Sequence[int]) -> None:
    """caller: the pid of a process in the namespaces that this one enters."""
    libc = ctypes.CDLL(None, use_errno=True)
    for file in [os.open(f"/proc/{caller}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    os.chdir(cwd)
    be_forked(words, env, streams, os.open(env[MARK].split()[1], os.O_WRONLY | os.O_APPEND))


def _wait_for(command: tuple[str, ...]) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, command
        time.sleep(0.05)
