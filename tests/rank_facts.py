"""Facts of a rank on a CPU, for what is decided by facts."""

from paceline.world.facts import RankFacts

FACTS = RankFacts(
    host="a",
    device="cpu",
    backend="gloo",
    processor="a processor",
    instructions="AVX512",
    rounding="1234",
    threads=1,
    threads_reason="one core",
    free_bytes=1e9,
    dtype="float32",
    dtype_reason="a reason",
)
