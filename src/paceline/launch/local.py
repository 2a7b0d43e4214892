"""`--nproc N`: N ranks of this command on this machine, through torch's elastic agent.

The agent starts the ranks, and ends the others when one fails. Each rank notes its exit status in a folder of ours,
because the agent's own report knows only success and failure: 75 ("saved, start me again") is neither.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from paceline.base.errors import EXIT_DONE, EXIT_RESUMABLE, EXIT_USER, RunError
from paceline.launch.status import LAUNCHER, STATUS_FOLDER, Status, read_statuses

_SAVE_GRACE_S = 60  # after SIGTERM or Ctrl-C: to end the step and save


def start_ranks(num_ranks: int, arguments: Sequence[str], port: int, interface: str) -> int:
    """Runs `python -m paceline ARGUMENTS` as ranks 0..num_ranks-1 and returns their common exit status.

    Raises RunError naming the first rank that died without a word of its own. port 0: any free one. Without an
    interface everything stays on the loopback one.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # its tracebacks bury the message of the rank concerned
    loopback = _loopback()
    if not interface and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        statuses = Path(scratch) / "statuses"
        statuses.mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            shutdown_timeout=_SAVE_GRACE_S,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(scratch) / "agent")),  # else it leaves a folder in /tmp
        )
        os.environ[STATUS_FOLDER] = str(statuses)
        os.environ[LAUNCHER] = str(os.getpid())
        failure: ChildFailedError | None = None
        try:
            elastic_launch(config, sys.executable)("-m", "paceline", *arguments)
        except ChildFailedError as error:
            failure = error
        except SignalException as error:
            if not list(statuses.iterdir()):
                raise RunError(f"stopped by {signal.Signals(error.sigval).name} before training began") from None
        found = read_statuses(statuses)
    return _common_status(found, num_ranks, failure)


def _common_status(found: dict[int, Status], num_ranks: int, failure: Exception | None) -> int:
    """One exit status for all ranks: 2 beats 1 beats 75 beats 0. What no rank could say is said here."""
    codes = [status.code for status in found.values()]
    if EXIT_USER in codes:
        return EXIT_USER
    silent = [rank for rank in range(num_ranks) if rank not in found]
    if silent:
        raise RunError(_who_died(silent, failure))
    failed = [status for status in found.values() if status.code not in (EXIT_DONE, EXIT_RESUMABLE)]
    if failed and all(status.consequence for status in failed):  # nobody died, and nobody said why
        raise RunError(str(failed[0].consequence))
    return failed[0].code if failed else max(codes)


def _who_died(silent: list[int], failure: Exception | None) -> str:
    reports = getattr(failure, "failures", {})
    for rank in silent:
        code = getattr(reports.get(rank), "exitcode", None)
        if isinstance(code, int) and code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" else ""
            return f"rank {rank} was killed by {name}{hint}; the other ranks were stopped"
    return f"rank {', '.join(map(str, silent))} ended without a word; the other ranks were stopped"


def _loopback() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return None
