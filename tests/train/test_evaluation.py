"""What an evaluation says, and that training goes on as without it: whole runs of a tiny model in this process."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from program import losses, rows
from whole_runs import status_of, tiny, words

from paceline.config import Config

TEXT = "To be, or not to be: that is the question.\n" * 200


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Four steps on text of which each character is a token and a byte."""
    folder, characters = tmp_path / "characters", sorted(set(TEXT))
    folder.mkdir()
    ids = np.array([characters.index(character) for character in TEXT], dtype=np.uint16)
    for name, part in (("train", ids[:6000]), ("val", ids[6000:])):
        part.tofile(folder / f"{name}.bin")
    known = {"itos": dict(enumerate(characters)), "stoi": {c: i for i, c in enumerate(characters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(characters), **known}))
    return tiny(data__path=str(folder), train__steps=4, model__dropout=0.2)


def test_bits_per_byte_are_the_losses_bits_where_a_token_is_a_byte(tmp_path: Path, config: Config) -> None:
    """Finds: nats per byte."""
    assert status_of(tmp_path / "run", config.replace("train", steps=1)) == 0
    (found,) = [row for row in rows(tmp_path / "run/metrics.jsonl") if "val_loss" in row]
    assert found["val_bpb"] == pytest.approx(found["val_loss"] / math.log(2), rel=1e-12)


def test_the_commands_that_are_proposed_work(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finds: `paceline sample` of data without a tokenizer, or without a prompt where no token begins a document. And a
    first save at a step that the run has not."""
    once = config.replace("train", steps=1, eval_every=-1).replace("checkpoint", every=5)
    assert status_of(tmp_path / "run", once) == 0
    said = words(capsys.readouterr().out)
    assert f"paceline sample {tmp_path / 'run'} --prompt TEXT" in said
    assert "every 5 steps, and at the end; the newest" in said
    (Path(config.data.path) / "meta.pkl").unlink()
    assert status_of(tmp_path / "without", once.replace("model", vocab_size=64)) == 0
    said = words(capsys.readouterr().out)
    assert "paceline sample" not in said
    assert f"Try next: paceline report {tmp_path / 'without'}" in said


def test_an_evaluation_leaves_training_as_it_was(tmp_path: Path, config: Config) -> None:
    """Finds: a model without dropout after its first evaluation."""
    for name, every in (("with", 2), ("without", -1)):
        assert status_of(tmp_path / name, config.replace("train", eval_every=every)) == 0
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
