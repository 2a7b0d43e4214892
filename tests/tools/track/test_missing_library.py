"""A tracker whose library is missing is what the user must change: exit status 2."""

from pathlib import Path

import pytest

from paceline.tools.track import follow


def test_a_missing_library_is_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("[train]\nsteps = 1\n")
    (run / "events.jsonl").write_text('{"event": "end", "reason": "horizon reached"}\n')
    folder, settings = follow.RunFolder(run), follow.TrackConfig(to="wandb", project="a b", prometheus_port=0)
    monkeypatch.setattr(follow.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(follow, "_LOOK_EVERY_S", 0.01)
    assert follow.follow(folder, settings, give_up_after_s=0.0) == 2
    said = capfd.readouterr().err
    assert "wandb is not installed; pip install wandb," in said
    assert f"`paceline track {run} --to wandb '--project=a b' --prometheus-port=0` sends the rest" in said, "there, too"
