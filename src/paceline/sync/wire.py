"""How many bits a strategy sends for each element of the model in a step. Needs no torch."""

from dataclasses import dataclass

_WEIGHT_BITS = {"int8": 4.125, "int4": 4.125}  # differences of weights: 4 bits, and a float32 scale for 256 elements
_GRADIENT_BITS = {"exact": 32.0, "bf16": 16.0, "int8": 8.125, "int4": 4.125}


@dataclass(frozen=True)
class WireBits:
    """Bits of an element that n ranks send (n-1)/n times."""

    gradient: float
    weight: float
    embedding: float  # of weights that are read in float32

    def bytes_sent(self, num_ranks: int, num_elements: int, num_embedding: int) -> float:
        """Returns what a rank sends in a step. num_embedding: how many of the elements are embeddings."""
        bits = num_elements * (self.gradient + self.weight) + num_embedding * (self.embedding - self.weight)
        return (num_ranks - 1) / num_ranks * bits / 8


def wire_bits(
    strategy: str, wire: str, compute_bits: int, *, sync_every: int = 1, ranks_per_host: float = 1, passes: int = 1
) -> WireBits:
    """Returns the bits that hosts send: of ddp, naive and, between hosts, hsdp (an all-reduce of gradients), zero,
    fsdp (gathers in forward and backward of each pass), or local (an all-reduce of a fragment).

    compute_bits: of the compute dtype, in which zero sends weights that are read in no other. ranks_per_host: ranks of
    a host add up float32 gradients before they send them; other gradients go from each rank to each.
    """
    if strategy == "fsdp":
        return WireBits(32, 2 * passes * 32, 2 * passes * 32)  # in float32: layers cast what was gathered
    if strategy != "zero":
        return WireBits(64 / sync_every, 0, 0)
    gradient = _GRADIENT_BITS[wire] * (1 if wire == "exact" else ranks_per_host)
    if wire in _WEIGHT_BITS:
        return WireBits(gradient, _WEIGHT_BITS[wire], _WEIGHT_BITS[wire])
    return WireBits(gradient, compute_bits, 32)
