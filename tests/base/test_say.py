"""What is said arrives, whatever it names."""

import pytest

from paceline.base.process import say


def test_a_path_that_is_not_utf_8_is_shown_with_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    say("runs/caf\udce9")
    assert capfd.readouterr().err == "runs/caf\\udce9\n"
