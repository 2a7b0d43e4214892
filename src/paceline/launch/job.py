"""The job of a rank: if the same command is started again after a failure, it resumes its run folder.

`--max-restarts` gives all attempts of a command one random name. People choose torchrun's run id and use it again
(`--rdzv-id 100`), so it counts only together with the command. A static rendezvous has none: there the agent, which
outlives its ranks, is the job. TORCHELASTIC_RESTART_COUNT is not enough: returning nodes have another.
"""

import hashlib
import os
import socket

import psutil

from paceline.base.process import has_launcher, start_ticks

JOB = "PACELINE_JOB"


def job_name(launcher_name: str, command: str) -> str | None:
    """Returns a name that only the attempts of this command share; None: nobody starts it again. launcher_name: the
    launcher's name for the job (empty: none). command: what its attempts have in common, on all hosts."""
    if has_launcher():
        return launcher_name
    if not launcher_name and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{launcher_name or _agent()} {hashlib.sha256(command.encode()).hexdigest()[:16]}"


def _agent() -> str:
    pid = os.getppid()
    return f"{socket.gethostname()}:{pid}:{start_ticks(pid) or psutil.Process(pid).create_time()}"
