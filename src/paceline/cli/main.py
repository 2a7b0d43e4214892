"""`paceline VERB`: finds the verb, runs it, and turns every error into one message and an exit status."""

import contextlib
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from paceline import __version__
from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, PacelineError, RunError, Stopped, UserError, nearest
from paceline.base.process import (
    EXIT_INTERRUPTED,
    discard_output,
    end_on_signals_no_more,
    flush_output,
    has_launcher,
    record_status,
)
from paceline.cli.verbs import GROUPS, VERBS, find_verb
from paceline.record.output import own_log, print_error

_FIRST_S = 1.0  # time for a launcher to end this rank, if local rank 0 also failed and printed why
# Verbs whose ranks wait for each other, so that all have to be told of a refusal: not those of a person in a pod.
_MEET = ("train", "resume", "verify", "bench", "learn")
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
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with _whole_output():
            run, rest = _find(words)
            return record_status(run(rest))
    except (Exception, KeyboardInterrupt) as error:
        status = _end_by(error)
        if isinstance(error, UserError) and words[0] in _MEET:
            _tell_other_hosts(error)
        return status
    finally:
        end_on_signals_no_more()  # the run is over, or refused: signals no longer stop it before training
        try:
            sys.stdout.flush()
        except OSError:  # of which `_end_by` has said what there is to say
            discard_output()


@contextlib.contextmanager
def _whole_output() -> Iterator[None]:
    """Raises RunError if what a verb printed cannot be written, also where it ends by SystemExit, as --help does."""
    try:
        yield
    except SystemExit:
        _flush()
        raise
    _flush()


def _flush() -> None:
    try:
        flush_output()
    except BrokenPipeError:  # `paceline ... | head`
        discard_output()
    except OSError as error:
        if own_log() is None:  # a rank's log may lack its end
            raise RunError(f"cannot write to standard output: {error.strerror}") from None


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
        print(_USAGE.format(verbs="\n".join(map(_group, GROUPS))), end="")
        return (lambda _: EXIT_DONE if arguments else EXIT_USER), []
    if arguments[0] == "--version":
        print(__version__)
        return (lambda _: EXIT_DONE), []
    verb, *rest = arguments
    if verb not in VERBS:
        raise UserError(f"there is no verb '{verb}'{nearest(verb, VERBS)}; there are: {', '.join(VERBS)}")
    return find_verb(verb), rest


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
    return "\n".join([title, *(f"  {verb:<11} {text}" for verb, text in GROUPS[title].items())])


def _unforeseen(error: BaseException) -> tuple[str, int]:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # a user gave the path, whichever it is
        return f"{_rank_prefix()}error: {error.filename}: {error.strerror}; give a shorter one", EXIT_USER
    log = own_log()
    hint = f"the traceback is in {log}, PACELINE_DEBUG=1 shows it here" if log else "PACELINE_DEBUG=1 shows where"
    return f"{_rank_prefix()}error: {type(error).__name__}: {error} ({hint})", EXIT_FAILED


def _end_with(error: PacelineError) -> int:
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if error.reach == "host" and os.environ.get("LOCAL_RANK", "0") != "0":  # local rank 0 prints it
        status = record_status(error.exit_status)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_FIRST_S)
            print_error(f"{_rank_prefix()}error: {error}")  # still alive: local rank 0 has not seen it
        return status
    if error.reach == "world" and local_rank != "0":  # one rank of each host prints it
        return record_status(error.exit_status)
    kind = "" if isinstance(error, Stopped) and error.reach != "rank" else "error: "
    log = own_log() if error.reach == "rank" and not isinstance(error, UserError) else None
    prefix = _rank_prefix() if error.reach == "rank" or os.environ.get("RANK", "0") != "0" else ""
    return _end(f"{prefix}{kind}{error}" + (f" (the log of this rank is {log})" if log else ""), error.exit_status)


def _tell_other_hosts(error: UserError) -> None:
    if {"LOCAL_WORLD_SIZE", "SLURM_PROCID", "PET_MASTER_ADDR"}.isdisjoint(os.environ):  # which tell of other hosts
        return
    from paceline.world.rendezvous import tell_others  # imports torch

    tell_others(error)


def _end(message: str, status: int) -> int:
    if message:
        print_error(message)
    return record_status(status)


def _rank_prefix() -> str:
    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank.isdigit() else ""
