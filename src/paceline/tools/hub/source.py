"""Reads a model from a folder of transformers, a repository on the hub, or nanoGPT's ckpt.pt.

JSON and safetensors cannot run code. nanoGPT's file is a pickle, read by torch's restricted reader, which accepts only
tensors, numbers, text and containers.
"""

import json
import os
import pickle
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paceline.base.errors import UserError
from paceline.base.files import exists
from paceline.data.hub import message
from paceline.data.tokenizer import FILE, Tokenizer
from paceline.model.config import ModelConfig
from paceline.tools.hub import tensors
from paceline.tools.hub.configs import read_config

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_VOCAB, _MERGES, _SPECIAL = "vocab.json", "merges.txt", "special_tokens_map.json"
_FROM_HUB = (CONFIG, "model*.safetensors", _INDEX, FILE, _VOCAB, _MERGES, _SPECIAL)
# Makes torch.load unrestricted. In torch 2.10 to 2.13 weights_only=True takes precedence, but torch does not promise
# it.
_UNRESTRICTED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_YES = ("1", "y", "yes", "true")  # as torch reads it
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)*(transformer\.)?")  # of DDP, torch.compile, and GPT-2 in its model
_NANOGPT_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


@dataclass(frozen=True)
class Source:
    model: ModelConfig
    weights: dict[str, Tensor]  # every parameter by our name, float32 on the CPU
    tokenizer: Tokenizer | None
    remark: str = ""  # why there is no tokenizer, if the source has one


def read_source(spec: str) -> Source:
    """Returns the model that `spec` names: a folder, a ckpt.pt, or ORG/NAME on the hub. Raises UserError, naming the
    file, if a file is missing, damaged, unknown, or of a model that we cannot compute."""
    path = Path(os.path.expanduser(spec))
    is_there = exists(path)
    if is_there and path.is_dir():
        return _read_folder(path)
    if is_there and path.is_file():
        return _read_nanogpt(path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.pt)", spec):
        return _read_folder(_fetch(spec))
    raise UserError(
        f"there is no {spec}: give a folder with {CONFIG} and {WEIGHTS}, nanoGPT's ckpt.pt, or ORG/NAME on the hub"
    )


def _read_folder(folder: Path) -> Source:
    if not (folder / CONFIG).is_file():
        if (folder / "config.toml").is_file():
            quoted = shlex.quote(str(folder))
            raise UserError(f"{folder} is a run folder already: `paceline train --init-from {quoted}` fine-tunes it")
        raise UserError(f"{folder} has no {CONFIG}, so it is not a folder that transformers saved")
    model = read_config(_read_json(folder / CONFIG), str(folder / CONFIG))
    theirs = _read_weights(folder)
    if model.arch == "gpt2":
        theirs = _without_prefixes(theirs, str(folder))
    layout = tensors.gpt2_layout if model.arch == "gpt2" else tensors.llama_layout
    weights = tensors.from_theirs(model, layout, theirs, str(folder))
    return Source(model, weights, *_read_tokenizer(folder, model))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a JSON object")
    return document


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).is_file():
        return _read_safetensors(folder / WEIGHTS)
    if not (folder / _INDEX).is_file():
        pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        what = f"only {', '.join(pickled)}, which can run code when read" if pickled else "no weights"
        raise UserError(
            f"{folder} has {what}; paceline reads {WEIGHTS}. Where the folder is trusted, transformers writes it: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    listed = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(_is_file_name(name) for name in listed.values()):
        raise UserError(f"{folder / _INDEX}: its weight_map does not say in which files of the folder the tensors are")
    theirs: dict[str, Tensor] = {}
    for name in sorted(set(listed.values())):
        theirs |= _read_safetensors(folder / name)
    if missing := sorted(set(listed) - set(theirs)):
        raise UserError(f"{folder}: {listed[missing[0]]} lacks {missing[0]}, which {_INDEX} says is in it")
    return theirs


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and "/" not in name and "\\" not in name


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read as safetensors: {reason}") from None


def _read_tokenizer(folder: Path, model: ModelConfig) -> tuple[Tokenizer | None, str]:
    """Returns the tokenizer, or None and the reason: the weights can be used without it."""
    try:
        if (folder / FILE).is_file():
            tokenizer = Tokenizer.load(folder / FILE)
        elif (folder / _VOCAB).is_file() and (folder / _MERGES).is_file():
            tokenizer = _from_merges(folder)
        else:
            return None, ""
    except UserError as error:
        return None, str(error)
    if tokenizer.vocab_size > model.vocab_size:
        return None, f"its ids reach {tokenizer.vocab_size - 1}, and the model has {model.vocab_size} only"
    return tokenizer, ""


def _from_merges(folder: Path) -> Tokenizer:
    """Returns the tokenizer of the two files of older formats, as transformers makes it."""
    from transformers import GPT2Tokenizer  # it has read the config already

    try:
        made = GPT2Tokenizer.from_pretrained(str(folder), local_files_only=True)
        return Tokenizer(made.backend_tokenizer.to_str(pretty=True))
    except Exception as error:  # of the library, or of the files
        raise UserError(f"{folder / _VOCAB} and {_MERGES} cannot be read: {error}") from None


def _fetch(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # an optional extra, and slow to import
    except ImportError:
        raise UserError(
            f"there is no folder {repository} here, and to fetch it from the hub: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(repository, allow_patterns=list(_FROM_HUB)))
    except Exception as error:  # of the hub, its HTTP client or the system; no common class
        remedy = "what was fetched is kept: try again, or give a folder"
        raise UserError(f"there is no folder {repository} here, and {message(repository, error, remedy)}") from error


def _read_nanogpt(path: Path) -> Source:
    saved = _load_restricted(path)
    arguments, theirs = saved.get("model_args"), saved.get("model")
    if not isinstance(arguments, dict) or not isinstance(theirs, dict):
        raise UserError(f"{path} is not nanoGPT's: it has no `model` beside `model_args`")
    if not all(isinstance(tensor, Tensor) for tensor in theirs.values()):
        raise UserError(f"{path}: its `model` has more than tensors")
    model = _nanogpt_config(arguments, str(path))
    plain = _without_prefixes(theirs, str(path))
    return Source(model, tensors.from_theirs(model, tensors.nanogpt_layout, plain, str(path)), None)


def _without_prefixes(theirs: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    plain = {_PREFIXES.sub("", str(name)): tensor for name, tensor in theirs.items()}
    if len(plain) < len(theirs):
        raise UserError(f"{where} has tensors twice, with and without the prefix of a wrapper such as DDP")
    return plain


def _nanogpt_config(arguments: Mapping[str, Any], where: str) -> ModelConfig:
    for name in _NANOGPT_SIZES:
        if type(arguments.get(name)) is not int or arguments[name] < 1:
            raise UserError(f"{where}: model_args has {name} = {arguments.get(name)!r}; it must be above 0")
    model = ModelConfig(
        arch="gpt2",
        n_layer=arguments["n_layer"],
        n_head=arguments["n_head"],
        n_embd=arguments["n_embd"],
        n_positions=arguments["block_size"],
        vocab_size=arguments["vocab_size"],
        bias=bool(arguments.get("bias", True)),
        gelu="exact",  # as nn.GELU()
        head="tied",
    )
    model.check()
    return model


def _load_restricted(path: Path) -> dict[str, Any]:
    if os.environ.get(_UNRESTRICTED, "").lower() in _YES:
        raise UserError(f"{_UNRESTRICTED} is set: it asks torch to run what files of weights say. Unset it")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))  # the function that the pickle calls
        named = f" (it names {match[1]})" if match else ""
        raise UserError(
            f"{path} is not a file of weights alone, and nothing in it was run{named}; "
            f"paceline reads nanoGPT's ckpt.pt, or a folder with {WEIGHTS}"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read, and nothing in it was run: {type(error).__name__}: {reason}") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path} is not nanoGPT's: it holds a {type(saved).__name__}")
    return saved
