"""The picture of the README, one loss curve of five worlds: `python docs/pictures/curves.py` (Linux, as root)

Trains the preset `tiny` five times, about a minute in all, prints the first and the last loss, and draws
docs/images/curves-light.svg and curves-dark.svg. `--runs FOLDER` keeps the runs there, and draws those that are there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from svg import SCHEMES, dot, line, polyline, text, write

KILLED_AT, RESTARTED_FROM = 27, 20
KILL = f"rank=1 step={KILLED_AT} phase=backward kind=kill"
# Folder of the run -> what the picture calls it, words before `train`, options after it, faults.
WORLDS = {
    "one": ("1 rank", "", "", ""),
    "two": ("2 ranks, one killed", "", "--nproc 2 --max-restarts 1 --checkpoint.every 10", KILL),
    "three": ("3 ranks", "", "--nproc 3", ""),
    "hosts": ("2 hosts, 1 Gbit/s", "lab --hosts 2 --rate 1gbit --", "", ""),
    "unequal": ("2 hosts, one with 35% of a core", "lab --hosts 2 --cpu 1.0,0.35 --", "--parallel.shares auto", ""),
}
# Each line lies on those before it, which are wider.
STROKES = {"one": 13.0, "two": 9.5, "three": 6.5, "hosts": 3.8, "unequal": 1.6}
COLORS = {
    "light": {"one": "#a5d8ff", "two": "#4dabf7", "three": "#1c7ed6", "hosts": "#ffd43b", "unequal": "#7048e8"},
    "dark": {"one": "#1b4b7a", "two": "#2f81d6", "three": "#74c0fc", "hosts": "#f5c518", "unequal": "#7048e8"},
}
KILL_COLOR = {"light": "#c2255c", "dark": "#ff6b9d"}

WIDTH, HEIGHT, LEFT, RIGHT = 860, 468, 66, 844
LOSS_TOP, LOSS_BOTTOM, LEAST_LOSS, MOST_LOSS = 56, 300, 5.3, 6.3  # of the upper plot
OFF_TOP, OFF_BOTTOM, MOST_OFF = 344, 424, 1.0  # of the lower one, in millionths of a nat


def train(folder: Path) -> None:
    """Trains each world whose run is not in the folder yet."""
    for name, (_, before, options, faults) in WORLDS.items():
        if not (folder / name).exists():
            words = f"{before} train --preset tiny {options} --parallel.threads 1 --out {folder / name}"
            command = (sys.executable, "-m", "paceline", *words.split())
            subprocess.run(command, env={**os.environ, "PACELINE_FAULTS": faults}, stdout=sys.stderr, check=True)


def losses(run: Path) -> list[float]:
    """Returns the loss of each step; of a step that was made twice, the one that counts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(by_step) == list(range(1, len(by_step) + 1)), run
    return list(by_step.values())


def x_of(step: int, num_steps: int) -> float:
    return LEFT + (RIGHT - LEFT) * (step - 1) / (num_steps - 1)


def loss_y(loss: float) -> float:
    return LOSS_BOTTOM - (LOSS_BOTTOM - LOSS_TOP) * (loss - LEAST_LOSS) / (MOST_LOSS - LEAST_LOSS)


def off_y(millionths: float) -> float:
    return (OFF_TOP + OFF_BOTTOM) / 2 - (OFF_BOTTOM - OFF_TOP) / 2 * millionths / MOST_OFF


def axes(num_steps: int, color: dict[str, str]) -> list[str]:
    parts = [text(LEFT, 24, "One loss curve, whatever it runs on", color["ink"], size=17)]
    parts.append(text(LEFT, 44, "loss, nats per token", color["faint"]))
    parts.append(text(LEFT, OFF_TOP - 12, "difference from 1 rank, millionths of a nat", color["faint"]))
    levels = [(loss_y(loss), f"{loss:.1f}") for loss in (5.4, 5.6, 5.8, 6.0, 6.2)]
    levels += [(off_y(off), f"{off:+.0f}" if off else "0") for off in (-MOST_OFF, 0.0, MOST_OFF)]
    for y, shown in levels:
        parts.append(line(LEFT, y, RIGHT, y, color["grid"]))
        parts.append(text(LEFT - 10, y + 4, shown, color["faint"], "end"))
    for step in (1, *range(10, num_steps + 1, 10)):
        parts += [text(x_of(step, num_steps), OFF_BOTTOM + 20, str(step), color["faint"], "middle")]
    return [*parts, text(WIDTH / 2, HEIGHT - 6, "step", color["faint"], "middle")]


def kill_mark(one: list[float], color: str) -> list[str]:
    x, y = x_of(KILLED_AT, len(one)), loss_y(one[KILLED_AT - 1])
    return [
        line(x, LOSS_TOP + 116, x, OFF_BOTTOM, color, 'stroke-dasharray="3 4"'),
        line(x - 7, y - 7, x + 7, y + 7, color, 'stroke-width="3"'),
        line(x - 7, y + 7, x + 7, y - 7, color, 'stroke-width="3"'),
        text(x + 8, LOSS_TOP + 126, f"kill -9 in step {KILLED_AT};", color),
        text(x + 8, LOSS_TOP + 144, f"restarted from step {RESTARTED_FROM}", color),
    ]


def draw(curves: dict[str, list[float]], scheme: str) -> None:
    one, color, of_world = curves["one"], SCHEMES[scheme], COLORS[scheme]
    parts = axes(len(one), color)
    for row, (name, curve) in enumerate(curves.items()):
        xs = [x_of(step, len(one)) for step in range(1, len(one) + 1)]
        off = [(loss - base) * 1e6 for loss, base in zip(curve, one, strict=True)]
        assert max(map(abs, off)) <= MOST_OFF, name
        parts.append(polyline(zip(xs, map(loss_y, curve), strict=True), of_world[name], STROKES[name]))
        if name != "one":
            parts += [dot(x, off_y(value), 2.6, of_world[name]) for x, value in zip(xs, off, strict=True)]
        y = LOSS_TOP + 8 + 20 * row
        parts.append(line(WIDTH - 300, y - 4, WIDTH - 260, y - 4, of_world[name], f'stroke-width="{STROKES[name]}"'))
        parts.append(text(WIDTH - 250, y, WORLDS[name][0], color["ink"]))
    parts += kill_mark(one, KILL_COLOR[scheme])
    write("curves", scheme, parts, WIDTH, HEIGHT, "The loss of `tiny` in five worlds is one line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder for the runs; without it they are removed")
    folder = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as temporary:
        runs = (folder or Path(temporary)).absolute()
        train(runs)
        curves = {name: losses(runs / name) for name in WORLDS}
    for name, curve in curves.items():
        print(f"{WORLDS[name][0]:32} {curve[0]:.7f} ... {curve[-1]:.7f}")
    for scheme in SCHEMES:
        draw(curves, scheme)


if __name__ == "__main__":
    main()
