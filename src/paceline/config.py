"""The complete configuration, one dataclass per section: defaults, then a preset (recipes/*.toml), a TOML file, flags.
A misspelt name, a wrong type or an impossible value raises UserError before any process starts."""

import dataclasses
import json
import math
import tomllib
import typing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from paceline.base.errors import UserError, nearest
from paceline.checkpoint.config import CheckpointConfig
from paceline.data.config import DataConfig
from paceline.model.config import ModelConfig
from paceline.optim.config import OptimConfig
from paceline.record.config import LogConfig, TrackConfig
from paceline.world.config import SHARDS_WEIGHTS, ParallelConfig

# What files of former versions may have, with the value that changes nothing.
_GONE = {("parallel", "repair"): False}
CONFIG_IS_KEPT = 'each checkpoint\'s manifest.json has the config that it was made with, under "config"'
HORIZONS = ("steps", "tokens", "tokens_per_param", "time_budget")  # of TrainConfig; a run has one of them
# Ways to say the same: a given one replaces those of a preset or file.
ALTERNATIVES = (HORIZONS, ("global_batch_size", "global_batch_tokens"))
# A given one takes the place of model.size auto.
SIZE_FIELDS = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "global_batch_size", "global_batch_tokens")
MOST_SEQUENCES = 1 << 20  # of a step or an evaluation: each micro-batch is an object in memory
_ABOVE_ALL = 10**100  # whole numbers; a float holds none of 400 digits
_MOST_TOKENS_PER_PARAM = 1e15  # times the parameters of any model it is a finite number of tokens
_AT_LEAST_1 = ("eval_sequences", "layered_micro_batches", "max_skips")  # of TrainConfig; others may be 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Horizon, batch, number format, evaluation."""

    steps: int = 0
    """Horizon in steps. Give one of steps, tokens, tokens-per-param, time-budget."""
    tokens: int = 0
    """Horizon in tokens, rounded up to whole steps."""
    tokens_per_param: float = 0.0
    """Horizon in tokens per parameter outside the embeddings (20: Chinchilla, arXiv 2203.15556)."""
    time_budget: float = 0.0
    """Horizon in seconds of training; the learning rate follows the time, agreed by all ranks."""
    max_epochs: float = 0.0
    """With time-budget: end after so many passes over the data (of data.mix: over the set that is read most), if that
    is sooner; 0: no limit. Text repeated up to 4 times is nearly as good as new text (arXiv 2305.16264); far beyond,
    the validation loss rises."""
    global_batch_size: int = 0
    """Sequences in a step, over all ranks; 0: from global-batch-tokens, or chosen."""
    global_batch_tokens: int = 0
    """Tokens in a step, over all ranks, rounded to whole sequences; 0: from global-batch-size, or chosen."""
    device_batch_size: int = 0
    """Sequences in a micro-batch of one rank; 0: chosen by memory."""
    layered_micro_batches: int = 1
    """Micro-batches that each half of a block computes before the next half does, also in backward (layered
    accumulation): for slow links, since gradients are sent during the backward pass of all of them. Their activations
    are all kept."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = "auto"
    """Number format of matrix products; weights and optimizer state stay float32. float8: those of the blocks' linear
    layers, on GPUs that have units for it, and the others in bfloat16; rounds more. Never chosen by auto."""
    deterministic: bool = False
    """On GPUs some of torch's kernels add in a changing order: use only those that repeat bit for bit, so that a resume
    is exact. Slower; CPUs repeat without it."""
    compile: bool = False
    """torch.compile, block by block; the first step takes a minute."""
    activation_checkpoint: bool = False
    """Recompute each block in backward: less memory, about a third more compute."""
    seed: int = 1337
    """Seed of initial weights, order of data, dropout."""
    init_from: str = ""
    """Start from the newest weights of this run folder; empty: from random weights. `train --init-from` sets it, and
    takes the model's shape from there, too."""
    eval_every: int = 0
    """Steps between evaluations; 0: at the end only; -1: never."""
    eval_sequences: int = 256
    """Sequences in an evaluation, spread evenly over the validation split; the same ones every time."""
    sample_tokens: int = 160
    """Tokens of the sample written at the end; 0: none."""
    sample_prompt: str = ""
    """Text that the sample continues; empty: the beginning of a document. No space at its end: words begin with one."""
    stop_at_step: int = 0
    """Stop after this step like after a signal: saved, exit status 75; 0: run to the horizon."""
    stop_after: float = 0.0
    """Stop this many seconds after the start like after a signal, before a queue's time limit does; 0: never."""
    profile: int = 0
    """Trace this step on every rank with torch's profiler to RUN/profile/, for ui.perfetto.dev; 0: none."""
    max_skips: int = 20
    """The run fails after this many consecutive steps whose gradient is not finite."""

    @property
    def horizons(self) -> list[str]:
        """The horizons that are given, named as the user types them."""
        return [f"train.{name.replace('_', '-')}" for name in HORIZONS if getattr(self, name)]

    def check(self) -> None:
        """Raises UserError for an impossible value, named as the user types it."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = -1 if item.name == "eval_every" else int(item.name in _AT_LEAST_1)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
                raise UserError(f"train.{item.name.replace('_', '-')} is {value}; it must be at least {least}")
        if self.tokens_per_param > _MOST_TOKENS_PER_PARAM:
            raise UserError(
                f"train.tokens-per-param is {self.tokens_per_param}; it must be at most {_MOST_TOKENS_PER_PARAM:g}"
            )
        if self.eval_sequences > MOST_SEQUENCES:
            raise UserError(f"train.eval-sequences is {self.eval_sequences}; it must be at most {MOST_SEQUENCES}")
        if len(self.horizons) != 1:
            raise UserError(
                f"the horizon of training is given by {' and '.join(self.horizons) or 'nothing'}; give exactly one of "
                "--train.steps, --train.tokens, --train.tokens-per-param, --train.time-budget"
            )
        if self.max_epochs and not self.time_budget:
            raise UserError(
                f"train.max-epochs is {self.max_epochs:g}, which only limits a train.time-budget, and "
                f"{self.horizons[0]} is given; leave it out"
            )
        if self.steps and self.profile > self.steps:
            raise UserError(f"train.profile is {self.profile}, after the last step {self.steps}; name an earlier one")
        if self.global_batch_size and self.global_batch_tokens:
            raise UserError("train.global-batch-size and train.global-batch-tokens are both given; give one")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def check(self) -> None:
        """Raises UserError for any impossible value or combination. Needs no torch."""
        for section in dataclasses.fields(self):
            getattr(self, section.name).check()
        for name, value in flatten(self).items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise UserError(f"{name} is {value!r}, which is not UTF-8, as config.toml is; give another") from None
        self._check_batch()
        if self.parallel.strategy in SHARDS_WEIGHTS and self.parallel.shares == "auto":
            raise UserError(
                f"parallel.shares auto needs each rank's own time, and with parallel.strategy {self.parallel.strategy} "
                "ranks wait for each other inside every pass; give numbers such as --parallel.shares 24,8, or "
                "--parallel.strategy zero"
            )
        if self.parallel.strategy in SHARDS_WEIGHTS and self.train.layered_micro_batches > 1:
            raise UserError(
                f"train.layered-micro-batches is {self.train.layered_micro_batches}, and parallel.strategy "
                f"{self.parallel.strategy} would gather a block's weights again for each of them; use "
                "--parallel.strategy zero, or leave it out"
            )
        if self.checkpoint.keep_best and self.train.eval_every < 0:
            raise UserError(
                "checkpoint.keep-best keeps the checkpoint with the lowest validation loss, and train.eval-every "
                f"{self.train.eval_every} never evaluates; give --train.eval-every a number of steps"
            )
        if 0 < self.model.n_positions < self.data.seq_len:
            raise UserError(
                f"data.seq-len is {self.data.seq_len}, longer than the model's positions "
                f"(model.n-positions {self.model.n_positions}); make one match the other"
            )

    def _check_batch(self) -> None:
        """Raises UserError if a micro-batch is larger than the batch, or shares are not all of it."""
        size, batch = self.train.device_batch_size, self.batch_in_sequences().train.global_batch_size
        asked = f"train.global-batch-size {batch}"
        if tokens := self.train.global_batch_tokens:
            asked = f"train.global-batch-tokens {tokens}, which are {batch} sequences"
        if size > batch > 0:
            raise UserError(
                f"train.device-batch-size is {size}, larger than {asked}; a micro-batch is a part of the batch"
            )
        shares = self.parallel.fixed_shares()
        if shares and sum(shares) != self.train.global_batch_size:
            raise UserError(
                f"parallel.shares {self.parallel.shares} sum to {sum(shares)} sequences, and train.global-batch-size "
                f"is {self.train.global_batch_size}; make them equal: --train.global-batch-size {sum(shares)}"
            )

    def replace(self, section: str, **values: Any) -> "Config":
        """Returns a copy with other values in one section."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **values)})

    def batch_in_sequences(self) -> "Config":
        """Returns a copy with train.global-batch-tokens, if given, as train.global-batch-size: as a run stores it."""
        tokens = self.train.global_batch_tokens
        if not tokens:
            return self
        return self.replace("train", global_batch_size=max(1, round(tokens / self.data.seq_len)), global_batch_tokens=0)

    def model_of_data(self, vocab_size: int) -> ModelConfig:
        """Returns the model with what it takes from the data. vocab_size: of the data; 0: of text, whose tokenizer is
        trained."""
        model, data = self.model, self.data
        vocab_size = model.vocab_size or vocab_size or data.expected_vocab
        return dataclasses.replace(model, vocab_size=vocab_size, n_positions=model.n_positions or data.seq_len)


def preset_names() -> list[str]:
    """Returns the names of the presets in the package."""
    folder = resources.files("paceline") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str, base: Config) -> Config:
    """Returns base overridden by a preset. Raises UserError with the nearest name if there is none."""
    names = preset_names()
    if name not in names:
        raise UserError(f"no preset is named '{name}'{nearest(name, names)}; there are: {', '.join(names)}")
    text = (resources.files("paceline") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    return from_toml(text, f"preset {name}", base)


def load_file(path: Path, base: Config) -> Config:
    """Returns base overridden by a TOML file. Raises UserError naming file and field."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin it with a byte order mark
    except OSError as error:
        raise UserError(f"cannot read --config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read --config {path}: not a text file") from None
    return from_toml(text, str(path), base)


def load_run(path: Path) -> Config:
    """Returns the config of a run from its config.toml. Raises UserError if the file is not as it was written."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; {CONFIG_IS_KEPT}") from None
    if not text.strip():
        raise UserError(f"{path} is empty; {CONFIG_IS_KEPT}")
    if text.startswith("[run]"):
        raise UserError(f"{path.parent} is the run of a script: its model is made by that script alone")
    return from_toml(text, str(path), Config())


def from_toml(text: str, where: str, base: Config) -> Config:
    """Returns base overridden by a TOML text: [section] field = value, with underscores or hyphens; below it the preset
    that a first line `preset = "NAME"` names."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
        raise UserError(f"{where} is not TOML: {error}") from None
    sections = [item.name for item in dataclasses.fields(Config)]
    below = load_preset(str(document.pop("preset")), base) if "preset" in document else base
    config = below
    for section, values in document.items():
        if section not in sections:
            raise UserError(f"{where}: no section [{section}]{nearest(section, sections)}")
        if not isinstance(values, dict):
            raise UserError(f"{where}: [{section}] must be a table of fields")
        current = getattr(config, section)
        hints = typing.get_type_hints(type(current))
        changes = {}
        for raw_name, value in values.items():
            name = raw_name.replace("-", "_")
            if (section, name) in _GONE and value == _GONE[section, name]:
                continue
            if name not in hints:
                raise UserError(f"{where}: {section} has no field '{raw_name}'{nearest(name, hints)}")
            if name in changes:
                raise UserError(f"{where}: {section} has the field {name} twice, with '_' and with '-'; give it once")
            changes[name] = checked(f"{where}: {section}.{name}", hints[name], value)
        config = config.replace(section, **changes)
    is_sized = any(name.replace("-", "_") in SIZE_FIELDS for values in document.values() for name in values)
    if is_sized and "size" not in document.get("model", {}):
        config = config.replace("model", size="given")
    return supersede(below, config)


def checked(where: str, kind: Any, value: Any) -> Any:
    """Returns the value as the wanted type. Raises UserError, naming its place `where`, for any other type."""
    try:
        repr(value)  # of which most messages show it
    except ValueError:  # Python writes no number of thousands of digits, also not one within a list
        raise UserError(f"{where} has more than 100 digits, more than a number here can have") from None
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{where} is {value!r}; it must be a list of strings")
        return tuple(value)
    choices = typing.get_args(kind)
    if choices:
        if value not in choices:
            near = nearest(str(value), map(str, choices))
            raise UserError(f"{where} is {value!r}{near}; it must be one of {', '.join(map(str, choices))}")
        return value
    if isinstance(value, int) and abs(value) >= _ABOVE_ALL:
        raise UserError(f"{where} has more than 100 digits, more than a number here can have")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where} is {value!r}; it must be of type {kind.__name__}")
    return value


def to_toml(config: Config) -> str:
    """Returns the config as TOML; from_toml of it gives the same config."""
    lines: list[str] = []
    for section, values in dataclasses.asdict(config).items():
        # JSON's strings, booleans, numbers and lists are valid TOML, except for one character.
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
        lines += [f"[{section}]", *(f"{name} = {text}" for name, text in texts.items()), ""]
    return "\n".join(lines).replace("\x7f", "\\u007f")


def flatten(config: Config) -> dict[str, Any]:
    """Returns `section.field-name` -> value, named as the user types it."""
    return {
        f"{section}.{name}".replace("_", "-"): value
        for section, values in dataclasses.asdict(config).items()
        for name, value in values.items()
    }


def with_size_of(stored: Config, config: Config) -> Config:
    """Returns `config` with the model, batch and weight decay that a run chose by model.size auto and stored."""
    batch = stored.train.global_batch_size
    config = dataclasses.replace(config, model=stored.model).replace("optim", weight_decay=stored.optim.weight_decay)
    return config.replace("train", global_batch_size=batch, global_batch_tokens=0)


def supersede(base: Config, changed: Config) -> Config:
    """Returns `changed` without the alternatives it replaces: a number of steps replaces a preset's time budget."""
    for names in ALTERNATIVES:
        new = [name for name in names if getattr(changed.train, name) != getattr(base.train, name)]
        if any(getattr(changed.train, name) for name in new):
            changed = changed.replace("train", **{name: 0 for name in names if name not in new})
    if base.train.time_budget > changed.train.time_budget == 0 and changed.train.max_epochs == base.train.max_epochs:
        changed = changed.replace("train", max_epochs=0.0)  # it limits a time
    return changed
