"""Small pieces of HTML, from plain text: what comes in as text is escaped, what comes in as HTML is said to be."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN = "-"  # what stands in a cell that has no value


def escape(value: str) -> str:
    """Returns text as HTML that shows it, also inside an attribute's quotes."""
    return html.escape(value, quote=True)


def findings(said: Sequence[str]) -> str:
    """Returns a paragraph a sentence."""
    return "".join(f'<p class="finding">{escape(sentence)}</p>' for sentence in said)


def choice(name: str, legend: str, options: Mapping[str, str]) -> str:
    """Returns buttons of which one is pressed, the first to begin with; options: value -> what is shown."""
    inputs = "".join(
        f'<label><input type="radio" name="{escape(name)}" value="{escape(value)}"{" checked" if index == 0 else ""}>'
        f"<span>{escape(shown)}</span></label>"
        for index, (value, shown) in enumerate(options.items())
    )
    return f'<fieldset><legend>{escape(legend)}</legend><div class="choice">{inputs}</div></fieldset>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, wide: bool = False) -> str:
    """A table of cells that are HTML already; the first cell of a row names it."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>"
        for cells in rows
    )
    about = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="wide"' if wide else ""
    return f"<table{kind}>{about}<thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def cell(value: str, note: str, tag: str = "span") -> str:
    """Returns a cell of a value with, below it, a note."""
    return f"<{tag}>{escape(value)}</{tag}>" + (f'<br><span class="caption">{escape(note)}</span>' if note else "")


def embedded(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    shown = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return shown.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
