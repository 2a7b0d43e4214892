"""Shared by train and resume: refuse early what cannot work, then be a rank or start ranks."""

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from paceline.base import units
from paceline.base.errors import EXIT_RESUMABLE, UserError
from paceline.base.parent import die_with_parent
from paceline.base.status import LAUNCHER
from paceline.checkpoint.steps import require_step
from paceline.cli.flags import without
from paceline.config import Config, flatten
from paceline.launch.job import job_name
from paceline.record import folder as run_folder
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.cores import usable_cores
from paceline.world.env import Environment, check_interface, check_master, check_port, check_size, detect
from paceline.world.memory import free_memory

_MOST_AUTOMATIC_RANKS = 4
_RANK_BYTES = 200 << 20  # a rank's memory before it has a model: torch and our libraries, measured on Linux
_RUNS = Path("runs")
_FIRST_S = 2.0  # torchrun ends all ranks as soon as one ends: rank 0 prints its message first
_STORE_HOST = "127.0.0.1"  # where --nproc's ranks meet


def start(request: Request, nproc: str, max_restarts: int, arguments: list[str]) -> int:
    """Trains as this process, or as `nproc` local ranks of the command line `arguments`; returns the exit status.
    Everything that can be refused without starting a process or reading a corpus is refused first."""
    config = request.config
    env, num_ranks = find_world(nproc, config.parallel, max_restarts)
    if env.is_distributed:
        die_with_parent(int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None)
    from paceline.data.cache import inspect_data  # imports numpy and tokenizers: a quarter second

    inspect_data(config.data, config.model.vocab_size)
    request, over = for_this_attempt(request, env)
    if over:
        if env.rank == 0:
            print(f"{request.out} was asked to stop ({over}) and is saved: it is not started again", flush=True)
        else:
            time.sleep(_FIRST_S)
        return EXIT_RESUMABLE
    if env.rank == 0:
        _check_folder(request)
    from paceline.world.device import choose_device  # imports torch: a second or two

    if num_ranks > usable_cores():
        text = (
            f"--nproc is {num_ranks}, and there are {usable_cores()} cores: the ranks take turns, and steps get slower"
        )
        print(f"warning: {text}", flush=True)
    if num_ranks == 1 and not max_restarts:
        choose_device(config.parallel.device, env.local_rank, env.local_world_size, env.world_size)
        from paceline.train.loop import train

        return train(request, env)
    for local_rank in range(num_ranks):
        choose_device(config.parallel.device, local_rank, num_ranks, num_ranks)
    from paceline.launch.local import start_ranks

    assert request.out is not None
    if not request.resume:
        arguments = [*without(arguments, "--out"), "--out", str(request.out)]
    return start_ranks(
        num_ranks,
        (sys.executable, "-m", "paceline", *arguments),
        request.out,
        max_restarts=max_restarts,
        port=config.parallel.port,
        interface=config.parallel.interface,
    )


def find_world(nproc: str, parallel: ParallelConfig, max_restarts: int = 0) -> tuple[Environment, int]:
    """Returns this process's environment, and how many ranks to start (1: itself). Raises UserError if impossible."""
    env = detect()
    num_ranks = _num_ranks(nproc, max_restarts, env)
    check_interface(parallel.interface)
    world_size = env.world_size if env.is_distributed else num_ranks
    check_size(world_size, parallel.expect_ranks)
    parallel.check_num_ranks(world_size)
    check_master(env, parallel.interface)
    if not env.is_distributed:
        check_port(parallel.port, _STORE_HOST)
    return env, num_ranks


def start_without_run(num_ranks: int, arguments: list[str], parallel: ParallelConfig) -> int:
    """Runs the command line `arguments`, which makes no run folder, as local ranks; returns the exit status."""
    from paceline.launch.local import start_ranks

    command = (sys.executable, "-m", "paceline", *without(arguments, "--nproc"))
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # a launcher looks for its run's records
        return start_ranks(num_ranks, command, Path(folder), port=parallel.port, interface=parallel.interface)


def _num_ranks(nproc: str, max_restarts: int, env: Environment) -> int:
    """Returns how many ranks this process starts; 1 without restarts: it is one itself."""
    if max_restarts < 0:
        raise UserError(f"--max-restarts is {max_restarts}; it must be at least 0")
    if env.is_distributed:
        for name, value, default in (("--nproc", nproc, "1"), ("--max-restarts", str(max_restarts), "0")):
            if value != default:
                raise UserError(
                    f"{name} {value} inside a world that a launcher made already; give the number to it alone"
                )
        return 1
    free = free_memory()
    most = max(1, free // _RANK_BYTES)
    if nproc == "auto":
        return min(usable_cores(), most, _MOST_AUTOMATIC_RANKS)
    if not nproc.isdigit() or not 1 <= int(nproc) <= 1024:
        raise UserError(f"--nproc is '{nproc}'; it must be a number of ranks from 1 to 1024, or auto")
    if int(nproc) > most:
        raise UserError(
            f"--nproc is {nproc}: a rank needs at least {units.size(_RANK_BYTES)} of memory, and this machine has "
            f"{units.size(free)} free, enough for {most}; start at most as many ranks as it has cores "
            f"({usable_cores()}) or GPUs"
        )
    return int(nproc)


def for_this_attempt(request: Request, env: Environment) -> tuple[Request, str]:
    """Returns the request with this attempt's run folder, which is that of the attempt before, and the reason if the
    run is over: torchrun also restarts a run that stopped on request with exit status 75."""
    job = job_name(env.job, _common_text(request.config))
    out = request.out or run_folder.find_own(_RUNS, job)
    is_own = out is not None and run_folder.is_own(out, job)
    last = run_folder.last_event(out) if out and is_own else {}
    is_complete = last.get("reason") == run_folder.COMPLETE
    # The first attempt of a torchrun with the same run id and command: requeued, or a new run of the same kind.
    goes_on = is_own and (env.attempt > 0 or not (request.resume or is_complete))
    if not goes_on and not request.out:
        out = None if env.is_distributed else _RUNS / f"{request.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    over = str(last["reason"]) if env.attempt > 0 and last.get("event") == "end" and not is_complete else ""
    resume_step = None if goes_on else request.resume_step
    return dataclasses.replace(request, out=out, job=job, goes_on=goes_on, resume_step=resume_step), over


def _common_text(config: Config) -> str:
    """Returns the part of the config that is the same on all hosts and in all attempts."""
    values = flatten(config).items()
    return json.dumps([item for item in values if not item[0].startswith(("parallel.", "data.path", "data.mix"))])


def _check_folder(request: Request) -> None:
    """Raises UserError if rank 0 could not write the run, or would have nothing left to do."""
    if request.out is None or request.resume or request.goes_on:
        run_folder.check_writable(request.out or _RUNS)
    else:
        run_folder.check_new(request.out)
    if request.out is not None and request.resume and not request.goes_on:
        _check_reached(request.out, request)


def _check_reached(folder: Path, request: Request) -> None:
    """Raises UserError if there is no such checkpoint, or a flag names a step that is already done."""
    reached = max(require_step(run_folder.RunFolder(folder).checkpoints, request.resume_step), default=0)
    train = request.config.train
    firsts = {"steps": reached, "stop-at-step": reached + 1, "profile": reached + 1}
    for name, value in (("steps", train.steps), ("stop-at-step", train.stop_at_step), ("profile", train.profile)):
        if 0 < value < firsts[name]:
            raise UserError(
                f"--train.{name} is {value}, and {folder} goes on from step {reached}: nothing would come of it. Give "
                f"at least {firsts[name]}, or an earlier checkpoint by --step"
            )
