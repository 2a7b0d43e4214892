"""Data-parallel training of GPT language models, from one laptop core to many hosts with the same command."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> module. Resolved when first used: importing paceline imports nothing else.
_PUBLIC = {
    "Config": "paceline.config",
    "GPT": "paceline.model.gpt",
    "ModelConfig": "paceline.model.config",
    "BatchPlan": "paceline.data.plan",
    "Dataset": "paceline.data.dataset",
    "open_world": "paceline.world.runtime",
    "make_strategy": "paceline.sync.strategy",
    "UserError": "paceline.base.errors",
    "RunError": "paceline.base.errors",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
