"""What a terminal is shown: text and no orders to it, lines no wider than they need to be."""

import unicodedata
from contextlib import redirect_stdout, suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from paceline.record.console import Console, facts, table
from paceline.record.output import print_error, printable

ALL = "".join(map(chr, range(0x180)))


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\x1b[31mb\x07\r\n\tc\x7f\x9b é ☃ 🚀\x00") == "a\\x1b[31mb\\x07\\x0d\n\tc\\x7f\\x9b é ☃ 🚀\\x00"
    left = {character for character in printable(ALL) if unicodedata.category(character) == "Cc"}
    assert left == {"\n", "\t"}
    assert all(character in printable(ALL) for character in ALL if unicodedata.category(character) != "Cc")
    assert printable("half \ud83d, byte \udcff") == "half \\ud83d, byte \\udcff"


def test_what_is_said_holds_no_orders_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(0)
    console.open_log(tmp_path / "rank.log")
    console.say("a \x1b]0;title\x07 [bold]sample[/]\x9b2J")
    print_error("error: \x1b[2J of a file's name")
    console.close()
    out, err = capfd.readouterr()
    assert "a \\x1b]0;title\\x07 [bold]sample[/]\\x9b2J" in out
    assert err == "error: \\x1b[2J of a file's name\n"
    for text in (out, (tmp_path / "rank.log").read_text()):
        assert "\\x1b]0;title" in text
        assert "\x1b" not in text
        assert "\x9b" not in text


def test_a_path_that_is_not_utf8_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(0)
    console.open_log(tmp_path / "rank-\udcff.log")
    console.say("said \udcff")
    console.say(facts([("folder", "fact \udcff")]))
    console.say(table("", ["run"], [["cell \udcff"]]))
    console.log("logged \udcff")
    console.close()
    log = (tmp_path / "rank-\udcff.log").read_text()
    for text in (capfd.readouterr().out, log):
        assert all(f"{word} \\udcff\n" in text for word in ("said", "fact", "cell"))
    assert "logged \\udcff\n" in log


def test_a_pipe_gets_narrow_tables_and_whole_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = "a path that is to stay in one line: " + "/folder" * 30
    console = Console(0)
    console.open_log(tmp_path / "rank.log")
    console.say(table("Times", ["part", "rank 0", "rank 1"], [["data", "1.0", "x"], ["forward", "2.0", ""]]))
    console.say(facts([("chosen", "words " * 40), ("world", "2 ranks")]))
    console.say(line)
    console.say()
    console.say("the last one")
    console.close()
    out = capfd.readouterr().out
    assert out == (tmp_path / "rank.log").read_text()
    lines = out.split("\n")
    assert lines[-4:] == [line, "", "the last one", ""]
    assert not [text for text in lines if text != text.rstrip()]
    assert 80 <= max(len(text) for text in lines if text != line) <= 100


def test_an_output_that_is_not_utf8_gets_escapes(tmp_path: Path) -> None:
    """Finds: a script with a Latin-1 output ended by a UnicodeEncodeError, in the table at its end."""
    console, output = Console(0), TextIOWrapper(BytesIO(), encoding="latin-1")
    console.open_log(tmp_path / "rank.log")
    with redirect_stdout(output):
        console.say("caf\u00e9 \u2500")
        console.say(table("times", ["part", "ms"], [["data", "1"]]))
    assert output.buffer.getvalue().startswith(b"caf\xe9 \\u2500\n")
    assert (tmp_path / "rank.log").read_text(encoding="utf-8").startswith("caf\u00e9 \u2500\n")
    console.log_file.close()


def test_a_closed_output_gets_nothing_and_the_log_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: the `Run` of `python script.py >&-` ended by an AttributeError, where Python itself prints nothing."""
    monkeypatch.setattr("sys.stdout", None)
    console = Console(0)
    console.open_log(tmp_path / "rank.log")
    console.say("said")
    console.close()
    print_error("told")
    assert (tmp_path / "rank.log").read_text() == "said\n"
    console.log_file.close()


def test_an_error_is_printed_though_standard_output_cannot_be_written(capfd: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    full.write("said before")
    with redirect_stdout(full):
        print_error("error: told")
    with suppress(OSError):
        full.close()
    assert capfd.readouterr().err == "error: told\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, then, this is a terminal
    monkeypatch.setenv("TERM", "dumb")
    console = Console(0)
    with console.progress(10):
        console.advance(1, "step 1/10", "loss 2.5")
        assert capfd.readouterr().out == "step 1/10  loss 2.5\n"
        for step in range(2, 11):
            console.advance(step, f"step {step}/10", "loss 2.5")
        assert capfd.readouterr().out.endswith("step 10/10  loss 2.5\n"), "lines are few, but the last one is there"
