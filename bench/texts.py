"""Writes three texts of about 1.1 million characters for speedrun.py and ablate.py, from what the environment has
installed, so that others with the same versions get the same ones: C++ (torch's headers), English (Python's language
reference and the docstrings of the standard library's packages), and Python with English (numpy's sources).

    python bench/texts.py FOLDER
    python bench/texts.py FOLDER --held-out

With --held-out three others, by which nothing was chosen: JavaScript (the sources of three.js, from npm), French
(Debian's manual pages) and English prose (Debian's fortunes). It calls `npm`, `apt-get` and `dpkg-deb`, on Debian 12.
"""

import argparse
import ast
import gzip
import re
import subprocess
import sysconfig
import tempfile
import unicodedata
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

_CHARACTERS = 1_115_394  # tiny Shakespeare's
_THREE = "three@0.170.0"
_DEBIAN = ("manpages-fr", "fortunes", "fortunes-min")


def docstrings(folder: Path) -> str:
    """Returns all docstrings of the packages in `folder`, in the order of their files."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in sorted(folder.glob("[a-z]*/*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
        found += [said for node in nodes if (said := ast.get_docstring(node))]
    return "\n\n".join(found)


def files(folder: Path, pattern: str) -> str:
    """Returns the files of this pattern in a folder and those inside it."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob(pattern)))


def installed() -> dict[str, str]:
    """Returns the texts for choosing by name."""
    return {
        "cpp": files(Path(torch.__path__[0]) / "include" / "torch", "*.h"),
        "english": "\n\n".join(topics.topics.values()) + docstrings(Path(sysconfig.get_path("stdlib"))),
        "numpy": files(Path(np.__path__[0]) / "lib", "*.py"),
    }


def held_out() -> dict[str, str]:
    """Returns the texts for the verdict by name, from the registries of npm and Debian."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(["npm", "pack", "--silent", _THREE], cwd=folder, check=True)
        subprocess.run(["tar", "xzf", next(folder.glob("three-*.tgz"))], cwd=folder, check=True)
        subprocess.run(["apt-get", "download", "-q", *_DEBIAN], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, "unpacked"], cwd=folder, check=True)
        pages = sorted((folder / "unpacked/usr/share/man/fr").glob("man[1-8]/*.gz"))
        french = "".join(gzip.decompress(page.read_bytes()).decode() for page in pages)
        quotes = sorted((folder / "unpacked/usr/share/games/fortunes").glob("*.u8"))
        return {
            "javascript": files(folder / "package/src", "*.js"),
            "french": re.sub(r"^[.'].*\n|\\f[A-Z]|\\", "", french, flags=re.MULTILINE),  # roff's requests and fonts
            "prose": "".join(path.read_text(encoding="utf-8") for path in quotes),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in (held_out() if options.held_out else installed()).items():
        plain = unicodedata.normalize("NFKD", text) if options.held_out else text  # e with an accent becomes e
        kept = plain.encode("ascii", "ignore").decode()[:_CHARACTERS]
        (options.folder / f"{name}.txt").write_text(kept, encoding="ascii")
        print(f"{name}: {len(kept)} characters")


if __name__ == "__main__":
    main()
