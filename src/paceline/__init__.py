"""Data-parallel training of GPT language models, from one laptop core to many hosts with the same command."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ finds, for type checkers
    from paceline.base.errors import RunError as RunError
    from paceline.base.errors import UserError as UserError
    from paceline.config import Config as Config
    from paceline.data.dataset import Dataset as Dataset
    from paceline.data.plan import BatchPlan as BatchPlan
    from paceline.model.config import ModelConfig as ModelConfig
    from paceline.model.gpt import GPT as GPT
    from paceline.script.joining import join as join
    from paceline.script.replica import Replica as Replica
    from paceline.script.share import share as share
    from paceline.world.config import ParallelConfig as ParallelConfig
    from paceline.world.runtime import World as World

__version__ = "0.1.0"

# Public name -> module. Resolved when first used: importing paceline imports nothing else.
_PUBLIC = {
    "join": "paceline.script.joining",
    "World": "paceline.world.runtime",
    "Replica": "paceline.script.replica",
    "share": "paceline.script.share",
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
