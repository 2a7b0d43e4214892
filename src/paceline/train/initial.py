"""Fine-tuning: a run that begins with the weights of another, `paceline train --init-from RUN`.

Three things are taken from that run: the model's shape, the weights, and the tokenizer that the data must have.
"""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.base.errors import RunError, UserError
from paceline.config import Config, from_toml
from paceline.data.cache import inspect_data
from paceline.data.config import DataConfig
from paceline.data.dataset import Dataset, is_dataset
from paceline.data.tokenizer import PATTERN, Tokenizer
from paceline.model.config import ModelConfig
from paceline.record import folder as run_folder

if TYPE_CHECKING:  # the command line checks what it can before torch is imported, which takes seconds
    import torch

    from paceline.model.gpt import GPT
    from paceline.world.group import Group

T = TypeVar("T")

# Fields that may be left to be derived, here from that run, and what they come to.
_DERIVED = {
    "n_kv_head": "num_kv_heads",
    "n_positions": "n_positions",
    "vocab_size": "vocab_size",
    "n_hidden": "hidden",
    "head": "tied",
}


def initial_model(source: Path) -> ModelConfig:
    """Returns the model of the run folder `source`. Raises UserError where it is none."""
    if not (source / "config.toml").exists() and (source.is_file() or (source / "config.json").exists()):
        raise UserError(
            f"--init-from is {source}, which is no run folder; make one of it first: paceline import {source} --out DIR"
        )
    found = run_folder.find(source)
    return from_toml(found.config.read_text(encoding="utf-8"), str(found.config), Config()).model


def settle_model(source: Path, given: ModelConfig) -> ModelConfig:
    """Returns the model of `source` with the dropout that is `given`.

    Raises UserError, naming the field and both values, where `given` has another shape.
    """
    model = initial_model(source)
    for field in dataclasses.fields(ModelConfig):
        theirs, ours = getattr(model, field.name), getattr(given, field.name)
        resolved = _DERIVED.get(field.name)
        if field.name == "dropout" or (resolved and ours in (0, "auto")):
            continue
        if getattr(given, resolved or field.name) != getattr(model, resolved or field.name):
            raise UserError(
                f"model.{field.name.replace('_', '-')} is given as {ours}, and the model of --init-from {source} has "
                f"{theirs}: its weights fit that alone; leave it out (only --model.dropout may differ)"
            )
    return dataclasses.replace(model, dropout=given.dropout)


def check_data(source: Path, config: DataConfig, vocab_size: int) -> None:
    """Raises UserError where the data's ids are surely not those of `source`: before a process starts or text is read.

    Text gets a tokenizer of its own, which can only be the same where that of `source` was learnt from text here.
    """
    inspect_data(config, vocab_size)
    known = _tokenizer_json(source)
    if known is None:
        return
    for path, _ in config.parts:
        if is_dataset(path):
            _require_same(source, Dataset.open(path, vocab_size).tokenizer_json, path)
        elif not _learnt_here(known):
            raise UserError(
                f"{path or 'the embedded corpus'} is text, and would be tokenized otherwise than what "
                f"--init-from {source} learnt from; {_advice(source, path)}"
            )


def check_tokenizer(group: "Group", source: Path, tokenizer_json: str | None, data_name: str) -> None:
    """Returns if the data's tokenizer is that of `source`, or one of the two is not known. Collective.

    Else raises UserError on every rank. Called with the data that was opened, before anything is written.
    """
    _as_rank_0_finds(group, lambda: _require_same(source, tokenizer_json, data_name))


def load_initial(model: "GPT", source: Path, group: "Group", device: "torch.device | None" = None) -> str:
    """Gives the model, on every rank, the newest whole weights of `source`; returns a line that says so. Collective.

    Rank 0 alone reads them. Costs the weights' bytes. `device` is where the group's tensors are, if not where the model
    is. Raises on every rank what rank 0 finds: RunError where no checkpoint is whole, UserError where names or shapes
    are not the model's; the model is as it was then.
    """
    import torch

    from paceline.checkpoint import load

    weights: dict[str, torch.Tensor] = {}

    def read() -> list[str]:
        found, problems = load.read_weights(run_folder.find(source).checkpoints, None)
        _require_fit(source, {name: parameter.shape for name, parameter in model.named_parameters()}, found)
        weights.update(found)
        return problems

    problems = _as_rank_0_finds(group, read)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            staged = torch.empty_like(parameter, device=device or parameter.device)
            if group.rank == 0:
                staged.copy_(weights.pop(name))
            group.broadcast(staged)
            parameter.copy_(staged)
    passed = "".join(f"; passed over a damaged checkpoint: {problem}" for problem in problems)
    return f"weights of {source}{passed}"


def _as_rank_0_finds(group: "Group", find: Callable[[], T]) -> T:
    """What `find` returns on rank 0, in JSON's types, on every rank; what it raises there, every rank raises."""
    answer: dict[str, Any] = {}
    if group.rank == 0:
        try:
            answer = {"found": find()}
        except (UserError, RunError) as error:
            answer = {"error": str(error), "is_users": isinstance(error, UserError)}
    answer = group.broadcast_json(answer)
    if "error" in answer:
        raise (UserError if answer["is_users"] else RunError)(answer["error"], reach="world")
    found: T = answer["found"]
    return found


def _require_fit(source: Path, wanted: dict[str, Any], weights: dict[str, Any]) -> None:
    odd = sorted(set(wanted) ^ set(weights))
    if odd:
        where = "lacks" if odd[0] in wanted else "has, and the model has not,"
        raise UserError(f"--init-from {source}: its checkpoint {where} {odd[0]}; its config.toml is of another model")
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise UserError(
                f"--init-from {source}: its checkpoint has {name} as {list(weights[name].shape)}, the model as "
                f"{list(shape)}; its config.toml is of another model"
            )


def _tokenizer_json(source: Path) -> str | None:
    path = run_folder.find(source).tokenizer
    return Tokenizer.load(path).json if path.exists() else None


def _require_same(source: Path, tokenizer_json: str | None, name: str) -> None:
    known = _tokenizer_json(source)
    if (
        known is None
        or tokenizer_json is None
        or known == tokenizer_json
        or _essence(known) == _essence(tokenizer_json)
    ):
        return
    raise UserError(
        f"the data ({name or 'the embedded corpus'}) was made with another tokenizer than --init-from {source} learnt "
        f"with, so its ids mean other text; {_advice(source, name)}"
    )


def _advice(source: Path, name: str) -> str:
    text = shlex.quote(name) if name and not is_dataset(name) else "TEXT"
    tokenizer = shlex.quote(str(source / "tokenizer.json"))
    return f"prepare it first: paceline data prepare {text} --out DIR --tokenizer {tokenizer}, then --data.path DIR"


def _essence(tokenizer_json: str) -> dict[str, Any]:
    """What decides which ids a text has; the same tokenizer may be written in more than one way."""
    found = Tokenizer(tokenizer_json).description()
    added = {token["content"]: token["id"] for token in found["added_tokens"]}
    return {"added": added, **{name: found[name] for name in ("model", "pre_tokenizer", "normalizer")}}


def _learnt_here(tokenizer_json: str) -> bool:
    """Whether text is cut before merges as `data.path` cuts it."""
    cuts = (Tokenizer(tokenizer_json).description().get("pre_tokenizer") or {}).get("pretokenizers", [])
    return any(cut.get("pattern", {}).get("Regex") == PATTERN for cut in cuts)
