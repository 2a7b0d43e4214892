"""What each value of `parallel.wire` sends, and how many bits a strategy sends for each element of the model in a step.
Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coding:
    """Bits of an element: 32 exact, 16 bfloat16, fewer integers with a scale for each block (codec.py). The times are
    for an element of the model, of which a rank encodes one half and decodes the other (two ranks, one thread of a
    Xeon)."""

    bits: int  # of gradients; with local of its changes of weights
    weight_bits: int  # of zero's changes of weights; 32: weights are sent as they are read
    encode_ns: float  # of gradients
    update_ns: float  # of weights
    is_for_zero: bool = True  # False: of local only

    @property
    def keeps_excess(self) -> bool:
        """Whether what messages had too much is subtracted from later ones (error feedback, arXiv 1901.09847)."""
        return self.bits < 8


CODINGS = {
    "exact": Coding(32, 32, 0.0, 0.0),
    "bf16": Coding(16, 32, 0.5, 0.4),
    "int8": Coding(8, 4, 1.8, 1.8),
    "int4": Coding(4, 4, 2.2, 1.8),
    "int2": Coding(2, 32, 3.0, 3.0, is_for_zero=False),
}


def bits_on_wire(bits: int) -> float:
    """Returns the bits of an element, with a float32 scale for 256 integers."""
    return bits + 32 / 256 if bits < 16 else float(bits)


@dataclass(frozen=True)
class WireBits:
    """Bits of an element that n ranks send (n-1)/n times, or n-1 times if each sends all of it to each other one."""

    gradient: float
    weight: float
    embedding: float  # of weights that are read in float32
    end_gradient: float  # of embeddings and head, less the weights' bits of which they need fewer
    is_to_each: bool = False

    def bytes_sent(self, num_ranks: int, num_elements: int, num_embedding: int, num_ends: int) -> float:
        """Returns what a rank sends in a step. num_embedding: how many of the elements are embeddings; num_ends:
        embeddings and head."""
        bits = num_elements * (self.gradient + self.weight) + num_embedding * (self.embedding - self.weight)
        bits += num_ends * (self.end_gradient - self.gradient)
        return (num_ranks - 1) * bits / 8 / (1 if self.is_to_each else num_ranks)


def wire_bits(
    strategy: str,
    wire: str,
    compute_bits: int,
    *,
    sync_every: int = 1,
    ranks_per_host: float = 1,
    passes: int = 1,
    by_gloo: bool = True,
) -> WireBits:
    """Returns the bits that hosts send: of ddp, naive and, between hosts, hsdp (an all-reduce of gradients), zero,
    fsdp (gathers in forward and backward of each pass), or local (an all-reduce of a fragment; with a codec each rank
    sends it to each other one).

    compute_bits: of the compute dtype, in which zero and fsdp send weights that are read in no other. ranks_per_host:
    ranks of a host add up float32 gradients before they send them; other gradients, and coded weights, go from each
    rank to each. passes: the most of a rank; CPUs send the gradients of a single one in the compute dtype, whose values
    they have, unless ranks add up inside a host. by_gloo: the backend is gloo.
    """
    if strategy == "fsdp":
        once = passes * compute_bits  # embeddings and head stay until backward is over
        return WireBits(32, 2 * once, 32 * passes + once, 32 - once)
    if strategy == "local" and wire != "exact":
        each = bits_on_wire(CODINGS[wire].bits) * ranks_per_host**2 / sync_every
        return WireBits(each, 0, 0, each, is_to_each=True)
    if strategy != "zero":
        return WireBits(64 / sync_every, 0, 0, 64 / sync_every)
    each = bits_on_wire(CODINGS[wire].bits) * ranks_per_host
    if CODINGS[wire].weight_bits < 32:
        weight = bits_on_wire(CODINGS[wire].weight_bits) * ranks_per_host
        return WireBits(each, weight, weight, each)
    if wire != "exact":
        return WireBits(each, compute_bits, 32, each)
    is_rounded = passes == ranks_per_host == 1 and by_gloo
    return WireBits(compute_bits if is_rounded else 32, compute_bits, 32, 32)
