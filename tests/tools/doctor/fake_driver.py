#!/usr/bin/env python3
"""nvidia-smi of a machine with two GPUs: one slowed by heat and with damaged memory, one used by another process."""

import sys

GPUS = """0, NVIDIA H100 80GB HBM3, 580.1, 900, 81559, 0, 91, 2, 0x0000000000000001
1, NVIDIA H100 80GB HBM3, 580.1, 70000, 81559, 97, 60, 0, 0x0000000000000020
2, NVIDIA H100 80GB HBM3, 580.1, 900, 81559, 0, 41, [N/A], 0x0000000000000001"""
print(GPUS if "--query-gpu" in sys.argv[1] else "4321, python, of a user, 69000")
