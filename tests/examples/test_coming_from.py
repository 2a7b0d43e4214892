"""docs/guide/from-*.md: a script of another library (-) and the same one here (+) print the same losses.

The other library's side runs on two ranks (Trainer's on one), and only where the library is installed, as for
`.ci/nightly`.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from program import COLD, TORCHRUN, Program

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "guide").glob("from-*.md"))
SCRIPTS = {  # by page: the two scripts of its diff, and the library
    page.stem: found.groups()
    for page in PAGES
    if (found := re.search(r'^```diff title="([\w.]+)"\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL))
}
NEEDS = {"torch.distributed": "torch", "transformers": "accelerate"}  # what Trainer needs
RANKS_BEFORE = {"from-trainer": 1}


def side(page: str, sign: str) -> str:
    """Returns one of the two scripts."""
    lines = SCRIPTS[page][1].splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", sign, ""))


def losses(folder: Path, script: str, ranks: int, **env: str) -> list[float]:
    folder.mkdir()
    (folder / "script.py").write_text(script)
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else (sys.executable,)
    with Program(str(folder / "script.py"), command=command, cwd=folder, env=env) as program:
        ended = program.wait().require()
    return [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", ended.out, re.MULTILINE)]


def test_every_page_has_its_scripts_but_the_one_of_a_patch() -> None:
    assert {page.stem for page in PAGES} - SCRIPTS.keys() == {"from-nanogpt"}
    for page in SCRIPTS:
        for sign in "-+":
            compile(side(page, sign), page, "exec")


@pytest.mark.long
@pytest.mark.parametrize("page", SCRIPTS)
def test_both_scripts_of_a_page_print_the_same_losses(page: str, tmp_path: Path) -> None:
    one, two = (losses(tmp_path / f"after-{ranks}", side(page, "+"), ranks) for ranks in (1, 2))
    assert len(one) > 10
    assert two == pytest.approx(one, abs=1e-4)
    library = SCRIPTS[page][0]
    if importlib.util.find_spec(NEEDS.get(library, library)):
        env = {} if library == "torch.distributed" else {"ACCELERATE_USE_CPU": "true", **COLD}
        before = losses(tmp_path / "before", side(page, "-"), RANKS_BEFORE.get(page, 2), **env)
        assert before == pytest.approx(one, abs=1e-4)


def test_the_table_of_nanogpt_is_of_its_script_and_of_the_patch() -> None:
    original = (ROOT / "tests" / "ports" / "originals" / "nanogpt" / "train.py").read_text()
    patch = (ROOT / "examples" / "ports" / "nanogpt.diff").read_text()
    table = re.findall(r"^\| `(.*?)`.*? \| (?:`(.*?)` )?\|$", (ROOT / "docs/guide/from-nanogpt.md").read_text(), re.M)
    assert len(table) > 10
    for theirs, ours in table:
        assert theirs in original, theirs
        assert ours in patch, ours
