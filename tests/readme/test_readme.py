"""What the README tells people to type works, word for word but for the size of the preset."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import run_blocks, runnable_blocks
from program import TORCHRUN, Program

from paceline.cli.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = sorted([*(ROOT / "docs" / "guide").glob("*.md"), *(ROOT / "docs" / "learn").glob("*.md")])
IN_EVERY_RUN = ("README",)  # of `make test-long`
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *GUIDE]

# A block of commands. Its title says what it needs beyond one machine ("needs 8 GPUs"): the site shows it, and no test
# runs it.
_BLOCK = re.compile(r"^```sh(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A file that a reader is to save under the name in its title.
_FILE = re.compile(r"^```\w+ title=\"([\w-]+\.\w+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LAB = re.compile(r"^paceline (lab --hosts|bench scaling)", re.MULTILINE)
_FAILS = "ends with status 1"  # the title of a block whose commands show a failure


def commands(document: Path, title: str = "") -> list[str]:
    """Returns the commands of a document's shell blocks, continued lines joined, comments dropped: of those with this
    beginning of a title; without one, of those that one machine can run."""
    found = []
    for its_title, block in _BLOCK.findall(document.read_text()):
        if its_title.startswith(title) if title else its_title in ("", _FAILS):
            lines = [line.split("#")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
            found += [line for line in lines if line]
    return found


def runnable(document: Path) -> list[str]:
    """Returns those that one machine can run, one after another: not the two hosts' (tests/laws), not make's (CI), not
    those for a second terminal (tests/tools/lab), those for a lab only where there can be one, and the README's only
    once. `verify` and what measures run from the README and in tests/tools/bench, two of the examples in
    tests/examples."""
    others = ["10.0.0.1", "lab set"]
    if document != README:
        others += ["bench link", "bench scaling", "paceline verify", "-- verify", "examples/toy", "examples/gpt"]
    if not can_have_a_lab():
        made = [re.search(r"--out (\S+)", c) for c in commands(document) if "lab --hosts" in c]
        others += ["lab --hosts", "lab clean", *(found[1] for found in made if found)]  # nor what needs the runs of one
    kept = [c for c in commands(document) if not c.startswith("make") and not any(word in c for word in others)]
    if document == README:
        return kept
    return [c for c in kept if not is_the_readmes(c, kept)]


def is_the_readmes(command: str, among: list[str]) -> bool:
    """Whether the README has this command, and all of these that have to do with its run, too."""
    run = re.search(r"\bruns/\w+", command)
    same = [other for other in among if run[0] in other] if run else [command]
    return {command, *same} <= set(commands(README))


def can_have_a_lab() -> bool:
    """Asks without making one."""
    command = ("unshare", "--net", "--mount", "ip", "link", "add", "lab0", "type", "veth")
    return shutil.which("ip") is not None and subprocess.run(command, check=False, capture_output=True).returncode == 0


def with_fewer_steps(command: str) -> str:
    """A run of the preset tiny with fewer steps than its 40: 24, where a flag or a fault speaks of steps up to 20. A
    slow host of a lab has twice the processor time."""
    if "lab --hosts" in command:
        command = re.sub(r" --train.steps \d+", "", command).replace("--cpu 1.0,0.35", "--cpu 1.0,0.7")
    if not re.search(r"\btrain .*--preset tiny", command) or "--train.steps" in command:
        return command
    count = 24 if re.search(r"\b(step|steps|stop-at-step|every|profile)\b", command) else 12
    return command.replace(" --out", f" --train.steps {count} --train.eval-sequences 8 --out")


def as_words(command: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns a command as words and the variables before it, so that it can be forked; what is a shell's stays one."""
    words = shlex.split(command)
    words = words[1:] if words[0] == "env" else words
    env = dict(word.split("=", 1) for word in itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
    first, *rest = words[len(env) :]
    programs = {"paceline": (sys.executable, "-m", "paceline"), "python": (sys.executable,), "torchrun": TORCHRUN}
    return ((*programs[first], *rest), env) if first in programs else (("bash", "-c", command), {})


def marks(document: Path) -> list[pytest.MarkDecorator]:
    """The commands of most pages run at night; test_marked.py parses all."""
    needed = {"lab": "lab --hosts" in document.read_text(), "nightly": document.stem not in IN_EVERY_RUN}
    return [pytest.mark.group(document.stem), *(getattr(pytest.mark, name) for name in needed if needed[name])]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document",
    [pytest.param(d, id=d.stem, marks=marks(d)) for d in (README, *GUIDE) if "```sh" in d.read_text()],
)
def test_every_command_of_the_documents_runs_in_order(document: Path, tmp_path: Path) -> None:
    for folder in ("docs", "texts"):  # what a reader would have
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.md").write_text(README.read_text() * 20)
    shutil.copy(README, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in _FILE.findall(document.read_text()):
        (tmp_path / name).write_text(text)
    records = [{"content": f"{i} {line}"} for i, line in enumerate(README.read_text().splitlines())]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    runs = runnable(document)
    assert runs or commands(document) or commands(document, "needs")
    for command in runs:
        words, env = as_words(with_fewer_steps(re.sub("--preset (demo|lesson)", "--preset tiny", command)))
        with Program(command=words, env={**path, **env}, cwd=tmp_path) as program:
            ended = program.wait()
        wanted = 75 if "--train.stop-at-step" in command else 1 if command in commands(document, _FAILS) else 0
        assert ended.status == wanted, f"{command}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"


PREAMBLES = Path(__file__).parent / "preambles"  # what a reader has who comes to a document's python blocks
WITH_PYTHON = [document for document in DOCUMENTS if runnable_blocks(document) and document.parent.name != "learn"]


def test_the_python_blocks_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    run_blocks(README, tmp_path, PREAMBLES / "README.py")


@pytest.mark.long
@pytest.mark.parametrize("document", WITH_PYTHON, ids=lambda document: document.stem)
def test_the_python_blocks_of_a_document_run_on_one_rank_and_on_two(document: Path, tmp_path: Path) -> None:
    said = []
    for name, ranks in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks))
        said.append(run_blocks(document, tmp_path / name, PREAMBLES / f"{document.stem}.py", launcher))
    one, two = map(printed_losses, said)
    assert one
    assert two == pytest.approx(one, abs=2e-4)


def printed_losses(out: str) -> list[float]:
    """What the blocks print; if they print none, what paceline.Run says of the last step: of others it may say none."""
    printed = re.findall(r"^(?!step [\d/]+  ).*?loss ([\d.]+)", out, re.MULTILINE)
    return list(map(float, printed or re.findall(r"^step (?:(\d+)/\1)  loss ([\d.]+)", out, re.MULTILINE)[-1][1:]))


def test_the_home_page_has_no_commands_but_the_readmes() -> None:
    assert len(commands(ROOT / "docs" / "index.md")) == 2
    assert set(commands(ROOT / "docs" / "index.md")) <= set(commands(README))


def test_files_and_verbs_that_the_documents_name_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
        for name in re.findall(r"`((?:src/|tests/|docs/|bench/|examples/)[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for verb in re.findall(r"`paceline (\w+)", text):
            assert verb in VERBS, f"{document.name} names the verb {verb}"


def test_the_architecture_names_files_that_exist_in_the_package() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    rooms = "data|model|sync|optim|replica|train|world|checkpoint|record|cli|launch|base"
    for name in re.findall(rf"`((?:{rooms})/[\w./]*)`", text):
        assert (ROOT / "src" / "paceline" / name).exists(), name
