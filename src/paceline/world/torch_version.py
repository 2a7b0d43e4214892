"""Which versions of torch this release was tested with, and whether one has the private names that we use."""

from operator import attrgetter

import torch
from torch import nn

from paceline.base.errors import UserError

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions that the tests were run with: constraints*.txt pin one of each, which `.ci/nightly torch` runs."""

# Private to torch and used without a fallback. Where else such a name is used, a fallback or an error stands beside it.
_PRIVATE_NAMES = (
    "_foreach_add_",
    "_foreach_copy_",
    "_foreach_lerp_",
    "_foreach_mul_",
    "_fused_adamw_",
    "_guards.TracingContext.try_get",
    "Tensor._make_wrapper_subclass",
    "Tensor._version",
)
_PRIVATE_NAMES_OF_MODULES = ("_forward_pre_hooks", "_non_persistent_buffers_set")


def is_tested() -> bool:
    return ".".join(torch.__version__.split(".")[:2]) in TESTED


def tested_text() -> str:
    return f"{TESTED[0]} to {TESTED[-1]}"


def check_private_names() -> None:
    """Raises UserError if this torch lacks a private name that we use, which would end a run at its first step."""
    for owner, names in ((torch, _PRIVATE_NAMES), (nn.Module(), _PRIVATE_NAMES_OF_MODULES)):
        for name in names:
            try:
                attrgetter(name)(owner)
            except AttributeError as error:
                raise UserError(
                    f"torch {torch.__version__} lacks a private name that paceline uses: {error}; install torch "
                    f"{tested_text()}: pip install 'torch=={TESTED[-1]}.*'"
                ) from None
