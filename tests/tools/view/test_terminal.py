"""What `paceline watch` prints: in full on a terminal or once, as lines to a pipe; it ends with the run."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest
from program import Program
from simulated_run import Simulated

from paceline.base.errors import UserError
from paceline.cli.main import main
from paceline.cli.watch import main as watch
from paceline.record.folder import COMPLETE
from paceline.tools.view import terminal
from paceline.tools.view.follow import Views
from paceline.tools.view.terminal import lines_of


def test_once_prints_one_run_or_a_table_and_no_orders_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Simulated(tmp_path / "one", 64, slow_rank=37)
    made.steps(30)
    made.event("checkpoint", step=20, seconds=2.4, bytes=1_493_000_000)
    made.event("failed", step=30, error="\x1b[2J[bold]lost")
    assert main(["watch", str(made.folder), "--once"]) == 0
    said = capsys.readouterr().out
    assert "one  ● failed: \\x1b[2J[bold]lost\n" in said
    assert re.search(r"\n +37 node4 +█+▓+·+ *25\d ms of work\n", said)
    ranks = [int(rank) for rank in re.findall(r"^ +(\d+) node", said, flags=re.MULTILINE)]
    assert (len(ranks), ranks[0]) == (5, 37)
    assert "and 59 more ranks, which work 19" in said
    assert "checkpoint at step 20  2.4 seconds, 1.4 GiB" in said
    Simulated(tmp_path / "two").steps(3)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    rows = {words[0]: words for line in out.splitlines() if (words := line.split())}
    assert rows["two"][1:5] == ["running", "3", "of", "500"]
    assert "\\x1b[2J[bold]lost" in out
    assert "samples" not in out
    script = Simulated(tmp_path / "scripts" / "three")
    (script.folder / "config.toml").write_text('[run]\nunit = "samples"\n')
    script.steps(3)
    assert main(["watch", str(tmp_path / "scripts"), "--once"]) == 0
    assert "k samples " in capsys.readouterr().out


def test_parts_below_0_make_no_bar_longer_than_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finds: in damaged rows the parts of a rank add up to little, and one of them is large: an OverflowError."""
    made = Simulated(tmp_path / "run")
    parts = {"rank_forward_ms": [-1e299, 60.0], "rank_backward_ms": [1e299, 118.0]}
    made.append("metrics.jsonl", made.row(1) | parts)
    assert main(["watch", str(made.folder), "--once"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100, said
    assert re.search(r"\n +0 node0 +█{40,} .* of work\n", said), said


def test_a_pipe_gets_lines_until_the_run_is_finished(tmp_path: Path) -> None:
    with Program("watch", "run", cwd=tmp_path) as program:
        said = lambda: program._said()  # noqa: E731
        program.wait_for(lambda: "run: waiting for the run to begin" in said())
        made = Simulated(tmp_path / "run")
        made.steps(5)
        program.wait_for(lambda: "run: running  step 5 of 500  loss 5." in said())
        made.event("end", step=5, reason=COMPLETE)
        out = program.wait().require().out
    assert out.count("waiting") == 1
    assert "run  ● finished" in out


@pytest.mark.parametrize(
    ("variable", "value", "is_terminal"), [("TERM", "xterm", True), ("TERM", "dumb", True), ("FORCE_COLOR", "1", False)]
)
def test_only_a_terminal_that_can_move_its_cursor_is_redrawn(
    variable: str, value: str, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutations: a dumb terminal stays empty; a pipe gets orders to the terminal, each second."""
    made = Simulated(tmp_path / "run")
    made.steps(5)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(terminal.time, "sleep", lambda _: made.event("end", step=5, reason=COMPLETE))
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        terminal.show(Views(made.folder))
        out.flush()
        said = os.read(reader, 1 << 16)
    os.close(reader)
    is_redrawn = value == "xterm"
    assert (b"\x1b[?1049h" in said) == is_redrawn
    assert (b"run: running  step 5 of 500" in said) != is_redrawn


def test_on_a_terminal_it_redraws_and_leaves_the_last_screen(tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run", 64)
    made.steps(20)
    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (24, 80))
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "paceline", "watch", "run"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=inner, stdout=inner) as process:
        os.close(inner)
        screen = pyte.Screen(80, 24)
        stream = pyte.ByteStream(screen)

        def until(text: str) -> None:
            while text not in "\n".join(screen.display):
                stream.feed(os.read(outer, 1 << 16))

        until("world size 64")  # the last line
        assert "step 20 of 500" in screen.display[1]
        assert screen.display[0].startswith("run  ● running")
        assert sum("of work" in line for line in screen.display) >= 4  # the slowest ranks fit above the events
        made.steps(5)
        until("step 25 of 500")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        os.close(outer)


def test_a_curve_of_dots() -> None:
    """Two points are a diagonal: in cells of 2 x 4 dots each column rises by half a cell's height."""
    assert lines_of([0, 1], [0, 1], 2, 1) == ["⡠⠊"]
    assert lines_of([1], [5], 1, 1) == ["⠉"]
    assert lines_of([0, 1, 2, 3], [0, 0, 1, 1], 2, 1) == ["⣀⠏"]  # steep parts are connected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the run folder to watch, or a folder of runs: paceline watch RUN"),
        (["file"], "cannot read file: Not a directory; name a run folder, or a folder of runs"),
        (["run", "--port", "9000"], "--port and --host belong to the page; add --page"),
        (["nosuch", "--once"], "cannot read nosuch: No such file or directory; name a run folder, or a folder of runs"),
        (["run", "--page", "--once"], "--once prints to the terminal; give it without --page"),
        (["run", "--page", "--port", "70000"], "--port is 70000; it lies between 0 and 65535"),
        (["run", "--page", "--host", "no.such.name.invalid"], "--host is no.such.name.invalid: .*; name an address"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=said):
        watch(arguments)
