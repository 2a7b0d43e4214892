"""paceline completion"""

import contextlib
import io
import typing
from collections.abc import Mapping
from typing import Any

from paceline.base.errors import EXIT_DONE, UserError
from paceline.cli.flags import TELL_KNOWN, Known, run_verb
from paceline.config import preset_names

_USAGE = """paceline completion bash|zsh|fish: what makes a shell complete verbs, options and values. Where it looks:

  paceline completion bash > ~/.local/share/bash-completion/completions/paceline
  paceline completion zsh > ~/.zfunc/_paceline            # after fpath+=~/.zfunc in ~/.zshrc, before compinit
  paceline completion fish > ~/.config/fish/completions/paceline.fish
"""
# The verb begins the line, or follows `--`; after the `--` of a verb that prints a job come the options of train.
_BASH = """\
_paceline() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} first=1 i words=
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [ "${{COMP_WORDS[i]}}" = -- ]; then first=$((i + 1)); fi
    done
    local verb=${{COMP_WORDS[first]}}
    case "${{COMP_WORDS[1]}}" in
        kubernetes | slurm) if [ $first != 1 ]; then verb=train first=0; fi ;;
    esac
    case "$before" in
{values}
        {switches}) ;;
        --?*) COMPREPLY=(); return ;;
    esac
    if [ -z "$words" ] && [ "$COMP_CWORD" = "$first" ]; then
        words="{verbs}"
    elif [ -z "$words" ]; then
        case "$verb ${{COMP_WORDS[first + 1]}} " in
{options}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _paceline paceline
"""
_ZSH = "#compdef paceline\nautoload -U +X bashcompinit && bashcompinit\n"


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] not in ("-h", "--help"):
        raise UserError(f"paceline completion takes the name of a shell, and {arguments[1]} comes after it")
    return run_verb("completion", {"bash": _bash, "zsh": _zsh, "fish": _fish}, arguments, _USAGE)


def known_words() -> dict[str, Mapping[str, Any]]:
    """Returns "train", "data prepare" ... -> the options, with their types; "data" -> the words that follow it."""
    from paceline.cli.main import _VERBS, find_main

    found: dict[str, Mapping[str, Any]] = {}

    def ask(main: Any, *words: str) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                main(["--help", TELL_KNOWN])
        except Known as known:
            found[" ".join(words)] = known.words
            for word, follows in known.words.items():
                if not word.startswith("-"):
                    ask(follows, *words, word)

    for verb in _VERBS:
        if verb != "completion":
            ask(find_main(verb), verb)
    return {**found, "completion": dict.fromkeys(("bash", "zsh", "fish"))}


def _values(known: dict[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the options of a few values, with them."""
    found: dict[str, list[str]] = {"--preset": preset_names()}
    for words in known.values():
        for word, kind in words.items():
            if typing.get_origin(kind) is typing.Literal:
                found[word] = sorted({*found.get(word, []), *map(str, typing.get_args(kind))})
    return found


def _bash(_: list[str]) -> int:
    known = known_words()
    last_first = sorted(known.items(), key=lambda item: -len(item[0]))  # "data prepare" before "data"
    values = [f'        {word}) words="{" ".join(values)}" ;;' for word, values in _values(known).items()]
    options = [f'            "{words} "*) words="{" ".join(takes)}" ;;' for words, takes in last_first]
    switches = {word for takes in known.values() for word, kind in takes.items() if kind is bool}
    script = {"values": "\n".join(values), "options": "\n".join(options), "switches": " | ".join(sorted(switches))}
    verbs = " ".join(words for words in known if " " not in words)
    print(_BASH.format(verbs=verbs, **script), end="")
    return EXIT_DONE


def _zsh(arguments: list[str]) -> int:
    print(_ZSH, end="")
    return _bash(arguments)


def _fish(_: list[str]) -> int:
    known = known_words()
    values = _values(known)
    verbs = " ".join(words for words in known if " " not in words)
    print(f'complete -c paceline -n __fish_use_subcommand -xa "{verbs}"')
    for words, takes in known.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words.split())
        for word, kind in takes.items():
            what = f'-xa "{word}"'
            if word.startswith("--"):
                choices = f' -xa "{" ".join(values[word])}"' if word in values else ""
                what = f"-l {word[2:]}" + (choices or ("" if kind is bool else " -r"))
            print(f'complete -c paceline -n "{seen}" {what}')
    return EXIT_DONE
