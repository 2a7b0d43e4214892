"""The Dockerfile's image, built from a base of this machine's Debian, trains as a user without rights.

apt-get install buildah mmdebstrap
PIP_FIND_LINKS=/folder/with/torch's/wheel/for/Debian's/Python pytest tests/packages/test_image.py
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import __version__
from paceline.record.folder import COMPLETE

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
WHEELS = os.environ.get("PACELINE_TEST_WHEELS", "")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # a network's own, too
Buildah = Callable[..., str]


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    """Runs buildah with a store of its own, and returns what it prints."""
    if not WHEELS or os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "mmdebstrap"))):
        pytest.skip("an image takes root, buildah, mmdebstrap, and PACELINE_TEST_WHEELS")

    def run(*arguments: str) -> str:
        store = ("--root", f"{tmp_path}/store", "--runroot", f"{tmp_path}/run")
        done = subprocess.run(("buildah", *store, *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")


def make_base(buildah: Buildah) -> None:
    made = buildah("from", "scratch")
    root, name = buildah("mount", made), platform.freedesktop_os_release()["VERSION_CODENAME"]
    options = ["--variant=minbase", "--include=ca-certificates"]
    options += [f"--customize-hook=copy-in {CERTIFICATES} {Path(CERTIFICATES).parent}"]
    subprocess.run(["mmdebstrap", "--quiet", *options, name, root], check=True)
    buildah("config", "--env", f"PIP_FIND_LINKS={WHEELS}", made)
    buildah("commit", "--rm", made, "base")


def test_the_image_trains_on_two_ranks(buildah: Buildah) -> None:
    make_base(buildah)
    arguments = ("--build-arg=BASE=localhost/base", "--build-arg=TORCH_INDEX=https://pypi.org/simple")
    buildah("build", "--isolation=chroot", f"--volume={WHEELS}:{WHEELS}:ro", *arguments, "--tag=paceline", ".")
    made = buildah("from", "paceline")

    def run(*command: str) -> str:
        return buildah("run", "--isolation=chroot", made, "--", *command)

    assert (run("id", "-u"), run("paceline", "--version")) == ("10001", __version__)
    run("paceline", "train", "--preset", "tiny", "--nproc", "2", "--train.steps", "5", "--out", "/runs/one")
    assert COMPLETE in run("cat", "/runs/one/events.jsonl")
