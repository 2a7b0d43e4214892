"""Output with nowhere to go, and characters that a terminal lacks, change no exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from program import run

COMMAND = (sys.executable, "-m", "paceline")


def redirected(where: str, *command: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command with a shell's redirections."""
    return subprocess.run(["sh", "-c", f'exec "$@" {where}', "sh", *command], capture_output=True, text=True)


def test_closed_streams_are_as_dev_null(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert redirected("<&- >&- 2>&-", *COMMAND, "runs", str(tmp_path)).returncode == 0
    ended = redirected(">&-", *COMMAND, "frobnicate")
    assert (ended.returncode, ended.stderr.startswith("error: there is no verb")) == (2, True)


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = "import sys; from paceline.cli.main import main; main(['--version']); sys.exit(open('x', 'w').fileno() < 3)"
    script = f"import os; os.chdir({str(tmp_path)!r}); {code}"
    assert redirected(">&- 2>&-", sys.executable, "-c", script).returncode == 0


@pytest.mark.parametrize("arguments", [["--version"], ["slurm", "--help"]], ids=lambda words: " ".join(words))
def test_a_pipe_without_a_reader_is_no_error(arguments: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        ended = subprocess.run([*COMMAND, *arguments], stdout=pipe, stderr=subprocess.PIPE, text=True, env=env)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_characters_that_the_encoding_lacks_are_printed_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "日本").mkdir()
    (tmp_path / "日本" / "config.toml").touch()
    assert "\\u65e5\\u672c" in run("runs", str(tmp_path), env={"PYTHONIOENCODING": "latin-1"}).require().out
