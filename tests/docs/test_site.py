"""The site builds without a warning, its links hold, it loads nothing from elsewhere, and the reference is complete.

The generator checks links in the Markdown; here they are checked once more in what a browser gets.
"""

import dataclasses
import os
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import paceline
from paceline.cli.verbs import VERBS
from paceline.config import Config, preset_names

ROOT = Path(__file__).resolve().parents[2]
_LOADS = {"src", "srcset", "data", "poster"}  # attributes that make a browser fetch; and a <link>'s href
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Html(HTMLParser):
    """What a page links to, loads, and can be linked to by."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif name == "class":
                self.classes.update(value.split())
            elif name in _LOADS or (tag == "link" and name == "href"):
                self.loads.append(value)
            elif tag == "a" and name == "href":
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    """Path in the site -> what is in that page."""
    return {str(path.relative_to(site)): Html(path.read_text()) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_that_is_there_and_to_a_place_in_it(site: Path, pages: dict[str, Html]) -> None:
    num_anchors, broken = 0, []
    for name, page in pages.items():
        if name == "404.html":  # its links are from the root of wherever the site is put
            continue
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            target = posixpath.join(target, "index.html") if (site / target).is_dir() else target
            if not (site / target).is_file():
                broken.append(f"{name}: {link}")
            elif parts.fragment and target in pages:
                num_anchors += 1
                if unquote(parts.fragment) not in pages[target].ids:
                    broken.append(f"{name}: {link}, no such place in the page")
    assert not broken, "\n".join(broken)
    assert num_anchors > 100


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[str, Html]) -> None:
    for name, page in pages.items():
        for link in page.loads:
            assert not urlsplit(link).netloc, f"{name} loads {link}"
        assert "mermaid" not in page.classes, f"{name}: the theme fetches mermaid from elsewhere"
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        for link in re.findall(r"(?:url\(|@import\s)\s*[\"']?((?:https?:)?//[^\"')\s]+)", sheet.read_text()):
            raise AssertionError(f"{sheet.name} loads {link}")


def test_every_document_is_a_page_and_the_navigation_leads_to_it(pages: dict[str, Html]) -> None:
    listed = {posixpath.normpath(urlsplit(link).path) for link in pages["index.html"].links}
    for path in (ROOT / "docs").rglob("*.md"):
        name = str(path.relative_to(ROOT / "docs")).replace("README.md", "index.md")
        html = name.removesuffix(".md") + ".html"
        assert html in pages
        in_log = html.startswith("log/")  # which is found from LOG.md, and not by searching
        assert html in listed or html == "index.html" or in_log, f"the home page's navigation lacks {html}"


def test_each_verb_public_name_field_and_preset_has_its_place_in_the_reference(
    site: Path, pages: dict[str, Html]
) -> None:
    cli = (site / "reference" / "cli.html").read_text()
    for verb in VERBS:
        assert f"paceline-{verb}" in pages["reference/cli.html"].ids
        assert f"paceline {verb}" in cli
    for words in ("data prepare", "data info", "bench link", "bench scaling", "lab set"):
        assert f"paceline-{words.replace(' ', '-')}" in pages["reference/cli.html"].ids
        assert f"usage: paceline {words}" in cli
    for name in paceline._PUBLIC:
        assert name.lower() in pages["reference/python.html"].ids
    configuration = (site / "reference" / "configuration.html").read_text()
    for section in dataclasses.fields(Config):
        assert section.name in pages["reference/configuration.html"].ids
        for field in dataclasses.fields(section.default_factory()):  # type: ignore[misc]
            assert f"--{section.name}.{field.name.replace('_', '-')}</code>" in configuration
    assert set(preset_names()) <= pages["reference/presets.html"].ids
