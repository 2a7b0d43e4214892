"""For all tests: one thread, a cache of their own, and guards against what a test might leave behind."""

import contextlib
import functools
import gc
import importlib
import inspect
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: ranks of tests share few cores, and sums keep one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PACELINE_LAB"] = f"-test-{os.getpid()}"  # a lab of another process is no obstacle
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else torch's compiler leaves a pool of workers behind

import budget
import hypothesis
import namespaces
import psutil
import pytest
import workers

# A suite started by nohup, or by a shell in the background, ignores these and would hand that on to what it starts.
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _handler)

# Machines are shared: a slow example is no failure.
hypothesis.settings.register_profile("shared", deadline=None, max_examples=30)
hypothesis.settings.load_profile("shared")

_SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")  # beginnings of names

_CACHE = pytest.StashKey[str]()
_SERVERS = pytest.StashKey[list[Any]]()  # of ranks, one for each worker

# Begun first of the files, so that no process still has one of them to do when the others are done.
_LONGEST = (
    "test_slurm.py",
    "test_ssh.py",
    "test_injected.py",
    "test_local_ranks.py",
    "test_ends.py",
    "test_follow.py",
    "test_watchdog.py",
    "test_rendezvous.py",
    "test_restarts.py",
    "test_switches.py",
    "test_sources.py",
    "test_group.py",
    "test_readme.py",
    "test_coded.py",
    "test_prepare.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    budget.pytest_addoption(parser)
    workers.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    """The embedded corpus takes seconds to build: one cache for the session, and never the user's own."""
    budget.register(config)
    if num_workers := config.getoption("--workers"):
        config.pluginmanager.register(workers.Runner(num_workers, _group_of, partial(_begin_worker, config)))
    if "PACELINE_TEST_CACHE" in os.environ:  # kept between sessions, for whoever runs the suite again and again
        os.environ["PACELINE_CACHE"] = os.environ["PACELINE_TEST_CACHE"]
        return
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="paceline-test-cache-")
    os.environ["PACELINE_CACHE"] = config.stash[_CACHE]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ranks are forked from one process, which imports torch while tests are collected (tests/ranks.py). Those of the
    workers are forks of this process, before a test is imported and a tensor made: variables may then still be read."""
    if num_workers := session.config.getoption("--workers"):
        import ranks

        for name in ranks.IMPORTED:
            importlib.import_module(name)
        _compute_once()
        session.config.stash[_SERVERS] = [ranks.fork_server() for _ in range(num_workers)]
    elif not session.config.getoption("--few"):
        import ranks

        forkserver.ensure_running()
    gc.disable()  # collecting 3,000 tests makes a million objects, and each search of them finds nothing: 2 s of a core


def _compute_once() -> None:
    """What each run and each command would do again in the same process."""
    from paceline.world import processor

    # Measure this machine's peak; each host of a test has a name of its own, and so none that is kept.
    processor._KNOWN_BUDGET_S, processor._BUDGET_S = 0.0, 0.001
    inspect.getsource = functools.cache(inspect.getsource)  # tyro reads that of each dataclass


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A long text's id is its length: one was 5 MB, and each report has it."""
    return f"{argname}-{len(val)}" if isinstance(val, (str, bytes)) and len(val) > 200 else None


def _begin_worker(config: pytest.Config, number: int) -> None:
    import ranks

    config.pluginmanager.unregister(name="judge")
    ranks.use_server(config.stash[_SERVERS][number])


def _group_of(item: pytest.Item) -> str:
    """The tests of a group run in one process, one after another: those of labs and hosts,
    and a file's other tests."""
    folders = set(item.path.parts)
    if marker := item.get_closest_marker("group"):
        return str(marker.args[0])
    if item.get_closest_marker("alone") or item.get_closest_marker("lab"):
        return "hosts"  # labs have one name
    if "laws" in folders and not item.get_closest_marker("long"):
        return "laws"
    return "cuda" if "cuda" in folders else item.path.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the modelled GPU come first: autograd learns which devices there are at the first backward pass of a
    process. Then come labs and hosts, and the files that take longest."""
    items.sort(
        key=lambda item: (
            "cuda" not in item.path.parts,
            item.get_closest_marker("lab") is None,
            "laws" not in item.path.parts and item.path.name not in _LONGEST,
        )
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay
    gc.enable()


@pytest.fixture
def two_hosts() -> Iterator[list[namespaces.Host]]:
    try:
        with namespaces.two_hosts() as hosts:
            yield hosts
    except namespaces.Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(autouse=True)
def _leaves_no_process_behind() -> Iterator[None]:
    before = set(_processes())
    yield
    deadline = time.monotonic() + 60
    while leaked := [pid for pid in _processes() if pid not in before and _is_alive(pid)]:
        if time.monotonic() > deadline:
            pytest.fail(f"the test left processes behind: {[_command(pid) for pid in leaked]}")
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _leaves_the_environment_alone() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:  # so that one test's fault stays one test's failure
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"the test changed environment variables: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def _leaves_no_process_group_open() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group open")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LIBRARIES)}


def _processes() -> list[int]:
    """Returns the pids of all below this process, and below its server of ranks."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    found = _descendants(os.getpid())
    return found if server is None or server in found else found + _descendants(server)


def _descendants(pid: int) -> list[int]:
    """Returns the pids of all processes below this one. psutil looks at every process of the machine: 2 ms."""
    if not os.path.exists("/proc/thread-self/children"):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found + [below for child in found for below in _descendants(child)]


def _is_alive(pid: int) -> bool:
    """Python's own helpers of multiprocessing are left out: they end with the interpreter that started them."""
    if pid == getattr(forkserver._forkserver, "_forkserver_pid", None):  # started by the first test that has ranks
        return False
    try:
        process = psutil.Process(pid)
        if any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
            return False
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline()[:5])}"
    except psutil.NoSuchProcess:
        return str(pid)
