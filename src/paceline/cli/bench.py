"""paceline bench loader | link | scaling"""

import importlib

from paceline.base.errors import UserError, nearest

_VERBS = ("loader", "link", "scaling")
_USAGE = """paceline bench loader [--data.path DIR]     what feeding costs a rank, in worlds of 1 to 1024
paceline bench link [--nproc N]             what crosses between ranks, and how long this model's all-reduce takes
paceline bench scaling [--preset NAME]      tokens/s and efficiency from one process to several hosts

`--help` after it shows its options.
"""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    if verb not in _VERBS:
        raise UserError(f"there is no `paceline bench {verb}`{nearest(verb, _VERBS)}; there are {', '.join(_VERBS)}")
    status: int = importlib.import_module(f"paceline.cli.bench_{verb}").main(rest)
    return status
