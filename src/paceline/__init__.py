"""Data-parallel training of GPT language models, from one laptop core to many hosts with the same command."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ finds, for type checkers
    from paceline.base.errors import EXIT_RESUMABLE as EXIT_RESUMABLE
    from paceline.base.errors import RunError as RunError
    from paceline.base.errors import UserError as UserError
    from paceline.config import Config as Config
    from paceline.data.dataset import Dataset as Dataset
    from paceline.data.plan import BatchPlan as BatchPlan
    from paceline.model.config import ModelConfig as ModelConfig
    from paceline.model.gpt import GPT as GPT
    from paceline.replica.batch import Batch as Batch
    from paceline.replica.checkpoints import Checkpoints as Checkpoints
    from paceline.replica.checkpoints import load_weights as load_weights
    from paceline.replica.joining import join as join
    from paceline.replica.replica import Replica as Replica
    from paceline.replica.result import StepResult as StepResult
    from paceline.replica.run import Run as Run
    from paceline.replica.share import share as share
    from paceline.replica.sources import Share as Share
    from paceline.replica.step import Step as Step
    from paceline.world.config import ParallelConfig as ParallelConfig
    from paceline.world.runtime import World as World

__version__ = "1.0.0"

# Public name -> module. Resolved when first used: importing paceline imports nothing else.
_PUBLIC = {
    "join": "paceline.replica.joining",
    "World": "paceline.world.runtime",
    "Replica": "paceline.replica.replica",
    "Step": "paceline.replica.step",
    "StepResult": "paceline.replica.result",
    "Checkpoints": "paceline.replica.checkpoints",
    "Run": "paceline.replica.run",
    "load_weights": "paceline.replica.checkpoints",
    "share": "paceline.replica.share",
    "Share": "paceline.replica.sources",
    "Batch": "paceline.replica.batch",
    "EXIT_RESUMABLE": "paceline.base.errors",
    "BatchPlan": "paceline.data.plan",
    "ParallelConfig": "paceline.world.config",
    "Config": "paceline.config",
    "GPT": "paceline.model.gpt",
    "ModelConfig": "paceline.model.config",
    "Dataset": "paceline.data.dataset",
    "UserError": "paceline.base.errors",
    "RunError": "paceline.base.errors",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
