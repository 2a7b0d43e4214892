"""Lines of JSON give the string under a key, whether they are read at once or in parts of any size."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data.jsonl import LongLine, clean, records

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=30) | st.text(
    alphabet='\\"/ \n\té\u2028😀\ud83d\ude00'
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def in_parts(line: str, cuts: list[int], key: str = "text") -> str | None:
    borders = sorted({min(cut, len(line)) for cut in cuts} | {0, len(line)})
    parts = [line[a:b] for a, b in itertools.pairwise(borders)]
    long_line = LongLine(parts, key, "x.jsonl line 7")
    text = "".join(long_line.text())
    return None if long_line.is_null else text


def at_once(line: str, key: str = "text") -> str | None:
    (found,) = records(line.encode("utf-8", "surrogateescape"), key, "x.jsonl", 7)
    return found


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, str]:
    """(line, the text in it)"""
    text = draw(ANY_TEXT)
    others = st.dictionaries(ANY_TEXT.filter(lambda key: key != "text"), VALUES, max_size=3)
    content: dict[str, Any] = {**draw(others), "text": text, **draw(others)}
    style: dict[str, Any] = draw(st.sampled_from([{}, {"separators": (" ,\t", " : ")}, {"separators": (",", ":")}]))
    line = json.dumps(content, ensure_ascii=draw(st.booleans()), **style)
    if draw(st.booleans()):
        line = line.replace("é", "\\u00E9").replace("/", "\\/")  # other ways to write the same
    return line, json.loads(line)["text"]


@given(lines(), st.lists(st.integers(0, 200), max_size=20), st.booleans())
@settings(max_examples=250)
def test_any_record_in_any_parts(made: tuple[str, str], cuts: list[int], each: bool) -> None:
    line, text = made
    assert in_parts(line, list(range(len(line))) if each else cuts) == text


@given(st.text(alphabet='{}[]:,"\\utex01.-eN\n ', max_size=25) | lines().map(lambda made: made[0]), st.data())
@settings(max_examples=400)
def test_what_is_taken_in_parts_is_what_is_taken_at_once(line: str, data: st.DataObject) -> None:
    line = line.replace("\n", " ")
    if data.draw(st.booleans()) and line:  # a broken one
        place = data.draw(st.integers(0, len(line) - 1))
        line = line[:place] + data.draw(st.sampled_from(["", '"', "\\", "}", ",", "\x01"])) + line[place + 1 :]
    try:
        parsed: Any = json.loads(line)
    except ValueError:
        parsed = ...
    wanted = parsed.get("text", 0) if isinstance(parsed, dict) else 0
    if line.count("text") > 1:
        return  # a key twice is refused in parts
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=10))
    if wanted is None or isinstance(wanted, str):
        assert in_parts(line, cuts) == wanted
    else:
        with pytest.raises(UserError, match="line 7"):
            in_parts(line, cuts)


def test_lines_are_read_with_their_numbers() -> None:
    content = (
        b'{"text": "one"}\r\n\n  \n{"id": {"text": 1}, "text": null}\n{"text": "d\\u00e9j\xc3\xa0\\ud83d\\ude00 \xfc"}'
    )
    assert list(records(content, "text", "x", 1)) == ["one", None, "déjà😀 \udcfc"]
    assert clean("déjà \udcfc \ud83d") == ("déjà \ufffd \ufffd", 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'text': 1}", ["is not JSON", "at character 2"]),
        ('{"text": "a}', ["is not JSON"]),
        ('{"text": "a"} {', ["is not JSON", "at character 15"]),
        ('["text"]', ["not an object|'{' is missing"]),
        ('{"texts": "a", "id": 1}', ["no key 'text'", "did you mean 'texts'", "it has texts, id", "--text-key"]),
        ('{"id": 1}', ["no key 'text'; it has id"]),
        ("{}", ["no key 'text'; it has none"]),
        ('{"text": ["a"]}', ["has a list under 'text'"]),
        ('{"text": {"a": 1}}', ["has an object under 'text'"]),
        ('{"text": 1.5}', ["has a number under 'text'"]),
        ('{"text": true}', ["has true or false under 'text'"]),
        ('{"text": "a", "n": ' + "[" * 100_000, ["JSON", "recursion|nested"]),
        ('{"n": ' + "1" * 6000 + ', "text": "a"}', ["JSON", "digits|no value"]),
        ('{"text": "\\q"}', ["JSON", "escape|backslash"]),
        ('{"text": "a\\u12"}', ["JSON", "escape|backslash|string"]),
    ],
)
def test_what_is_wrong_is_said(line: str, says: list[str]) -> None:
    for read in (lambda: at_once(line), lambda: in_parts(line, list(range(0, len(line), 3)))):
        with pytest.raises(UserError) as error:
            read()
        assert str(error.value).startswith("x.jsonl line 7 ")
        for each in says:
            assert any(one in str(error.value) for one in each.split("|")), str(error.value)


def test_a_key_twice_in_a_long_line() -> None:
    with pytest.raises(UserError, match="has the key 'text' twice"):
        in_parts('{"text": "a", "text": "b"}', [])
