"""`python wrapped.py SECONDS TORCH VERB ...`: the command with a clock that is ahead, another version of torch, and a
processor that gets one element of a product wrong."""

import sys
import time

import torch

from paceline.cli.main import main

ahead_s, version = float(sys.argv[1]), sys.argv[2]
true_time = time.time
time.time = lambda: true_time() + ahead_s
torch.__version__ = torch.torch_version.TorchVersion(version)
true_product = torch.Tensor.__matmul__


def wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = true_product(a, b)
    if found.is_floating_point():
        found[3, 5] += 1
    return found


torch.Tensor.__matmul__ = wrong_product  # type: ignore[method-assign]
sys.exit(main(sys.argv[3:]))
