"""`paceline VERB`: finds the verb, runs it, and turns every error into one message and an exit status."""

import errno
import importlib
import io
import keyword
import os
import sys
import time
import traceback
from collections.abc import Callable

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, PacelineError, Stopped, UserError, nearest
from paceline.base.process import EXIT_INTERRUPTED, discard_output, end_on_signals_no_more, has_launcher, record_status

# In the order in which they are printed.
_GROUPS = {
    "train": {
        "train": "train a model, on one rank or many",
        "resume": "resume a run from its newest complete checkpoint, on any number of ranks",
        "sample": "write text from a run's newest checkpoint, also while it trains",
    },
    "data and models": {
        "data": "documents to token shards (data prepare), what a data set holds (data info)",
        "import": "make a run folder of a model of transformers or nanoGPT, to sample from or to fine-tune",
        "export": "write a run's model as a folder that transformers loads",
    },
    "more machines": {
        "slurm": "print a batch script with which Slurm trains, and queues the job again until it is done",
        "launch": "train on several hosts by ssh, from one terminal",
        "kubernetes": "print a job whose pods train, and are started again until it is done",
        "lab": "several hosts on this machine, with their own links and processors, to try all of this",
    },
    "know before": {
        "bench": "measure the network (bench link), scaling (bench scaling)",
        "learn": "watch an all-reduce step by step, between real processes (learn ring)",
        "plan": "predict memory, time and price of a run on this machine or a described cluster",
        "doctor": "find what is wrong with a machine or all hosts of a job, and what fixes it",
        "verify": "prove on these machines that replicas stay equal, curves agree and resume is exact",
    },
    "look at runs": {
        "runs": "a table of the runs in a folder: state, step, loss, rate, and how their configs differ",
        "track": "send a run to TensorBoard, Weights & Biases, trackio, MLflow or Prometheus",
        "watch": "show a run while it trains: in the terminal, or as a live page (--page); several runs side by side",
        "report": "one self-contained HTML page with plots of one or several runs",
    },
    "shell": {
        "completion": "print what makes bash, zsh or fish complete verbs, options and their values",
    },
}
_VERBS = {verb: text for verbs in _GROUPS.values() for verb, text in verbs.items()}
_FIRST_S = 1.0  # time for a launcher to end this rank, if local rank 0 also failed and printed why
_USAGE = """paceline: data-parallel training of GPT language models, from one laptop core to many hosts.

  paceline train --preset tiny                  10 seconds on one core: does it work here?
  paceline train --preset demo --nproc auto     3 minutes: a model of Python source, on all cores or GPUs
  paceline watch runs                           what runs do, while they train; report: one page with plots
  paceline verify                               1 minute: one curve, equal replicas, exact resume, on this machine

{verbs}

paceline VERB --help: its options
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line, by default that of this process, and returns its exit status."""
    _prepare_streams()
    try:
        run, rest = _find(sys.argv[1:] if arguments is None else arguments)
        return record_status(run(rest))
    except (Exception, KeyboardInterrupt) as error:
        return _end_by(error)
    finally:
        end_on_signals_no_more()  # the run is over, or refused: signals no longer stop it before training
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `paceline ... | head`
            discard_output()


def _prepare_streams() -> None:
    """Opens /dev/null in place of closed standard streams (`>&-`): the next file would get their number, and with it
    what is printed. A character that the encoding of standard output lacks is printed as an escape."""
    while None in (sys.stdin, sys.stdout, sys.stderr) and (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
        setattr(sys, ("stdin", "stdout", "stderr")[number], open(number, "w" if number else "r"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _find(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """Returns what runs, and its arguments. Raises UserError if there is no such verb, naming the nearest."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE.format(verbs="\n".join(map(_group, _GROUPS))), end="")
        return (lambda _: EXIT_DONE if arguments else EXIT_USER), []
    if arguments[0] == "--version":
        from paceline import __version__

        print(__version__)
        return (lambda _: EXIT_DONE), []
    verb, *rest = arguments
    if verb not in _VERBS:
        raise UserError(f"there is no verb '{verb}'{nearest(verb, _VERBS)}; there are: {', '.join(_VERBS)}")
    return find_main(verb), rest


def _end_by(error: BaseException) -> int:
    """Prints the error, if this rank is the one to print it, and returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        # With a launcher, that prints it for all its ranks.
        return _end("" if has_launcher() else "interrupted", EXIT_INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        discard_output()
        return EXIT_DONE
    if os.environ.get("PACELINE_DEBUG") == "1":
        traceback.print_exception(error)  # additional: exit status and report to the launcher stay
    if not isinstance(error, PacelineError):
        return _end(*_unforeseen(error))
    if error.is_consequence and has_launcher():  # it knows who died, and prints it
        return record_status(error.exit_status, consequence=str(error))
    return _end_with(error)


def _group(title: str) -> str:
    return "\n".join([title, *(f"  {verb:<11} {text}" for verb, text in _GROUPS[title].items())])


def find_main(verb: str) -> Callable[[list[str]], int]:
    module = importlib.import_module(f"paceline.cli.{verb}" + ("_" if keyword.iskeyword(verb) else ""))
    main: Callable[[list[str]], int] = module.main
    return main


def _unforeseen(error: BaseException) -> tuple[str, int]:
    from paceline.record.console import own_log  # imports rich

    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # a user gave the path, whichever it is
        return f"{_rank_prefix()}error: {error.filename}: {error.strerror}; give a shorter one", EXIT_USER
    log = own_log()
    hint = f"the traceback is in {log}, PACELINE_DEBUG=1 shows it here" if log else "PACELINE_DEBUG=1 shows where"
    return f"{_rank_prefix()}error: {type(error).__name__}: {error} ({hint})", EXIT_FAILED


def _end_with(error: PacelineError) -> int:
    from paceline.record.console import own_log, print_error  # imports rich

    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if error.reach == "host" and os.environ.get("LOCAL_RANK", "0") != "0":  # local rank 0 prints it
        status = record_status(error.exit_status)
        _tell_other_hosts(error)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_FIRST_S)
            print_error(f"{_rank_prefix()}error: {error}")  # still alive: local rank 0 has not seen it
        return status
    if error.reach == "world" and local_rank != "0":  # one rank of each host prints it
        return record_status(error.exit_status)
    kind = "" if isinstance(error, Stopped) and error.reach != "rank" else "error: "
    log = own_log() if error.reach == "rank" and not isinstance(error, UserError) else None
    prefix = _rank_prefix() if error.reach == "rank" or os.environ.get("RANK", "0") != "0" else ""
    status = _end(f"{prefix}{kind}{error}" + (f" (the log of this rank is {log})" if log else ""), error.exit_status)
    _tell_other_hosts(error)
    return status


def _tell_other_hosts(error: PacelineError) -> None:
    if {"LOCAL_WORLD_SIZE", "SLURM_PROCID", "PET_MASTER_ADDR"}.isdisjoint(os.environ):  # which tell of other hosts
        return
    from paceline.world.rendezvous import tell_others  # imports torch

    tell_others(error)


def _end(message: str, status: int) -> int:
    if message:
        from paceline.record.console import print_error  # imports rich

        print_error(message)
    return record_status(status)


def _rank_prefix() -> str:
    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank.isdigit() else ""
