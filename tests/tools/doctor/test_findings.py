"""What the doctor finds in reports of hosts, and on a host: nothing is broken for it."""

import dataclasses
import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_facts import FACTS

from paceline.config import Config
from paceline.tools.doctor import devices, doctor, files
from paceline.tools.doctor.compare import _speed, _versions
from paceline.tools.doctor.devices import driver
from paceline.tools.doctor.finding import ok
from paceline.tools.doctor.host import Place, busiest, described, environment, interface, versions
from paceline.tools.doctor.link import Listener, largest_packet, measure
from paceline.tools.doctor.meeting import Report
from paceline.world import torch_version
from paceline.world.env import Environment

Versions = dict[str, str]


def place_of(out: Path, config: Config | None = None, **notes: Any) -> Place:
    of_host = {"host": "a", "num_ranks": 1, "world_size": 1}
    return Place(config=config or Config(), has_config=bool(config), out=out, notes=notes, **of_host)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    "version", ["2.10.0", "2.11.0+cu130", "2.13.0", "2.15.1.post2", "2.16.0.dev20261130", "2.1.5", "3.13"]
)
def test_a_torch_that_was_not_tested_is_a_warning(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: each is taken for tested. Finds texts compared as numbers or by their beginnings, too."""
    monkeypatch.setattr(torch_version, "TESTED", ("2.11", "2.12", "2.13", "2.14", "2.15"))
    monkeypatch.setattr(torch, "__version__", version)
    [(level, seen, fix)] = versions(place_of(tmp_path))
    assert all(part in seen for part in (f"torch {version}, ", "tested with torch 2.11 to 2.15"))
    if version[:5] in ("2.11.", "2.13.", "2.15."):
        assert (level, fix) == ("ok", "")
    else:
        assert level == "warning"
        assert fix == "pip install 'torch==2.15.*', or try this one: paceline verify --nproc 2"


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
    here = place_of(tmp_path, versions={})
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://me:secret@proxy:3128", "http://...@proxy:3128"),
        ("me:secret@proxy:3128", "...@proxy:3128"),
        ("http://me:se@cr/et@proxy", "http://...@proxy"),
        ("http://proxy:3128", "http://proxy:3128"),
    ],
)
def test_a_proxys_password_is_not_shown(
    value: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: only one after http://, or only up to the first @."""
    monkeypatch.setenv("https_proxy", value)
    place = place_of(tmp_path)
    assert ok(f"https_proxy={shown} downloads go through it, ranks do not") in list(environment(place))
    assert place.notes["variables"]["https_proxy"] == shown


def test_several_data_sets_are_read_in_the_time_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: that time for each, which is more than a check has: a failure."""

    def read_for_ever(advance: Any) -> None:
        while True:
            advance(1)

    seconds = itertools.count(step=0.125)
    large = SimpleNamespace(fingerprint="f", vocab_size=8, num_bytes=1 << 40, verify=read_for_ever)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(files, "inspect_data", lambda *_: None)
    monkeypatch.setattr(files, "is_dataset", lambda _: True)
    monkeypatch.setattr(files.Dataset, "open", lambda *_: large)
    place = place_of(tmp_path, Config().replace("data", mix=("a=1", "b=1", "c=1")))
    assert [level for level, _, _ in files.data(place)] == ["ok"] * 3
    assert files._VERIFY_S <= next(seconds) < files._VERIFY_S + 2
    assert place.notes["data"] == ["f"] * 3


def test_a_host_that_was_long_at_its_own_checks_still_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: it looks once, as its time is over, and says that they are missing."""
    now, left_s = [0.0], []

    def busy(*_: Any) -> None:
        now[0] += 20.0

    def looked(*arguments: Any) -> list[Any]:
        left_s.append(arguments[-1] - now[0])
        return []

    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(doctor, "_examine_alone", busy)
    monkeypatch.setattr(doctor, "_find_hosts", looked)
    monkeypatch.setattr(doctor, "_examine_together", lambda *_: ({}, []))
    place = dataclasses.replace(place_of(tmp_path), num_hosts=2, world_size=2)
    env = Environment(world_size=2, master_addr="127.0.0.1", master_port=29400)
    assert doctor.doctor(place, env, None, 15.0, as_json=False) == 0
    assert left_s == [7.5]


def test_a_plan_for_the_doctors_link_has_the_payload_that_the_doctor_measured() -> None:
    """Finds the headers taken off twice."""
    note, link = {"ranks": [{}]}, {"bytes_per_s": 119.625e6, "round_trip_us": 90.0}
    hosts = {node: Report(host="ab"[node], notes=note, links={str(1 - node): link}) for node in (0, 1)}
    expected = {"hosts": 2, "ranks_per_host": 1, "link_gbit": pytest.approx(1.0), "latency_us": 45.0}
    assert doctor._cluster(hosts) == expected


def test_on_a_mac_nothing_is_said_that_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_right", lambda *_: True)
    verdicts = devices._product(place_of(tmp_path, flops={}), torch.device("mps"), FACTS)
    assert list(verdicts) == [ok("mps (a processor): float32")]
    monkeypatch.setattr("sys.platform", "darwin")
    listener = Listener("127.0.0.1")
    assert largest_packet("127.0.0.1", listener.port, 1500) == 0
    listener.close()
