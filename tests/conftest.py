"""For all tests: one thread, a cache of their own, and guards against what a test might leave behind."""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

# Before torch is imported anywhere: ranks of tests share few cores, and sums keep one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PACELINE_LAB"] = f"-test-{os.getpid()}"  # a lab of another process is no obstacle
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else torch's compiler leaves a pool of workers behind

import budget
import hypothesis
import namespaces
import psutil
import pytest

# A suite started by nohup, or by a shell in the background, ignores these and would hand that on to what it starts.
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _handler)

# Machines are shared: a slow example is no failure.
hypothesis.settings.register_profile("shared", deadline=None, max_examples=30)
hypothesis.settings.load_profile("shared")

_SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")  # beginnings of names

_CACHE = pytest.StashKey[str]()
pytest_addoption = budget.pytest_addoption

# Begun first of the files, so that no process still has one of them to do when the others are done.
_LONGEST = (
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
    "test_slurm.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """The embedded corpus takes seconds to build: one cache for the session, and never the user's own."""
    budget.register(config)
    if "PACELINE_TEST_CACHE" in os.environ:  # kept between sessions, for whoever runs the suite again and again
        os.environ["PACELINE_CACHE"] = os.environ["PACELINE_TEST_CACHE"]
        return
    if hasattr(config, "workerinput"):  # a process of pytest-xdist: the cache of the one that started it
        return
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="paceline-test-cache-")
    os.environ["PACELINE_CACHE"] = config.stash[_CACHE]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ranks are forked from one process, which imports torch while tests are collected (tests/ranks.py)."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # the process that starts pytest-xdist's others runs no test
    if not session.config.getoption("--few"):
        import ranks  # noqa: F401  what it is to import

        forkserver.ensure_running()
    gc.disable()  # collecting 3,000 tests makes a million objects, and each search of them finds nothing: 2 s of a core


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A long text's id is its length: pytest-xdist sends each id several times, and one was 5 MB."""
    return f"{argname}-{len(val)}" if isinstance(val, (str, bytes)) and len(val) > 200 else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup, tests that measure labs run in one process, one after another, and so do other tests of
    hosts, and a file's other tests. Tests of the modelled GPU come first: autograd learns which devices there are at
    the first backward pass of a process. Then come labs and hosts, and the files that take longest."""
    for item in items:
        folders = set(item.path.parts)
        if item.get_closest_marker("xdist_group"):
            continue
        if item.get_closest_marker("alone") or item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.xdist_group("lab" if folders & {"tools", "record"} else "hosts"))
        else:
            shares_runs = "laws" in folders and not item.get_closest_marker("long")
            group = "cuda" if "cuda" in folders else "laws" if shares_runs else item.path.name
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(
        key=lambda item: (
            "cuda" not in item.path.parts,
            item.get_closest_marker("lab") is None,
            "laws" not in item.path.parts and item.path.name not in _LONGEST,
        )
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules and tests stay
    gc.enable()
    if getattr(session.config.option, "loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "this pytest-xdist does not group tests"


@pytest.fixture
def two_hosts() -> Iterator[list[namespaces.Host]]:
    try:
        with namespaces.two_hosts() as hosts:
            yield hosts
    except namespaces.Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(autouse=True)
def _leaves_no_process_behind() -> Iterator[None]:
    before = set(_descendants(os.getpid()))
    yield
    deadline = time.monotonic() + 60
    while leaked := [pid for pid in _descendants(os.getpid()) if pid not in before and _is_alive(pid)]:
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
