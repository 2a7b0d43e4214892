"""The tables of `paceline bench link`."""

from rich.table import Table

from paceline.base import units
from paceline.bench.link import CollectiveReport, Host, LinkReport
from paceline.bench.link_pairs import Pair
from paceline.record.console import Console, facts, table


def show(report: LinkReport, console: Console) -> None:
    """Prints everything that was measured."""
    console.say(facts(_what(report)))
    console.say()
    console.say(_pairs(report))
    for found in report.collectives:
        console.say(_collective(found))
        if found.left_out_bytes:
            sizes = ", ".join(units.size(num_bytes) for num_bytes in found.left_out_bytes)
            console.say(f"left out, for lack of time (--time-budget): {sizes}\n")
    console.say(_fits(report))
    console.say(_model(report))
    console.say(_in_words(report))


def _what(report: LinkReport) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    ranks = f"{report.world_size} ranks on {len(report.hosts)} host{'s'[: len(report.hosts) > 1]}"
    return [
        ("world", f"{ranks}, backend {report.backend} ({versions})"),
        *[(f"host {host.name}", _host(host, report.backend)) for host in report.hosts],
        ("figures", _unit_text(report)),
    ]


def _host(host: Host, backend: str) -> str:
    ranks = f"rank{'s'[: len(host.ranks) > 1]} {', '.join(map(str, host.ranks))}"
    interface = host.interface
    if not interface.name:
        return f"{ranks}; the interface is {backend}'s choice, and it does not say"
    speed = interface.speed_bits_per_s
    known = f"{units.count(speed)}bit/s" if speed else "speed not known to the kernel"
    return f"{ranks}, interface {interface.name} {interface.address}, MTU {interface.mtu or 'unknown'}, {known}"


def _unit_text(report: LinkReport) -> str:
    text = "payload, 1 MB = 10^6 bytes: what the program sends, without the headers of the network"
    share = report.payload_share
    if share is None:
        return text
    mtu = min(host.interface.mtu or 0 for host in report.hosts)
    return f"{text}. Of an Ethernet link's bits that is {share:.1%} at most ({mtu - 52} bytes of {mtu + 14} in a frame)"


def _pairs(report: LinkReport) -> Table:
    columns = ["between", "latency us", "TCP there MB/s", "back", f"{report.backend} there", "back", "both ways, each"]
    columns.append("link Gbit/s")
    title = "Between two ranks (TCP: the link itself, one connection; the others through the backend)"
    return table(title, columns, [_pair(pair) for pair in report.pairs])


def _pair(pair: Pair) -> list[str]:
    (first, second), hosts = pair.ranks, pair.hosts
    name = f"{hosts[0]} and {hosts[1]}" if hosts[0] != hosts[1] else f"ranks {first} and {second}"
    ways = (pair.tcp_there_bytes_per_s, pair.tcp_back_bytes_per_s, pair.there_bytes_per_s, pair.back_bytes_per_s)
    rates = [_mb(way) for way in (*ways, pair.both_bytes_per_s)]
    return [name, f"{pair.latency_s * 1e6:.0f}", *rates, f"{pair.link_bytes_per_s * 8 / 1e9:.3f}"]


def _collective(found: CollectiveReport) -> Table:
    columns = ["size", "runs", "median ms", "least", "most", "algorithm MB/s", "bus MB/s", "bus Gbit/s", "fit ms"]
    rows = [
        [
            units.size(time.num_bytes),
            f"{time.iterations}",
            _ms(time.seconds),
            _ms(time.least_s),
            _ms(time.most_s),
            _mb(time.algorithm_bytes_per_s),
            _mb(time.bus_bytes_per_s),
            f"{time.bus_bytes_per_s * 8 / 1e9:.3f}",
            _ms(found.fit.seconds(time.num_bytes)),
        ]
        for time in found.times
    ]
    return table(f"{found.name} (size and bandwidths as in nccl-tests)", columns, rows)


def _fits(report: LinkReport) -> Table:
    columns = ["time = alpha + size / beta", "alpha us", "beta MB/s", "off by, mean", "worst", "at"]
    rows = [
        [
            found.name,
            f"{found.fit.alpha_s * 1e6:.0f}",
            _mb(found.fit.beta_bytes_per_s),
            f"{found.fit.residual_frac:.1%}",
            f"{found.fit.worst_frac:+.0%}",
            units.size(found.fit.worst_bytes),
        ]
        for found in report.collectives
    ]
    return table("Latency and bandwidth of the collectives", columns, rows)


def _model(report: LinkReport) -> Table:
    model, link = report.model, report.slowest.link_bytes_per_s
    buckets = len(model.bucket_bytes)
    count = f"{buckets} bucket{'s'[: buckets > 1]}"
    steps = f"{model.num_steps} steps of {model.tokens_per_rank} tokens a rank"
    rows = [
        (f"computed: {units.size(model.wire_bytes)} a rank over the link's {_mb(link)} MB/s", model.computed_s),
        (f"+ {report.backend}'s messages, both ways at once", model.messages_s),
        ("+ the all-reduce's copies and additions, by byte", model.copies_s),
        (f"+ latency, {count}", model.latency_s),
        ("= by the fit, one bucket after the other", model.fitted_s),
        ("+ all under way together, and what the fit misses", model.together_s),
        ("= measured alone", model.alone_s),
        ("+ beside backward: shared processors, ranks that come late", _difference(model.beside_s, model.alone_s)),
        (f"= measured beside backward, {steps}", model.beside_s),
        ("   of which backward does not hide", model.exposed_s),
        ("for comparison: one all-reduce of everything", model.whole_s),
        ("   so what the buckets cost, or save where negative", _difference(model.alone_s, model.whole_s)),
    ]
    title = f"All-reduce of {units.count(model.parameters)} parameters: {units.size(model.gradient_bytes)}, {count}"
    return table(title, ["once a step", "ms"], [[name, "not measured" if s is None else _ms(s)] for name, s in rows])


def _in_words(report: LinkReport) -> str:
    model = report.model
    if model.beside_s is not None:
        how = "measured beside backward"
    elif model.alone_s is not None:
        how = "measured alone; steps with backward do not fit into the time budget"
    else:
        how = "by the fit; not even one fits into the time budget"
    return f"prediction: comm_ms of a training step, strategy ddp: {_ms(model.predicted_s)} ms ({how})"


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if abs(ms) < 10 else f"{ms:.1f}"


def _mb(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "-"
    mb = bytes_per_s / 1e6
    return f"{mb:.1f}" if mb < 1000 else f"{mb:.0f}"
