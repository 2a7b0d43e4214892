"""Dropout as a function of the sequence: it drops the same elements in any micro-batch, rank or device.

A hash of (sequence key, site in the model, element position) decides. So there is no generator state to restore, for
activation checkpointing or for a resume at another world size.

B batch, T sequence, C width.
"""

import torch
from torch import Tensor

# Multipliers of MurmurHash3's 32-bit finaliser (A. Appleby, public domain) and of Knuth's multiplicative hashing.
_FINAL_1 = 0x85EBCA6B
_FINAL_2 = 0xC2B2AE35
_GOLDEN = 0x9E3779B1


def dropout(x_BTC: Tensor, probability: float, keys_B: Tensor, site: int | Tensor) -> Tensor:
    """Returns x with each element zeroed with `probability` and the others divided by (1 - probability).

    keys_B: int64, one key a sequence. `site` is the place in the model, a number or a CPU tensor of one int64. Costs
    nine element-wise int32 passes, one if compiled, and keeps one byte an element for backward.
    """
    keep_BTC = keep_mask(keys_B, site, x_BTC.shape[1], x_BTC.shape[2], probability)
    return torch.where(keep_BTC, x_BTC * (1.0 / (1.0 - probability)), 0.0)


def keep_mask(keys_B: Tensor, site: int | Tensor, num_positions: int, width: int, probability: float) -> Tensor:
    """Returns the bool mask [B, T, C], true where an element stays; a pure function of its arguments."""
    place_TC = torch.arange(num_positions * width, dtype=torch.int32, device=keys_B.device).view(num_positions, width)
    # Two 32-bit words a sequence: two keys that agree in one word still give unrelated masks.
    site_B = keys_B ^ (site * _GOLDEN)
    word_1_B11 = _finalise(_low_word(site_B))[:, None, None]
    word_2_B11 = _finalise(_low_word(keys_B >> 32) + word_1_B11[:, 0, 0])[:, None, None]
    hash_BTC = (place_TC * _signed(_GOLDEN)) ^ word_1_B11
    hash_BTC = torch.add(word_2_B11, _fold_(hash_BTC), alpha=_signed(_FINAL_1))
    hash_BTC = _fold_(_shift(hash_BTC, 13).bitwise_xor_(hash_BTC).mul_(_signed(_FINAL_2)))
    # The hash is uniform over int32; its lowest `probability` is dropped.
    return hash_BTC >= round(probability * 2**32) - 2**31


def _finalise(word: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int32, wrapping. Changes `word`."""
    word = _fold_(word) * _signed(_FINAL_1)
    return _fold_((_shift(word, 13) ^ word) * _signed(_FINAL_2))


def _fold_(word: Tensor) -> Tensor:
    """Returns word ^ (word >> 16), which it may write into `word`."""
    if torch.compiler.is_compiling():
        return _shift(word, 16) ^ word  # fused with what is before and after
    halves = word.view(torch.int16)  # little-endian, as all of torch's devices are: one pass instead of three
    halves[..., ::2].bitwise_xor_(halves[..., 1::2])
    return word


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's >> on int32 keeps the sign, which the mask removes."""
    return (word >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _low_word(key: Tensor) -> Tensor:
    """The low 32 bits of an int64, as an int32 with the same bits."""
    low = key & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
