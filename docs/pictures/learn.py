"""The pictures of docs/learn: `python docs/pictures/learn.py` draws ring, overlap and scaling, light and dark.

What they show is computed here, by the algorithms and the numbers of the pages that show them.
"""

from collections.abc import Callable

from svg import SCHEMES, arrow_down, dot, line, polyline, rectangle, text, write

BLUE = {"light": "#4dabf7", "dark": "#2f81d6"}
GREEN = {"light": "#51cf66", "dark": "#2b8a3e"}
ORANGE = {"light": "#ff922b", "dark": "#e8590c"}
WIDTH = 860


# ---- the ring all-reduce of three ranks: 2 (3 - 1) = 4 rounds, a frame each ----


def ring_rounds(n: int) -> list[tuple[list[int], list[list[int]]]]:
    """Returns for each round the chunk that each rank sends, and of how many ranks each chunk is the sum afterwards."""
    summands = [[1] * n for _ in range(n)]
    rounds = []
    for step in range(2 * (n - 1)):
        chunks = [(rank - step) % n for rank in range(n)]
        arriving = [summands[rank][chunks[rank]] for rank in range(n)]
        for rank in range(n):
            left = (rank - 1) % n
            chunk = chunks[left]
            summands[rank][chunk] = summands[rank][chunk] + arriving[left] if step < n - 1 else arriving[left]
        rounds.append((chunks, [list(row) for row in summands]))
    return rounds


def draw_ring(scheme: str) -> None:
    n, color, side, frame = 3, SCHEMES[scheme], 34, 212
    shades = {1: color["grid"], 2: BLUE[scheme], 3: GREEN[scheme]}
    parts = [text(10, 24, "A ring all-reduce of three ranks: four rounds", color["ink"], size=17)]
    for number, (chunks, summands) in enumerate(ring_rounds(n)):
        x0 = 10 + number * frame
        half = "add" if number < n - 1 else "copy"
        parts.append(text(x0, 54, f"round {number + 1}: send a chunk, {half} it", color["faint"]))
        for rank in range(n):
            y = 70 + rank * 64
            parts.append(text(x0, y + 22, f"{rank}", color["faint"]))
            for chunk, count in enumerate(summands[rank]):
                x = x0 + 18 + chunk * (side + 4)
                new = chunk == chunks[(rank - 1) % n]
                edge = f'stroke="{color["ink"]}" stroke-width="2"' if new else ""
                parts.append(rectangle(x, y, side, side, shades[count], edge))
                parts.append(text(x + side / 2, y + 22, str(count), color["ink"], "middle"))
            if rank < n - 1:
                x = x0 + 18 + chunks[rank] * (side + 4) + side / 2
                parts.append(arrow_down(x, y + side + 4, y + 62, ORANGE[scheme]))
        x = x0 + 18 + chunks[n - 1] * (side + 4) + side / 2
        parts.append(text(x, 70 + n * 64 - 12, "to 0", ORANGE[scheme], "middle", 12))
    parts.append(
        text(
            10,
            286,
            "The number says how many ranks' values a chunk is the sum of. Framed: what has just",
            color["faint"],
        )
    )
    parts.append(
        text(
            10,
            304,
            "arrived. After two rounds each rank has one complete chunk, after four it has all three.",
            color["faint"],
        )
    )
    write("ring", scheme, parts, WIDTH, 318, "A ring all-reduce of three ranks in four frames")


# ---- buckets that are sent while backward computes ----

FORWARD_MS, BACKWARD_MS, UPDATE_MS, LINK_MS, BUCKETS = 205.0, 308.0, 9.0, 372.0, 5  # `lesson`, two hosts, 1 Gbit/s


def sends(ready: Callable[[int], float]) -> list[tuple[float, float]]:
    """Returns when each bucket is on the link: it starts when it is full and the one before it has gone."""
    free, spans = 0.0, []
    for number in range(BUCKETS):
        begin = max(free, ready(number))
        free = begin + LINK_MS / BUCKETS
        spans.append((begin, free))
    return spans


def draw_overlap(scheme: str) -> None:
    color, left, scale, computed = SCHEMES[scheme], 100, 0.8, FORWARD_MS + BACKWARD_MS
    parts = [text(10, 24, "Buckets are sent while backward computes", color["ink"], size=17)]
    ways = {
        "after backward": sends(lambda number: computed),
        "overlapped": sends(lambda number: FORWARD_MS + BACKWARD_MS * (number + 1) / BUCKETS),
    }
    for row, (name, spans) in enumerate(ways.items()):
        y, end = 56 + row * 132, spans[-1][1]
        blocks = [
            (0.0, FORWARD_MS, "forward", BLUE),
            (FORWARD_MS, BACKWARD_MS, "backward", BLUE),
            (end, UPDATE_MS, "", GREEN),
        ]
        parts.append(text(10, y + 6, f"{name}: a step takes {end + UPDATE_MS:.0f} ms", color["ink"]))
        parts.append(text(10, y + 38, "compute", color["faint"]))
        parts.append(text(10, y + 76, "network", color["faint"]))
        for begin, duration, words, shade in blocks:
            edge = f'stroke="{color["paper"]}"'
            parts.append(rectangle(left + begin * scale, y + 18, duration * scale, 30, shade[scheme], edge))
            parts.append(text(left + (begin + duration / 2) * scale, y + 38, words, color["ink"], "middle"))
        for number, (begin, finish) in enumerate(spans):
            x, width = left + begin * scale, (finish - begin) * scale
            parts.append(rectangle(x, y + 56, width, 30, ORANGE[scheme], f'stroke="{color["paper"]}"'))
            parts.append(text(x + width / 2, y + 76, str(number + 1), color["ink"], "middle"))
        parts.append(
            line(left + computed * scale, y + 100, left + end * scale, y + 100, color["ink"], 'stroke-width="2"')
        )
        middle = left + (computed + end) / 2 * scale
        parts.append(text(middle, y + 116, f"exposed: {end - computed:.0f} ms", color["ink"], "middle"))
    parts.append(
        text(
            10,
            326,
            "The preset lesson on two hosts with 1 Gbit/s, computed: 372 ms on the link, in five buckets. The last",
            color["faint"],
        )
    )
    parts.append(
        text(
            10,
            344,
            "bucket is full only when backward ends, so it is always exposed. The green line is the update.",
            color["faint"],
        )
    )
    write("overlap", scheme, parts, WIDTH, 358, "A step's timeline with and without overlap")


# ---- strong and weak scaling, by the formula of reading-the-scaling-curve.md ----

ONE_MS, BACKWARD_FRACTION, MICRO_BATCHES = 1023.7, 0.6, 2


def efficiency(hosts: int, gigabits: float, kind: str) -> float:
    link = LINK_MS * 2 * (hosts - 1) / hosts / gigabits
    compute = ONE_MS if kind == "weak" else ONE_MS / hosts
    passes = MICRO_BATCHES if kind == "weak" else MICRO_BATCHES / hosts
    return compute / (compute + max(0.0, link - BACKWARD_FRACTION * compute / max(1.0, passes)))


def draw_scaling(scheme: str) -> None:
    color, left, right, top, bottom = SCHEMES[scheme], 60, 640, 50, 300
    hosts = list(range(1, 17))

    def place(n: int, value: float) -> tuple[float, float]:
        return left + (right - left) * (n - 1) / (hosts[-1] - 1), bottom - (bottom - top) * value

    parts = [text(10, 24, "Efficiency over hosts, the preset lesson", color["ink"], size=17)]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(1, value)[1]
        parts.append(line(left, y, right, y, color["grid"]))
        parts.append(text(left - 8, y + 4, f"{value:.0%}", color["faint"], "end"))
    parts += [text(place(n, 0)[0], bottom + 20, str(n), color["faint"], "middle") for n in (1, 2, 4, 8, 16)]
    parts.append(text((left + right) / 2, bottom + 40, "hosts", color["faint"], "middle"))
    lines = [
        ("strong", 1.0, ORANGE, ""),
        ("weak", 1.0, BLUE, ""),
        ("strong", 10.0, ORANGE, 'stroke-dasharray="7 6"'),
        ("weak", 10.0, BLUE, 'stroke-dasharray="7 6"'),
    ]
    for row, (kind, gigabits, shade, dashes) in enumerate(lines):
        points = [place(n, efficiency(n, gigabits, kind)) for n in hosts]
        parts.append(polyline(points, shade[scheme], 3, dashes))
        y = 70 + 24 * row
        parts.append(line(right + 24, y - 4, right + 60, y - 4, shade[scheme], f'stroke-width="3" {dashes}'))
        parts.append(text(right + 68, y, f"{kind}, {gigabits:.0f} Gbit/s", color["ink"]))
    for value, shade in ((0.80, ORANGE), (0.95, BLUE)):
        x, y = place(2, value)
        parts += [dot(x, y, 6, color["ink"]), dot(x, y, 4, shade[scheme])]
    parts += [dot(right + 42, 166, 6, color["ink"]), text(right + 68, 170, "measured", color["ink"])]
    write("scaling", scheme, parts, WIDTH, 350, "Strong and weak scaling at 1 and 10 Gbit/s")


if __name__ == "__main__":
    for scheme in SCHEMES:
        draw_ring(scheme)
        draw_overlap(scheme)
        draw_scaling(scheme)
