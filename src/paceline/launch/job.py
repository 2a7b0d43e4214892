"""Which job a rank belongs to: the same command may be started again after a failure, and its folder is its own.

`--max-restarts` gives all attempts of a command one random name. torchrun gives its run id, which people choose
themselves and use again (`--rdzv-id 100`), so it counts only together with what the command says; a static rendezvous
has none, and there the agent itself, which outlives its ranks, is the job. TORCHELASTIC_RESTART_COUNT alone would not
do: it differs between nodes once one of them has gone and come back.
"""

import hashlib
import os
import socket
from pathlib import Path

import psutil

from paceline.base.status import has_launcher

JOB, ATTEMPT = "PACELINE_JOB", "PACELINE_ATTEMPT"


def job_name(given: str, command: str) -> str | None:
    """Returns a name that all lives of this command share, and no other command has; None: nobody starts it again.

    given is the launcher's name for the job (empty: none), command what its lives, on all hosts, have in common.
    """
    if has_launcher():
        return given
    if not given and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{given or _agent()} {hashlib.sha256(command.encode()).hexdigest()[:16]}"


def _agent() -> str:
    """Names the process that started this one, and no later one that gets its number."""
    pid = os.getppid()
    stat = Path(f"/proc/{pid}/stat")
    # Ticks since boot: psutil's seconds since 1970 move when the clock is set.
    since = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else psutil.Process(pid).create_time()
    return f"{socket.gethostname()}:{pid}:{since}"
