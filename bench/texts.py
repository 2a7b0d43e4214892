"""Writes three texts of about 1.1 million characters for speedrun.py, from what the environment has installed, so that
others with the same versions get the same ones: C++ (torch's headers), English (Python's language reference and the
docstrings of the standard library's packages), and Python with English (numpy's sources).

    python bench/texts.py FOLDER
"""

import ast
import sys
import sysconfig
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

_CHARACTERS = 1_115_394  # tiny Shakespeare's


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


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        "cpp": files(Path(torch.__path__[0]) / "include" / "torch", "*.h"),
        "english": "\n\n".join(topics.topics.values()) + docstrings(Path(sysconfig.get_path("stdlib"))),
        "numpy": files(Path(np.__path__[0]) / "lib", "*.py"),
    }
    for name, text in texts.items():
        kept = text.encode("ascii", "ignore").decode()[:_CHARACTERS]
        (target / f"{name}.txt").write_text(kept, encoding="ascii")
        print(f"{name}: {len(kept)} characters")


if __name__ == "__main__":
    main()
