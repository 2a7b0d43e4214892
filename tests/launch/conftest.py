"""Two hosts with real sshd, for the tests of a file."""

from collections.abc import Iterator

import namespaces
import pytest
from ssh_hosts import SshHosts, ssh_hosts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    try:
        with ssh_hosts(tmp_path_factory.mktemp("ssh")) as found:
            yield found
    except namespaces.Unavailable as why:
        pytest.skip(str(why))
