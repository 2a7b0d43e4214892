"""`paceline export`: a run's newest weights as a folder that transformers loads, whole or not at all."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import sync, write_synced
from paceline.checkpoint import load
from paceline.config import Config, from_toml
from paceline.data.tokenizer import FILE, Tokenizer
from paceline.hub import tensors
from paceline.hub.configs import Dtype, write_config
from paceline.hub.importing import aside_of, require_new
from paceline.hub.source import CONFIG, WEIGHTS
from paceline.model.config import ModelConfig
from paceline.record import folder as run_folder


def export_run(run: Path, out: Path, step: int | None, dtype: Dtype) -> list[str]:
    """Makes the folder `out` of a run's newest whole checkpoint, or that of `step`; returns what is to be said of it.

    Works while the run goes on. Raises UserError where `run` is no run folder, `out` exists or can not be written, or
    transformers has no such model; then nothing is left at `out`.
    """
    require_new(out)
    run_folder.check_writable(out)
    found = run_folder.find(run)
    model = from_toml(found.config.read_text(encoding="utf-8"), str(found.config), Config()).model
    tokenizer = Tokenizer.load(found.tokenizer) if found.tokenizer.exists() else None
    config = write_config(model, tokenizer.end_of_text if tokenizer else None, dtype)
    weights, problems = load.read_weights(found.checkpoints, step)
    theirs = _their_tensors(model, weights, getattr(torch, dtype))
    aside = aside_of(out)
    try:
        aside.mkdir(parents=True)
        _write(aside, config, theirs)
        _write_tokenizer(aside, tokenizer, model.n_positions)
        sync(aside)
        require_new(out)
        os.rename(aside, out)
        sync(out.absolute().parent)
    except (OSError, safetensors.SafetensorError) as error:  # the latter is how it reports a full disk
        raise UserError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _told(config, theirs, tokenizer, problems, run, out)


def _their_tensors(model: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of their model, contiguous, by the name that their file has it under."""
    if model.arch == "llama":
        theirs = tensors.to_theirs(weights, tensors.llama_layout)
    else:
        # GPT2LMHeadModel has biases in any case; where ours has none, zeros are the same model.
        shapes = tensors.parameter_shapes(dataclasses.replace(model, bias=True))
        filled = {name: weights[name] if name in weights else torch.zeros(shape) for name, shape in shapes.items()}
        theirs = {_prefixed(name): tensor for name, tensor in tensors.to_theirs(filled, tensors.gpt2_layout).items()}
    return {name: tensor.to(dtype).contiguous() for name, tensor in theirs.items()}


def _prefixed(name: str) -> str:
    return name if name.startswith("lm_head.") else f"transformer.{name}"


def _write(folder: Path, config: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    _write_json(folder / CONFIG, config)
    end_of_text = config["eos_token_id"]
    generation = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    _write_json(folder / "generation_config.json", generation if end_of_text is not None else {})
    safetensors.torch.save_file(theirs, folder / WEIGHTS, metadata={"format": "pt"})  # transformers asks for it
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors makes files that nobody else can read
    sync(folder / WEIGHTS)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer | None, n_positions: int) -> None:
    """The tokenizer.json as it is, and what AutoTokenizer needs to take it as it is."""
    if tokenizer is None:
        return
    token = tokenizer.document_token
    special = {"bos_token": token, "eos_token": token, "pad_token": token} if token else {}
    write_synced(folder / FILE, tokenizer.json.encode())
    _write_json(folder / "special_tokens_map.json", special)
    # This class and no model's own: those make the tokenizer anew from its merges, with the model's way to cut text.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": n_positions}
    _write_json(folder / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False, **special})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_synced(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def _told(
    config: dict[str, Any],
    theirs: dict[str, Tensor],
    tokenizer: Tokenizer | None,
    problems: list[str],
    run: Path,
    out: Path,
) -> list[str]:
    size = units.size(sum(tensor.numel() * tensor.element_size() for tensor in theirs.values()))
    lines = [f"passed over a damaged checkpoint: {problem}" for problem in problems]
    lines.append(f"{run}: {config['architectures'][0]} in {config['dtype']}, {size}, now in {out}")
    if tokenizer is None:
        lines.append(f"{run} has no tokenizer.json: its data came without one, so the export has no tokenizer")
    return lines
