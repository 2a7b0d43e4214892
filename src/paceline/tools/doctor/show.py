"""The doctor's table: failures last; what hosts agree on is one line."""

from collections.abc import Sequence

import rich.box
import rich.table
from rich.text import Text

from paceline.record.console import printable
from paceline.tools.doctor.finding import Finding, Level

_ORDER: tuple[Level, ...] = ("ok", "warning", "failure")
_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def table(findings: Sequence[Finding], num_hosts: int) -> rich.table.Table:
    """Returns the findings by level, each with the hosts that it is about."""
    made = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for column in ("check", "host", "", "found"):
        made.add_column(column, overflow="fold", no_wrap=column == "")
    for level in _ORDER:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for finding in (each for each in findings if each.level == level):
            alike.setdefault((finding.check, finding.seen, finding.fix), []).append(finding.host)
        checks = list(dict.fromkeys(check for check, _, _ in alike))
        for (check, seen, fix), hosts in sorted(alike.items(), key=lambda row: checks.index(row[0][0])):
            who = "all" if len(set(hosts)) == num_hosts > 1 else ", ".join(dict.fromkeys(hosts))
            style = _STYLES[level]
            found = Text(printable(seen), "bold" if level == "failure" else "")
            if fix:
                found.append(f"\nfix: {printable(fix)}", style)
            made.add_row(Text(check), Text(printable(who)), Text(level, style), found)
    return made


def summary(findings: Sequence[Finding], num_hosts: int, seconds: float) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in _ORDER}
    hosts = f"{num_hosts} host{'s'[: num_hosts > 1]}"
    return f"{hosts} in {seconds:.1f} s: {counts['ok']} ok, {counts['warning']} warnings, {counts['failure']} failures"
