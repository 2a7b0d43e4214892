"""paceline slurm"""

import sys
from pathlib import Path

from paceline.cli.flags import parse
from paceline.cli.scheduled import options_and_command, require_positive
from paceline.tools.jobs.slurm import Slurm, batch_script


def main(arguments: list[str]) -> int:
    options, command = options_and_command("slurm", arguments, "starts the ranks: give --nodes and --tasks-per-node")
    parsed = parse(Slurm, Slurm(), options, "slurm")
    require_positive(parsed, "nodes", "tasks_per_node", "save_before_s")
    name = Path(command[command.index("--out") + 1]).name
    print(batch_script(parsed, name, [sys.executable, "-m", "paceline", *command]), end="")
    return 0
