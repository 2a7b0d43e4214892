"""A program for tests of joining: all-reduces in a loop, a line of JSON for each, until a file named `stop` appears.

python all_reduces.py FOLDER INTERFACE TIMEOUT_S
"""

import json
import sys
import time
from pathlib import Path

import torch

from paceline.base.errors import PacelineError
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import open_world


def main(folder: Path, interface: str, timeout_s: float) -> int:
    env = detect()
    began = time.monotonic()
    with (folder / f"rank-{env.rank}.jsonl").open("a", buffering=1) as told:

        def tell(**what: object) -> None:
            print(json.dumps({"at_s": time.monotonic(), "attempt": env.attempt, **what}), file=told)

        try:
            config = ParallelConfig(device="cpu", threads=1, interface=interface, timeout_s=timeout_s)
            with open_world(config, env) as world:
                tell(opened=world.generation, took_s=time.monotonic() - began, warnings=world.warnings)
                stop = torch.zeros(1)
                while not stop.item():
                    stop.fill_(float((folder / "stop").exists()))
                    world.group.all_reduce(stop, "max")
                    tell(generation=world.generation, world_size=world.world_size)
                    time.sleep(0.02)
        except PacelineError as error:
            tell(error=str(error), status=error.exit_status)
            print(f"rank {env.rank}: {error}", file=sys.stderr, flush=True)
            return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
