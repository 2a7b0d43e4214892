"""Stands in for training where the launcher is tested: a launcher, or one of its ranks, in a tenth of a second.

    python stand_in.py launch RUN '{"num_ranks": 2, "max_restarts": 3, "lives": [["5 kill", "wait"], ["done", "done"]]}'

A life says what each rank does: rank 0 first writes rows up to a step, if it has a number; then the word's deed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.base.errors import PacelineError
from paceline.base.process import record_status
from paceline.launch.local import one_host, open_ranks

_CODES = {"done": 0, "fail": 1, "hurt": 1, "user": 2, "saved": 75}


def launch(run: Path, plan: dict[str, Any]) -> int:
    command = (sys.executable, __file__, "rank", str(run), json.dumps(plan))
    places = one_host(plan["num_ranks"], plan.get("port", 0))
    try:
        with open_ranks(command, run, grace_s=plan.get("grace_s", 120.0)) as ranks:
            return ranks.run_to_the_end(places, plan.get("max_restarts", 0))
    except KeyboardInterrupt:
        return 130
    except PacelineError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def rank(run: Path, plan: dict[str, Any]) -> int:
    number, attempt = int(os.environ["RANK"]), int(os.environ["PACELINE_ATTEMPT"])
    heard: list[int] = []
    for name in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, lambda got, _: heard.append(got))
    lives = plan["lives"]
    words = lives[min(attempt, len(lives) - 1)][number].split()
    with contextlib.suppress(ValueError):
        write_rows(run, int(words[0]))
    facts = {
        name: value for name, value in os.environ.items() if name.startswith(("PACELINE", "MASTER", "TORCHEL", "GLOO"))
    }
    note = run / f"life-{attempt}-rank-{number}.json"
    note.with_suffix(".new").write_text(json.dumps({**facts, "pid": os.getpid(), "time": time.monotonic()}))
    os.replace(note.with_suffix(".new"), note)
    return record_status(do(words[-1], heard, run))


def write_rows(run: Path, last: int) -> None:
    """As training does: an attempt begins again at step 3, and what was later is forgotten."""
    rows = [json.dumps({"step": step}) + "\n" for step in range(1, last + 1)]
    (run / "metrics.jsonl").write_text("".join(rows))
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "resume", "step": min(3, last)}) + "\n")


def do(deed: str, heard: list[int], run: Path) -> int:
    if deed in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
    if deed == "parent":
        subprocess.Popen(["sleep", "600"])
    while deed in ("wait", "hurt", "deaf", "parent", "save") and not heard:
        time.sleep(0.01)
    if heard:
        os.write(1, f"heard {signal.Signals(heard[0]).name}\n".encode())  # one write: ranks share the pipe
    while deed == "deaf":
        time.sleep(1)
    if deed == "save":
        (run / "checkpoints" / ".step-5.unfinished").mkdir(parents=True)
        with (run / "checkpoints" / ".step-5.unfinished" / "model").open("wb", buffering=0) as file:
            for _ in range(40):
                file.write(b"x")
                time.sleep(0.1)
    return _CODES.get(deed, 75)


if __name__ == "__main__":
    sys.exit({"launch": launch, "rank": rank}[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3])))
