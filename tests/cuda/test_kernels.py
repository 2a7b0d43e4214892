"""The kernels of bench/gpu without a GPU, and the roofline beside what was measured on one. `.ci/nightly kernels`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import no_gpu
import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.nightly
BENCH = Path(__file__).parents[2] / "bench" / "gpu"
# Tokens/s of one H100 (docs/LOG.md, 2026-11-24): what was compiled, by preset.
MEASURED = {"gpt2-124m": 507_227, "gpt2-124m, float8": 491_000, "gpt2-124m-modern": 471_919}


def said_by(script: str, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *words], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fused_kernels_are_as_exact_as_what_they_replace() -> None:
    """Finds a wrong factor of GELU's slope, swapped quarters of a tile, a target one column off, no maximum."""
    lines = said_by("kernels.py", "check").splitlines()
    assert len(lines) == 30
    assert all(line.startswith("ok") for line in lines)


def test_they_build_for_hopper_and_spill_little() -> None:
    """Finds a product that ends its tile whole: backward it spills, and needs 272 KiB of 227 of shared memory."""
    said = said_by("kernels.py", "build")
    assert len(re.findall(r"product with GELU, \w+ .* 0 bytes of stack", said)) == 2


def test_every_variant_trains() -> None:
    said = said_by("kernels.py", "time", "--rehearse", "--batch", "2", "--rounds", "1", "--updates", "2")
    assert [float(gap) < 1e-5 for gap in re.findall(r"at most (\S+) apart", said)] == [True] * 5


@pytest.mark.skipif(bool(no_gpu.why_not()), reason=no_gpu.why_not() or "-")
@pytest.mark.parametrize("preset", ["gpt2-124m", "gpt2-124m-modern"])
def test_the_roofline_is_within_3_percent_of_what_an_h100_reached(preset: str) -> None:
    """Finds GELU, the loss or attention counted twice or not at all."""
    said = said_by("roofline.py", "--preset", preset)
    estimated = {
        title: float(rate.replace(",", "")) for title, rate in re.findall(r"^(\S.*): (\S+) tokens/s", said, re.M)
    }
    compared = {title: estimated[title] / rate for title, rate in MEASURED.items() if title in estimated}
    assert compared
    assert all(abs(ratio - 1) < 0.03 for ratio in compared.values()), compared
