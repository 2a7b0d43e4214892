"""Shared by the verbs that start ranks: refuse early what cannot work, then be a rank or start ranks."""

import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.base import units
from paceline.base.errors import EXIT_RESUMABLE, UserError
from paceline.base.net import LOOPBACK, listen
from paceline.base.process import die_with_parent, has_launcher, say
from paceline.checkpoint.bucket import Bucket
from paceline.checkpoint.steps import newest_whole
from paceline.cli.flags import without
from paceline.config import Config, flatten
from paceline.launch import agent
from paceline.launch.job import JOB, job_name
from paceline.launch.local import one_host, one_of_many, open_ranks
from paceline.launch.options import MOST_RANKS as MOST_RANKS
from paceline.record import folder as run_folder
from paceline.train.changes import LOCAL
from paceline.train.request import RUNS, Request
from paceline.world.config import ParallelConfig
from paceline.world.cores import free_memory, usable_cores
from paceline.world.env import Environment, check_interface, check_size, detect, listening_address, wait_for_master
from paceline.world.schedulers import Pod, read_pod

_MOST_AUTOMATIC_RANKS = 4
_RANK_BYTES = 200 << 20  # a rank's memory before it has a model: torch and our libraries, measured on Linux
_PRELOAD = ("paceline.train.loop",)  # what a rank imports
_NVIDIA = Path("/dev/nvidiactl")  # of NVIDIA's driver
_FIRST_S = 2.0  # torchrun ends all ranks as soon as one ends: rank 0 prints its message first


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Flags of train and resume: where ranks run, and what happens when they end."""

    nproc: str = "1"
    """Ranks to start on this machine, or auto: one for each GPU; without GPUs one for each core, at most 4. Under
    torchrun leave it out."""
    max_restarts: int = 0
    """How often to start the ranks again, from the newest checkpoint, after one of them failed."""
    start: Literal["auto", "warm", "cold"] = "auto"
    """warm: ranks are forks of one process that has imported torch, so a restart takes a second (Linux). cold: each
    rank is a new process. auto: cold where there are NVIDIA GPUs, with which warm ranks were not tried yet."""


def start(request: Request, flags: RankFlags, arguments: list[str]) -> int:
    """Trains as this process, or as local ranks of the command line `arguments`; returns the exit status.
    Everything that can be refused without starting a process or reading a corpus is refused first."""
    config = request.config
    env, num_ranks, others = _place_in_world(request, flags)
    from paceline.data.cache import inspect_data  # imports numpy and tokenizers: a quarter second

    inspect_data(config.data, config.model.vocab_size)
    request, over = for_this_attempt(request, env)
    if over:
        if env.rank == 0:
            say(f"{request.out} was asked to stop ({over}) and is saved: it is not started again")
        else:
            time.sleep(_FIRST_S)
        return EXIT_RESUMABLE
    if env.rank == 0:
        _check_folder(request)
    if config.checkpoint.to:
        Bucket(config.checkpoint.to)  # refuses a wrong address, or a missing library
    if num_ranks > usable_cores():
        cores = f"there are {usable_cores()} cores"
        say(f"warning: {num_ranks} ranks start here, and {cores}: they share cores, and steps are slower")
    if num_ranks == 1 and not flags.max_restarts and others is None:
        gc.disable()  # a tenth of the imports' time goes into collections that find nothing
        from paceline.train.loop import train
        from paceline.world.device import choose_device  # imports torch, as the one above does: a second or two

        gc.freeze()  # what was imported stays: later collections leave it out
        gc.enable()
        choose_device(config.parallel.device, env.local_rank, env.local_world_size, env.world_size)
        return train(request, env)
    _require_devices(config.parallel.device, num_ranks)
    out = request.out or request.new_folder()
    if not request.out:
        arguments = [*arguments, "--out", str(out)]
    arguments = without(arguments, "--nproc", "--max-restarts", "--start")
    command = (sys.executable, "-m", "paceline", *arguments)
    try:
        return _start_ranks(dataclasses.replace(request, out=out), num_ranks, flags, others, command)
    finally:
        if not request.out:
            with suppress(OSError):  # it has a run, unless that was refused
                out.rmdir()


def start_script(request: Request, flags: RankFlags, script: Sequence[str]) -> int:
    """Runs a script with its arguments as this process, or as local ranks; returns the exit status."""
    if not os.path.isfile(script[0]):  # also where its folder may not be entered
        raise UserError(f"{script[0]} is no file in {os.getcwd()}: after `--` comes a script, a file of Python")
    env, num_ranks, others = _place_in_world(request, flags)
    if num_ranks == 1 and not flags.max_restarts and others is None:
        from paceline.replica.joining import run_script  # imports torch: a second or two

        return run_script(script)
    if flags.start == "auto":  # what a script sets before it imports torch is to have an effect
        flags = dataclasses.replace(flags, start="cold")
    command = (sys.executable, "-m", "paceline", "train", "--out", str(request.out), "--", *script)
    return _start_ranks(dataclasses.replace(request, job=env.job), num_ranks, flags, others, command)


def _place_in_world(request: Request, flags: RankFlags) -> tuple[Environment, int, agent.Coordinator | Pod | None]:
    """Returns this process's environment, how many ranks to start (1: itself, if nobody knows of other hosts), and who
    knows of other hosts."""
    pod = _pod(request, flags)
    coordinator = agent.of_this_process()
    parallel = request.config.parallel
    env, num_ranks = find_world(flags.nproc, parallel, flags.max_restarts, pod, with_hosts=bool(coordinator))
    if coordinator:
        env = dataclasses.replace(env, job=os.environ.pop(JOB))
    if env.is_distributed:
        die_with_parent()
    return env, num_ranks, coordinator or pod


def _require_devices(wanted: str, num_ranks: int) -> None:
    """Raises UserError if this host lacks the GPUs that its ranks are to have."""
    if wanted in ("cuda", "mps"):
        from paceline.world.device import choose_device  # imports torch: a second or two

        for local_rank in range(num_ranks):
            choose_device(wanted, local_rank, num_ranks, num_ranks)


def _pod(request: Request, flags: RankFlags) -> Pod | None:
    pod = read_pod(os.environ)
    if pod is None or pod.num_ranks == "1":
        return None
    if flags.nproc != "1" or flags.max_restarts:
        raise UserError(
            "--nproc and --max-restarts inside a pod: its job has them (PET_NPROC_PER_NODE; backoffLimit); leave them "
            "out"
        )
    if request.out is None:
        raise UserError("a pod's run needs --out, a run folder on a volume, by which a pod that comes back finds it")
    return pod


def _start_ranks(
    request: Request, num_ranks: int, flags: RankFlags, others: agent.Coordinator | Pod | None, command: tuple[str, ...]
) -> int:
    """Starts the ranks of this host. others: who knows the other hosts; None: there are none."""
    out, config = request.out, request.config
    assert out is not None
    is_warm = flags.start == "warm" or (flags.start == "auto" and not _NVIDIA.exists())
    options: dict[str, Any] = {"grace_s": config.checkpoint.grace_s, "preload": _PRELOAD if is_warm else ()}
    if others is None:
        with open_ranks(command, out, **options) as ranks:
            return ranks.run_to_the_end(one_host(num_ranks, config.parallel.port), flags.max_restarts)
    options["job"] = request.job or ""
    if isinstance(others, Pod):
        places = one_of_many(num_ranks, others.number, others.num_pods, others.master_addr, others.master_port)
        with open_ranks(command, out, address="", **options) as ranks:
            return ranks.run_to_the_end(places)
    with closing(others), open_ranks(command, out, address=others.address, **options) as ranks:
        return agent.serve(others, ranks, num_ranks, config.parallel.port)


def find_world(
    nproc: str, parallel: ParallelConfig, max_restarts: int = 0, pod: Pod | None = None, with_hosts: bool = False
) -> tuple[Environment, int]:
    """Returns this process's environment, and how many ranks to start (1: itself, if this is no pod). Raises UserError
    if impossible."""
    # A pod's launcher has no rank: 0 is the launcher that checks the run folder for all.
    env = Environment(rank=pod.number, job=pod.job) if pod else detect()
    name = "PET_NPROC_PER_NODE" if pod else "the number of ranks in --hosts" if with_hosts else "--nproc"
    num_ranks = _num_ranks(name, pod.num_ranks if pod else nproc, max_restarts, env, parallel.device)
    check_interface(parallel.interface)
    if not with_hosts and not pod:  # other hosts have more ranks, which check the number
        world_size = env.world_size if env.is_distributed else num_ranks
        check_size(world_size, parallel.expect_ranks)
        parallel.check_num_ranks(world_size)
    wait_for_master(env, parallel.timeout_s)
    if env.is_distributed and env.rank == 0 and not env.agent_holds_store:
        listen(listening_address(env, parallel.interface), env.master_port).close()
    elif parallel.port and not (env.is_distributed or pod or with_hosts):
        listen(LOOPBACK, parallel.port).close()
    return env, num_ranks


def start_without_run(num_ranks: int, arguments: list[str], parallel: ParallelConfig) -> int:
    """Runs the command line `arguments`, which makes no run folder, as local ranks; returns the exit status."""
    command = (sys.executable, "-m", "paceline", *without(arguments, "--nproc"))
    # A launcher looks for its run's records.
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, open_ranks(command, Path(folder)) as ranks:
        return ranks.run_to_the_end(one_host(num_ranks, parallel.port))


def _num_ranks(name: str, nproc: str, max_restarts: int, env: Environment, device: str) -> int:
    """Returns how many ranks to start. name: of their number, for messages."""
    if max_restarts < 0:
        raise UserError(f"--max-restarts is {max_restarts}; it must be at least 0")
    if env.is_distributed:
        for flag, value, default in (("--nproc", nproc, "1"), ("--max-restarts", str(max_restarts), "0")):
            if value != default:
                raise UserError(
                    f"{flag} {value} inside a world that a launcher made already; give the number to it alone"
                )
        return 1
    if nproc == "auto":
        return automatic_ranks(device)
    free = free_memory()
    most = max(1, free // _RANK_BYTES)
    if not nproc.isdecimal() or not 1 <= int(nproc) <= MOST_RANKS:
        raise UserError(f"{name} is '{nproc}'; it must be a number of ranks from 1 to {MOST_RANKS}, or auto")
    if int(nproc) > most:
        raise UserError(
            f"{name} is {nproc}: a rank needs at least {units.size(_RANK_BYTES)} of memory, and this machine has "
            f"{units.size(free)} free, enough for {most}; start at most as many ranks as it has cores "
            f"({usable_cores()}) or GPUs"
        )
    return int(nproc)


def automatic_ranks(device: str) -> int:
    """Returns the ranks that `--nproc auto` starts on this machine. device: parallel.device."""
    from paceline.world.device import count_gpus  # imports torch: a second or two

    num_gpus = count_gpus() if device in ("auto", "cuda") else 0
    return num_gpus or min(usable_cores(), max(1, free_memory() // _RANK_BYTES), _MOST_AUTOMATIC_RANKS)


def for_this_attempt(request: Request, env: Environment) -> tuple[Request, str]:
    """Returns the request with this attempt's run folder, which is that of the attempt before, and the reason if the
    run is over: torchrun also restarts a run that stopped on request with exit status 75."""
    job = job_name(env.job, _common_text(request.asked or request.config))
    out = request.out or run_folder.find_own(RUNS, job)
    is_own = out is not None and run_folder.is_own(out, job)
    last = run_folder.last_event(out) if out and is_own else {}
    was_written = out is not None and run_folder.was_written_since_lock(out)  # else the end is of an earlier session
    is_complete = last.get("reason") == run_folder.COMPLETE
    # The first attempt of a torchrun with the same run id and command: requeued, or a new run of the same kind.
    is_restart = request.is_restart or (is_own and (env.attempt > 0 or not (request.resume or is_complete)))
    if not is_restart:
        out = request.out
    is_ended = env.attempt > 0 and last.get("event") == "end" and not is_complete and was_written
    over = str(last["reason"]) if is_ended and not _is_restart(str(last["reason"])) else ""
    # An attempt that ended before its checkpoint was restored has not set the later ones aside: it is asked for again.
    resume_step = None if out and is_restart and run_folder.has_resumed(out, job) else request.resume_step
    return dataclasses.replace(request, out=out, job=job, is_restart=is_restart, resume_step=resume_step), over


def _is_restart(reason: str) -> bool:
    """Whether the launcher itself stopped the run, to start it again with a host that came."""
    from paceline.world.torchrun import Torchrun  # imports torch: a second

    return has_launcher() or (reason.startswith("SIGTERM") and Torchrun.of_this_process().is_dynamic)


def _common_text(config: Config) -> str:
    """Returns the part of the config that is the same on all hosts and in all attempts."""
    values = flatten(config).items()
    left_out = [name for name in LOCAL if name != "train.init-from"]  # another source is another run
    return json.dumps([item for item in values if item[0] not in left_out and not item[0].startswith("track.")])


def _check_folder(request: Request) -> None:
    """Raises UserError if rank 0 could not write the run, or would have nothing left to do."""
    if request.out is None or request.resume or request.is_restart:
        run_folder.check_writable(request.out or RUNS, is_begun=request.resume)
    else:
        run_folder.check_new(request.out)
    if request.out is not None and request.resume and not request.is_restart:
        _check_reached(request.out, request)


def _check_reached(folder: Path, request: Request) -> None:
    reached = newest_whole(run_folder.RunFolder(folder).checkpoints, request.resume_step)
    train = request.config.train
    firsts = {"steps": reached, "stop-at-step": reached + 1, "profile": reached + 1}
    for name, value in (("steps", train.steps), ("stop-at-step", train.stop_at_step), ("profile", train.profile)):
        if 0 < value < firsts[name]:
            raise UserError(
                f"--train.{name} is {value}, and {folder} continues from step {reached}: no step would be made. "
                f"Give at least {firsts[name]}, or an earlier checkpoint by --step"
            )
