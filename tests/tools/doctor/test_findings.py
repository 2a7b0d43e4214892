"""What the doctor finds in reports of hosts, and on a host: nothing is broken for it."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from paceline.config import Config
from paceline.tools.doctor.compare import _speed, _versions
from paceline.tools.doctor.devices import driver
from paceline.tools.doctor.host import Place, busiest, described, interface
from paceline.tools.doctor.link import Listener, measure
from paceline.tools.doctor.meeting import Report

Versions = dict[str, str]


def reports(*notes: dict[str, Any]) -> dict[int, Report]:
    return {node: Report(host="abc"[node], notes=each) for node, each in enumerate(notes)}


@pytest.mark.parametrize(
    ("first", "second", "level", "fix"),
    [
        ({"NCCL": "2.27.3"}, {"NCCL": "2.21.5"}, "failure", "pip install torch==2.13.0"),
        ({"torch": "2.13.0"}, {"torch": "2.12.1"}, "failure", "pip install torch==2.13.0"),
        ({}, {"NCCL": "2.21.5"}, "failure", ""),
        ({"driver": "580.1"}, {}, "warning", "install driver 580.1"),
        ({}, {"driver": "580.1"}, "warning", ""),
    ],
)
def test_another_version_is_mended_by_what_can_be_installed(
    first: Versions, second: Versions, level: str, fix: str
) -> None:
    found = reports(*({"versions": {"torch": "2.13.0", **own}} for own in (first, second)))
    assert [(verdict[0], verdict[2]) for verdict in _versions(1, found)] == [(level, fix)]


def test_the_two_busiest_programs_are_named() -> None:
    """Mutation: the seconds since they began, by which a browser of last week is named."""
    before = {1: 900.0, 2: 3.0, 3: 0.0, 4: 5.0}
    after = {1: 900.01, 2: 3.4, 3: 0.3, 4: 5.2, 5: 0.5}
    assert busiest(before, after) == [2, 3]
    assert busiest(before, {**before, 4: 5.2}) == [4]
    assert described(os.getpid()).startswith(f"pid {os.getpid()} of ")


def test_a_host_whose_device_cannot_be_used_does_not_count_among_the_speeds() -> None:
    fast, slow = ({"ranks": [{"processor": "x"}], "flops": {"cuda:0": speed}} for speed in (4.0, 1.0))
    found = reports(fast, slow, {"ranks": [], "flops": {}})
    assert [[verdict[0] for verdict in _speed(node, found)] for node in range(3)] == [[], ["warning"], []]


def test_the_name_of_a_process_on_a_gpu_may_have_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(__file__).with_name("fake_driver.py"), tmp_path / "nvidia-smi")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    here = Place(host="a", config=Config(), has_config=False, out=tmp_path, num_ranks=1, world_size=1)
    here.notes["versions"] = {}
    assert "process 4321 (python, of a user) uses 69000 MiB of a GPU" in [seen for _, seen, _ in driver(here)]


@pytest.mark.parametrize(("address", "fix"), [("127.0.0.1", "give --hosts the addresses"), ("", "give --hosts")])
def test_the_remedy_for_listening_on_loopback_is_not_loopback(address: str, fix: str, tmp_path: Path) -> None:
    """Finds a remedy that is the fault: --parallel.interface lo."""
    config = Config().replace("parallel", interface="lo")
    place = Place(
        host="a", config=config, has_config=True, out=tmp_path, num_ranks=1, world_size=2, num_hosts=2, address=address
    )
    ((level, seen, remedy),) = interface(place)
    assert level == "failure"
    assert "other hosts do not reach 127.0.0.1" in seen
    assert remedy.startswith(fix)


def test_an_address_with_a_label_is_one_of_its_interface() -> None:
    listener = Listener("127.0.0.1")
    with patch("paceline.tools.doctor.link.interface_of", return_value="lo:1"):
        link = measure("127.0.0.1", listener.port, "127.0.0.1", is_quick=True)
    listener.close()
    assert (link.problem, link.interface) == ("", "lo")
    assert link.interface_mtu > 0
