"""Runs the examples inside the process groups of Accelerate, Fabric and Ray Train on two CPU ranks, and compares the
losses with the toy's of one process. Not in CI: the three take 300 MB.

    pip install accelerate lightning-fabric "ray[train]"; python bench/adopt.py
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAUNCHED = {
    "toy/after.py": (),
    "adopt/with_accelerate.py": ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
    "adopt/with_fabric.py": (),
    "adopt/with_ray_train.py": (),
}


def losses(script: str) -> dict[int, float]:
    """Returns step -> the loss that the script prints, from all its processes."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
    command = (sys.executable, *LAUNCHED[script], str(EXAMPLES / script))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        sys.exit(f"{script}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    said = re.findall(r"step (\d+) loss ([\d.]+)", done.stdout + done.stderr)
    return {int(step): float(loss) for step, loss in said}


def main() -> int:
    expected, status = losses("toy/after.py"), 0
    for script in list(LAUNCHED)[1:]:
        began = time.monotonic()
        found = losses(script)
        furthest = max(abs(found.get(step, float("inf")) - loss) for step, loss in expected.items())
        took = time.monotonic() - began
        print(f"{script}: {len(found)} steps, furthest from one process {furthest:.1g}, {took:.0f} s", flush=True)
        status |= furthest > 1e-4
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
