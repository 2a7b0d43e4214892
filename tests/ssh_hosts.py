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
        found = SshHosts(hosts, folder)
        for host in hosts:
            line = host.inside(SSHD, "-D", "-f", f"{folder}/sshd_config", "-E", f"{folder}/{host.name}.log")
            server = subprocess.Popen(line)
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
