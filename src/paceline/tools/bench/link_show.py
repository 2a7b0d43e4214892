"""What `paceline bench link` prints: the answer, then tables."""

from collections.abc import Sequence

from rich.table import Table

from paceline.base import units
from paceline.record.console import Console, facts, table
from paceline.tools.bench.link import Host, LinkReport, Pair
from paceline.tools.plan.schedule import Prediction

_GOAL_FRAC = 0.97  # of the speed that a link without cost would give


_SHARED_MEMORY = (
    "no prediction of a training step: `train` lets these ranks add gradients in shared memory, and what is timed here "
    "is sending, as they do with --parallel.no-shared-memory. `paceline bench scaling` measures training here"
)


def show(report: LinkReport, console: Console) -> None:
    """Prints the answer, then what it follows from."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    world = [("world", f"{_where(report)} ({versions})")]
    console.say(facts(world + [(f"host {host.name}", _host(host, report.backend)) for host in report.hosts]))
    slowest = report.slowest
    console.say(f"\nthe slowest pair: {_between(slowest)}, {_mb(slowest.bytes_per_s)} MB/s")
    if report.shares_memory:
        console.say(_SHARED_MEMORY + "\n", style="yellow")
    else:
        console.say(_predicted(report))
        console.say(choice_text(report.paths) + "\n", style="bold")
        console.say(_paths(report))
    console.say(_model(report))
    console.say(_pairs(report))
    console.say(_collectives(report))
    if left_out := [num_bytes for collective in report.collectives for num_bytes in collective.left_out_bytes]:
        console.say(f"left out, for lack of time (--time-budget): {units.size(min(left_out))} and more\n")
    console.say(_fits(report))


def _predicted(report: LinkReport) -> str:
    model = report.model
    how = "by the fit; not measured, for lack of time (--time-budget)" if model.alone_s is None else "measured alone"
    return f"prediction: comm_ms of a training step, strategy ddp: {_ms(model.predicted_s)} ms ({how})"


def _where(report: LinkReport) -> str:
    return f"{report.world_size} ranks on {units.plural(len(report.hosts), 'host')}, backend {report.backend}"


def _host(host: Host, backend: str) -> str:
    ranks = f"rank{'s'[: len(host.ranks) > 1]} {', '.join(map(str, host.ranks))}"
    if not host.interface:
        return f"{ranks}; {backend} chooses the interface, and does not say which"
    return f"{ranks}, interface {host.interface}"


def _between(pair: Pair) -> str:
    return "{} and {}".format(*pair.hosts) if len(set(pair.hosts)) > 1 else "ranks {} and {}".format(*pair.ranks)


def _pairs(report: LinkReport) -> Table:
    rows = [
        [_between(pair), f"{pair.latency_s * 1e6:.0f}", _mb(pair.bytes_per_s), f"{pair.bytes_per_s * 8 / 1e9:.3f}"]
        for pair in report.pairs
    ]
    columns = ["between", "latency us", "each way, both busy, MB/s", "Gbit/s"]
    return table(f"Between two ranks, through {report.backend}", columns, rows)


def _collectives(report: LinkReport) -> Table:
    """A row for each size; a dash if there was no time for it."""
    rows = []
    for num_bytes in sorted({time.num_bytes for collective in report.collectives for time in collective.times}):
        row = [units.size(num_bytes)]
        for collective in report.collectives:
            cell = next((time for time in collective.times if time.num_bytes == num_bytes), None)
            row += [_ms(cell.seconds), _mb(cell.bus_bytes_per_s)] if cell else ["-", "-"]
        rows.append(row)
    columns = ["size"] + [text for collective in report.collectives for text in (f"{collective.name}\nms", "bus\nMB/s")]
    return table("Collectives (size and bus bandwidth as in nccl-tests)", columns, rows)


def _fits(report: LinkReport) -> Table:
    columns = ["time = alpha + size / beta", "alpha us", "beta MB/s", "off by, mean"]
    fits = [(collective.name, collective.fit) for collective in report.collectives]
    rows = [
        [name, f"{line.alpha_s * 1e6:.0f}", _mb(line.beta_bytes_per_s), f"{line.residual_frac:.1%}"]
        for name, line in fits
    ]
    return table("Latency and bandwidth of the collectives", columns, rows)


def _model(report: LinkReport) -> Table:
    model, link = report.model, report.slowest.bytes_per_s
    rows = [
        [f"computed: {units.size(model.wire_bytes)} a rank over the link's {_mb(link)} MB/s", _ms(model.computed_s)],
        ["by the fit, one bucket after the other", _ms(model.fitted_s)],
        ["measured alone, all buckets under way", "not measured" if model.alone_s is None else _ms(model.alone_s)],
    ]
    size = f"{units.size(model.gradient_bytes)}, {units.plural(len(model.bucket_bytes), 'bucket')}"
    return table(
        f"All-reduce of {units.count(model.parameters)} parameters ({model.shape}): {size}", ["once a step", "ms"], rows
    )


def _paths(report: LinkReport) -> Table:
    rows = [
        [
            measured.path.flags,
            "nothing: exact" if measured.path.kind == "exact" else measured.path.kind,
            units.size(measured.wire_bytes),
            _ms(measured.step_s),
            f"{measured.efficiency_frac:.1%}",
        ]
        for measured in report.paths
    ]
    job = report.job
    title = f"A step predicted: {_ms(job.compute_s)} ms of forward and backward, micro-batches: {job.num_micro_batches}"
    columns = ["path", "changes", "a host sends", "step, ms", "of the ideal"]
    return table(title, columns, rows)


def choice_text(predictions: Sequence[Prediction]) -> str:
    if enough := next((each for each in predictions if each.efficiency_frac >= _GOAL_FRAC), None):
        changes = "exact" if enough.path.kind == "exact" else f"it changes: {enough.path.kind}"
        return f"the first that reaches {_GOAL_FRAC:.0%}: {enough.path.flags} ({changes})"
    best = max(predictions, key=lambda each: each.efficiency_frac)
    return (
        f"none reaches {_GOAL_FRAC:.0%}; the best: {best.path.flags} ({best.path.kind}, {best.efficiency_frac:.1%}). A "
        "larger --train.global-batch-size hides more"
    )


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def _mb(bytes_per_s: float) -> str:
    mb = bytes_per_s / 1e6
    return f"{mb:.1f}" if mb < 1000 else f"{mb:.0f}"
