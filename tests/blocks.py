"""Runs the python blocks of a document as they stand there: in order, in one interpreter.

A `text` block right below a python block is what that one prints, word for word. A block whose title says what it needs
("needs a model from elsewhere") is shown to readers and not run.
"""

import re
import sys
from pathlib import Path

from program import Program

_BLOCK = re.compile(
    r"^```python(?: title=\"(needs .*?)\")?\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE
)
_NEXT = "\x1e"  # between the outputs of two blocks

_RUNNER = f"""
import re, sys
if "program" in sys.modules:  # this is a fork
    sys.modules["program"].fork_what_runs()
text, preamble, namespace = open(sys.argv[1]).read(), sys.argv[2], {{"__name__": "__main__"}}
if preamble:
    exec(compile(open(preamble).read(), preamble, "exec"), namespace)
print({_NEXT!r}, end="", flush=True)
for found in re.finditer({_BLOCK.pattern!r}, text, {int(_BLOCK.flags)}):
    if found[1] is None:
        line = text.count("\\n", 0, found.start(2))
        exec(compile("\\n" * line + found[2], sys.argv[1], "exec"), namespace)  # a traceback has the page's lines
        print({_NEXT!r}, end="", flush=True)
"""


def run_blocks(
    document: Path, folder: Path, preamble: Path | None = None, launcher: tuple[str, ...] = (), status: int = 0
) -> str:
    """Runs them in this folder, after what a reader has already: `preamble`. launcher: words before the script, of
    torchrun. Returns what they printed; fails where a block raises, or prints other than what stands below it."""
    text = document.read_text()
    blocks = _BLOCK.findall(text)
    assert len(blocks) == text.count("```python"), "a block of another shape"
    runner = folder / "runner.py"
    runner.write_text(_RUNNER)
    command = (*(launcher or (sys.executable,)), str(runner), str(document), str(preamble or ""))
    with Program(command=command, cwd=folder) as program:
        out = program.wait().require(status).out
    expected = [printed for needs, _, printed in blocks if not needs]
    for number, (printed, wanted) in enumerate(zip(out.split(_NEXT)[1:], expected, strict=False)):
        assert not wanted or printed == wanted, f"block {number + 1} prints\n{printed}\nand the page says\n{wanted}"
    return out.replace(_NEXT, "")


def runnable_blocks(document: Path) -> int:
    """Returns how many python blocks of the document are run."""
    return sum(not needs for needs, _, _ in _BLOCK.findall(document.read_text()))
