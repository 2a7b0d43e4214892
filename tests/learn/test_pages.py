"""The pages of docs/learn run: their python blocks in order, in one interpreter, with the assertions that they make.

A `text` block right below a python block is what that one prints, word for word.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "learn"
LONG = {"ddp", "counting-bytes"}  # start worlds of processes
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE)
_NEXT = "\x1e"  # between the outputs of two blocks

RUNNER = f"""
import re, sys
text, namespace = open(sys.argv[1]).read(), {{"__name__": "__main__"}}
for found in re.finditer({_BLOCK.pattern!r}, text, {int(_BLOCK.flags)}):
    line = text.count("\\n", 0, found.start(1))
    exec(compile("\\n" * line + found[1], sys.argv[1], "exec"), namespace)  # a traceback then has the page's lines
    print({_NEXT!r}, end="", flush=True)
"""


def cases() -> list[object]:
    pages = sorted(page for page in PAGES.glob("*.md") if "```python" in page.read_text())
    return [pytest.param(page, id=page.stem, marks=[pytest.mark.long] * (page.stem in LONG)) for page in pages]


@pytest.mark.parametrize("page", cases())
def test_the_blocks_of_a_page_run_in_order_and_print_what_stands_below_them(page: Path, tmp_path: Path) -> None:
    expected = [printed for _, printed in _BLOCK.findall(page.read_text())]
    assert len(expected) == page.read_text().count("```python"), "a block of another shape"
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(page)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    for number, (printed, wanted) in enumerate(zip(done.stdout.split(_NEXT), expected, strict=False)):
        assert not wanted or printed == wanted, f"block {number + 1} prints\n{printed}\nand the page says\n{wanted}"


def test_the_index_names_every_page() -> None:
    text = (PAGES / "README.md").read_text()
    assert all(f"]({page.name})" in text for page in PAGES.glob("*.md") if page.name != "README.md")
