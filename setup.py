"""What pyproject.toml cannot say: where the repository is, which whoever publishes a package gives.

PACELINE_REPOSITORY=https://HOST/OWNER/paceline python -m build

The package then names it, and the README's links into the repository lead there; otherwise they are plain text.
"""

import os
import re
from pathlib import Path

from setuptools import setup

REPOSITORY = os.environ.get("PACELINE_REPOSITORY", "").rstrip("/")
PICTURE = re.compile(r'<picture>.*?<img alt="([^"]*)" src="([^"]*)">.*?</picture>', re.DOTALL)  # one for each scheme
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")  # neither https: nor a heading of the page


def elsewhere(link: re.Match[str]) -> str:
    """Returns a link as it is shown outside the repository; an image needs the file itself."""
    mark, text, path = link.groups()
    if REPOSITORY:
        return f"{mark}[{text}]({REPOSITORY}/{'raw' if mark else 'blob'}/HEAD/{path})"
    return "" if mark else text


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=LINK.sub(elsewhere, PICTURE.sub(r"![\1](\2)", readme)),
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md"} if REPOSITORY else {},
)
