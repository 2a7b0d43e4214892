"""What the pictures are drawn with: pieces of SVG as text, and the two color schemes of GitHub and of the site."""

from collections.abc import Iterable
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
SCHEMES = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "grid": "#d8dee4", "paper": "#ffffff"},
    "dark": {"ink": "#e6edf3", "faint": "#9198a1", "grid": "#30363d", "paper": "#0d1117"},
}
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def write(name: str, scheme: str, parts: Iterable[str], width: int, height: int, title: str) -> None:
    """Writes docs/images/NAME-SCHEME.svg. The background is the page's."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    body = "\n".join(parts)
    svg = f'{head} font-family="{_FONT}" role="img">\n<title>{title}</title>\n{body}\n</svg>\n'
    (IMAGES / f"{name}-{scheme}.svg").write_text(svg)


def text(x: float, y: float, words: str, color: str, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def rectangle(x: float, y: float, width: float, height: float, color: str, more: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}" {more}/>'


def dot(x: float, y: float, radius: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def polyline(points: Iterable[tuple[float, float]], color: str, width: float, more: str = "") -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'
    return f'<polyline points="{joined}" {style} {more}/>'


def arrow_down(x: float, y1: float, y2: float, color: str) -> str:
    head = f'<polygon points="{x:.1f},{y2:.1f} {x - 4:.1f},{y2 - 7:.1f} {x + 4:.1f},{y2 - 7:.1f}" fill="{color}"/>'
    return line(x, y1, x, y2, color, 'stroke-width="1.6"') + head
