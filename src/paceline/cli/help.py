"""What `--help` prints: one screen for a verb that trains, whose options are many; everything for the others.

    paceline train --help             usage, examples, the options that most people need, the presets
    paceline train --help parallel    all options of a section, or of several
    paceline train --help all         all of them

The texts are the docstrings of the dataclasses' fields, which docs/generate.py puts into the reference, too.
"""

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import tyro

from paceline.base.errors import UserError, nearest
from paceline.config import Config, preset_names
from paceline.world.config import StrategyName

_POSITIONAL = typing.get_args(tyro.conf.Positional[str])[1]  # what tyro marks an argument without a flag with
_WIDEST = 100
_TEXT_AT = 34  # the column at which texts begin
# What `paceline train --help` prints: a screen for the first hour.
EXAMPLES = {
    "paceline train --preset tiny": "10 seconds on one core: does it work here?",
    "paceline train --preset demo --nproc auto": "3 minutes: a model of Python source",
    "paceline train --preset fast --data.path TEXT --nproc auto": "3 minutes, on your text",
    "torchrun --nproc-per-node 8 -m paceline train --preset gpt2-124m": "4 days on 8 A100 (nanoGPT's figure)",
}
OFTEN_USED = {
    "--preset NAME": "a configuration that comes with paceline: see below",
    "--config FILE": "a TOML file over it; flags are over both",
    "--out FOLDER": "the run folder; else runs/NAME-DATE-TIME",
    "--nproc N": "ranks on this machine, or auto; under torchrun leave it out",
    "--max-restarts N": "start again from the newest checkpoint when a rank fails",
    "--resume auto": "the same command again continues the run in --out",
    "--init-from RUN": "fine-tune: begin with this run's weights",
    "--data.path PATH": "token shards, a text file, or a folder of texts",
    "--data.seq-len N": "tokens in a sequence",
    "--model.n-layer N": "blocks; --model.n-embd and --model.n-head: their width and heads",
    "--train.steps N": "how long; or --train.time-budget S, --train.tokens N",
    "--train.global-batch-size N": "sequences in a step, over all ranks",
    "--train.dtype NAME": "auto, float32, bfloat16, float16, float8",
    "--optim.lr X": "peak learning rate",
    "--parallel.strategy NAME": f"auto, {', '.join(typing.get_args(StrategyName))}",
    "--checkpoint.every N": "steps between checkpoints",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option, or an argument without a flag, of a verb."""

    flag: str  # as `--train.steps`; of an argument without a flag its name, as `RUN`
    kind: Any  # the field's type
    default: Any
    section: str  # of the config: `train`; of the verb itself: empty
    owner: type  # the dataclass that has the field
    field: str

    @property
    def is_positional(self) -> bool:
        return not self.flag.startswith("--")

    @property
    def text(self) -> str:
        return field_docs(self.owner)[self.field][1]


def options_of(default: Any) -> list[Option]:
    """Returns the options of a verb, whose arguments are the dataclass `default`, in the order of its fields. A
    dataclass within it has its name before those of its fields, but for the whole config."""
    options: list[Option] = []

    def visit(value: Any, prefix: str, section: str) -> None:
        hints = typing.get_type_hints(type(value), include_extras=True)
        kinds = typing.get_type_hints(type(value))
        for item in dataclasses.fields(value):
            inner, name = getattr(value, item.name), item.name.replace("_", "-")
            annotations = getattr(hints[item.name], "__metadata__", ())
            if dataclasses.is_dataclass(inner):
                is_flat = any(getattr(note, "name", None) == "" for note in annotations)
                is_section = isinstance(value, Config)
                visit(inner, prefix if is_flat else f"{prefix}{name}.", name if is_section else section)
                continue
            is_positional = _POSITIONAL in annotations
            metavar = next((note.metavar for note in annotations if getattr(note, "metavar", None)), name.upper())
            options.append(
                Option(
                    flag=metavar if is_positional else f"--{prefix}{name}",
                    kind=kinds[item.name],
                    default=inner,
                    section=section,
                    owner=type(value),
                    field=item.name,
                )
            )

    visit(default, "", "")
    return options


@functools.cache
def field_docs(kind: type) -> dict[str, tuple[str, str]]:
    """Returns field -> (its type as it is written, its docstring on one line) of a dataclass and those it extends."""
    docs: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = ast.literal_eval(following.value) if _is_text(following) else ""  # type: ignore[attr-defined]
                docs[statement.target.id] = ast.unparse(statement.annotation), " ".join(text.split())
    return docs


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def help_text(default: Any, verb: str, wanted: Sequence[str]) -> str:
    """Returns what `paceline VERB --help WANTED...` prints. default: the verb's arguments. Raises UserError for a
    section that it does not have."""
    options = options_of(default)
    sections = list(dict.fromkeys(option.section for option in options if option.section))
    for word in wanted:
        if word not in (*sections, "all"):
            choices = ["all", *sections] if sections else ["all"]
            raise UserError(
                f"`paceline {verb} --help` has no part '{word}'{nearest(word, choices)}; it has {', '.join(choices)}"
            )
    about = " ".join(inspect.cleandoc(type(default).__doc__ or "").split())
    positional = [option for option in options if option.is_positional]
    usage = " ".join(["usage: paceline", verb, *(option.flag for option in positional), "[options]"])
    parts = [usage, _filled(about)]
    shown = [section for section in sections if section in wanted or "all" in wanted]
    if wanted and "all" not in wanted:
        return "\n\n".join([usage, *(_section(default, options, section) for section in shown)])
    if not sections or wanted:
        parts.append(_listed([option for option in options if not option.section]))
        parts += [_section(default, options, section) for section in shown]
    elif verb == "train":
        parts += [_table(EXAMPLES), _table(OFTEN_USED), "presets\n" + _table(_presets()), _more(verb, sections)]
    else:
        parts.append(_listed([option for option in options if not option.section]))
        parts.append(_filled("Besides, the options of `paceline train`.") + "\n" + _more(verb, sections))
    return "\n\n".join(part for part in parts if part)


def _section(default: Any, options: Sequence[Option], section: str) -> str:
    about = next(inspect.getdoc(option.owner) for option in options if option.section == section) or ""
    return f"{section}: {_filled(' '.join(about.split()))}\n\n" + _listed(
        [option for option in options if option.section == section]
    )


def _listed(options: Sequence[Option]) -> str:
    """Each option with its text and, in brackets, its default."""
    lines = []
    for option in options:
        value = "" if option.default == option.flag else _shown(option.default)
        lines += _row(_spelled(option), f"{option.text} [{value}]" if value else option.text)
    return "\n".join(lines)


def _table(rows: Mapping[str, str]) -> str:
    widest = max(map(len, rows))
    return "\n".join(f"  {left.ljust(widest)}  {text}" for left, text in rows.items())


def _spelled(option: Option) -> str:
    if option.is_positional:
        return option.flag
    if option.kind is bool:
        return f"{option.flag.replace('--', '--[no-]', 1)}" if "." not in option.flag else option.flag
    if typing.get_origin(option.kind) is typing.Literal:
        return f"{option.flag} {'|'.join(map(str, typing.get_args(option.kind)))}"
    if typing.get_origin(option.kind) is tuple:
        return f"{option.flag} VALUE ..."
    name = {int: "N", str: "VALUE"}.get(option.kind, "X")
    return f"{option.flag} {name}"


def _row(left: str, text: str) -> list[str]:
    indent = " " * _TEXT_AT
    wrapped = textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(left) + 4 > _TEXT_AT or not wrapped:
        return [f"  {left}", *wrapped]
    return [f"  {left}".ljust(_TEXT_AT) + wrapped[0].strip(), *wrapped[1:]]


def _shown(value: Any) -> str:
    """A default as a user would give it; empty where there is none to tell."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _filled(text: str) -> str:
    return textwrap.fill(text, _width(), break_on_hyphens=False)


def _width() -> int:
    return min(_WIDEST, max(_TEXT_AT + 30, shutil.get_terminal_size().columns))


def _presets() -> dict[str, str]:
    """Returns name -> what its file says first."""
    texts = {
        name: (resources.files("paceline") / "recipes" / f"{name}.toml").read_text("utf-8") for name in preset_names()
    }
    return {name: re.split("[.:;]", text.removeprefix("# "), maxsplit=1)[0] for name, text in texts.items()}


def _more(verb: str, sections: Sequence[str]) -> str:
    return _filled(
        f"paceline {verb} --help all: every option; --help PART: those of {', '.join(sections[:-1])} or {sections[-1]}."
    )
