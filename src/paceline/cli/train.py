"""paceline train"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from paceline.base.errors import EXIT_USER, UserError
from paceline.cli.flags import base_config, parse
from paceline.cli.help import help_text
from paceline.cli.resume import refuse_other_run, stored_config
from paceline.cli.start import RankFlags, start
from paceline.config import Config, load_file, supersede, with_size_of
from paceline.data.config import DataConfig
from paceline.record.folder import RunFolder, has_begun
from paceline.train.request import Request


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RankFlags):
    """Train a model, on one rank or many."""

    preset: str = ""
    """A configuration that comes with paceline. --config is over it, flags are over both."""
    config: str = ""
    """A TOML file of [section] field = value."""
    init_from: str = ""
    """Start from the newest weights of this run folder, with its model, whatever a preset says; the data must use its
    tokenizer. `paceline import` makes such a folder from a model of transformers or nanoGPT."""
    out: str = ""
    """The run folder, new; empty: runs/NAME-DATE-TIME."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in --out if the same command began it before, so that a scheduler may repeat the command.
    Settings that are left at their defaults are those of the run."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def checked_arguments(flags: list[str]) -> TrainArguments:
    """Returns the options of a `paceline train` that starts elsewhere. Raises UserError for a config that it would
    refuse; with --init-from the config is not checked, since that run's model may be known only there."""
    parsed = parse(TrainArguments, TrainArguments(settings=base_config(flags)), flags, "train")
    if not (parsed.init_from or parsed.settings.train.init_from):
        parsed.settings.check()
    return parsed


def main(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(TrainArguments(), "train", ()))
        return EXIT_USER
    base = base_config(arguments)
    parsed = parse(TrainArguments, TrainArguments(settings=base), arguments, "train")
    init_from = parsed.init_from or parsed.settings.train.init_from
    source = Path(init_from).absolute() if init_from else None
    if source is None:
        config = parsed.settings
        config.check()
    else:
        config = _fine_tuned(source, parsed, base, arguments)
    name = parsed.preset or (
        Path(parsed.config).stem if parsed.config else source.name if source else config.model.arch
    )
    request = Request(config, Path(parsed.out) if parsed.out else None, name)
    if parsed.resume == "auto":
        request = _continued(request)
    return start(request, parsed, ["train", *arguments])


def _continued(request: Request) -> Request:
    """Returns a request to continue the run in --out, if there is one. Raises UserError for settings of another run."""
    if request.out is None:
        raise UserError("--resume auto needs --out, the run folder, by which the same command finds its run again")
    if not has_begun(request.out):
        return request
    stored, default = stored_config(RunFolder(request.out)), Config()
    config, asked = stored, request.config
    if asked.model.size == "auto":
        asked = with_size_of(stored, asked)
    for section in dataclasses.fields(Config):
        own = getattr(asked, section.name)
        given = {
            item.name: value
            for item in dataclasses.fields(own)
            if (value := getattr(own, item.name)) != getattr(getattr(default, section.name), item.name)
        }
        config = config.replace(section.name, **given)
    config = supersede(stored, config).batch_in_sequences()
    refuse_other_run(stored, config)
    config.check()
    return dataclasses.replace(request, config=config, is_restart=True)


def _fine_tuned(source: Path, parsed: TrainArguments, base: Config, arguments: list[str]) -> Config:
    """Returns the config of a run that begins with another's weights: the model of that run, then --config, then flags.
    Flags are parsed again over it, so that a flag with our default value counts as given."""
    from paceline.train.initial import check_data, initial_model, require_same_shape

    model = initial_model(source)
    below = Config(model=model)
    base = dataclasses.replace(base, model=load_file(Path(parsed.config), below).model if parsed.config else model)
    if base.data.seq_len == DataConfig().seq_len:
        base = base.replace("data", seq_len=min(base.data.seq_len, model.n_positions))
    parsed = parse(TrainArguments, TrainArguments(settings=base), arguments, "train")
    config = dataclasses.replace(parsed.settings, model=require_same_shape(source, parsed.settings.model))
    config = config.replace("train", init_from=str(source))  # a run that dies before a save begins with them again
    config.check()
    check_data(source, config.data, config.model.vocab_size)
    return config
