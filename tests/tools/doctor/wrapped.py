"""`python wrapped.py SECONDS TORCH VERB ...`: the command with a clock that is ahead, and another version of torch."""

import sys
import time

import torch

from paceline.cli.main import main

ahead_s, version = float(sys.argv[1]), sys.argv[2]
true_time = time.time
time.time = lambda: true_time() + ahead_s
torch.__version__ = torch.torch_version.TorchVersion(version)
sys.exit(main(sys.argv[3:]))
