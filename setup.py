"""What pyproject.toml cannot say: on a package index the README's links into the repository are absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LINK = re.compile(r"(!?)(\[[^]]*\]\()(?!\w+:|#)([^)]+)")  # neither https: nor a heading of the page


def absolute(link: re.Match[str]) -> str:
    """Returns the beginning of a link, up to its closing parenthesis; an image needs the file itself."""
    return f"{link[1]}{link[2]}{REPOSITORY}/{'raw' if link[1] else 'blob'}/HEAD/{link[3]}"


setup(
    long_description=LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
