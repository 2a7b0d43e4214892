"""A picture of a terminal, from a real run: python docs/pictures/terminal.py docs/images/demo.svg -- COMMAND ...

Runs the command in a pseudo-terminal, follows its output as a terminal would, and draws the last screen as SVG.
"""

import io
import os
import pty
import sys

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 118, 140
_RICH_NAMES = {"default": None, "brown": "yellow", "brightblack": "bright_black"}


def record(command: list[str]) -> pyte.Screen:
    """Returns the terminal's screen as the command left it."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    os.environ.update(COLUMNS=str(COLUMNS), LINES=str(ROWS), TERM="xterm-256color")

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        stream.feed(data)
        return data

    pty.spawn(command, read)
    return screen


def draw(screen: pyte.Screen, title: str) -> str:
    """Returns the screen as SVG, without its empty last lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    last = max((y for y in range(ROWS) if screen.display[y].strip()), default=0)
    for y in range(last + 1):
        line = Text()
        for x in range(COLUMNS):
            cell = screen.buffer[y][x]
            color = _RICH_NAMES.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 and not cell.fg.isalpha() else cell.fg)
            line.append(cell.data, Style(color=color, bold=cell.bold))
        line.rstrip()
        console.print(line)
    return console.export_svg(title=title)


def main() -> None:
    target, separator, *command = sys.argv[1:]
    if separator != "--":
        sys.exit(__doc__)
    os.environ["COLUMNS"] = str(COLUMNS)
    svg = draw(record(command), " ".join(command))
    with open(target, "w") as file:
        file.write(svg)


if __name__ == "__main__":
    main()
