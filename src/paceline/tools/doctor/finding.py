"""A row of the doctor's table: the check, its level, what was seen, and the command that fixes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.base.clock import within
from paceline.base.errors import PacelineError

Level = Literal["ok", "warning", "failure"]
Verdict = tuple[Level, str, str]  # what a check yields: the level, what was seen, what fixes it


@dataclass(frozen=True, kw_only=True)
class Finding:
    host: str
    check: str
    level: Level
    seen: str
    fix: str = ""


def ok(seen: str) -> Verdict:
    return "ok", seen, ""


def warning(seen: str, fix: str) -> Verdict:
    return "warning", seen, fix


def failure(seen: str, fix: str) -> Verdict:
    return "failure", seen, fix


def examine(host: str, check: str, limit_s: float, verdicts: Callable[[], Iterable[Verdict]]) -> list[Finding]:
    """Returns what a check yields. An error, or no answer within the limit (a network disk hangs), is a failure."""
    answers: list[Verdict] = []

    def collect() -> None:
        for verdict in verdicts():
            answers.append(verdict)  # noqa: PERF402  also what came before an error counts

    try:
        within(limit_s, collect)
    except TimeoutError as error:
        answers.append(failure(str(error), "see whether a disk, a driver or a name server hangs, and fix that first"))
    except PacelineError as error:
        seen, _, fix = str(error).rpartition("; ")
        answers.append(failure(seen or fix, fix if seen else ""))
    except Exception as error:
        answers.append(failure(f"{type(error).__name__}: {error}", ""))
    return [Finding(host=host, check=check, level=level, seen=seen, fix=fix) for level, seen, fix in answers]
