"""Code and documents use the field's words (docs/glossary.md), and none that stand for them in private."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_TERMS = 40
# The private word, as a part of a name or a word of a text, and what to say.
BANNED = {
    "seer": "rank that shares the file system",
    "settle": "wait for the parameters; resolve",
    "cry": "print the error",
    "lent": "",
    "owes": "pending",
    "company": "dummy micro-batch",
    "odd": "without a pair; unusual",
    "telling": "recording",
    "course": "",
    "riddle": "",
}
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
HISTORY = {"log", "design"}  # what was written then stays as it was


def words(name: str) -> set[str]:
    """The words of a name: make_best_of, MakeBestOf."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names(path: Path) -> Iterator[str]:
    """What a module defines: modules, functions, classes, arguments, variables, attributes."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_no_name_has_a_private_word() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name in names(path)
        if words(name) & BANNED.keys()
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_has_a_private_word(document: Path) -> None:
    if HISTORY & set(document.relative_to(ROOT).parts) | HISTORY & {document.name}:
        return
    text = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.DOTALL)
    found = {word for word in re.findall(r"[a-z]+", text.lower()) if word in BANNED}
    assert not found, f"{document.relative_to(ROOT)}: {found}"


def test_the_glossary_is_short_and_in_order() -> None:
    terms = re.findall(
        r"^\| ([\w -]+?) \| (?!meaning)", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE
    )
    terms = [term for term in terms if term.strip("- ")]
    assert len(terms) <= MOST_TERMS
    assert terms == sorted(terms, key=str.lower)


def test_the_readme_shows_before_it_tells() -> None:
    """A reader sees a command and Python on the first screen, and all of it in five minutes."""
    text = (ROOT / "README.md").read_text()
    before_command, before_python = (text[: text.index(fence)] for fence in ("```sh", "```diff"))
    assert len(before_command.split()) <= 120
    assert len(before_python.split()) <= 220
    assert len(text.split()) <= 900
