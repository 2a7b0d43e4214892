"""All checks in their order: this host's own, then together with the other hosts."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import rich.box
import rich.table
from rich.text import Text
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.base import units
from paceline.base.errors import EXIT_DONE, EXIT_FAILED
from paceline.record.console import Console
from paceline.record.output import printable
from paceline.tools.doctor import devices, files
from paceline.tools.doctor.compare import compare, host_names
from paceline.tools.doctor.finding import Finding, Level, Verdict, examine, failure
from paceline.tools.doctor.fit import fits
from paceline.tools.doctor.host import ALONE, Place, load
from paceline.tools.doctor.link import Listener, measure
from paceline.tools.doctor.meeting import Address, Meeting, Report
from paceline.tools.plan.devices import PAYLOAD_FRAC
from paceline.world.env import Environment, is_loopback, transfer_address
from paceline.world.store import open_store, post, read

_CHECK_S = 10.0
_MOST_ROUNDS = 8  # of measured links: a host of a larger job measures so many, and the round trip to all others
_QUICK = 16  # round trips at a time
_LOOK_EVERY_S = 0.1
Hosts = tuple[Sequence[Address], int]  # the addresses, and which of them is this host


def doctor(place: Place, env: Environment, hosts: Hosts | None, wait_s: float, as_json: bool) -> int:
    """Examines this host and, with `hosts` or a launcher's environment, all of the job; prints what was found, and
    returns the exit status: 1 for a failure. wait_s: for the other hosts, from now on. Raises UserError if this host
    cannot listen at its address."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(files.remove_token, place)
        report = Report(host=place.host, notes=place.notes)
        if place.num_hosts == 1:
            _examine_alone(place, report)
            report.findings += examine(place.host, "load", _CHECK_S, partial(load, place))
            reports = {0: report}
            findings, num_hosts, prints = _with_config(place, reports), 1, True
        else:
            if not hosts:
                place.address = _own_address(place, env)
            meeting = stack.enter_context(Meeting(hosts[0][hosts[1]] if hosts else (place.address, 0), report))
            _examine_alone(place, report)
            if hosts:
                meeting.invite(*hosts)
            else:
                until = max(began + wait_s, time.monotonic() + 0.5 * wait_s)  # its own checks may have taken longer
                find = partial(_find_hosts, place, env, meeting, until)
                report.findings += examine(place.host, "rendezvous", 1.5 * wait_s, find)
            reports, findings = _examine_together(place, meeting, began + wait_s)
            num_hosts = len(meeting.addresses)
            # A launcher shows the output of all hosts in one place.
            first = meeting.heard.get(0)
            prints = bool(hosts) or meeting.node == 0 or first is None or meeting.node not in first.heard
        if prints:
            _print(findings, num_hosts, time.monotonic() - began, _cluster(reports) if as_json else None)
    return EXIT_FAILED if any(finding.level == "failure" for finding in findings) else EXIT_DONE


def _print(findings: Sequence[Finding], num_hosts: int, seconds: float, cluster: dict[str, float] | None) -> None:
    if cluster is None:
        console = Console(0)
        console.say(table(findings, num_hosts))
        console.say(summary(findings, num_hosts, seconds))
        return
    by_host: dict[str, list[dict[str, str]]] = {}
    for finding in findings:
        row = asdict(finding)
        by_host.setdefault(row.pop("host"), []).append(row)
    is_well = all(finding.level != "failure" for finding in findings)
    print(json.dumps({"ok": is_well, "seconds": round(seconds, 1), "hosts": by_host, "cluster": cluster}))


def _cluster(reports: Mapping[int, Report]) -> dict[str, float]:
    """Returns the hosts as `paceline plan --cluster` takes them, with the slowest link; empty if their numbers of ranks
    differ."""
    num_ranks = {len(report.notes.get("ranks", ())) for report in reports.values()}
    if len(num_ranks) > 1 or num_ranks == {0}:
        return {}
    links = [link for report in reports.values() for link in report.links.values() if link["bytes_per_s"]]
    cluster: dict[str, float] = {"hosts": len(reports), "ranks_per_host": num_ranks.pop()}
    if links:
        cluster["link_gbit"] = 8e-9 * min(link["bytes_per_s"] for link in links) / PAYLOAD_FRAC
        cluster["latency_us"] = max(link["round_trip_us"] for link in links) / 2
    return cluster


def _examine_alone(place: Place, report: Report) -> None:
    checks = {**ALONE, "driver": devices.driver, "device": devices.products}
    if place.has_config:
        checks["data"] = files.data
    checks["run folder"] = files.run_folder  # after the data, which tells the model's size
    for name, check in checks.items():
        report.findings += examine(place.host, name, _CHECK_S, partial(check, place))


def _with_config(place: Place, reports: dict[int, Report]) -> list[Finding]:
    findings = [finding for report in reports.values() for finding in report.findings]
    if place.has_config:
        rates = [link["bytes_per_s"] for report in reports.values() for link in report.links.values()]
        notes = [report.notes for report in reports.values()]
        config = partial(fits, place.config, notes, min(filter(None, rates), default=0.0))
        findings += examine("job", "config", _CHECK_S, config)
    return findings


# ---- the other hosts ----


def _own_address(place: Place, env: Environment) -> str:
    """Returns the address at which other hosts reach this one: that of ranks or, if it is loopback, the one that
    leads to rank 0."""
    with contextlib.suppress(OSError, IndexError):  # IndexError: no such interface, which a check reports
        if not is_loopback(address := transfer_address(place.interface)):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((env.master_addr, env.master_port))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _find_hosts(place: Place, env: Environment, meeting: Meeting, deadline: float) -> Iterator[Verdict]:
    """Learns the hosts' addresses at the ranks' store, where a run begins, too; nothing else goes through it."""
    store = open_store(env, place.interface, max(1.0, deadline - time.monotonic()))
    board = PrefixStore(f"doctor/{env.attempt}", store)
    post(board, f"{env.rank}", (place.address, meeting.port, env.local_world_size))
    hosts: dict[int, tuple[str, int, int]] = {}  # by the host's first rank
    while sum(num_ranks for _, _, num_ranks in hosts.values()) < env.world_size:
        for rank in range(env.world_size):
            if rank not in hosts and (known := read(board, f"{rank}")):
                hosts[rank] = known
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    firsts = sorted(hosts)
    meeting.invite([(hosts[rank][0], hosts[rank][1]) for rank in firsts], firsts.index(env.rank))
    if (present := sum(num_ranks for _, _, num_ranks in hosts.values())) < env.world_size:
        yield failure(
            f"hosts with {present} of {env.world_size} ranks came to {env.master_addr}:{env.master_port}",
            "start the same command on the other hosts, each with LOCAL_RANK and LOCAL_WORLD_SIZE",
        )


def _examine_together(place: Place, meeting: Meeting, deadline: float) -> tuple[dict[int, Report], list[Finding]]:
    """Measures clocks and links with the hosts that answer, and returns the reports and the findings of all."""
    notes, report = place.notes, meeting.report
    ranks_at = notes.get("listens", place.address)
    listener = Listener(ranks_at if is_loopback(ranks_at) == is_loopback(place.address) else place.address)
    notes["listener"] = [listener.address, listener.port]
    meeting.reach(1, max(1.0, deadline - time.monotonic()))
    report.findings += examine(place.host, "load", _CHECK_S, partial(load, place))  # all hosts rest
    meeting.reach(2)
    notes["clocks"] = {str(node): meeting.clock_offset_s(node) for node in meeting.heard}
    tokens = {node: other.notes.get("token") for node, other in meeting.heard.items()}
    notes["tokens_seen"] = [node for node, token in tokens.items() if token and Path(token).exists()]
    num_hosts = len(meeting.addresses)
    num_rounds = min(num_hosts - 1, _MOST_ROUNDS)
    for distance in range(1, num_rounds + 1):
        meeting.reach(2 + distance)
        _measure(place, meeting, [(meeting.node + distance) % num_hosts], is_quick=False)
    _measure(place, meeting, [n for n in meeting.heard if str(n) not in report.links], is_quick=True)
    meeting.reach(3 + num_rounds)
    listener.close()
    reports = dict(sorted({**meeting.heard, meeting.node: report}.items()))
    shown = host_names(reports, meeting.addresses)
    for node, each in reports.items():
        each.findings = [replace(finding, host=shown[node]) for finding in each.findings]
    return reports, _with_config(place, reports) + compare(reports, meeting.addresses, meeting.problems)


def _measure(place: Place, meeting: Meeting, nodes: Sequence[int], is_quick: bool) -> None:
    def to(node: int) -> None:
        host, port = meeting.heard[node].notes["listener"]
        meeting.report.links[str(node)] = asdict(measure(host, port, place.address, is_quick=is_quick))

    with ThreadPoolExecutor(_QUICK) as pool:
        list(pool.map(to, filter(meeting.heard.__contains__, nodes)))


# ---- the table ----

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
            cell = Text(printable(seen), "bold" if level == "failure" else "")
            if fix:
                cell.append(f"\nfix: {printable(fix)}", style)
            made.add_row(Text(check), Text(printable(who)), Text(level, style), cell)
    return made


def summary(findings: Sequence[Finding], num_hosts: int, seconds: float) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in _ORDER}
    hosts = units.plural(num_hosts, "host")
    return f"{hosts} in {seconds:.1f} s: {counts['ok']} ok, {counts['warning']} warnings, {counts['failure']} failures"
