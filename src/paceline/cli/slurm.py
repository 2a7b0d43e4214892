"""paceline slurm"""

import sys
from pathlib import Path

from paceline.cli.flags import parse
from paceline.cli.scheduled import divided, require_positive, train_command
from paceline.tools.jobs.slurm import Slurm, batch_script


def main(arguments: list[str]) -> int:
    options, flags = divided(arguments)
    parsed = parse(Slurm, Slurm(), options, "slurm")
    command = train_command("slurm", flags, "starts the ranks: give --nodes and --tasks-per-node")
    require_positive(parsed, "nodes", "tasks_per_node", "save_before_s")
    name = Path(command[command.index("--out") + 1]).name
    print(batch_script(parsed, name, [sys.executable, "-m", "paceline", *command]), end="")
    return 0
