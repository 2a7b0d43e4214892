"""Codecs against the definition of a block, and the same bytes on every processor."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.codec import Blocks

CODECS = st.builds(Blocks, bits=st.sampled_from([2, 4, 8]), block=st.sampled_from([4, 64, 192, 256]))
SCALES = st.sampled_from([0.0, 1e-42, 1e-30, 1e-9, 1.0, 1e30])


def tensor(num_elements: int, seed: int, scale: float) -> torch.Tensor:
    """Normal values, and one outlier in the middle."""
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(seed)) * scale
    if num_elements:
        x[num_elements // 2] *= 1e4
    return x


def coded(codec: Blocks, x: torch.Tensor, *, minus: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the message and `excess`."""
    message, excess = torch.empty(codec.num_bytes(x.numel()), dtype=torch.uint8), torch.full_like(x, 9.0)
    codec.encode(x, message, minus, excess)
    again = torch.empty_like(message)
    codec.encode(x, again, minus)
    assert again.equal(message)  # `excess` is only an output
    return message, excess


def decoded(codec: Blocks, message: torch.Tensor, num_elements: int) -> torch.Tensor:
    into = torch.zeros(num_elements)
    codec.add_decoded(message, into)
    return into


@given(CODECS, st.integers(0, 2000), st.integers(0, 9), SCALES)
def test_a_value_is_off_by_at_most_half_a_step_of_its_block(
    codec: Blocks, num_elements: int, seed: int, scale: float
) -> None:
    x = tensor(num_elements, seed, scale)
    message, excess = coded(codec, x)
    got = decoded(codec, message, num_elements)
    for start in range(0, num_elements, codec.block):
        part = slice(start, min(start + codec.block, num_elements))
        largest = x[part].abs().max().item()
        step = max(largest / ((1 << (codec.bits - 1)) - 1), 1e-30)
        assert (got[part] - x[part]).abs().max().item() <= step * 0.500001
        assert got[part].abs().max().item() == pytest.approx(largest, rel=1e-6, abs=1e-30)
    assert excess.equal(got - x)
    assert len(message) <= num_elements * codec.bits / 8 + (num_elements / codec.block + 8 / codec.bits) * (
        4 + codec.block * codec.bits / 8
    )


@given(CODECS, st.integers(1, 1000), st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.data())
def test_a_value_that_is_not_finite_makes_its_decoded_block_not_finite(
    codec: Blocks, num_elements: int, value: float, data: st.DataObject
) -> None:
    x = tensor(num_elements, 0, 1.0)
    at = data.draw(st.integers(0, num_elements - 1))
    x[at] = value
    got = decoded(codec, coded(codec, x)[0], num_elements)
    block = torch.arange(num_elements) // codec.block == at // codec.block
    assert not got[block].isfinite().any()
    assert got[~block].isfinite().all()


@pytest.mark.parametrize("bits", [3, 6, 16])
def test_integers_that_do_not_fill_a_byte_are_refused(bits: int) -> None:
    """Finds: integers of six bits that were sent as eight."""
    with pytest.raises(ValueError, match=f"{bits} bits do not fill"):
        Blocks(bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_left_over_arrives_later(bits: int) -> None:
    """Error feedback of gradients: the sum of what was decoded is the sum of what was sent, but for one step's error.
    Differences of weights: the copy comes as close to the original as the blocks of a shrinking difference are."""
    codec = Blocks(bits)
    total, arrived, excess = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    replica, master = torch.zeros(1000), tensor(1000, 99, 1.0)
    for seed in range(20):
        gradient = tensor(1000, seed, 1.0)
        message, excess = coded(codec, gradient, minus=excess)
        total += gradient
        codec.add_decoded(message, arrived)
        codec.add_decoded(coded(codec, master, minus=replica)[0], replica)
    torch.testing.assert_close(arrived - excess, total, rtol=1e-5, atol=0.01)
    torch.testing.assert_close(replica, master, rtol=1e-6, atol=1e-7)


def code() -> str:
    """A digest of messages and of what is decoded from them, on this processor. Called in a process of its own, too."""
    digest = hashlib.sha256()
    for codec in (Blocks(2), Blocks(4, 192), Blocks(8)):
        x = torch.from_numpy(__import__("numpy").random.default_rng(0).standard_normal(100_001, "float32"))
        message, excess = coded(codec, x, minus=x.flip(0) * 0.5)
        for result in (message, excess, decoded(codec, message, len(x))):
            digest.update(result.numpy().tobytes())
    return digest.hexdigest()


def test_messages_are_the_same_with_two_threads() -> None:
    alone = code()
    torch.set_num_threads(2)
    try:
        assert code() == alone
    finally:
        torch.set_num_threads(1)


@pytest.mark.long
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_messages_are_the_same_on_other_processors(capability: str) -> None:
    command = "from tests.sync.test_codec import code; print(code())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    ran = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == code()
