"""What pyproject.toml cannot say: that a package holds the example which `paceline learn ring` runs, and where the
repository is, which whoever publishes a package gives.

PACELINE_REPOSITORY=https://HOST/OWNER/paceline python -m build

The package then names it, and the README's links into the repository lead there; otherwise they are plain text.
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLE = "examples/ring.py"
REPOSITORY = os.environ.get("PACELINE_REPOSITORY", "").rstrip("/")
PICTURE = re.compile(r'<picture>.*?<img alt="([^"]*)" src="([^"]*)">.*?</picture>', re.DOTALL)  # one for each scheme
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")  # neither https: nor a heading of the page


def elsewhere(link: re.Match[str]) -> str:
    """Returns a link as it is shown outside the repository; an image needs the file itself."""
    mark, text, path = link.groups()
    if REPOSITORY:
        return f"{mark}[{text}]({REPOSITORY}/{'raw' if mark else 'blob'}/HEAD/{path})"
    return "" if mark else text


class BuildWithExample(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.mkpath(f"{self.build_lib}/paceline/examples")
            self.copy_file(EXAMPLE, f"{self.build_lib}/paceline/{EXAMPLE}")

    def get_source_files(self) -> list[str]:
        """Of these the source archive is made."""
        return [*super().get_source_files(), EXAMPLE]


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    cmdclass={"build_py": BuildWithExample},
    long_description=LINK.sub(elsewhere, PICTURE.sub(r"![\1](\2)", readme)),
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md"} if REPOSITORY else {},
)
