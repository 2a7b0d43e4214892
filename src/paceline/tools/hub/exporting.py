"""`paceline export`: a run's newest weights as a folder that transformers loads."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from paceline.base import units
from paceline.base.files import sync, write_synced
from paceline.checkpoint import load
from paceline.config import load_run
from paceline.data.tokenizer import FILE, Tokenizer
from paceline.model.config import ModelConfig
from paceline.model.gpt import parameter_shapes
from paceline.record import folder as run_folder
from paceline.tools.hub import tensors
from paceline.tools.hub.configs import Dtype, write_config
from paceline.tools.hub.source import CONFIG, WEIGHTS
from paceline.tools.hub.writing import check_out, new_folder
from paceline.train.initial import require_fit


def export_run(run: Path, out: Path, step: int | None, dtype: Dtype) -> list[str]:
    """Writes the folder `out` from a run's newest complete checkpoint, or that of `step`. Returns lines to print.

    Works during training. Raises UserError, leaving nothing at `out`, if `run` is no run folder, `out` exists or cannot
    be written, transformers has no such model, or the weights are of another one than config.toml.
    """
    check_out(out)
    run_path = run_folder.find(run)
    model = load_run(run_path.config).model
    tokenizer = Tokenizer.load(run_path.tokenizer) if run_path.tokenizer.exists() else None
    config = write_config(model, tokenizer.end_of_text if tokenizer else None, dtype)
    weights, problems = load.read_weights(run_path.checkpoints, step)
    require_fit(str(run), model, weights)
    theirs = _their_tensors(model, weights, getattr(torch, dtype))
    with new_folder(out) as folder:
        folder.mkdir(parents=True)
        _write(folder, config, theirs)
        if tokenizer is not None:
            _write_tokenizer(folder, tokenizer, model.n_positions)
    size = units.size(sum(tensor.numel() * tensor.element_size() for tensor in theirs.values()))
    lines = [f"passed over a damaged checkpoint: {problem}" for problem in problems]
    lines.append(f"{run}: {config['architectures'][0]} in {dtype}, {size}, now in {out}")
    if tokenizer is None:
        lines.append(f"{run} has no tokenizer.json: its data came without one, so the export has no tokenizer")
    return lines


def _their_tensors(model: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    if model.arch == "llama":
        theirs = tensors.to_theirs(weights, tensors.llama_layout)
    else:
        # GPT2LMHeadModel always has biases; zeros have no effect.
        shapes = parameter_shapes(dataclasses.replace(model, bias=True))
        filled = {name: weights[name] if name in weights else torch.zeros(shape) for name, shape in shapes.items()}
        named = tensors.to_theirs(filled, tensors.gpt2_layout)
        theirs = {name if name.startswith("lm_head.") else f"transformer.{name}": named[name] for name in named}
    return {name: tensor.to(dtype).contiguous() for name, tensor in theirs.items()}


def _write(folder: Path, config: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    _write_json(folder / CONFIG, config)
    end_of_text = config["eos_token_id"]
    generation = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    _write_json(folder / "generation_config.json", generation if end_of_text is not None else {})
    safetensors.torch.save_file(theirs, folder / WEIGHTS, metadata={"format": "pt"})  # transformers requires it
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # else only their owner could read it
    sync(folder / WEIGHTS)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, n_positions: int) -> None:
    """Writes the tokenizer.json, and the files with which AutoTokenizer uses it unchanged."""
    token = tokenizer.document_token
    special = {"bos_token": token, "eos_token": token, "pad_token": token} if token else {}
    write_synced(folder / FILE, tokenizer.json.encode())
    _write_json(folder / "special_tokens_map.json", special)
    # The model's own class would build another tokenizer from the merges, with its own splitting.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": n_positions}
    _write_json(folder / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False, **special})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_synced(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
