"""One attempt: the ranks of one host, started and watched by torch's elastic agent.

Two things are ours. The meeting point: one host has nobody to meet, so what is left of a rendezvous is the ranks'
store, which listens on the loopback interface alone and is new for each attempt: no rank can read there where the dead
of an earlier attempt listened. And the end: after a failure torch's agent waits 30 s for ranks that hang (2 s here),
and it turns signals into a failure, where here the ranks get them and decide together.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig

from paceline.base.net import listen
from paceline.base.status import read_statuses
from paceline.launch.signals import Asked, has_handler

_HOST = "127.0.0.1"
_LOOK_EVERY_S = 0.05
_FAILURE_GRACE_S = 2.0  # for the other ranks: those that wait for the dead one notice within 0.1 s and say goodbye
_SAVE_GRACE_S = 60.0  # after a signal: to end the step and save


def run_attempt(
    num_ranks: int, command: Sequence[str], job: str, port: int, asked: Asked, statuses: Path
) -> dict[int, int]:
    """Runs the command as ranks 0..num_ranks-1 until all have ended; nothing of them is left then.

    statuses is the folder in which ranks note how they end; one that has done so after a failure is not waited for.
    Returns rank -> exit status (negative: the signal that killed it) of those that ended by themselves or by somebody
    else's doing, in the order of their ends. Ranks that were killed here are not in it.
    """
    logs = DefaultLogsSpecs(log_dir=str(statuses / "agent"))  # else it leaves a folder in /tmp
    spec = WorkerSpec(
        role="trainer",
        local_world_size=num_ranks,
        rdzv_handler=_OneHost(job, port),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        monitor_interval=_LOOK_EVERY_S,
        # torch's own choice: where each rank has a GPU, the cores beside it.
        numa_options=LaunchConfig(1, 1, num_ranks, logs_specs=logs).numa_options,
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # none: `asked` has them
    agent = _Agent(spec, logs, asked, statuses)
    agent.run()
    return agent.ends


class _OneHost(RendezvousHandler):
    """A world of one host: nothing to agree on, and a store that this process holds."""

    def __init__(self, job: str, port: int):
        self._job, self._port = job, port

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the store; none of them hosts one."""
        return True

    def get_backend(self) -> str:
        return "one-host"

    def next_rendezvous(self) -> RendezvousInfo:
        listener = listen(_HOST, self._port)
        port = listener.getsockname()[1]
        store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._job

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """Passes signals on to the ranks, and has short patience with those that outlive a failure."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, asked: Asked, statuses: Path):
        super().__init__(spec, logs)
        self.ends: dict[int, int] = {}
        self._asked, self._statuses = asked, statuses
        self._was_passed_on = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if self._has_failure():  # torch's own answer would be SIGTERM, 30 s, SIGKILL
            until = time.monotonic() + _FAILURE_GRACE_S
            while self._speaking() and time.monotonic() < until and not self._asked.is_urgent:
                time.sleep(_LOOK_EVERY_S)
                self._look()
            self._kill_all()
        elif self._asked.is_urgent or self._is_overdue():
            self._kill_all()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Called last on every way out, an exception's included."""
        self._kill_all()
        super()._shutdown(*args, **kwargs)

    def _look(self) -> None:
        """Notes who has ended since, and tells the living what was asked."""
        for rank, process in self._processes().items():
            code = process.poll()
            if code is not None and rank not in self.ends:
                self.ends[rank] = code
        if self._asked.first is not None and not self._was_passed_on:
            self._was_passed_on = True
            for rank in self._alive():
                process = self._processes()[rank]
                # Before it trains a rank has nothing to save, and Python would answer Ctrl-C with a traceback.
                is_ready = has_handler(process.pid, signal.SIGTERM)
                process.send_signal(self._asked.passed_on if is_ready else signal.SIGTERM)

    def _has_failure(self) -> bool:
        statuses = read_statuses(self._statuses).values()
        return any(self.ends.values()) or not all(status.is_good for status in statuses)

    def _speaking(self) -> list[int]:
        """Ranks that may have something to say yet. Who has noted a status has not: what is left of him is an
        interpreter that takes torch down, which lasts 0.7 s."""
        return [rank for rank in self._alive() if rank not in read_statuses(self._statuses)]

    def _is_overdue(self) -> bool:
        return self._asked.since_s is not None and time.monotonic() - self._asked.since_s > _SAVE_GRACE_S

    def _alive(self) -> list[int]:
        return [rank for rank in self._processes() if rank not in self.ends]

    def _kill_all(self) -> None:
        """Ends what is left, processes that ranks started included: each rank leads a process group of its own."""
        for process in self._processes().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _processes(self) -> dict[int, Any]:
        """Rank -> its subprocess.Popen."""
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}  # none was started
        return {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
