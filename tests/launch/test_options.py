"""Lists of hosts, by the names that ssh knows, or by address."""

import dataclasses
from pathlib import Path

import pytest

from paceline.base.errors import UserError
from paceline.cli.start import find_world
from paceline.launch.options import own_place, read_names
from paceline.world.config import ParallelConfig
from paceline.world.schedulers import Pod


@pytest.mark.parametrize(
    ("names", "node", "says"),
    [
        ("a..b,127.0.0.1", 0, "does not resolve: it is no name of a host"),
        ("127.0.0.1", 0, "two or more hosts"),
        ("127.0.0.1,127.0.0.2", -1, "several are an address.*--node-rank"),
        ("203.0.113.1,203.0.113.2", -1, "none is an address"),
        ("127.0.0.1,127.0.0.2", 2, "--node-rank is 2; the list of hosts has places 0 to 1"),
        ("0.0.0.0,127.0.0.1", 0, "name the address at which the other hosts reach it"),
        ("127.0.0.1,203.0.113.2", 0, "name the address at which the other hosts reach it"),
    ],
)
def test_a_list_of_addresses_that_cannot_be_used_is_refused(names: str, node: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        own_place(names.split(","), node)


def test_the_place_of_this_host_among_others() -> None:
    assert own_place(["127.0.0.1", "127.0.0.2"], 1) == 1


def test_names_of_hosts_as_ssh_and_mpirun_have_them(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=2\n\nme@b:auto  # the second\nc\n")
    expected = [("a", "2"), ("me@b", "auto"), ("c", "1")]
    assert list(map(dataclasses.astuple, read_names("", str(file)))) == expected
    assert list(map(dataclasses.astuple, read_names("a:2, me@b:auto,c", ""))) == expected


@pytest.mark.parametrize(
    ("text", "file", "says"),
    [
        ("", "", "which hosts"),
        ("a:2", "file", "which hosts"),
        ("", "/nonexistent", "cannot read --hostfile /nonexistent"),
        ("a:2,a:1", "", "each host once"),
        ("a:29400,b:29400", "", "'a:29400' is no host.*a port is given by --parallel.port"),
        ("a:1025", "", "RANKS is at most 1024"),
        ("fd00::1,10.0.0.2", "", "'fd00::1' is an IPv6 address; give the host's name"),
        ("[fe80::1]:2", "", "is an IPv6 address"),
        ("a:0", "", "is no host"),
        ("-oProxyCommand=x", "", "is no host"),
    ],
)
def test_names_that_cannot_be_used_are_refused(text: str, file: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_names(text, file)


def test_a_pod_is_told_of_the_variable_that_it_has() -> None:
    with pytest.raises(UserError, match="PET_NPROC_PER_NODE is '0'; it must be a number of ranks from 1 to 1024"):
        find_world("1", ParallelConfig(), pod=Pod(0, 2, "0", "a", 1))
