"""The pages of docs/learn run: their python blocks, with the assertions that they make (tests/blocks.py)."""

from pathlib import Path

import pytest
from blocks import run_blocks

PAGES = Path(__file__).resolve().parents[3] / "docs" / "learn"
# These start worlds of processes; the second, 18 s of a core, runs at night, as the commands of most pages do.
LONG = {"ddp": [pytest.mark.long], "counting-bytes": [pytest.mark.long, pytest.mark.nightly]}


def cases() -> list[object]:
    pages = sorted(page for page in PAGES.glob("*.md") if "```python" in page.read_text())
    return [pytest.param(page, id=page.stem, marks=LONG.get(page.stem, [])) for page in pages]


@pytest.mark.parametrize("page", cases())
def test_the_blocks_of_a_page_run_in_order_and_print_what_stands_below_them(page: Path, tmp_path: Path) -> None:
    run_blocks(page, tmp_path)


def test_the_index_names_every_page() -> None:
    text = (PAGES / "README.md").read_text()
    assert all(f"]({page.name})" in text for page in PAGES.glob("*.md") if page.name != "README.md")
