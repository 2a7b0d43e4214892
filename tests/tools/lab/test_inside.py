"""The parts of a host's first process that need no host: how it passes on what ranks say."""

import os

import pytest

from paceline.tools.lab.inside import _Voice


@pytest.mark.parametrize(
    ("said", "passed_on"),
    [
        (b"one\n", "[b1] one\n"),
        (b"one\n\ntwo", "[b1] one\n[b1] \n[b1] two\n"),  # an empty line of its own, and a last one without its end
        (b"", ""),
    ],
)
def test_every_line_of_a_rank_is_passed_on_and_no_other(
    capfd: pytest.CaptureFixture[str], said: bytes, passed_on: str
) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, said)
    os.close(theirs)
    voice = _Voice(ours, "[b1] ")
    assert not voice.speak()
    assert capfd.readouterr().err == passed_on
    voice.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)
    assert not voice.speak()  # as when its end is told after the last words
