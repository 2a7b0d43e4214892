"""The reference, made from the code: `python docs/generate.py` writes it into docs/reference/; a test keeps it equal.

In a page of docs/reference/ what stands between `<!-- made by docs/generate.py: NAME -->` and `<!-- end -->` is

    verbs           a section for each verb, with what its --help prints
    configuration   a table for each section of the config: flag, type, default, the field's docstring
    presets         each preset's file
    python          each public name: signature, docstring, members, and its example of docs/reference/examples.py
"""

import ast
import concurrent.futures
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing
from importlib import resources
from pathlib import Path
from typing import Any

import paceline
from paceline.cli.help import field_docs
from paceline.cli.verbs import VERBS
from paceline.config import Config, preset_names
from paceline.optim import config as optim_config
from paceline.world import config as world_config

REFERENCE = Path(__file__).parent / "reference"
SOURCES = Path(paceline.__file__).parent
_MADE = re.compile(r"(<!-- made by docs/generate.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SECTIONS = [section.name for section in dataclasses.fields(Config)]
_COLUMNS = 100  # of the --help that is shown


def made(page: Path) -> str:
    """Returns the page's text with what is made from the code as the code is now."""
    makers = {"verbs": verbs, "configuration": configuration, "presets": presets, "python": python}
    return _MADE.sub(lambda mark: f"{mark[1]}\n{makers[mark[2]]()}\n\n{mark[3]}", page.read_text(encoding="utf-8"))


# ---- the command line ----


def verbs() -> str:
    """Returns a section for each verb that `paceline --help` names and each verb of theirs, such as `data prepare`."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        helped = dict(zip(VERBS, pool.map(lambda verb: ask_help(verb), VERBS), strict=True))
        inner = [(verb, word) for verb in VERBS for word in _words_after(verb, helped[verb])]
        helped |= dict(
            zip((" ".join(pair) for pair in inner), pool.map(lambda pair: ask_help(*pair), inner), strict=True)
        )
    parts = []
    for verb, says in VERBS.items():
        if not helped[verb]:
            raise RuntimeError(f"`paceline {verb} --help` has failed")
        parts.append(f"## paceline {verb}\n\n{says[0].upper()}{says[1:]}.\n\n{_help_block(helped[verb])}")
        words = [" ".join(pair) for pair in inner if pair[0] == verb]
        parts += [f"### paceline {both}\n\n{_help_block(helped[both])}" for both in words if helped[both]]
    return "\n\n".join(parts)


def ask_help(*words: str) -> str:
    """Returns what `paceline WORDS --help all` prints on a terminal of 100 columns; empty where it has no such help."""
    plain = {**os.environ, "COLUMNS": str(_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    command = (sys.executable, "-m", "paceline", *words, "--help", "all")
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _words_after(verb: str, text: str) -> list[str]:
    """The words that a verb's help puts after it: perhaps verbs of its own."""
    return list(dict.fromkeys(re.findall(rf"\bpaceline {verb} ([a-z]+)\b", text)))


def _help_block(text: str) -> str:
    """A help as a block. The config's sections are left out, and the page that has them is named."""
    own_options, *sections = re.split(rf"\n\n(?=(?:{'|'.join(_SECTIONS)}): )", text.rstrip())
    left_out = [section.partition(":")[0] for section in sections]
    block = f"```text\n{own_options}\n```"
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
            rows.append(
                f"| `--{flag}` | {_cell(_spelled(kind))} | {_cell(value)} | {text.replace('|', chr(92) + '|')} |"
            )
        head = ["| flag | type | default | |", "| --- | --- | --- | --- |"]
        intro = inspect.getdoc(type(default)) or ""
        parts.append(f"## {section.name}\n\n{intro}\n\n" + "\n".join([*head, *rows]))
    return "\n\n".join(parts)


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


def _spelled(text: str) -> str:
    """An annotation with the names that it allows in the place of their alias."""
    for alias in ("OptimizerName", "StrategyName", "WireName"):
        names = typing.get_args(getattr(optim_config, alias, None) or getattr(world_config, alias, None))
        listed = ", ".join(map(repr, names))
        text = re.sub(rf"(Literal\[[^\]]*){alias}", rf"\g<1>{listed}", text).replace(alias, f"Literal[{listed}]")
    return text


def _cell(text: str) -> str:
    """Code in a table. `Literal['a', 'b']` is read as a, b."""
    choices = re.fullmatch(r"Literal\[(.*)\]", text)
    if choices:
        return ", ".join(f"`{choice.strip()[1:-1]}`" for choice in choices[1].split(","))
    return text if text == "none" else f"`{text}`".replace(" | ", "` or `")  # a bar would end the cell


# ---- presets, Python ----


def presets() -> str:
    """Returns a section for each preset: its comment, which says command, hardware, time and loss, and its fields."""
    parts = []
    for name in preset_names():
        text = (resources.files("paceline") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
        parts.append(f"## {name}\n\n```toml\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


# Public name -> its members that a script uses, in the order in which it meets them. "__init__": a script makes it.
MEMBERS = {
    "World": "rank world_size local_rank local_world_size device is_main say sum mean max gather barrier main_first "
    "leave",
    "Replica": "__init__ num_steps stop_reason steps train step evaluate state_dict aside agree_to_stop merge",
    "Step": "backward reduce finish draw",
    "StepResult": "loss grad_norm weight skipped stop_reason times by_rank",
    "Run": "__init__ steps record log evaluated save_every save",
    "Checkpoints": "__init__ restore save save_every finish",
    "Share": "peek flat",
    "Batch": "__init__",
    "BatchPlan": "global_batch_size device_batch_size world_size shares num_micro_batches micro_batches",
    "Config": "check replace",
    "GPT": "__init__ forward logits",
    "Dataset": "open documents verify",
}


def python() -> str:
    """Returns a section for each public name."""
    examples = example_of_each()
    parts = []
    for name, module in paceline._PUBLIC.items():
        node = _definition(name, module)
        parts.append(f"## {name}")
        if isinstance(node, ast.FunctionDef):
            parts.append(_signature(node, name))
        if not isinstance(node, ast.Assign):
            parts.append(inspect.cleandoc(ast.get_docstring(node) or ""))
        parts.append(f"```python\n{examples[name]}\n```")
        if isinstance(node, ast.ClassDef):
            parts += _members(node, MEMBERS.get(name, "").split())
    return "\n\n".join(part for part in parts if part)


def example_of_each() -> dict[str, str]:
    """Returns name -> the lines below its `# ---- NAME ----` in examples.py."""
    text = (REFERENCE / "examples.py").read_text(encoding="utf-8")
    _, *parts = re.split(r"^# ---- (\w+) ----\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _definition(name: str, module: str) -> ast.FunctionDef | ast.ClassDef | ast.Assign:
    path = SOURCES.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and name in (getattr(target, "id", "") for target in node.targets):
            return node
    raise LookupError(f"{module} defines no {name}")


def _members(node: ast.ClassDef, names: list[str]) -> list[str]:
    """The constructor first, then a table of fields and properties, then a part for each method."""
    methods = {inner.name: inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
    fields = {pair[0].target.id: pair for pair in _fields(node)}  # type: ignore[attr-defined]
    rows, parts = ["| | type | |", "| --- | --- | --- |"], []
    for name in names:
        if name in fields:
            field, text = fields[name]
            rows.append(f"| `{name}` | {_cell(ast.unparse(field.annotation))} | {text} |")
            continue
        method = methods[name]
        text = inspect.cleandoc(ast.get_docstring(method) or "")
        if any(ast.unparse(decorator) == "property" for decorator in method.decorator_list):
            returned = _cell(ast.unparse(method.returns)) if method.returns else ""
            rows.append(f"| `{name}` | {returned} | {' '.join(text.split())} |")
        elif name == "__init__":
            parts.insert(0, f"{_signature(method, node.name)}\n\n{text}")
        else:
            parts.append(f"### {node.name}.{name}\n\n{_signature(method, name)}\n\n{text}")
    if len(rows) > 2:
        parts.insert(1 if "__init__" in names else 0, "\n".join(rows))
    return parts


def _fields(node: ast.ClassDef) -> list[tuple[ast.AnnAssign, str]]:
    """Fields with their docstrings on one line."""
    found = []
    for statement, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign):
            text = following.value.value if _is_text(following) else ""  # type: ignore[attr-defined]
            found.append((statement, " ".join(text.split()).replace("|", "\\|")))
    return found


def _signature(node: ast.FunctionDef, name: str) -> str:
    """A call as a block of Python, an argument a line where it is long."""
    arguments = node.args
    arguments.args = [argument for argument in arguments.args if argument.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name[0].islower() else ""
    listed = _spelled(ast.unparse(arguments))
    call = f"{name}({listed}){returns}"
    if len(call) > _COLUMNS:
        call = f"{name}(\n    {_by_line(listed)}\n){returns}"
    return f"```python\n{call}\n```"


def _by_line(arguments: str) -> str:
    """Breaks at the commas that stand in no brackets."""
    depth, parts = 0, [""]
    for character in arguments:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            parts[-1] += ","
            parts.append("")
        else:
            parts[-1] += character
    return "\n    ".join(part.strip() for part in parts)


if __name__ == "__main__":
    for page in sorted(REFERENCE.glob("*.md")):
        page.write_text(made(page), encoding="utf-8")
