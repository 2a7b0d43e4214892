"""paceline resume"""

import dataclasses
import os
import shlex
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from paceline.base.errors import EXIT_DONE, UserError, require_at_least
from paceline.checkpoint.bucket import identity
from paceline.checkpoint.steps import newest_whole
from paceline.cli.flags import asked_help, parse, shell_words
from paceline.cli.start import RankFlags, start
from paceline.config import CONFIG_IS_KEPT, Config, load_run
from paceline.record import folder as run_folder
from paceline.record.console import Console
from paceline.record.output import printable
from paceline.train.changes import changes, makes_another_run
from paceline.train.request import Request


@dataclass(frozen=True, kw_only=True)
class ResumeArguments(RankFlags):
    """Resume a run from its newest complete checkpoint, on any number of ranks."""

    folder: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """The run folder, or the address that was checkpoint.to: its newest checkpoint is brought to runs/NAME."""
    run: bool = False
    """Of the run of a script: execute its command. Without it the command is printed."""
    step: int = -1
    """The checkpoint of this step; -1: the newest complete one."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(arguments: list[str]) -> int:
    if arguments and "://" in arguments[0]:
        arguments = _brought(arguments)
    is_help = asked_help(arguments) is not None
    if arguments and not is_help and (script := run_folder.script_of(Path(arguments[0]))) is not None:
        return _resume_script(arguments[0], arguments[1:], script)
    folder, stored = _stored(arguments)
    default = ResumeArguments(folder=folder, settings=stored)
    parsed = parse(ResumeArguments, default, arguments, "resume")
    require_at_least(parsed, "--", step=-1)
    if parsed.run:
        raise UserError(f"--run executes the command of a script; {folder} needs none: leave it out")
    config = parsed.settings.batch_in_sequences()
    refuse_other_run(stored, config)
    config.check()
    request = Request(config, Path(parsed.folder), resume=True, resume_step=parsed.step if parsed.step >= 0 else None)
    return start(request, parsed, ["resume", *arguments])


def _brought(arguments: list[str]) -> list[str]:
    """Brings the run at an address to this disk. Returns the arguments that resume it here, and send there again."""
    from paceline.checkpoint.bring import bring

    url, options, folder = arguments[0].rstrip("/"), arguments[1:], folder_of(arguments[0])
    parsed = parse(ResumeArguments, ResumeArguments(folder=url), arguments, "resume")
    require_at_least(parsed, "--", step=-1)
    say = Console(int(os.environ.get("RANK", "0") != "0")).say  # once, by rank 0
    say(f"bringing the run at {url} to {folder}")
    step, known = parsed.step if parsed.step >= 0 else None, identity(folder)
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and known.get("to") == url
    if is_restart and not known.get("later") and newest_whole(folder / "checkpoints", None):
        step = None  # an earlier attempt went on from it, and may have removed it since
    for problem in bring(url, folder, step):
        say(f"passed over a damaged checkpoint: {problem}")
    is_script = run_folder.script_of(folder) is not None
    return [str(folder), *([] if is_script else ["--checkpoint.to", url]), *options]  # the last of two options counts


def folder_of(run: str) -> Path:
    """Returns the run folder that `resume` continues: for an address the one to which it is brought."""
    return Path("runs", run.rstrip("/").rpartition("/")[2]) if "://" in run else Path(run)


def _resume_script(folder: str, options: list[str], script: dict[str, Any]) -> int:
    """Prints the command of a script, or executes it in its directory, in place of this process."""
    command = script.get("command")
    if options not in ([], ["--run"]):
        raise UserError(
            f"{folder} is the run of a script, whose command has its settings: `paceline resume` prints it, and with "
            f"--run executes it; leave the others out ({' '.join(options)})"
        )
    if not isinstance(command, str) or not command:
        raise UserError(f"{folder} is the run of a notebook or a prompt, so it has no command: run the cell again")
    if not options:
        said = f"{folder} is the run of a script; the same command continues it (each rank runs this):\n{command}"
        _, _, script_words = command.partition(" ")
        if script_words and not script_words.startswith("-m "):
            said += f"\non two ranks:\npaceline train --nproc 2 --out {shlex.quote(folder)} -- {script_words}"
        print(printable(said))  # which somebody else may have written
        return EXIT_DONE
    _require_own(Path(folder))
    words = shell_words(command)
    try:
        os.chdir(str(script.get("directory", ".")))
        os.execv(sys.executable, [sys.executable, *words[1:]])
    except OSError as error:
        raise UserError(f"cannot execute {command}: {error.filename}: {error.strerror}") from None


def _require_own(folder: Path) -> None:
    """Raises UserError if somebody else may have written the command."""
    if identity(folder).get("is_brought"):
        raise UserError(
            f"{folder} came from a bucket, so its command may not be yours: read it by `paceline resume "
            f"{shlex.quote(str(folder))}`, and run it yourself"
        )
    for path in (folder, folder / "config.toml"):
        facts = path.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(
                f"{path} is another user's, or others may write it, so its command may not be yours: read it by "
                f"`paceline resume {shlex.quote(str(folder))}`, and run it yourself (or `chmod go-w {path}`)"
            )


def _stored(arguments: list[str]) -> tuple[str, Config]:
    """Returns the run folder and its config. Raises UserError if nothing can be resumed."""
    if asked_help(arguments) is not None:
        return "RUN", Config()
    if not arguments or arguments[0].startswith("-"):
        raise UserError("the run folder comes first: paceline resume RUN [options]")
    run = run_folder.find(Path(arguments[0]))
    stored = stored_config(run)
    if not stored.train.horizons:
        if run_folder.was_imported(run.path):
            raise UserError(
                f"{run.path} was imported, not trained, so there is nothing to resume; "
                f"fine-tune it: paceline train --init-from {shlex.quote(arguments[0])}"
            )
        raise UserError(
            f"{run.config} says nothing of how long the run is, so it is not as it was written; {CONFIG_IS_KEPT}"
        )
    return arguments[0], stored


def stored_config(run: run_folder.RunFolder) -> Config:
    """Returns a run's config without stops and trace, which are of one attempt. Raises UserError as `load_run`."""
    return load_run(run.config).replace("train", stop_at_step=0, stop_after=0.0, profile=0)


def refuse_other_run(stored: Config, config: Config) -> None:
    """Raises UserError if the config is that of another run than the stored one."""
    for name, (before, value) in changes(dataclasses.asdict(stored), config).items():
        if makes_another_run(name):
            raise UserError(
                f"--{name} {value} would make it another run: it was started with {before!r}; "
                "leave it out, or start a new run with `paceline train`"
            )
