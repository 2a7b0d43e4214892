"""paceline train"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from paceline.base.errors import EXIT_USER, UserError
from paceline.checkpoint.steps import list_steps
from paceline.cli.flags import base_config, divided, flag_of, parse
from paceline.cli.help import help_text
from paceline.cli.resume import refuse_other_run, stored_config
from paceline.cli.start import RankFlags, start, start_script
from paceline.config import Config, load_file, supersede, with_size_of
from paceline.data.config import DataConfig
from paceline.record.folder import RunFolder, has_begun
from paceline.train.request import Request

# Those that have an effect where a script trains: they are the launcher's. A script always continues its run.
_WITH_SCRIPT = ("--nproc", "--max-restarts", "--start", "--out", "--resume", "--checkpoint.grace-s", "--parallel.port")


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RankFlags):
    """Train a model, on one rank or many. `train --out RUN -- SCRIPT ...` starts a script of yours, whose paceline.Run
    has this folder."""

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


def checked_arguments(arguments: list[str]) -> TrainArguments:
    """Returns the options of a `paceline train`, also of one that starts elsewhere. Raises UserError for a config that
    cannot be trained; with --init-from the config is not checked, since that run's model may be known only there."""
    flags, script = divided(arguments)
    _check_words(flags, script)
    default = TrainArguments(settings=base_config(flags))
    parsed = parse(TrainArguments, default, flags if script else arguments, "train")
    if not (script or parsed.init_from or parsed.settings.train.init_from):
        parsed.settings.check()
    return parsed


def _check_words(flags: list[str], script: list[str]) -> None:
    """Raises UserError for a script that is not after `--`, and for options that have no effect on one."""
    if flags and not flags[0].startswith("-"):
        raise UserError(
            f"'{flags[0]}' is no option of `paceline train`; a script of yours comes after `--`, and --out is the "
            f"folder of its paceline.Run: train --out runs/x -- {flags[0]}"
        )
    if not script:
        return
    options = [flag_of(word) for word in flags if word.startswith("--")]
    if without_effect := [option for option in options if option not in _WITH_SCRIPT]:
        raise UserError(
            f"{', '.join(without_effect)}: no effect on a script, which has settings of its own. Give them after "
            f"{script[0]}; before `--` there are {', '.join(_WITH_SCRIPT)}"
        )
    if "--out" not in options:
        raise UserError(f"there is no run folder: give --out, the folder of paceline.Run in {script[0]}, before `--`")


def main(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(TrainArguments(), "train", ()))
        return EXIT_USER
    parsed = checked_arguments(arguments)
    if script := divided(arguments)[1]:
        return start_script(Request(parsed.settings, Path(parsed.out)), parsed, script)
    init_from = parsed.init_from or parsed.settings.train.init_from
    source = Path(init_from).absolute() if init_from else None
    if parsed.resume == "auto":
        _bring(parsed)  # first: a run that continues needs nothing of its source
    config = _fine_tuned(source, parsed, arguments) if source else parsed.settings
    name = parsed.preset or (
        Path(parsed.config).stem if parsed.config else source.name if source else config.model.arch
    )
    request = Request(config, Path(parsed.out) if parsed.out else None, name)
    if parsed.resume == "auto":
        request = _continued(request)
    return start(request, parsed, ["train", *arguments])


def _bring(parsed: TrainArguments) -> None:
    """Brings the run at checkpoint.to to --out, if that has no checkpoint: an earlier call may have been killed after
    it brought the records."""
    if not parsed.out:
        raise UserError("--resume auto needs --out, the run folder, by which the same command finds its run again")
    out, to = Path(parsed.out), parsed.settings.checkpoint.to
    if to and not (has_begun(out) and list_steps(out / "checkpoints")):
        from paceline.checkpoint.bring import bring

        bring(to, out, must_exist=False)


def _continued(request: Request) -> Request:
    """Returns a request to continue the run in --out, if there is one. Raises UserError for settings of another run."""
    out = request.out
    if out is None or not has_begun(out):
        return request
    stored, default = stored_config(RunFolder(out)), Config()
    config, asked = stored, request.config
    source = stored.train.init_from
    if source and Path(source).name == Path(asked.train.init_from).name and list_steps(out / "checkpoints"):
        asked = asked.replace("train", init_from=source)  # read no more, and elsewhere on this machine
    if asked.model.size == "auto":
        asked = with_size_of(stored, asked)
    for section in dataclasses.fields(Config):
        changed = getattr(asked, section.name)
        set_fields = {
            item.name: value
            for item in dataclasses.fields(changed)
            if (value := getattr(changed, item.name)) != getattr(getattr(default, section.name), item.name)
        }
        config = config.replace(section.name, **set_fields)
    config = supersede(stored, config).batch_in_sequences()
    refuse_other_run(stored, config)
    config.check()
    return dataclasses.replace(request, config=config, asked=request.config, is_restart=True)


def _fine_tuned(source: Path, parsed: TrainArguments, arguments: list[str]) -> Config:
    """Returns the config of a run that begins with another's weights: the model of that run, then --config, then flags.
    Flags are parsed again over it, so that a flag with our default value counts as given."""
    from paceline.train.initial import check_data, initial_model, require_same_shape

    is_begun = parsed.resume == "auto" and parsed.out and has_begun(Path(parsed.out))
    # A run that continues has the model and the tokenizer of its source, which may be gone or another one by now.
    known = Path(parsed.out) if is_begun else source
    model = initial_model(known)
    below, base = Config(model=model), base_config(arguments)
    base = dataclasses.replace(base, model=load_file(Path(parsed.config), below).model if parsed.config else model)
    if base.data.seq_len == DataConfig().seq_len:
        base = base.replace("data", seq_len=min(base.data.seq_len, model.n_positions))
    parsed = parse(TrainArguments, TrainArguments(settings=base), arguments, "train")
    config = dataclasses.replace(parsed.settings, model=require_same_shape(known, parsed.settings.model))
    config = config.replace("train", init_from=str(source))  # a run that dies before a save begins with them again
    config.check()
    check_data(known, config.data, config.model.vocab_size)
    return config
