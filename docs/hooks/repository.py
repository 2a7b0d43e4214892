"""Links out of docs/ work in the site: what they name becomes a page of it, as it stands in the repository.

In the repository, and where it is hosted, they are links to files: ../../SECURITY.md, ../../examples/toy.py. In the
site Markdown is a page, other text a page with the file in it, a folder its README or the list of its files. Pages that
are made so may themselves link to more. A link to what is not there stays as it is, and fails the strict build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_DOCS = "docs/"
_MADE = "repository/"  # in the site: what is not in docs/
_LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files, and a page for each thing outside docs/ that one of them, or such a page, links to."""
    root = _root(config)
    todo = [(_DOCS + file.src_uri, file.content_string) for file in files.documentation_pages()]
    while todo:
        here, text = todo.pop()
        for _, link, _ in _LINK.findall(text):
            target = _resolved(here, link, root)
            if target is None or target.startswith(_DOCS) or files.get_file_from_path(_page_of(target)):
                continue
            shown = _shown(root / target)
            files.append(File.generated(config, _page_of(target), content=shown, inclusion=InclusionLevel.NOT_IN_NAV))
            todo.append((target, shown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page's text, its links to files of the repository turned into links to pages of the site."""
    root, uri = _root(config), page.file.src_uri
    here = _source_of(uri, root) if uri.startswith(_MADE) else _DOCS + uri

    def in_site(match: re.Match[str]) -> str:
        target = _resolved(here, match[2], root)
        if target is None:
            return match[0]
        return match[1] + posixpath.relpath(_page_of(target), posixpath.dirname(uri) or ".") + match[3]

    parts = _FENCE.split(markdown)  # every second one is a block of code
    return "".join(part if place % 2 else _LINK.sub(in_site, part) for place, part in enumerate(parts))


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _resolved(here: str, link: str, root: Path) -> str | None:
    """What a link in the file `here` names, as a path from the root; None where that is no file of the repository."""
    if ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    if target.startswith("..") or not (root / target).exists():
        return None
    return f"{target}/README.md" if (root / target / "README.md").is_file() else target


def _page_of(target: str) -> str:
    """The page of the site that shows a file or folder of the repository."""
    if target.startswith(_DOCS):
        return target.removeprefix(_DOCS)
    return _MADE + (target if target.endswith(".md") else f"{target}.md")


def _source_of(page: str, root: Path) -> str:
    """The inverse of _page_of, for what is not in docs/."""
    target = page.removeprefix(_MADE)
    return target if (root / target).is_file() else target.removesuffix(".md")


def _shown(path: Path) -> str:
    """A file or folder of the repository as Markdown."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        return f"# {path.name}\n\n" + "".join(f"- [{name}]({path.name}/{name})\n" for name in names)
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {path.name}\n\n```{_LANGUAGES.get(path.suffix, 'text')}\n{text}```\n"
