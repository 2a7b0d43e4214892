"""Seeds by purpose, such as `key(seed, "order", epoch)`: no part of a run draws from a global generator."""

import hashlib


def key(*parts: int | str) -> int:
    """Returns a 63-bit integer that depends on every part and its position; equal on all machines and Pythons."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
