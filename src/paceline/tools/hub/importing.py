"""`paceline import`: makes a run folder at step 0 from a model that was trained elsewhere."""

import dataclasses
from pathlib import Path

import torch

from paceline import __version__
from paceline.base import units
from paceline.checkpoint import writers
from paceline.config import Config, to_toml
from paceline.model.cost import num_parameters
from paceline.record import folder as run_folder
from paceline.tools.hub.source import Source, read_source
from paceline.tools.hub.writing import check_out, new_folder
from paceline.train.progress import Progress


def import_model(spec: str, out: Path) -> list[str]:
    """Makes the run folder `out` of the model that `spec` names, with float32 weights. Returns lines to print. Raises
    UserError, leaving nothing at `out`, as `read_source` does, and if `out` exists or cannot be written."""
    check_out(out)
    source = read_source(spec)
    with new_folder(out) as folder:
        _write(source, spec, folder)
    model = source.model
    parameters = units.count(num_parameters(model).total)
    lines = [f"{spec}: {model.arch}, {model.n_layer} layers x {model.n_embd}, {parameters} parameters, now in {out}"]
    if source.tokenizer is None:
        reason = f"its tokenizer was left out ({source.remark})" if source.remark else "it came without a tokenizer"
        lines.append(f"{reason}: put the tokenizer.json that made its ids into {out} to turn them into text")
    return lines


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
        "data": "",  # no data set: there is no training to resume
        "world_size": 1,
        "versions": {"paceline": __version__, "torch": torch.__version__},
        "config": dataclasses.asdict(config),
    }
    writers.save_complete(run.checkpoints, 0, source.weights, {}, facts)
