"""Bytes to text: whether a file is text, its text, and where a long document is cut into slices.

A plain file is read as UTF-8 without a byte order mark; CRLF and CR become LF; bytes that are not UTF-8 become U+FFFD.
The string of a record (JSONL, Parquet) is not changed. A long document is cut where no tokenizer makes a token across,
so that its tokens do not depend on the cut.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterator

SNIFF_BYTES = 8192  # of a file's beginning, to tell text from binary data
SLICE_BYTES = 1 << 18  # longest slice of a document, at least 8
REPLACEMENT = "\ufffd"
BYTE_ORDER_MARK = codecs.BOM_UTF8

REMEDIES = {
    "is empty": "there is nothing to read in it",
    "is UTF-16": "make it UTF-8: iconv -f UTF-16 -t UTF-8 IN > OUT",
    "is UTF-32": "make it UTF-8: iconv -f UTF-32 -t UTF-8 IN > OUT",
    "contains NUL bytes": "it looks like a binary file, or like UTF-16 without a byte order mark: if it is text, "
    "iconv -f UTF-16LE -t UTF-8 IN > OUT",
    "is not UTF-8 text": "make it UTF-8, from Latin-1: iconv -f LATIN1 -t UTF-8 IN > OUT, or replace such bytes by "
    "U+FFFD: paceline data prepare --format text",
    "is an archive": "unpack it first",
    "is an Arrow file": "if datasets.save_to_disk wrote it, make Parquet of it: "
    "datasets.load_from_disk(FOLDER).to_parquet(OUT)",
    "is Megatron's": "it is tokens already: give its folder as --data.path",
    "has no known name": "known are .parquet, .jsonl, .ndjson and .txt, also with .gz, .zst, .bz2 or .lz4",
}
"""Why a file is not read, and what to do about it."""


def why_not_text(head: bytes, *, trusted: bool = False) -> str | None:
    """Returns why a file's beginning is not UTF-8 text; None if it is. trusted: the user says that it is text; only NUL
    bytes and other encodings' marks are refused then."""
    if not head:
        return "is empty"
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # before UTF-16, whose mark it begins with
        return "is UTF-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16"
    if b"\0" in head:  # valid UTF-8, but not text
        return "contains NUL bytes"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # incremental: the last character may be cut
    except UnicodeDecodeError:
        return None if trusted else "is not UTF-8 text"
    return None


def plain_text(content: bytes) -> tuple[str, int]:
    """Returns a plain file's text, and how many places in it became U+FFFD."""
    content = with_line_feeds(content)
    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        text = content.decode("utf-8", "replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())


def with_line_feeds(content: bytes) -> bytes:
    """Returns a plain file's bytes with LF for CRLF and CR."""
    return content.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in content else content


def record_text(content: bytes) -> tuple[str, int]:
    """Returns a record's text, and how many places became U+FFFD: lone surrogates, and bytes that are not UTF-8."""
    try:
        text = content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = content.decode("utf-8", "replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
    return (text, 0) if text.isascii() else _SURROGATE.subn(REPLACEMENT, text)


def slices(content: bytes) -> Iterator[bytes]:
    """Yields a document's bytes in slices of at most SLICE_BYTES, at least one; see `cut`."""
    at = 0
    while len(content) - at > SLICE_BYTES:
        end = at + cut(content[at : at + SLICE_BYTES + 1])
        yield content[at:end]
        at = end
    yield content[at:] if at else content


def cut(beginning: bytes) -> int:
    """Returns the end of a slice, 1 to SLICE_BYTES bytes, given more than SLICE_BYTES of the document from its start.

    The end is the last place after a letter or digit and before a space or line end: every known pattern splits text
    there before merging, so the tokens are those of the complete document. If there is none, the slice ends after any
    character, but not inside CRLF.
    """
    window = 1 << 10
    while True:
        matches = _LAST_OF_WORD.finditer(beginning, max(0, SLICE_BYTES - window), SLICE_BYTES + 1)
        for end in reversed([match.end() for match in matches]):
            if beginning[end - 1] < 0x80 or _is_letter(beginning[max(0, end - 4) : end]):
                return end
        if window >= SLICE_BYTES:
            break
        window *= 16
    end = SLICE_BYTES
    while beginning[end] & 0xC0 == 0x80 and end > SLICE_BYTES - 4:  # 10xxxxxx continues a character
        end -= 1
    if beginning[end] & 0xC0 == 0x80:  # no character is so long: not UTF-8
        end = SLICE_BYTES
    return end - (beginning[end - 1 : end + 1] == b"\r\n")


def end_of_word(data: bytes, start: int) -> int | None:
    """Returns the first place from `start` on, and before the data's end, where `cut` may end a slice; None if there is
    none."""
    for match in _LAST_OF_WORD.finditer(data, max(0, start - 1)):
        end = match.end()
        if end >= start and (data[end - 1] < 0x80 or _is_letter(data[max(0, end - 4) : end])):
            return end
    return None


_SURROGATE = re.compile("[\ud800-\udfff]")
_LAST_OF_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff](?=[ \r\n])")


def _is_letter(tail: bytes) -> bool:
    """Whether the last character is a letter or digit, also in Unicode 3.2, as libraries have different versions."""
    start = max((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), default=0)
    try:
        character = tail[start:].decode()
    except UnicodeDecodeError:
        return False
    return character.isalnum() and unicodedata.ucd_3_2_0.category(character)[0] in "LN"
