"""A run on S3: a real server in a process of its own (moto's), which is cut off in the middle of what it gets.

Needs packages that the others do not: `.ci/nightly storage` installs them.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import TINY, losses, run
from saving import keep, read

from paceline.checkpoint.bring import bring
from paceline.checkpoint.bucket import Bucket
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.steps import folder_name, list_steps
from paceline.checkpoint.storage import Storage

pytestmark = [pytest.mark.long, pytest.mark.nightly]
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

# Forwards bytes to the server, and dies without a word after so many of the client's.
_PROXY = """
import os, select, socket, sys, threading
listener, server, left = socket.create_server(("127.0.0.1", int(sys.argv[1]))), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
def forward(source, target, counts):
    global left
    while data := source.recv(4096):
        target.sendall(data)
        if counts:
            left -= len(data)
            if left < 0:
                os._exit(1)
    target.close()
while True:
    client, upstream = listener.accept()[0], socket.create_connection(("127.0.0.1", server))
    for pair in ((client, upstream, True), (upstream, client, False)):
        threading.Thread(target=forward, args=pair, daemon=True).start()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        yield started
        started.kill()


@contextlib.contextmanager
def forwarding(port: int, server: int, num_bytes: int = 1 << 30) -> Iterator[subprocess.Popen[str]]:
    """What stands before the server, until so many bytes have come."""
    with process(sys.executable, "-c", _PROXY, str(port), str(server), str(num_bytes)) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of a server with the bucket `runs`."""
    port = free_port()
    with process(sys.executable, "-m", "moto.server", "-p", str(port)):
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        with at(port):
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("runs")
        yield port


@contextlib.contextmanager
def at(port: int) -> Iterator[None]:
    """Names the server and its credentials as S3's libraries find them."""
    names = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    names |= {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "what", "AWS_MAX_ATTEMPTS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        yield


def complete(url: str) -> list[int]:
    """The steps that are complete there."""
    bucket = Bucket(url)
    return [step for step in bucket.steps() if bucket.manifest(step)]


@pytest.mark.parametrize("moment", range(10))
def test_a_server_that_is_killed_loses_no_complete_checkpoint(server: int, moment: int, tmp_path: Path) -> None:
    """At ten moments of an upload; the next one has it all. Mutation: a manifest is sent before the files."""
    url, folder, port = f"s3://runs/killed-{moment}", tmp_path / "run", free_port()
    config = CheckpointConfig(to=url, retry_s=30.0)
    folder.mkdir()
    keep(folder / "checkpoints", 1)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n' * 500)
    with at(port), forwarding(port, server) as whole:
        storage = Storage(url, folder, config)
        storage.begin(brings=False, progress=lambda: None)
        while not storage.take_news():  # that step 1 is there
            time.sleep(0.05)
        whole.kill()
        whole.wait()
        # An upload of two files and their records has some 20 kB with its requests' heads.
        with forwarding(port, server, 1000 + 2500 * moment) as cut:
            keep(folder / "checkpoints", 2)
            storage.saved(2)
            cut.wait(60)
            with at(server):
                sent = complete(url)
                bring(url, tmp_path / "brought")
            assert sent in ([1], [1, 2])
            assert list_steps(tmp_path / "brought/checkpoints") == sent[-1:]
            read(tmp_path / "brought/checkpoints" / folder_name(sent[-1]))
        with forwarding(port, server):
            keep(folder / "checkpoints", 3, keep=2)
            storage.saved(3)
            while storage.is_ending_within(0.5):
                pass
            storage.release()
            with at(server):
                assert complete(url) == [2, 3]
                assert Bucket(url).owner()["is_over"]


def test_a_run_goes_on_from_a_bucket_on_another_machine(server: int, tmp_path: Path) -> None:
    """Without a server the run trains and saves all the same, and says so once."""
    url, (here, there) = "s3://runs/whole", (tmp_path / "a", tmp_path / "b")
    here.mkdir()
    there.mkdir()
    flags = ("train", *TINY, "--checkpoint.every", "10")
    with at(server):
        run(*flags, "--out", "x", "--checkpoint.to", url, "--train.stop-at-step", "25", cwd=here).require(75)
        refused = run(*flags, "--out", "y", "--checkpoint.to", url, cwd=there).require(2)
        assert "holds another run, up to step 25" in refused.err
        run("resume", url, "--train.stop-at-step", "30", cwd=there).require(75)
    with at(free_port()):
        alone = run("resume", "runs/whole", "--train.stop-at-step", "35", "--checkpoint.retry-s", "1", cwd=there)
        assert alone.require(75).out.count(f"not sent to {url}") == 1
    with at(server):
        run("resume", "runs/whole", "--checkpoint.retry-s", "90", cwd=there).require(0)
        assert json.loads(Bucket(url).read("owner.json") or b"")["is_over"]
        assert complete(url) == [35, 40]
    straight = tmp_path / "straight"
    run("train", *TINY, "--out", str(straight)).require(0)
    assert losses(there / "runs/whole") == losses(straight)
