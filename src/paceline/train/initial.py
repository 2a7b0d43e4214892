"""Fine-tuning: `paceline train --init-from RUN` starts with the model shape, weights and tokenizer of RUN."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UserError
from paceline.config import CONFIG_IS_KEPT, load_run
from paceline.data.cache import inspect_data
from paceline.data.config import DataConfig
from paceline.data.dataset import is_dataset, tokenizer_json_of
from paceline.data.tokenizer import PATTERN, Tokenizer
from paceline.model.config import ModelConfig
from paceline.record import folder as run_folder

if TYPE_CHECKING:  # the command line calls some of this before importing torch, which takes seconds
    import torch

    from paceline.model.gpt import GPT
    from paceline.world.group import Group

# Field -> the property with its value if the field is derived.
_DERIVED = {
    "n_kv_head": "num_kv_heads",
    "n_positions": "n_positions",
    "vocab_size": "vocab_size",
    "n_hidden": "hidden",
    "head": "tied",
}


def initial_model(source: Path) -> ModelConfig:
    """Returns the model config of the run folder `source`. Raises UserError if it is none."""
    if not (source / "config.toml").exists() and (source.is_file() or (source / "config.json").exists()):
        raise UserError(
            f"--init-from is {source}, which is not a run folder; make one of it first: paceline import "
            f"{shlex.quote(str(source))} --out DIR"
        )
    run = run_folder.find(source)
    return load_run(run.config).model


def require_same_shape(source: Path, asked: ModelConfig) -> ModelConfig:
    """Returns the model config of `source` with the dropout of `asked`. Raises UserError, naming the field and both
    values, if `asked` has another shape."""
    model = initial_model(source)
    for field in dataclasses.fields(ModelConfig):
        value, asked_value = getattr(model, field.name), getattr(asked, field.name)
        derived = _DERIVED.get(field.name)
        if field.name == "dropout" or (derived and asked_value in (0, "auto")):
            continue
        name = derived or field.name
        if getattr(asked, name) != getattr(model, name):
            raise UserError(
                f"model.{field.name.replace('_', '-')} is given as {asked_value}, and the model of --init-from "
                f"{source} has {value}: the weights only fit that value; remove the flag (only --model.dropout may "
                "differ)"
            )
    return dataclasses.replace(model, dropout=asked.dropout)


def check_data(source: Path, config: DataConfig, vocab_size: int) -> None:
    """Raises UserError if the data's token ids cannot match those of `source`, before processes start or text is read.
    Text gets its own tokenizer, which can only match if that of `source` was trained by paceline, too."""
    tokenizer = _tokenizer_of(source)
    for path, _ in config.parts if tokenizer else ():
        if is_dataset(path):  # before the size of its vocabulary, which is another tokenizer's
            require_same_tokenizer(source, tokenizer_json_of(path), path)
        elif tokenizer and not _was_trained_here(tokenizer):
            raise UserError(
                f"{path or 'the embedded corpus'} is text, and would be tokenized differently from the "
                f"data of --init-from {source}; {_advice(source, path)}"
            )
    inspect_data(config, vocab_size)


def require_same_tokenizer(source: Path, tokenizer_json: str | None, name: str) -> None:
    """Raises UserError if the data `name` has another tokenizer than `source`. An unknown tokenizer is not compared."""
    of_source = _tokenizer_of(source)
    if of_source is None or tokenizer_json is None or _meaning(of_source) == _meaning(tokenizer_json):
        return
    raise UserError(
        f"the data ({name or 'the embedded corpus'}) was made with another tokenizer than the model of --init-from "
        f"{source}, so its ids mean other text; {_advice(source, name)}"
    )


def load_initial(model: "GPT", source: Path, group: "Group", device: "torch.device") -> list[str]:
    """Copies the newest complete weights of `source` into the model on every rank. Returns the problems of newer
    checkpoints.

    Collective: rank 0 reads, which may take any time, and broadcasts. device: of the group's tensors. Raises on every
    rank, with the model unchanged: RunError if no checkpoint is complete, UserError if names or shapes differ from the
    model's.
    """
    import torch

    from paceline.checkpoint import load

    weights: dict[str, torch.Tensor] = {}

    def read(progress: Callable[[], object]) -> list[str]:
        of_checkpoint, problems = load.read_weights(run_folder.find(source).checkpoints, None, progress)
        require_fit(f"--init-from {source}", model.config, of_checkpoint)
        weights.update(of_checkpoint)
        return problems

    problems = load.from_rank_0_in_rounds(group, lambda: None, read)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            staged = torch.empty_like(parameter, device=device)
            if group.rank == 0:
                staged.copy_(weights.pop(name))
            group.broadcast(staged)
            parameter.copy_(staged)
    return problems


def require_fit(run: str, model: ModelConfig, weights: "Mapping[str, torch.Tensor]") -> None:
    """Raises UserError if the weights of a run are not of `model`, the one of its config.toml, which people edit."""
    from paceline.model.gpt import parameter_shapes

    shapes = parameter_shapes(model)
    problems = [
        f"{'lacks' if name in shapes else 'has, and the model has not,'} {name}"
        for name in sorted(shapes.keys() ^ weights.keys())
    ]
    problems += [
        f"has {name} as {list(weights[name].shape)}, the model as {list(shape)}"
        for name, shape in shapes.items()
        if name in weights and weights[name].shape != shape
    ]
    if problems:
        raise UserError(f"{run}: its checkpoint {problems[0]}; its config.toml is of another model: {CONFIG_IS_KEPT}")


def _tokenizer_of(source: Path) -> str | None:
    path = run_folder.find(source).tokenizer
    return Tokenizer.load(path).json if path.exists() else None


def _advice(source: Path, name: str) -> str:
    text = shlex.quote(name) if name and not is_dataset(name) else "TEXT"
    tokenizer = shlex.quote(str(source / "tokenizer.json"))
    return f"prepare it first: paceline data prepare {text} --out DIR --tokenizer {tokenizer}, then --data.path DIR"


def _meaning(tokenizer_json: str) -> dict[str, Any]:
    """Returns what decides the ids of a text: equal for equal tokenizers, however they are written."""
    description = Tokenizer(tokenizer_json).description()
    added = {token["content"]: token["id"] for token in description["added_tokens"]}
    return {"added": added, **{name: description[name] for name in ("model", "pre_tokenizer", "normalizer")}}


def _was_trained_here(tokenizer_json: str) -> bool:
    """Whether the tokenizer splits text before merges as `data.path` does."""
    splits = (Tokenizer(tokenizer_json).description().get("pre_tokenizer") or {}).get("pretokenizers", [])
    return any(split.get("pattern", {}).get("Regex") == PATTERN for split in splits)
