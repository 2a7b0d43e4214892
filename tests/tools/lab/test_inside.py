"""The parts of a host's first process that need no host: how it passes on what ranks say."""

import io

import pytest

from paceline.tools.lab.inside import pass_on


def test_every_line_of_a_rank_is_passed_on_and_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    pass_on(io.BytesIO(b"one\n\ntwo"), b"[b1] ")  # an empty line of its own, and a last one without its end
    pass_on(io.BytesIO(b""), b"[b2] ")
    assert capfd.readouterr().err == "[b1] one\n[b1] \n[b1] two\n"
