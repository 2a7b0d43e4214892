"""The page of one or several runs as one file: the live page with its style, its scripts and the runs in it.

Its Content-Security-Policy allows its own scripts only, by their hashes, and no network. What run folders say stands in
it as JSON, which page.js sets as text.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from paceline import __version__
from paceline.base.errors import UserError
from paceline.record import folder
from paceline.tools.view.read import Run
from paceline.tools.view.view import view_of

FILES = {
    "page.html": "text/html",
    "page.css": "text/css",
    "uPlot.js": "text/javascript",
    "charts.js": "text/javascript",
    "page.js": "text/javascript",
}
_PARTS = {"page.css": ["uPlot/uPlot.min.css", "page.css"], "uPlot.js": ["uPlot/uPlot.iife.min.js"]}


def asset(name: str) -> str:
    """Returns a file of the page."""
    here = resources.files("paceline.tools.view")
    return "".join((here / part).read_text(encoding="utf-8") for part in _PARTS.get(name, [name]))


def make_page(paths: Sequence[Path], num_parameters: Callable[[Path], int] = lambda path: 0) -> bytes:
    """Returns the page of the runs in these folders. num_parameters: of a run's model, 0 if unknown, to compute the
    bytes that a step must send. Raises UserError if a folder is no run, or cannot be read."""
    runs = []
    for path, name in zip(paths, _distinct(paths), strict=True):
        _require_readable(folder.find(path))
        run = Run(path, name, num_parameters)
        run.read()
        runs.append(view_of(run).as_json())
    data = {"now": time.time(), "path": "", "runs": dict(enumerate(runs))}
    scripts = [asset(name) for name in FILES if name.endswith(".js")]
    allowed = " ".join(_hash(script) for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    page = asset("page.html")
    data_script = f'<script type="application/json" id="data">{_inlined(data)}</script>'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    made = f"Made by paceline {__version__} on {time.strftime('%Y-%m-%d %H:%M %Z')}"
    inlined = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{policy}',
        '<link rel="stylesheet" href="page.css">': f"<style>{asset('page.css')}</style>",
        '<footer id="footer">': f'<footer id="footer">{made}',
        "<script src": f"{data_script}\n<script src",
    }
    for name in FILES:
        inlined[f'<script src="{name}"></script>'] = f"<script>{asset(name)}</script>"
    for old, new in inlined.items():
        page = page.replace(old, new, 1)
    return page.encode(errors="backslashreplace")


def _require_readable(run: folder.RunFolder) -> None:
    for path in (run.metrics, run.events):
        try:
            path.open("rb").close()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; it must be a readable file") from None


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Returns the folders' names, with as many parents as needed to distinguish them."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _inlined(data: object) -> str:
    """Returns JSON that ends no script, whatever texts are in it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
