"""Shows runs in a terminal, redrawn every second. Without a terminal it prints a line now and then, as `train` does.

Texts of the records are no markup here, and their control characters are escaped.
"""

import math
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from paceline.base import units
from paceline.record.console import PLAIN_WIDTH, table, without_trailing_blanks
from paceline.record.output import printable
from paceline.tools.view.follow import Views
from paceline.tools.view.view import RankView, RunView

_EVERY_S = 1.0
_STYLES = {"good": "green", "open": "yellow", "bad": "bold red"}
# Part of a step -> its sign and style. Waiting differs from work without colour, too.
_PARTS = {
    "compute": ("█", "blue"),
    "data": ("▒", "yellow"),
    "forward": ("█", "bright_cyan"),
    "backward": ("█", "blue"),
    "optimizer": ("▓", "green"),
    "exposed communication": ("·", "bright_red"),
    "other": (" ", ""),
}
_LABEL = 17  # characters before a bar
_LEAST_LINES = 4  # of ranks, and of events


def show(runs: Views, *, once: bool = False) -> None:
    """Shows the runs: one run until it reaches its horizon, a folder of runs for ever; with `once` what is now."""
    is_pipe = not sys.stdout.isatty()  # also with FORCE_COLOR, with which rich takes it for a terminal
    terminal = Console(highlight=False, width=PLAIN_WIDTH if is_pipe else None)
    is_redrawn = not is_pipe and terminal.is_terminal and not terminal.is_dumb_terminal
    runs.update()
    if not once and is_redrawn:
        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            while not _is_over(runs):
                live.update(screen(runs, *terminal.size), refresh=True)
                time.sleep(_EVERY_S)
                runs.update()
    elif not once:
        _print_lines(runs)
    with terminal.capture() as drawn:
        terminal.print(screen(runs, terminal.width, 60))
    print(without_trailing_blanks(drawn.get()), end="")


def _is_over(runs: Views) -> bool:
    return runs.is_one and runs.all[0].state == "ended"


def _print_lines(runs: Views) -> None:
    """Prints a line a run, often at first, then rarely, and at once when its state is another one."""
    began_s = time.monotonic()
    said: dict[str, tuple[str, float]] = {}  # run -> its state, and when the next line is due
    while not _is_over(runs):
        now_s = time.monotonic()
        for view in runs.all or [RunView(name=runs.path.name)]:
            state, due_s = said.get(view.name, ("", math.inf))
            if state != view.state or now_s >= due_s:
                every_s = min(60.0, max(2.0, (now_s - began_s) / 10)) if view.state == "running" else math.inf
                said[view.name] = view.state, now_s + every_s
                told = [f"{view.name}: {view.said}", *([f"step {view.step}"] if view.step else [])]
                told += [f"{fact.label.lower()} {fact.value}" for fact in view.facts]
                print(printable("  ".join(told)), flush=True)
        time.sleep(_EVERY_S)
        runs.update()


def screen(runs: Views, width: int, height: int) -> RenderableType:
    """Returns what fits on a screen of this many characters and lines."""
    views = runs.all
    if not views:
        return Text(f"waiting for a run in {printable(str(runs.path))}", "yellow")
    if not runs.is_one:
        columns = ["run", "state", "step", "loss", "validation", "tokens/s", "left", "curve"]
        return table(_literal(str(runs.path)), columns, [_cells(view) for view in views[-max(5, height - 6) :]])
    view = views[0]
    head = [*_head(view, width), *_curve(view, width, 5 if height < 30 else 8)]
    free = height - 6 - len(head)
    num_ranks = min(len(view.ranks), max(_LEAST_LINES, free - _LEAST_LINES))
    return Group(*head, *_ranks(view, width, num_ranks), *_events(view, max(_LEAST_LINES, free - num_ranks)))


def _cells(view: RunView) -> list[str]:
    facts = {fact.label: fact.value for fact in view.facts}
    steps, losses = _losses(view)
    curve = lines_of(steps, losses, 16, 1)[0] if steps else ""
    known = [facts.get(label, "-") for label in ("Loss", "Validation loss", "Throughput", "Time left")]
    if view.unit != "tokens" and "Throughput" in facts:
        known[2] += f" {_literal(view.unit)}"
    return [_literal(view.name), _literal(view.said[:40]), view.step, *known, curve]


def _literal(text: str) -> str:
    return escape(printable(text))


def _head(view: RunView, width: int) -> list[RenderableType]:
    title = Text.assemble((printable(view.name), "bold"), "  ", ("● " + printable(view.said), _STYLES[view.level]))
    where, bar = f" step {view.step}", list[str | tuple[str, str]]()
    if math.isfinite(view.frac):
        length = max(10, min(60, width - len(where) - 6))
        done = round(length * min(1.0, view.frac))
        bar = [("━" * done, "cyan"), ("━" * (length - done), "bright_black"), f" {view.frac:4.0%}"]
    facts = [Text.assemble((f"{label} ", "bright_black"), (printable(value), "bold")) for label, value, _ in view.facts]
    return [title, Text.assemble(*bar, where), Columns(facts, padding=(0, 2))]


def _losses(view: RunView) -> tuple[list[float], list[float]]:
    """Returns the steps with a finite loss, and those losses."""
    table = view.curves.get("steps", {})
    losses = table.get("loss", {"mean": []})["mean"]
    known = [(step, loss) for step, loss in zip(table.get("step", []), losses, strict=False) if math.isfinite(loss)]
    return [step for step, _ in known], [loss for _, loss in known]


def _curve(view: RunView, width: int, height: int) -> list[Text]:
    steps, losses = _losses(view)
    if len(losses) < 2:
        return []
    labels = [f"{max(losses):.3f}", *[""] * (height - 2), f"{min(losses):.3f}"]
    drawn = lines_of(steps, losses, max(10, width - 9), height)
    lines = [f"{label:>7}  {dots}" for label, dots in zip(labels, drawn, strict=True)]
    return [Text(""), *(Text(line, "cyan", no_wrap=True) for line in lines)]


def _ranks(view: RunView, width: int, most: int) -> list[Text]:
    said = [Text(printable(view.findings["ranks"]))] if "ranks" in view.findings else []
    if not view.ranks:
        return [Text(""), *said] if said else []
    legend = [
        (f"{sign * 2} {part}   ", style)
        for part, (sign, style) in _PARTS.items()
        if part != "other" and part in view.ranks[0].parts
    ]
    longest_ms = max(sum(max(0.0, ms) for ms in each.parts.values()) for each in view.ranks)  # as bars are drawn
    lines = [Text(""), *said, Text.assemble(*legend)]
    lines += [_bar(each, width, longest_ms) for each in view.ranks[:most]]
    if view.other_ranks:
        lines.append(Text(f"{'':{_LABEL}}{view.other_ranks}", "bright_black"))
    return lines


def _bar(each: RankView, width: int, longest_ms: float) -> Text:
    label = f"{each.rank:>5} {printable(each.host)[: _LABEL - 7]}"
    end = f" {units.milliseconds(each.work_ms)} of work"
    room = max(10, width - _LABEL - len(end) - 5)
    bar: list[tuple[str, str]] = []
    drawn, total_ms = 0, 0.0
    for part, (sign, style) in _PARTS.items():
        total_ms += max(0.0, each.parts.get(part, 0.0))
        upto = round(room * total_ms / longest_ms) if longest_ms > 0 else 0  # of the sum: the bar has its length
        bar.append((sign * (upto - drawn), style))
        drawn = max(drawn, upto)
    slow = (" slow", "bold red") if each.is_slow else ""
    return Text.assemble((f"{label:<{_LABEL}}", "bold" if each.is_slow else ""), *bar, end, slow, no_wrap=True)


def _events(view: RunView, most: int) -> list[Text]:
    lines = [Text("")]
    for event in view.events[:most]:
        told = f"{event.time[11:]}  {event.kind}" + (f" at step {event.step}" if event.step else "")
        style = "bright_black" if event.kind == "checkpoint" else ""
        lines.append(Text(printable(f"{told}  {event.facts}"), style, no_wrap=True))
    return lines


# ---- a curve as text ----

_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # row, column -> bit


def lines_of(xs: Sequence[float], ys: Sequence[float], width: int, height: int) -> list[str]:
    """Returns `height` lines of `width` characters, the highest value on top. xs increase."""
    cells = [[0] * width for _ in range(height)]
    low, high = min(ys), max(ys)
    scale = (4 * height - 1) / (high - low) if high > low else 0.0
    before = None
    for column in range(2 * width):
        x = xs[0] + (xs[-1] - xs[0]) * column / max(1, 2 * width - 1)
        row = round((high - _at(x, xs, ys)) * scale)
        # Dots up to the column before, so that a steep curve is one line.
        for each in range(min(row, before + 1), max(row, before - 1) + 1) if before is not None else [row]:
            cells[each // 4][column // 2] |= _BITS[each % 4][column % 2]
        before = row
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def _at(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    right = bisect_left(xs, x)
    if right == 0 or right == len(xs):
        return ys[min(right, len(ys) - 1)]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])
