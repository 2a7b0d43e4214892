"""Findings that need the reports of several hosts: differences between hosts, and the links.

Functions of the reports alone, so hosts that heard the same ones judge alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from paceline.base import units
from paceline.tools.doctor.finding import Finding, Verdict, examine, failure, ok, warning
from paceline.tools.doctor.link import Link
from paceline.tools.doctor.meeting import STILL_BUSY, Address, Report
from paceline.world.torchrun import MOST_CLOCK_OFFSET_S

_NOTED_CLOCK_OFFSET_S = 1.0
_MOST_ROUND_TRIP_US = 10_000.0
_LEAST_OF_BEST = 0.5  # of the fastest link, or of the fastest processor of a kind
_LIMIT_S = 5.0
_FIREWALL = "let it in there: ufw allow from {}; and see: ip route get {}"
Reports = Mapping[int, Report]  # by the host's place in the list


def compare(reports: Reports, addresses: Sequence[Address], problems: Mapping[int, str]) -> list[Finding]:
    """Returns the findings about links and differences. problems: why this host did not hear another, by its place."""
    names = host_names(reports, addresses)
    compared = []
    for node, name in enumerate(names):
        if node not in reports:
            compared += examine(name, "answers", _LIMIT_S, partial(_silence, addresses[node], problems.get(node, "")))
            continue
        for other in range(len(names)):
            if other != node and other in reports:
                verdicts = partial(_link, node, other, reports, addresses)
                compared += examine(name, f"to {names[other]}", _LIMIT_S, verdicts)
        for check, judge in _DIFFERENCES.items():
            compared += examine(name, check, _LIMIT_S, partial(judge, node, reports))
    return compared


def host_names(reports: Reports, addresses: Sequence[Address]) -> list[str]:
    """Returns a name for each host: its own, or its address if that is not known, or not the only one of that name."""
    names = [reports[node].host if node in reports else "" for node in range(len(addresses))]
    shown = [f"{address[0]}:{address[1]}" for address in addresses]
    return [name if name and names.count(name) == 1 else text for name, text in zip(names, shown, strict=True)]


def _silence(address: Address, problem: str) -> Iterator[Verdict]:
    where = f"{address[0]}:{address[1]}"
    if "refused" in problem:
        yield failure(f"nothing listens at {where}", "start the same command there")
    elif problem == STILL_BUSY:
        yield failure(f"{where} answers, but {problem}", "--wait-s 60")
    else:
        yield failure(
            f"{where}: {problem or 'no answer'}", f"ping {address[0]}; ip route get {address[0]}; its firewall"
        )


def _link(node: int, other: int, reports: Reports, addresses: Sequence[Address]) -> Iterator[Verdict]:
    """The way from one host to another, as the first of them measured it."""
    report, target = reports[node], addresses[other][0]
    if other not in report.heard:
        problem = report.problems.get(str(other), "no answer")
        yield failure(f"{target}:{addresses[other][1]}: {problem}", _FIREWALL.format(addresses[node][0], target))
        return
    if str(other) not in report.links:
        yield failure("the link was not measured: a host left early", "start the doctor again")
        return
    link = Link(**report.links[str(other)])
    if link.problem:
        fits = f"; ip link set dev {link.interface} mtu {link.mtu}" if 0 < link.mtu < link.interface_mtu else ""
        where, fix = reports[other].notes["listener"], _FIREWALL.format(addresses[node][0], target)
        yield failure(f"at {where[0]}:{where[1]}, a port as ranks open: {link.problem}", fix + fits)
        return
    rates = [each["bytes_per_s"] for one in reports.values() for each in one.links.values()]
    seen = f"round trip {link.round_trip_us:.0f} µs"
    if link.bytes_per_s:
        seen += f", {8 * link.bytes_per_s / 1e9:.3g} Gbit/s with both ways in use"
    if 0 < link.mtu < link.interface_mtu:
        fix = f"ip link set dev {link.interface} mtu {link.mtu}"
        yield warning(f"{seen}; packets of {link.interface_mtu} bytes are lost, {link.mtu} pass", fix)
    elif 0 < link.bytes_per_s < _LEAST_OF_BEST * max(rates):
        yield warning(
            f"{seen}; others carry {8 * max(rates) / 1e9:.3g}", f"ethtool {link.interface}; its cable, a switch"
        )
    elif link.round_trip_us > _MOST_ROUND_TRIP_US:
        yield warning(f"{seen}: far, or wireless", "use a cable; --parallel.interface names its interface")
    else:
        yield ok(seen + (f", MTU {link.mtu}" if link.mtu else ""))


# ---- differences from the first host ----


def _first(reports: Reports) -> Report:
    return reports[min(reports)]


def _clock(node: int, reports: Reports) -> Iterator[Verdict]:
    first = _first(reports)
    offset = first.notes.get("clocks", {}).get(str(node))
    if offset is None:
        return
    seen = f"{abs(offset):.2f} s {'ahead of' if offset > 0 else 'behind'} {first.host}"
    fix = "timedatectl set-ntp true, or: chronyc makestep"
    if abs(offset) > MOST_CLOCK_OFFSET_S:
        yield failure(f"{seen}: torchrun may take living hosts for dead", fix)
    else:
        yield warning(seen, fix) if abs(offset) > _NOTED_CLOCK_OFFSET_S else ok("clocks agree within a second")


def _versions(node: int, reports: Reports) -> Iterator[Verdict]:
    versions, first = reports[node].notes["versions"], _first(reports).notes["versions"]
    for name in versions.keys() | first.keys():
        here, there = versions.get(name, "none"), first.get(name, "none")
        if here == there:
            continue
        seen = f"{name} {here}, and {there} on {_first(reports).host}"
        if name in ("torch", "paceline", "NCCL"):
            package = "torch" if name == "NCCL" else name  # which brings NCCL
            fix = "" if there == "none" else f"pip install {package}=={first[package]}"
            yield failure(f"{seen}: a run refuses that", fix)
        else:
            yield warning(seen, "" if there == "none" else f"install {name} {there}")


def _variables(node: int, reports: Reports) -> Iterator[Verdict]:
    variables, first = reports[node].notes["variables"], _first(reports).notes["variables"]
    for name in sorted(variables.keys() | first.keys()):
        here, there = variables.get(name), first.get(name)
        if here != there and not name.endswith(("_IFNAME", "VISIBLE_DEVICES")):  # these may differ
            fix = f"unset {name}" if there is None else f"export {name}={there}"
            yield warning(f"{name} is {here or 'not set'}, and {there or 'not set'} on {_first(reports).host}", fix)


def _data(node: int, reports: Reports) -> Iterator[Verdict]:
    here, first = reports[node].notes.get("data"), _first(reports).notes.get("data")
    if here is not None and first is not None and here != first:
        yield failure(
            f"another data set than on {_first(reports).host}", f"copy that of {_first(reports).host}: rsync -a"
        )


def _speed(node: int, reports: Reports) -> Iterator[Verdict]:
    for device, speed in reports[node].notes.get("flops", {}).items():
        alike = [
            each.notes.get("flops", {}).get(device, 0.0)
            for each in reports.values()
            if (each.notes.get("ranks") or [{}])[0].get("processor") == reports[node].notes["ranks"][0]["processor"]
        ]
        if speed and speed < _LEAST_OF_BEST * max(alike):
            yield warning(
                f"{device}: {units.count(speed)}FLOP/s, {units.count(max(alike))} on another host with this processor",
                "look for load, heat and power limits there, or use --parallel.shares auto",
            )


def _folder(node: int, reports: Reports) -> Iterator[Verdict]:
    """Whether hosts share the run folder: each looked for the files of all others."""
    seen_by = [set(report.notes.get("tokens_seen", [])) for report in reports.values()]
    others = len(reports) - 1
    if others == 0 or node != min(reports):
        return
    shared = sum(map(len, seen_by))
    if shared == others * (others + 1):
        yield ok("all hosts share the run folder")
    elif shared == 0:
        yield ok("each host has a run folder of its own: that of rank 0's host will have the checkpoints")
    else:
        yield warning("some hosts share the run folder, and others do not", "mount it on all hosts, or on none")


_DIFFERENCES: dict[str, Callable[[int, Reports], Iterator[Verdict]]] = {
    "clock": _clock,
    "same versions": _versions,
    "same variables": _variables,
    "same data": _data,
    "same speed": _speed,
    "shared folder": _folder,
}
