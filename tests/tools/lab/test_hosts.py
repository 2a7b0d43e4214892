"""What is asked of a lab, before anything is made: rates, shares, cores; and how a share is written down."""

import math
import os
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.cores import physical_cores
from paceline.base.errors import UserError
from paceline.tools.lab import network, state
from paceline.tools.lab.hosts import divide_cores, lay_out, rate_text, read_rate, read_share
from paceline.tools.lab.processors import NAME, Controller, set_share


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("100mbit", 10**8), ("500kbit", 500_000), ("unlimited", None)],
)
def test_a_rate_is_read_and_written_the_same(text: str, bits: int | None) -> None:
    assert read_rate(text) == bits
    assert rate_text(bits) == text.lower()


@pytest.mark.parametrize("text", ["1g", "100", "-1gbit", "0mbit", "1000gbit", "fast", "1gbit 2", "9" * 310 + "gbit"])
def test_a_rate_that_cannot_be_is_refused_with_what_it_was(text: str) -> None:
    with pytest.raises(UserError, match=text):
        read_rate(text)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_kernel_without_ipv6_hears_nothing_of_it(
    has_ipv6: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses `addrgenmode`, and so each lab."""
    scripts = list[str]()
    monkeypatch.setattr(network, "_IPV6", tmp_path if has_ipv6 else tmp_path / "absent")
    monkeypatch.setattr(network, "inside", lambda pid, *command: command)
    monkeypatch.setattr(network, "call", lambda command, purpose, script="": scripts.append(script))
    monkeypatch.setattr(network, "attempt", lambda command: None)
    network.plug_in(1, lay_out(1, 1, "", "").hosts[0], 2)
    assert any("addrgenmode" in script for script in scripts) == has_ipv6


def test_a_folder_of_state_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").touch()
    monkeypatch.setattr(state, "FOLDER", tmp_path / "run" / "lab")
    with pytest.raises(UserError, match=r"cannot make .*run/lab, .*: Not a directory; make .*run writable"):
        state.running_lab()


@pytest.mark.parametrize("text", ["0", "0.01", "3", "-1", "nan", "inf", "half"])
def test_a_share_that_cannot_be_is_refused_with_what_it_was(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text}'.*from 0.1 to 2"):
        read_share(text, 2)


def test_a_group_that_the_kernel_does_not_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"could not make the cgroup .*/a of a host: No such file"):
        Controller(tmp_path, tmp_path / "missing", 2).make("a", 0.5)


def test_hosts_are_laid_out_one_after_the_other() -> None:
    hosts = lay_out(3, 2, "1gbit,100mbit,unlimited", "unlimited").hosts
    assert [(host.name, host.address, host.rate, list(host.ranks)) for host in hosts] == [
        ("a", "10.0.0.1", 10**9, [0, 1]),
        ("b", "10.0.0.2", 10**8, [2, 3]),
        ("c", "10.0.0.3", None, [4, 5]),
    ]
    assert "".join(host.name for host in lay_out(26, 1, "", "").hosts) == string.ascii_lowercase
    with pytest.raises(UserError, match="2 values for 3 hosts"):
        lay_out(3, 1, "1gbit,100mbit", "")
    with pytest.raises(UserError, match="--rate 1gbit, has no value for host b"):
        lay_out(2, 1, "1gbit,", "")


@given(
    num_cores=st.integers(1, 32),
    shares=st.lists(st.one_of(st.none(), st.floats(0.1, 8)), min_size=1, max_size=26),
)
def test_no_core_is_given_to_two_hosts(num_cores: int, shares: list[float | None]) -> None:
    cores = tuple(range(100, 100 + num_cores))
    divided = divide_cores(cores, shares)
    wanted = sum(math.ceil(share) if share else 1 for share in shares)
    assert (divided is None) == (wanted > num_cores)
    if divided is None:
        return
    given_out = [core for host in divided for core in host]
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= set(cores)
    assert all(len(host) >= (math.ceil(share) if share else 1) for host, share in zip(divided, shares, strict=True))
    unlimited = [len(host) for host, share in zip(divided, shares, strict=True) if not share]
    if unlimited:  # who may have all of the processors gets what is left, evenly
        assert len(given_out) == num_cores
        assert max(unlimited) - min(unlimited) <= 1


def test_hosts_are_given_cores_that_this_process_may_use() -> None:
    cores = physical_cores()
    assert cores
    assert set(cores) <= os.sched_getaffinity(0)


def test_a_share_is_written_as_version_2_reads_it(tmp_path: Path) -> None:
    """On a plain folder; what version 1 does with its files is seen in real labs."""
    controller = Controller(tmp_path, tmp_path, 2)
    (tmp_path / "cgroup.subtree_control").touch()
    controller.open()
    folder = controller.make("b", 0.35)
    assert folder == tmp_path / NAME / "b"
    assert (folder / "cpu.max").read_text() == "1750 5000"
    assert [path.read_text() for path in sorted(tmp_path.rglob("cgroup.subtree_control"))] == ["+cpu", "+cpu"]
    set_share(folder, None)
    assert (folder / "cpu.max").read_text() == "max 5000"
    set_share(folder, 0.04)
    assert (folder / "cpu.max").read_text() == "1000 25000"  # the kernel's least quota
