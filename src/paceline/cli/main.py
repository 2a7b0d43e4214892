"""`paceline VERB`: finds the verb, runs it, and turns every error into one message and an exit status."""

import errno
import importlib
import keyword
import os
import sys
import traceback

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, PacelineError, UserError, nearest
from paceline.base.status import has_launcher, note_status

_VERBS = {
    "train": "train a model, on one rank or many",
    "resume": "go on with a run from its newest whole checkpoint, on any number of ranks",
    "sample": "write text from a run's newest checkpoint, also while it trains",
    "data": "documents to token shards (data prepare), what a data set holds (data info)",
    "import": "make a run folder of a model of transformers or nanoGPT, to sample from or to fine-tune",
    "export": "write a run's model as a folder that transformers loads",
    "lab": "several hosts on this machine, with their own links and processors, to try all of this",
    "bench": "measure the network (bench link), scaling (bench scaling), the data path (bench loader)",
    "learn": "watch an all-reduce step by step, between real processes (learn ring)",
    "verify": "prove on these machines that replicas stay equal, curves agree and resume is exact",
    "report": "one self-contained HTML page with plots of one or several runs",
}
_USAGE = """paceline: data-parallel training of GPT language models, from one laptop core to many hosts.

  paceline VERB [options]        paceline VERB --help shows all of them

{verbs}

  paceline train --preset demo --nproc 2        two ranks on this machine, on the embedded corpus
  torchrun --nproc-per-node 4 -m paceline train --preset demo
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return _leave("" if has_launcher() else "interrupted", 130)  # the launcher says it for all its ranks
    except BrokenPipeError:  # `paceline ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_DONE
    except PacelineError as error:
        if os.environ.get("PACELINE_DEBUG") == "1":
            traceback.print_exc()  # besides: the exit status and what the launcher is told stay as they are
        if error.is_consequence and has_launcher():  # which knows who died, and says it
            return note_status(error.exit_status, consequence=str(error))
        return _leave(_message(error), error.exit_status)
    except Exception as error:
        if os.environ.get("PACELINE_DEBUG") == "1":
            traceback.print_exc()  # besides: the exit status and what the launcher is told stay as they are
        return _leave(*_unforeseen(error))


def _dispatch(arguments: list[str]) -> int:
    verbs = "\n".join(f"  {verb:<8} {text}" for verb, text in _VERBS.items())
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE.format(verbs=verbs))
        return EXIT_DONE if arguments else EXIT_USER
    if arguments[0] == "--version":
        from paceline import __version__

        print(__version__)
        return EXIT_DONE
    verb, rest = arguments[0], arguments[1:]
    if verb not in _VERBS:
        raise UserError(f"there is no verb '{verb}'{nearest(verb, _VERBS)}; there are: {', '.join(_VERBS)}")
    module = importlib.import_module(f"paceline.cli.{verb}" + ("_" if keyword.iskeyword(verb) else ""))
    status: int = module.main(rest)
    return _leave("", status)


def _unforeseen(error: Exception) -> tuple[str, int]:
    """What to say of an error that nobody foresaw, and the exit status."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # whichever path it is, somebody gave it
        return f"{_rank_prefix()}error: {error.filename}: {error.strerror}; give a shorter one", EXIT_USER
    hint = "the rank's log has the traceback, PACELINE_DEBUG=1 shows it here"
    return f"{_rank_prefix()}error: {type(error).__name__}: {error} ({hint})", EXIT_FAILED


def _message(error: PacelineError) -> str:
    """The error as it is to be said by this rank; empty where another rank says it."""
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if (error.reach == "world" and rank != 0) or (error.reach == "host" and local_rank != 0):
        return ""
    return (f"{_rank_prefix()}error: " if error.reach == "rank" else "error: ") + str(error)


def _rank_prefix() -> str:
    return f"rank {os.environ['RANK']}: " if os.environ.get("RANK", "0").isdigit() and "RANK" in os.environ else ""


def _leave(message: str, status: int) -> int:
    if message:
        from paceline.record.console import cry

        cry(message)
    return note_status(status)
