"""The peaks of GPUs, from their data sheets. Needs no torch."""

import re
from dataclasses import dataclass

# Dense peaks in TFLOP/s from the vendors' data sheets: bfloat16 and float16 with float32 accumulation, then float32
# outside the tensor cores (TF32 is off). The first entry whose words are all in the device's name is used. If the name
# does not tell the form factor, it is SXM's peak.
_GPU_PEAKS = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("GH200", 989.0, 67.0),
    ("H200 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("A6000", 154.8, 38.7),
    ("A5000", 111.1, 27.8),
    ("A4000", 76.7, 19.2),
    ("6000 Ada", 364.2, 91.1),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100 PCIe", 112.0, 14.0),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 4080", 97.5, 48.7),
    ("RTX 4070", 58.3, 29.1),
    ("RTX 3090", 71.0, 35.6),
    ("RTX 3080", 59.5, 29.8),
)
# Variants with the same number and another speed; MIG is a part of a GPU.
_OTHER_PARTS = frozenset(("ti", "super", "d", "laptop", "mobile", "max", "mig"))


@dataclass(frozen=True)
class Peak:
    """The FLOP/s that MFU is relative to (None: unknown), and their origin."""

    flops_per_s: float | None
    source: str


def gpu_peak(name: str, dtype: str) -> Peak:
    """Returns the peak of the GPU with this driver name, in a dtype such as bfloat16."""
    words = set(re.findall("[a-z0-9]+", name.lower()))
    for entry, half, single in _GPU_PEAKS:
        if words.issuperset(entry.lower().split()) and words.isdisjoint(_OTHER_PARTS):
            if dtype == "float32":
                return Peak(single * 1e12, f"{name}, {single:g} TFLOP/s by data sheet, float32 without TF32")
            return Peak(half * 1e12, f"{name}, {half:g} TFLOP/s dense by data sheet")
    return Peak(None, f"{name} is not in the table of peaks")
