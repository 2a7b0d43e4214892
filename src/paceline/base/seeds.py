"""Seeds by purpose. No part of a run draws from a global generator, so no part can disturb another.

A key is a 64-bit integer made from the run's seed and the names of what it is for: `key(seed, "order", epoch)`.
"""

import hashlib


def key(*parts: int | str) -> int:
    """Returns a 63-bit integer that depends on every part and its place; equal on every machine and Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
