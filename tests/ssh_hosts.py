"""Two hosts with a real sshd each, and keys made for them: OpenSSH's, as root, on network namespaces."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import namespaces

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


def _wait_for(command: tuple[str, ...]) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, command
        time.sleep(0.05)
