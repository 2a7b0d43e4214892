"""A folder in the navigation stands for all its pages: a page that is added needs no line in mkdocs.yml.

First its index (README.md, which GitHub shows for a folder, or index.md), then the pages in the order in which the
index links to them, then those it does not name, by file name. The log's pages are kept out of the search.
"""

import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\(([^)#\s]+\.md)")


@event_priority(-100)  # when the other hooks have made their pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files as they are; the navigation names each page afterwards."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages() if file.inclusion.is_in_nav()}
    config.nav = [_expanded(entry, texts) for entry in config.nav or []]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text as it is; of the log it tells the search to leave the page out."""
    if page.file.src_uri.startswith("log/"):
        page.meta["search"] = {"exclude": True}
    return markdown


def _expanded(entry: Any, texts: dict[str, str]) -> Any:
    """The entry with the pages of a folder in its place; pages and lists of them as they are."""
    ((title, value),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
    if isinstance(value, list):
        return {title: [_expanded(inner, texts) for inner in value]}
    if title is None or not value.endswith("/"):
        return entry
    return {title: pages_of(value, texts)}


def pages_of(folder: str, texts: dict[str, str]) -> list[str]:
    """Returns the pages of a folder ("guide/"), of those that `texts` holds by path, in their order."""
    pages = sorted(page for page in texts if posixpath.dirname(page) == folder.rstrip("/"))
    index = next((page for page in pages if posixpath.basename(page) in ("README.md", "index.md")), None)
    linked: list[str] = []
    if index is not None:
        linked = [posixpath.normpath(posixpath.join(folder, link)) for link in _LINK.findall(texts[index])]
        linked.insert(0, index)
    return [page for page in dict.fromkeys([*linked, *pages]) if page in pages]
