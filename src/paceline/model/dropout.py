"""Dropout as a function of the sequence: it drops the same elements in any micro-batch, rank or device.

A hash of (sequence key, site in the model, element position) decides. So there is no generator state to restore, for
activation checkpointing or for a resume at another world size.

B batch, T sequence, C width.
"""

import torch
from torch import Tensor

# Knuth's multiplicative hashing, and T. Mueller's mixer (stackoverflow.com/a/12996028): its shifts are all by 16.
_GOLDEN = 0x9E3779B1
_MIX = 0x45D9F3B


def dropout(x_BTC: Tensor, probability: float, keys_B: Tensor, site: int | Tensor) -> Tensor:
    """Returns x with each element zeroed with `probability` and the others divided by (1 - probability).

    keys_B: int64, one key a sequence. `site` is the place in the model, a number or a CPU tensor of one int64. Costs
    seven element-wise passes over half as many int32, one pass if compiled, and keeps a byte an element for backward.
    """
    keep_BTC = keep_mask(keys_B, site, x_BTC.shape[1], x_BTC.shape[2], probability)
    return torch.where(keep_BTC, x_BTC, 0.0).mul_(1.0 / (1.0 - probability))


def keep_mask(keys_B: Tensor, site: int | Tensor, num_positions: int, width: int, probability: float) -> Tensor:
    """Returns the bool mask [B, T, C], true where an element stays; a pure function of its arguments. The probability
    is rounded to 16 bits: a hash of W = (C + 1) // 2 words of 32 bits decides for two neighbours a word."""
    is_compiling, num_words = torch.compiler.is_compiling(), (width + 1) // 2
    positions_T1 = torch.arange(num_positions, dtype=torch.int32, device=keys_B.device)[:, None]
    elements_C = torch.arange(width, dtype=torch.int32, device=keys_B.device)
    # A compiler computes each word twice rather than write it: nothing but the mask goes through memory.
    words_W = elements_C // 2 if is_compiling else elements_C[:num_words]
    # Two 32-bit words a sequence: two keys that agree in one word still give unrelated masks.
    high_B = _low_word(keys_B >> 32)
    word_1_B = _mixed(_low_word(keys_B ^ (site * _GOLDEN)), high_B)
    word_2_B = _mixed(word_1_B + high_B, word_1_B)
    # (position * W + word) * _GOLDEN. A compiler that multiplied W in would have a constant Triton refuses for int32.
    place_TW = positions_T1 * _signed(num_words * _GOLDEN) + words_W * _signed(_GOLDEN)
    hash_BTW = _mixed(place_TW ^ word_1_B[:, None, None], word_2_B[:, None, None])
    shift_C = 16 - elements_C % 2 * 16
    half_BTC = hash_BTW << shift_C >> 16 if is_compiling else hash_BTW.view(torch.int16)[..., :width]
    # The halves are uniform over int16; their lowest `probability` is dropped.
    return half_BTC >= min(round(probability * 2**16) - 2**15, 2**15 - 1)


def _mixed(word: Tensor, added: Tensor) -> Tensor:
    """Returns each int32 mixed, wrapping, with `added` to the first product. May change `word`."""
    return _fold_(_fold_(torch.add(added, _fold_(word), alpha=_MIX)).mul_(_MIX))


def _fold_(word: Tensor) -> Tensor:
    """Returns word ^ (word >> 16), which it may write into `word`."""
    if torch.compiler.is_compiling():
        return word ^ ((word >> 16) & 0xFFFF)  # fused with what is before and after
    halves = word.view(torch.int16)  # little-endian, as all of torch's devices are: one pass instead of three
    halves[..., ::2].bitwise_xor_(halves[..., 1::2])
    return word


def _low_word(key: Tensor) -> Tensor:
    """The low 32 bits of an int64, as an int32 with the same bits."""
    low = key & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _signed(word: int) -> int:
    """The low 32 bits, as an int32 has them."""
    low = word & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low
