"""Which documents were seen before, kept on the disk so that a killed preparation goes on."""

import os
from hashlib import blake2b
from pathlib import Path

_DIGEST_BYTES = 16  # two of 2**40 different documents agree by chance with probability 2**-49


class Seen:
    """The digests of all documents so far: 16 bytes each on the disk, about 100 in memory."""

    def __init__(self, path: Path, num_saved: int) -> None:
        """`num_saved`: how many digests of the file count; what follows them was never saved."""
        path.touch()
        self._file = path.open("r+b")
        self._file.truncate(num_saved * _DIGEST_BYTES)
        stored = self._file.read()
        self._digests = {stored[i : i + _DIGEST_BYTES] for i in range(0, len(stored), _DIGEST_BYTES)}

    def add(self, digest: bytes) -> bool:
        """Whether a document is new; it is not any more."""
        if digest in self._digests:
            return False
        self._digests.add(digest)
        self._file.write(digest)
        return True

    def save(self) -> int:
        """Returns how many digests there are; all are on the disk by then."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return len(self._digests)

    def close(self) -> None:
        self._file.close()


def digest_of(text: str) -> bytes:
    """Of a document, or of a piece of one."""
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def digest_of_pieces(digests: list[bytes]) -> bytes:
    """Of a document that came in pieces."""
    return blake2b(b"".join(digests), digest_size=_DIGEST_BYTES).digest()
