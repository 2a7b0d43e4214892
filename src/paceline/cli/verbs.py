"""The verbs of `paceline`, in groups, and the module of each.

A module is imported when its verb runs. At its head it imports what takes no time; torch and numpy, which take seconds,
and the rooms that need them, are imported in the function that uses them: `--help` and refusals answer at once.
"""

import importlib
import keyword
from collections.abc import Callable

# In the order in which they are printed.
GROUPS = {
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
        "completion": "print what makes bash or zsh complete verbs, options and their values",
    },
}
VERBS = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}


def find_verb(verb: str) -> Callable[[list[str]], int]:
    """Returns the function that runs a verb with its arguments, and returns the exit status."""
    module = importlib.import_module(f"paceline.cli.{verb}" + ("_" if keyword.iskeyword(verb) else ""))
    main: Callable[[list[str]], int] = module.main
    return main
