"""The reference is made from the code when the site is built; what is committed of it is the prose around.

In a page of docs/reference/ `<!-- made from the code: NAME -->` becomes

    verbs           a section for each verb, with what its --help prints
    configuration   a table for each section of the config: flag, type, default, the field's docstring
    presets         each preset's file
    api             each public name, by mkdocstrings, which reads the sources
"""

import ast
import concurrent.futures
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import textwrap
from importlib import resources
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import paceline
from paceline.cli.main import _VERBS
from paceline.config import Config, preset_names

_MARK = re.compile(r"<!-- made from the code: (\w+) -->")
_SECTIONS = [section.name for section in dataclasses.fields(Config)]
_COLUMNS = 100  # of the --help that is shown


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page's text with what is made from the code in its place."""
    made = {"verbs": verbs, "configuration": configuration, "presets": presets, "api": api}
    if not page.file.src_uri.startswith("reference/"):
        return markdown
    return _MARK.sub(lambda mark: made[mark[1]](), markdown)


# ---- the command line ----


def verbs() -> str:
    """Returns a section for each verb that `paceline --help` names and each verb of theirs, such as `data prepare`."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        helped = dict(zip(_VERBS, pool.map(lambda verb: ask_help(verb), _VERBS), strict=True))
        inner = [(verb, word) for verb in _VERBS for word in _words_after(verb, helped[verb])]
        helped |= dict(
            zip((" ".join(pair) for pair in inner), pool.map(lambda pair: ask_help(*pair), inner), strict=True)
        )
    parts = []
    for verb, says in _VERBS.items():
        if not helped[verb]:
            raise PluginError(f"`paceline {verb} --help` has failed")
        parts.append(f"## paceline {verb}\n\n{says[0].upper()}{says[1:]}.\n\n{_help_block(helped[verb])}")
        words = [" ".join(pair) for pair in inner if pair[0] == verb]
        parts += [f"### paceline {both}\n\n{_help_block(helped[both])}" for both in words if helped[both]]
    return "\n\n".join(parts)


def ask_help(*words: str) -> str:
    """Returns what `paceline WORDS --help` prints on a terminal of 100 columns; empty where it has no such help."""
    plain = {**os.environ, "COLUMNS": str(_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    command = (sys.executable, "-m", "paceline", *words, "--help")
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _words_after(verb: str, text: str) -> list[str]:
    """The words that a verb's help puts after it: perhaps verbs of its own."""
    return list(dict.fromkeys(re.findall(rf"\bpaceline {verb} ([a-z]+)\b", text)))


def _help_block(text: str) -> str:
    """A help as a block. The boxes of the config's sections are left out, and the page that has them is named."""
    kept, left_out = [], []
    for box in re.split(r"\n(?=╭)", text.rstrip()):
        section = re.match(r"╭─ (\w+) options ─", box)
        if section and section[1] in _SECTIONS:
            left_out.append(section[1])
        else:
            kept.append(box)
    block = "```text\n" + "\n".join(kept) + "\n```"
    if left_out:
        block += (
            "\n\nBesides, all of " + ", ".join(f"[`--{name}.*`](configuration.md#{name})" for name in left_out) + "."
        )
    return block


# ---- the configuration ----


def configuration() -> str:
    """Returns a section with a table for each dataclass that Config is composed of."""
    parts = []
    for section in dataclasses.fields(Config):
        default = section.default_factory()  # type: ignore[misc]
        told = field_docs(type(default))
        rows = []
        for item in dataclasses.fields(default):
            flag, (kind, text) = f"{section.name}.{item.name.replace('_', '-')}", told[item.name]
            value = _default(getattr(default, item.name))
            rows.append(f"| `--{flag}`{{ #{flag} }} | {_cell(kind)} | {_cell(value)} | {text} |")
        head = ["| flag | type | default | |", "| --- | --- | --- | --- |"]
        intro = inspect.getdoc(type(default)) or ""
        parts.append(f"## {section.name}\n\n{intro}\n\n" + "\n".join([*head, *rows]))
    return "\n\n".join(parts)


def field_docs(kind: type) -> dict[str, tuple[str, str]]:
    """Returns field -> (its type as it is written, its docstring on one line) of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = following.value.value if _is_text(following) else ""  # type: ignore[attr-defined]
            found[statement.target.id] = (ast.unparse(statement.annotation), " ".join(text.split()).replace("|", "\\|"))
    return found


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value not in ("", ()) else "none"


def _cell(text: str) -> str:
    """Code in a table. `Literal['a', 'b']` is read as a, b."""
    choices = re.fullmatch(r"Literal\[(.*)\]", text)
    if choices:
        return ", ".join(f"`{choice.strip()[1:-1]}`" for choice in choices[1].split(","))
    return text if text == "none" else f"`{text}`"


# ---- presets, Python ----


def presets() -> str:
    """Returns a section for each preset: its comment, which says command, hardware, time and loss, and its fields."""
    parts = []
    for name in preset_names():
        text = (resources.files("paceline") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
        parts.append(f"## {name}\n\n```toml\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def api() -> str:
    """Returns a section for each public name."""
    return "\n\n".join(f"::: {module}.{name}" for name, module in paceline._PUBLIC.items())
