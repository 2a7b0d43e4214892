"""From the ends of an attempt's ranks to the end of the attempt. Pure: the first rule that applies is used.

refused         a rank reported 2: the user has to change something
early           a signal came before a rank had trained: nothing is lost
died            a rank ended without a report, or by a signal
failed          a rank reported 1, and has printed why
lost others     no rank died, and none printed why: a rank of another host is gone
hung            a rank had to be killed: it did not end by itself after a signal, or another rank's failure
ended           all ranks reported 0, or 75
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER
from paceline.base.process import Status
from paceline.base.units import listed


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a launcher knows of ranks after an attempt, on all hosts of which it hears."""

    ranks: range
    reports: Mapping[int, Status]  # by rank: what it said of its own end
    exits: Mapping[int, int]  # by rank: its exit status, or minus a signal; without the ranks that were killed here
    lost: tuple[str, ...] = ()  # hosts that left meanwhile, with the ends of their ranks
    makes_room: bool = False  # the ranks were asked to save, so that a host can come in
    stop: signal.Signals | None = None  # the signal that was to end the run
    grace_s: float = 0.0  # how long ranks may save after that signal
    has_begun: bool = True  # a rank had begun to train

    @property
    def failures(self) -> dict[int, Status]:
        """Reports of ranks that have printed what failed."""
        return {rank: report for rank, report in self.reports.items() if report.is_failure}

    @property
    def unready(self) -> set[int]:
        """Ranks that the signal ended before they handled it: they had only begun to import."""
        by_it = {rank for rank, code in self.exits.items() if code == -signal.SIGTERM}
        return by_it - set(self.reports) if self.stop else set()

    @property
    def silent(self) -> list[int]:
        """Ranks that died: they ended by themselves, and reported nothing."""
        return [rank for rank in self.exits if rank not in self.reports and rank not in self.unready]

    @property
    def killed(self) -> list[int]:
        """Ranks that were killed here, because their time was over."""
        return [] if self.lost else [rank for rank in self.ranks if rank not in self.exits]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How an attempt ended, over all ranks."""

    status: int
    what: str = ""  # who failed, and how
    was_said: bool = True  # by a rank, on the terminal
    rank: int | None = None  # the first to blame
    is_early: bool = False  # a signal came before training, and no rank has said so


def how_it_ended(ends: Ends) -> Ended:
    """Returns the first answer."""
    for rule in (_refused, _early, _died, _failed, _lost_others, _hung):
        if (ended := rule(ends)) is not None:
            return ended
    # No report: all hosts were lost at once.
    return Ended(status=max((report.code for report in ends.reports.values()), default=EXIT_FAILED))


def _refused(ends: Ends) -> Ended | None:
    if EXIT_USER in [report.code for report in ends.reports.values()]:
        return Ended(status=EXIT_USER)
    return None


def _early(ends: Ends) -> Ended | None:
    """A rank that is killed while it reads or prepares data (a library may hear no signal) has lost nothing."""
    is_cut_short = bool(ends.killed or ends.silent or ends.lost)
    if ends.stop is None or ends.failures or (is_cut_short and ends.has_begun):
        return None
    has_rank_0_said = 0 in ends.reports and ends.reports[0].is_good  # which prints
    if 0 in ends.unready or not any(report.is_good for report in ends.reports.values()):
        return Ended(status=EXIT_RESUMABLE, is_early=True)
    return Ended(status=EXIT_RESUMABLE, is_early=not has_rank_0_said) if ends.killed else None


def _died(ends: Ends) -> Ended | None:
    silent = ends.silent
    if ends.failures and all(ends.exits[rank] == -signal.SIGKILL for rank in silent):
        return None  # killed by the watchdog of those that failed, which printed why
    if not silent:
        return None
    code = next((ends.exits[rank] for rank in silent if ends.exits[rank] < 0), ends.exits[silent[0]])
    dead = sorted(rank for rank in silent if ends.exits[rank] == code)
    what = _who_died(dead, code, is_explained=bool(ends.failures))
    return Ended(status=EXIT_FAILED, what=what, was_said=False, rank=dead[0])


def _failed(ends: Ends) -> Ended | None:
    if not ends.failures:
        return None
    rank = next((rank for rank in ends.exits if rank in ends.failures), min(ends.failures))
    return Ended(status=ends.failures[rank].code, what=f"rank {rank} failed", rank=rank)


def _lost_others(ends: Ends) -> Ended | None:
    suffered = [report.consequence for report in ends.reports.values() if report.consequence]
    return Ended(status=EXIT_FAILED, what=suffered[0], was_said=False) if suffered else None


def _hung(ends: Ends) -> Ended | None:
    hanging = [rank for rank in ends.ranks if rank not in ends.reports and rank not in ends.unready]
    if not hanging:
        return None
    after, advice = "the failure of another", ""
    if ends.lost:
        after = f"the loss of {' and '.join(ends.lost)}"
    elif ends.stop:
        after = f"{ends.stop.name}, and {ends.grace_s:g} s without a byte of a save,"
        advice = "; to give a slow disk more time to save, raise --checkpoint.grace-s"
    what = f"rank {listed(hanging, 16)} did not end after {after} and was killed"
    return Ended(status=EXIT_FAILED, what=what + advice, was_said=False)


def _who_died(ranks: list[int], code: int, *, is_explained: bool) -> str:
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
    if code >= 0:
        return f"{who} ended with exit status {code}, and did not report why"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")  # 35 to 63 have no names
    hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" and not is_explained else ""
    return f"{who} {'were' if len(ranks) > 1 else 'was'} killed by {name}{hint}"
