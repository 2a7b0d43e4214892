"""`paceline import`: a model that others made becomes a run folder at step 0, whole or not at all."""

import dataclasses
import os
import shutil
from pathlib import Path

import torch

from paceline import __version__
from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import sync
from paceline.checkpoint import save
from paceline.config import Config, to_toml
from paceline.hub.source import Source, read_source
from paceline.model.cost import num_parameters
from paceline.record import folder as run_folder
from paceline.train.state import Progress


def import_model(spec: str, out: Path) -> list[str]:
    """Makes the run folder `out` of the model that `spec` names, and returns what is to be said of it, in lines.

    Weights are float32 there whatever they were. Raises UserError as `read_source` does, and where `out` exists or
    can not be written; then nothing is left at `out`.
    """
    require_new(out)
    run_folder.check_writable(out)
    source = read_source(spec)
    aside = aside_of(out)
    try:
        _write(source, spec, aside)
        require_new(out)
        os.rename(aside, out)
        sync(out.absolute().parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _told(source, spec, out)


def require_new(out: Path) -> None:
    """Raises UserError where there is anything at `out`."""
    if out.exists() or out.is_symlink():
        raise UserError(f"--out is {out}, which exists; name a folder that does not exist yet")


def aside_of(out: Path) -> Path:
    """Returns where a folder is made before it is renamed to `out`; what a killed process left there is gone."""
    aside = out.absolute().with_name(f".{out.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def _write(source: Source, spec: str, folder: Path) -> None:
    config = Config(model=source.model)
    config = config.replace("data", seq_len=min(config.data.seq_len, source.model.n_positions))
    run = run_folder.create(folder)
    run.write_setup(to_toml(config), source.tokenizer.json if source.tokenizer is not None else None)
    run.append_event("import", source=spec)
    run.close()
    facts = {
        "progress": dataclasses.asdict(Progress()),
        "val_loss": None,
        "num_updates": 0,
        "data": "",  # of no data set, which is how a resume knows that there is nothing to go on with
        "scaler": {"scale": 1.0, "num_finite": 0},
        "world_size": 1,
        "strategy": config.parallel.strategy,
        "versions": {"paceline": __version__, "torch": torch.__version__},
        "config": dataclasses.asdict(config),
    }
    save.save_whole(run.checkpoints, 0, source.weights, {}, facts)
    sync(folder)


def _told(source: Source, spec: str, out: Path) -> list[str]:
    model = source.model
    parameters = units.count(num_parameters(model).total)
    lines = [f"{spec}: {model.arch}, {model.n_layer} layers x {model.n_embd}, {parameters} parameters, now in {out}"]
    if source.tokenizer is None:
        reason = f"its tokenizer was left out ({source.remark})" if source.remark else "it came without a tokenizer"
        lines.append(f"{reason}: put the tokenizer.json that made its ids into {out} to turn them into text")
    return lines
