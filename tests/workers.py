"""Runs the tests in several processes, which are forked when torch is imported and the tests are collected.

    pytest --workers 3 ...

pytest-xdist imports and collects in each of its processes, and each needs a server of ranks that imports torch again.
Here that happens once. A worker gets groups of tests (`group_of` in conftest.py), one after another, and sends the
reports; the process that has collected shows them. A worker that dies fails the test that it was at, and another takes
its place.
"""

import contextlib
import io
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

Group = list[int]  # numbers of tests in session.items


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forked processes")


@dataclass
class Worker:
    """A forked process, as the process that has collected sees it."""

    number: int
    pid: int
    connection: Connection
    todo: Group = field(default_factory=list)


class Runner:
    """In the process that collects: forks the workers, hands out the groups, and reports."""

    def __init__(self, num_workers: int, group_of: Callable[[pytest.Item], str], begin: Callable[[int], None]):
        """begin: what a worker calls first, with its number."""
        self._num_workers, self._group_of, self._begin = num_workers, group_of, begin
        self._workers: list[Worker] = []
        self._free = list(range(num_workers))  # numbers of workers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop says why
        waiting = deque(self._groups(session.items))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all
        try:
            while len(self._workers) < min(self._num_workers, len(waiting)):
                self._fork(session)
            while self._workers:
                for worker in self._that_said_something():
                    self._listen(session, worker, waiting)
                if session.shouldfail or session.shouldstop:
                    waiting.clear()
                    self._stop()
        finally:
            self._stop()
            for worker in self._workers:
                os.waitpid(worker.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _groups(self, items: Sequence[pytest.Item]) -> list[Group]:
        groups: dict[str, Group] = {}
        for number, item in enumerate(items):
            groups.setdefault(self._group_of(item), []).append(number)
        return list(groups.values())

    def _fork(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        number = self._free.pop(0)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *(worker.connection for worker in self._workers)):
                connection.close()
            session.config.pluginmanager.unregister(self)
            _be_a_worker(session, theirs, partial(self._begin, number))
        theirs.close()
        self._workers.append(Worker(number, pid, ours))

    def _that_said_something(self) -> list[Worker]:
        ready = wait([worker.connection for worker in self._workers])
        return [worker for worker in self._workers if worker.connection in ready]

    def _listen(self, session: pytest.Session, worker: Worker, waiting: deque[Group]) -> None:
        hook = session.config.hook
        try:
            kind, said = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._bury(session, worker, waiting)
            return
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=said)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=said)
        elif kind == "begun":
            del worker.todo[: worker.todo.index(said)]
        elif kind == "ended":  # as it was told to
            worker.todo = []
        else:
            worker.todo = waiting.popleft() if waiting else []
            with contextlib.suppress(ConnectionError):
                worker.connection.send(worker.todo)

    def _bury(self, session: pytest.Session, worker: Worker, waiting: deque[Group]) -> None:
        self._workers.remove(worker)
        self._free.append(worker.number)
        _, status = os.waitpid(worker.pid, 0)
        if not worker.todo:
            return
        item = session.items[worker.todo[0]]
        why = f"the process that ran it ended with {os.waitstatus_to_exitcode(status)}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if worker.todo[1:]:
            waiting.appendleft(worker.todo[1:])
        if waiting and not session.shouldfail:
            self._fork(session)

    def _stop(self) -> None:
        """Each worker ends after the test that it is at."""
        for worker in self._workers:
            with contextlib.suppress(ConnectionError):
                worker.connection.send([])


def _be_a_worker(session: pytest.Session, connection: Connection, begin: Callable[[], None]) -> None:
    status = 1
    try:
        _speak_through(session.config, connection)
        begin()
        while True:
            connection.send(("done", None))
            group = connection.recv()
            if not group or not _run(session, connection, group):
                break
        connection.send(("ended", None))
        status = 0
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other process has ended, or ends
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    finally:
        util._exit_function()  # type: ignore[attr-defined]  # multiprocessing's own files
        os._exit(status)


def _run(session: pytest.Session, connection: Connection, group: Group) -> bool:
    """Returns whether all of them ran."""
    items = [session.items[number] for number in group]
    try:
        for number, item, following in zip(group, items, [*items[1:], None], strict=True):
            if connection.poll():
                return False
            connection.send(("begun", number))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True
    finally:
        session._setupstate.teardown_exact(None)  # what a group broken off shares


def _speak_through(config: pytest.Config, connection: Connection) -> None:
    """Reports and warnings go to the other process; what pytest holds of the terminal and of files is made anew."""
    plugins = config.pluginmanager
    plugins.register(_Reports(config, connection))
    plugins.getplugin("terminalreporter")._tw._file = io.StringIO()
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{os.getpid()}"
    factory._basetemp.mkdir()


class _Reports:
    def __init__(self, config: pytest.Config, connection: Connection):
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        text = warnings.WarningMessage(
            str(warning_message.message), warning_message.category, warning_message.filename, warning_message.lineno
        )
        said = {"warning_message": text, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", said))
