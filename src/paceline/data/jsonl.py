"""Records of JSON, one a line: the text under one key of each, however long a line is.

Lines of usual length are parsed by the standard library. A line of hundreds of megabytes is read as it comes:
`LongLine` walks over it once, gives the wanted string piece by piece, and holds no more than the piece it was handed.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from paceline.base.errors import UserError, nearest
from paceline.data.corpora import REPLACEMENT

_KEY_CHARACTERS = 1 << 12  # of a key of a long line; what follows them is not looked at
_SHOWN_KEYS = 12
_MAX_DEPTH = 500
_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


def records(content: bytes, key: str, where: str, first_line: int) -> Iterator[str | None]:
    """Yields the string under `key` of each line that is not blank; None where it is null.

    Bytes that are not UTF-8 are lone surrogates in it, see `clean`. `first_line` counts from 1. Raises UserError,
    naming file and line, for what is not JSON, not an object, has no such key or no string under it.
    """
    for number, line in enumerate(content.decode("utf-8", "surrogateescape").split("\n"), first_line):
        if line and not line.isspace():
            yield _text(line, key, f"{where} line {number}")


def _text(line: str, key: str, place: str) -> str | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{place} can not be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{place} is {_TYPES.get(type(record), 'null')}, not an object with a key {key!r}")
    if key not in record:
        raise UserError(_no_key(place, key, list(record)))
    value = record[key]
    if value is not None and not isinstance(value, str):
        raise UserError(_no_string(place, key, _TYPES[type(value)]))
    return value


def _no_key(place: str, key: str, keys: list[str]) -> str:
    there = ", ".join(keys[:_SHOWN_KEYS]) + (", ..." if len(keys) > _SHOWN_KEYS else "")
    return f"{place} has no key {key!r}{nearest(key, keys)}; it has {there or 'none'}: give --text-key"


def _no_string(place: str, key: str, found: str) -> str:
    return f"{place} has {found} under {key!r}, not a string; give --text-key another key"


def clean(text: str) -> tuple[str, int]:
    """Returns a record's string with U+FFFD for each lone surrogate, and how many there were."""
    if text.isascii():
        return text, 0
    return _SURROGATE.subn(REPLACEMENT, text)


class LongLine:
    """One line that comes in parts. It takes the JSON that the standard library takes, with two exceptions: brackets
    are nested at most 500 deep outside of it, and the wanted key may be there once."""

    def __init__(self, parts: Iterable[str], key: str, place: str) -> None:
        """`place` names file and line for messages."""
        self._parts, self._key, self._place = iter(parts), key, place
        self._data, self._at = "", 0
        self._before = 0  # characters of the line before _data
        self.is_null = False

    def text(self) -> Iterator[str]:
        """Yields the string under the key in pieces of any length, not cut between two halves of a surrogate pair.

        The whole line is read; UserError as `records` has it.
        """
        self._require("{")
        keys: list[str] = []
        closed = self._take("}")
        while not closed:
            key = self._read_key()
            if key == self._key and key in keys:
                raise UserError(f"{self._place} has the key {key!r} twice; remove one")
            keys += [key] if key not in keys and len(keys) <= 1000 else []
            if key == self._key:
                yield from self._wanted()
            else:
                self._skip_value()
            closed = self._take("}")
            if not closed:
                self._require(",")
        if self._peek():
            self._refuse("there is more after the object")
        if self._key not in keys:
            raise UserError(_no_key(self._place, self._key, keys))

    def _wanted(self) -> Iterator[str]:
        first = self._peek()
        if first == '"':
            yield from self._string()
            return
        if first == "n":
            self._scalar()
            self.is_null = True
            return
        found = {"{": "an object", "[": "a list", "t": "true or false", "f": "true or false"}.get(first, "a number")
        raise UserError(_no_string(self._place, self._key, found))

    def _read_key(self) -> str:
        if self._peek() != '"':
            self._refuse("a key in double quotes is missing")
        key = ""
        for part in self._string():
            key = key if len(key) >= _KEY_CHARACTERS else key + part
        self._require(":")
        return key

    def _skip_value(self) -> None:
        inside: list[str] = []  # what closes the brackets that are open
        while True:
            if opened := {"{": "}", "[": "]"}.get(self._peek()):
                inside.append(opened)
                self._at += 1
                if len(inside) > _MAX_DEPTH:
                    self._refuse(f"brackets are nested more than {_MAX_DEPTH} deep")
                if not self._take(opened):
                    self._skip_key_of(inside)
                    continue
                inside.pop()
            else:
                self._skip_simple()
            while inside and self._take(inside[-1]):
                inside.pop()
            if not inside:
                return
            self._require(",")
            self._skip_key_of(inside)

    def _skip_key_of(self, inside: list[str]) -> None:
        if inside[-1] == "}":
            self._read_key()

    def _skip_simple(self) -> None:
        if self._peek() == '"':
            for _ in self._string():
                pass
        else:
            self._scalar()

    def _scalar(self) -> None:
        """Passes over a number, true, false or null."""
        self._peek()
        word = ""
        while match := _SCALAR.match(self._data, self._at):
            word += match[0]
            self._at = match.end()
            if len(word) > 5000 or (self._at == len(self._data) and not self._more()):
                break
        try:
            json.loads(word)
        except ValueError:
            self._refuse(f"{word[:20]!r} is no value")

    def _string(self) -> Iterator[str]:
        """Yields the parts of the string that begins here."""
        self._at += 1
        while True:
            end = _WHOLE_CHARACTERS.match(self._data, self._at).end()  # type: ignore[union-attr]
            if end > self._at:
                yield self._unescaped(end)
            if self._data.startswith('"', end):
                self._at = end + 1
                return
            if len(self._data) - end >= _LONGEST_ESCAPE:
                self._refuse("a backslash is followed by what it can not be")
            if not self._more():
                self._refuse("the line ends in a string")

    def _unescaped(self, end: int) -> str:
        try:
            found: str = json.loads(f'"{self._data[self._at : end]}"')
        except json.JSONDecodeError as error:
            self._at += error.pos - 1
            self._refuse(error.msg)
        self._at = end
        return found

    def _peek(self) -> str:
        """The next character that is no white space, not taken; empty at the line's end."""
        while True:
            self._at = _SPACE.match(self._data, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._data):
                return self._data[self._at]
            if not self._more():
                return ""

    def _take(self, character: str) -> bool:
        found = self._peek() == character
        self._at += found
        return found

    def _require(self, character: str) -> None:
        if not self._take(character):
            self._refuse(f"{character!r} is missing")

    def _more(self) -> bool:
        """Puts the next part behind what is not yet taken; False at the line's end."""
        part = next((part for part in self._parts if part), "")
        self._before += self._at
        self._data, self._at = self._data[self._at :] + part, 0
        return bool(part)

    def _refuse(self, message: str) -> NoReturn:
        raise UserError(f"{self._place} is not JSON: {message} at character {self._before + self._at + 1}")


_SPACE = re.compile(r"[ \t\n\r]*+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]++")
_LONGEST_ESCAPE = 12  # a surrogate pair
# A high surrogate is whole when what follows is there: it may be the other half.
_WHOLE_CHARACTERS = re.compile(
    r"""(?: [^"\\]++ | \\[^u] | \\u(?![dD][89abAB])[^"\\]{4}
    | \\u[dD][89abAB][^"\\]{2}(?= [^\\] | \\[^u] | \\u[^"\\]{4} ) )*+""",
    re.VERBOSE,
)
