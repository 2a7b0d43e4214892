"""Says which tests cost more than their kind may: processor time, which another program on the machine does not change.

A short test may cost two worlds of two ranks (`run_ranks(nothing, 2)`, measured in the same run); what a fixture that
several tests share costs is counted apart. The processor time is that of this process, of the commands that it waited
for, and of the ranks and commands that were forked from the server of ranks.py, with all that they waited for.

    pytest --costs costs.jsonl ...       # also writes one JSON object for each test: id, cpu_s, long
    python tests/budget.py costs.jsonl   # processor seconds by folder
"""

import collections
import json
import os
import statistics
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

_WORLDS = 2  # what a short test may cost
_WORTH_A_LINE = 12  # of those above it
_COST = "cpu_s"
_SHARED = "shared_cpu_s"
_WORLD = "world_cpu_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="append each test's processor time to this file, as JSON lines")
    parser.addoption("--few", action="store_true", help="run a few tests: no costs, no server of ranks ahead of need")


class Meter:
    """In a process that runs tests: adds its cost to each test's last report."""

    def __init__(self) -> None:
        self._began_at = self._shared = 0.0
        self._world: float | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        if self._world is None:
            self._world = _cost_of_a_world()
        self._began_at, self._shared = _cpu_s(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before, shared = _cpu_s(), self._shared
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":  # those that it asks for are within it
                self._shared = shared + _cpu_s() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            costs = {_COST: _cpu_s() - self._began_at - self._shared, _SHARED: self._shared, _WORLD: self._world}
            report.user_properties += costs.items()
            report.user_properties.append(("long", item.get_closest_marker("long") is not None))
        return report


class Judge:
    """In the process that reports: collects the costs, and says at the end which are too high."""

    def __init__(self, path: str | None):
        self._path = path
        self._worlds: list[float] = []
        self._short: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        costs = dict(report.user_properties)
        if report.when != "teardown" or _COST not in costs:
            return
        if self._path:
            row = {"id": report.nodeid, _COST: round(costs[_COST], 3), _SHARED: round(costs[_SHARED], 3)}
            with open(self._path, "a") as file:
                file.write(json.dumps({**row, "long": costs["long"]}) + "\n")
        self._worlds.append(costs[_WORLD])
        if not costs["long"]:
            self._short[report.nodeid] = costs[_COST]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._worlds:
            return
        most = _WORLDS * statistics.median(self._worlds)
        above = sorted(((cost, test) for test, cost in self._short.items() if cost > most), reverse=True)
        if above:
            what = f"{len(above)} short tests cost more than {most:.2f} s of a core, {_WORLDS} worlds of two ranks"
            terminalreporter.write_line(f"{what}: make them cheaper, or mark them long")
            for cost, test in above[:_WORTH_A_LINE]:
                terminalreporter.write_line(f"  {cost:5.2f} s  {test}")


def register(config: pytest.Config) -> None:
    """Call it from pytest_configure."""
    if config.getoption("--few"):
        return
    config.pluginmanager.register(Meter())
    config.pluginmanager.register(Judge(config.getoption("--costs")), "judge")


def _cost_of_a_world() -> float:
    """Returns the processor time of the second of two worlds of two ranks; the first pays for imports."""
    import ranks

    costs = []
    for _ in range(2):
        before = _cpu_s()
        ranks.run_ranks(_nothing, 2)
        costs.append(_cpu_s() - before)
    return costs[-1]


def _nothing(world: object) -> None:
    pass


def _cpu_s() -> float:
    here = os.times()
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return here.user + here.system + here.children_user + here.children_system + _cpu_s_of(server)


def _cpu_s_of(pid: int | None) -> float:
    """Returns the processor time of a process and of those that it has waited for."""
    if pid is None or not os.path.exists(f"/proc/{pid}/stat"):
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime: proc(5)


def _print_by_folder(path: str) -> None:
    sums: dict[tuple[str, bool], list[float]] = collections.defaultdict(list)
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        parts = row["id"].split("::")[0].split("/")
        for folder in ("/".join(parts[1:-1][:2]), "all"):
            sums[folder, row["long"]].append(row[_COST] + row[_SHARED])
    print(f"{'folder':24} {'short':>6} {'CPU s':>8} {'long':>6} {'CPU s':>8}")
    for folder in sorted({name for name, _ in sums}, key=lambda name: -sum(sums[name, False])):
        short, long = sums[folder, False], sums[folder, True]
        print(f"{folder:24} {len(short):6} {sum(short):8.1f} {len(long):6} {sum(long):8.1f}")


if __name__ == "__main__":
    _print_by_folder(sys.argv[1])
