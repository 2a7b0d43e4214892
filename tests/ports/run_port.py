"""python run_port.py KILL_AT SCRIPT ARGUMENTS: runs a script in its folder, with stand-ins for what it imports.

KILL_AT: rank 0 gets SIGKILL when it has made this step, before the step is recorded; 0: never.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import stand_ins

from paceline.replica.step import Step


def kill_at(number: int) -> None:
    finish = Step.finish

    def finish_or_die(step: Step, *arguments: Any, **options: Any) -> Any:
        result = finish(step, *arguments, **options)
        if step.number == number and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Step.finish = finish_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    at, script, *arguments = sys.argv[1:]
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    stand_ins.install()
    if int(at):
        kill_at(int(at))
    os.chdir(Path(script).parent)
    sys.path.insert(0, "")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
