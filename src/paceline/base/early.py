"""Signals that arrive before training, while Python imports libraries, which takes seconds."""

import os
import signal
from types import FrameType
from typing import NoReturn

from paceline.base.errors import EXIT_RESUMABLE
from paceline.base.say import say
from paceline.base.status import has_launcher

EXIT_INTERRUPTED = 130  # 128 + SIGINT
# SIGTERM last: a launcher looks for its handler.
STOP_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)


def stopped_early(name: str) -> str:
    """Returns the message of a rank that a signal stopped before training."""
    return f"stopped by {name} before training began; start the same command again"


def end_on_signals() -> None:
    """Makes stop signals end this process at once, as long as there is nothing to save. The handler raises nothing,
    because an import may swallow an exception. An ignored SIGHUP (nohup) stays ignored."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def end_on_signals_no_more() -> None:
    """Restores Python's default handlers where `end_on_signals` set ours and nobody replaced them."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    if has_launcher():  # it prints one message for all its ranks, as for a rank that had no handler yet
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    is_interrupt = number == signal.SIGINT
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        say("interrupted" if is_interrupt else stopped_early(signal.Signals(number).name))
    os._exit(EXIT_INTERRUPTED if is_interrupt else EXIT_RESUMABLE)
