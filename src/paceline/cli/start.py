"""What train and resume share: refuse early what cannot work, then be a rank or start some."""

from pathlib import Path

from paceline.base.errors import UserError
from paceline.record import folder as run_folder
from paceline.train.request import Request
from paceline.world.env import Environment, check_interface, check_master, check_port, detect

_MOST_AUTOMATIC_RANKS = 4


def start(request: Request, nproc: str, arguments: list[str]) -> int:
    """Trains as this process, or as `nproc` local ranks of the command line `arguments`; returns the exit status.

    Everything that can be refused without starting a process or reading a corpus is refused first.
    """
    config = request.config
    env = detect()
    num_ranks = _num_ranks(nproc, env)
    check_interface(config.parallel.interface)
    check_master(env)
    if not env.is_distributed:
        check_port(config.parallel.port)
    from paceline.data.cache import inspect_data  # numpy and the tokenizers' libraries from here on: a quarter second

    inspect_data(config.data, config.model.vocab_size)
    if env.rank == 0:
        if request.out is None or request.resume:
            run_folder.check_writable(request.out or Path("runs"))
        else:
            run_folder.check_new(request.out)
    from paceline.world.device import choose_device  # torch from here on: seconds

    if num_ranks == 1:
        choose_device(config.parallel.device, env.local_rank, env.local_world_size, env.world_size)
        from paceline.train.loop import train

        return train(request, env)
    for local_rank in range(num_ranks):
        choose_device(config.parallel.device, local_rank, num_ranks, num_ranks)
    from paceline.launch.local import start_ranks

    return start_ranks(num_ranks, arguments, config.parallel.port, config.parallel.interface)


def _num_ranks(nproc: str, env: Environment) -> int:
    """Ranks for this process to start; 1: be one itself."""
    if env.is_distributed:
        if nproc != "1":
            raise UserError(f"--nproc {nproc} inside a world that a launcher made already; give the number to it alone")
        return 1
    if nproc == "auto":
        from paceline.world.cores import usable_cores

        return min(usable_cores(), _MOST_AUTOMATIC_RANKS)
    if not nproc.isdigit() or not 1 <= int(nproc) <= 1024:
        raise UserError(f"--nproc is '{nproc}'; it must be a number of ranks from 1 to 1024, or auto")
    return int(nproc)


def without(arguments: list[str], *names: str) -> list[str]:
    """Returns the arguments without these flags and their values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument.split("=", 1)[0] not in names:
            kept.append(argument)
    return kept
