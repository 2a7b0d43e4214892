"""Facts of one run, in numbers and sentences. Plain text: the page escapes it."""

import math
from dataclasses import dataclass

import numpy as np

from paceline.base import units
from paceline.record.events import hosts, starts
from paceline.record.folder import RunFolder
from paceline.record.read import number
from paceline.record.state import read_state
from paceline.record.stragglers import none_named
from paceline.tools.report import events
from paceline.tools.report.read import Floats, Records, lower_median, median
from paceline.tools.view.findings import repairs, slow_stretches, slow_text, state_text

# The parts of a step in order: name, column of rank 0, column by rank.
PARTS = (
    ("data", "data_ms", "rank_data_ms"),
    ("forward", "forward_ms", "rank_forward_ms"),
    ("backward", "backward_ms", "rank_backward_ms"),
    ("exposed communication", "exposed_comm_ms", "rank_exposed_comm_ms"),
    ("optimizer", "optim_ms", "rank_optim_ms"),
)
_OWN_WORK = ("rank_data_ms", "rank_forward_ms", "rank_backward_ms", "rank_optim_ms")
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Fact:
    """A large figure at the top of the page."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Traffic:
    """Medians of rank 0's communication in a step at the last world size."""

    num_bytes: float  # sent by the rank
    comm_ms: float  # with a collective under way
    exposed_ms: float  # the part of comm_ms that no compute hides
    step_ms: float
    computed_bytes: float  # of a ring all-reduce of the gradients; NaN if unknown

    @property
    def rate(self) -> str:
        """Bytes over the time of collectives."""
        return bit_rate(1e3 * self.num_bytes / self.comm_ms if self.comm_ms > 0 else math.nan)


class Summary:
    """All facts computed from one run's records."""

    def __init__(self, records: Records, name: str = "", num_parameters: int = 0):
        """name: of this run on the page. num_parameters: of its model, 0 if unknown."""
        self.records, self.steps, self.ranks, self.events = records, records.steps, records.ranks, records.events
        self.name = name or records.path.name
        self.training_s = records.training_s()
        self.state = read_state(RunFolder(records.path))
        self.status = state_text(self.state, self.events)
        self.restarts = events.restarts(self.events)
        self.hosts = hosts(self.events)
        self.slow = slow_stretches(self.events, _last(self.steps["step"]), self.state.is_running)
        self.shares_memory = any(start.get("shares_memory") is True for start in starts(self.events)[-1:])
        self.straggler_cost_s = events.straggler_cost_s(self.events)
        self.work_ms = _own_work(records)
        self.steady = self._steady()
        self.traffic = self._traffic(num_parameters)

    # ---- the head of the page ----

    def headline(self) -> str:
        """A warning to read before the figures; empty if there is none."""
        if self.records.config.get("parallel.strategy") == "local":
            return (
                "Trained with local steps (parallel.strategy local), which is another algorithm than data-parallel "
                "training: the loss depends on the number of ranks."
            )
        repaired_at = repairs(self.events)
        if not repaired_at:
            return ""
        steps = [f"{step:,.0f}" for step in repaired_at if math.isfinite(step)]
        times = "once" if len(repaired_at) == 1 else f"{len(repaired_at)} times"
        at = f" (step{_s(len(steps))} {units.listed(steps, 6)})" if steps else ""
        return (
            f"Replicas differed and were repaired {times}{at}: a rank had other values than most ranks, and was given "
            "theirs. Find out why: different processors, or faulty memory."
        )

    def facts(self) -> list[Fact]:
        steps, loss = self.steps["step"], self.steps["loss"]
        lowest_at = steps[int(np.nan_to_num(loss, nan=math.inf).argmin())] if len(steps) else math.nan
        val_loss, val_bpb = (_last(self.records.evaluations[name]) for name in ("val_loss", "val_bpb"))
        bits = f"{val_bpb:.3f} bits a byte" if math.isfinite(val_bpb) else ""
        tokens, rate = _last(self.steps["tokens"]), self.state.rate
        tokens_per_s, mfu = (rate.tokens_per_s, rate.mfu) if rate else (math.nan, math.nan)
        over = f"last {units.plural(rate.num_rows, 'row')}" if rate else ""
        time_s, cost_s, (num_restarts, num_repeated) = _last(self.training_s), self.straggler_cost_s, self.restarts
        slow = sorted({stretch.rank for stretch in self.slow})
        named = f"named: rank {', '.join(map(str, slow[:6]))}" if slow else "no rank was named"
        found = [
            (_last(loss), Fact("Loss", f"{_last(loss):.3f}", "nats a token", f"lowest at step {lowest_at:,.0f}")),
            (val_loss, Fact("Validation loss", f"{val_loss:.3f}", "nats a token", bits)),
            (tokens, Fact("Tokens", count(tokens), "", f"in {_last(steps):,.0f} steps")),
            (time_s, Fact("Training time", duration(time_s), "without pauses")),
            (tokens_per_s, Fact("Throughput", count(tokens_per_s), "tokens a second", over)),
            (mfu, Fact("MFU", f"{100 * mfu:.1f}%", "of the ranks' peak", over)),
            (1.0 if starts(self.events) else math.nan, Fact("Ranks", self._world_sizes(), "", self._host_names())),
            (cost_s or math.nan, Fact("Stragglers cost", duration(cost_s), "", named)),
            (
                num_restarts or math.nan,
                Fact("Restarts", f"{num_restarts}", "", f"{num_repeated} steps repeated" if num_repeated else ""),
            ),
        ]
        return [fact for value, fact in found if math.isfinite(value)]

    def _world_sizes(self) -> str:
        sizes = [number(start.get("world_size")) for start in starts(self.events)]
        sizes = [size for size in sizes if size > 0]
        changes = [size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1]]
        return " → ".join(f"{size:.0f}" for size in changes) or "?"

    def _host_names(self) -> str:
        names = list(dict.fromkeys(self.hosts))
        return f"on {units.listed(names, 4)}" if names else ""

    # ---- findings ----

    def loss_text(self) -> str:
        loss, values = self.steps["loss"], self.records.evaluations["val_loss"]
        known = _known(loss)
        if not len(known):
            return "No step has a finite loss."
        said = f"Loss went from {known[0]:.2f} to {known[-1]:.2f} in {units.count(len(loss))} recorded steps"
        if len(_known(values)):
            best = int(np.nanargmin(values))
            at = self.records.evaluations["step"][best]
            said += f"; validation is best at step {at:,.0f} with {values[best]:.3f}"
        num_missing = len(loss) - len(known)
        missing = f" {num_missing} step{_s(num_missing)} without a finite loss." if num_missing else ""
        return f"{said}.{missing}"

    def rate_text(self) -> str:
        rates = self.steps["tokens_per_s"][self.steady]
        if not len(_known(rates)):
            return "No step has a throughput."
        low, middle, high = (count(value) for value in np.nanpercentile(rates, [5, 50, 95]))
        slowest = int(np.nanargmin(rates))
        return (
            f"Half of the steps made {middle} tokens a second or more, nine of ten between {low} and {high}; "
            f"the slowest is step {self.steps['step'][self.steady][slowest]:,.0f} with {count(rates[slowest])}."
        )

    def update_text(self) -> str:
        """Describes learning rate and gradient norm; empty if no row has them."""
        steps, rates, norms = (self.steps[name] for name in ("step", "lr", "grad_norm"))
        said = []
        if len(known := _known(rates)):
            at = steps[int(np.nanargmax(rates))]
            said.append(f"The learning rate peaks at {known.max():.3g} in step {at:,.0f} and ends at {known[-1]:.3g}.")
        if len(known := _known(norms)):
            at, clip = steps[int(np.nanargmax(norms))], number(self.records.config.get("optim.grad-clip"))
            clipped = f"; {(known > clip).mean():.0%} of the steps are clipped to {clip:g}" if clip > 0 else ""
            said.append(
                f"The gradient's norm is {median(known):.3g} in the median and largest in step {at:,.0f} "
                f"with {known.max():.3g}{clipped}."
            )
        return " ".join(said)

    def parts(self) -> list[tuple[str, float]]:
        """Returns the mean milliseconds of each part of rank 0's step, `other` last; their sum is the mean step. Leaves
        out the first step of each attempt. Empty if no row has all parts, or they take no time."""
        step_ms = _mean(self.steps["step_ms"][self.steady])
        means = [(name, _mean(self.steps[column][self.steady])) for name, column, _ in PARTS]
        other_ms = step_ms - sum(ms for _, ms in means)
        return [*means, ("other", other_ms)] if step_ms > 0 and math.isfinite(other_ms) else []

    def parts_text(self) -> str:
        parts = self.parts()
        step_ms = sum(ms for _, ms in parts)
        largest = sorted(parts, key=lambda part: part[1], reverse=True)[:3]
        shares = ", ".join(f"{name} {share(ms, step_ms)}" for name, ms in largest)
        return f"A step of {step_ms:,.3g} ms on average goes into {shares}."

    def ranks_text(self) -> str:
        chosen = self.steady & np.isfinite(self.work_ms).any(axis=1)
        work, num_steps = self.work_ms[chosen], self.records.steps_per_row()[chosen]
        if work.shape[1] < 2 or not len(work):
            return "One rank: nobody to wait for."
        wait_s = float(np.nansum((np.nanmax(work, axis=1) - lower_median(work)) * num_steps)) / 1e3
        cost = (
            "Were each step's slowest rank as fast as its median one, "
            f"training would take {duration(wait_s) or 'an unknown time'} less."
        )
        if self.is_uneven:
            cost += " Some ranks compute more sequences of a step than others, which is a part of that."
        return f"{self._slow_ranks(work)} {cost}"

    def _slow_ranks(self, work_ms: Floats) -> str:
        """Names the ranks that training reported, as `watch` does. work_ms: (rows, ranks)."""
        if not self.slow:
            return none_named(dict(enumerate(map(_mean, work_ms.T))), "In the mean of all steps")
        return slow_text(self.slow)

    def traffic_text(self) -> str:
        traffic = self.traffic
        assert traffic is not None
        size, took = units.size(traffic.num_bytes), f"{traffic.comm_ms:,.3g} ms"
        what = f"A rank sends {size} a step in {took}: {traffic.rate}."
        if self.shares_memory:
            what = f"Ranks add gradients in shared memory, {size} a step in {took}; nothing is sent."
        said = (
            f"{what} {share(traffic.exposed_ms, traffic.comm_ms)} of that time is exposed, "
            f"which is {share(traffic.exposed_ms, traffic.step_ms)} of the step."
        )
        if math.isfinite(traffic.computed_bytes) and not self.shares_memory:
            said += f" The model's gradients alone come to {units.size(traffic.computed_bytes)} by the ring's formula."
        return said

    # ---- ranks ----

    @property
    def is_uneven(self) -> bool:
        sequences = self.ranks["rank_sequences"]
        return bool((np.isfinite(sequences) & (sequences != sequences[:, :1])).any())

    def label(self, rank: int) -> str:
        return f"{rank} · {self.hosts[rank]}" if rank < len(self.hosts) else f"{rank}"

    def _steady(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """(rows,): False for the first step of each attempt, which compiles; all True if there are no others."""
        attempts = starts(self.events)
        begun = [number(start.get("step")) if start["event"] == "resume" else 0.0 for start in attempts] or [0.0]
        is_first = np.isin(self.steps["step"], np.array(begun) + 1.0)
        return ~is_first | is_first.all()

    def _traffic(self, num_parameters: int) -> Traffic | None:
        size = _last(self.steps["world_size"])
        chosen = self.steady & (self.steps["world_size"] == size)
        names = ("comm_bytes", "comm_ms", "exposed_comm_ms", "step_ms")
        num_bytes, comm_ms, exposed_ms, step_ms = (median(self.steps[name][chosen]) for name in names)
        if not size > 1 or not math.isfinite(num_bytes) or not math.isfinite(comm_ms):
            return None
        computed = math.nan
        # fsdp gathers the weights for every micro-batch, whose number the records lack; local sends no gradients.
        if num_parameters and self.records.config.get("parallel.strategy") not in ("fsdp", "hsdp", "local"):
            computed = 2 * (size - 1) / size * num_parameters * _GRADIENT_BYTES  # nccl-tests, PERFORMANCE.md
        return Traffic(num_bytes, comm_ms, exposed_ms, step_ms, computed)


def _own_work(records: Records) -> Floats:
    """(rows, ranks): milliseconds of a rank's own work. Older rows have only the sum of data, forward and backward."""
    total = np.sum([records.ranks[name] for name in _OWN_WORK], axis=0)
    return np.where(np.isfinite(total), total, records.ranks["rank_compute_ms"])


def bit_rate(bytes_per_s: float) -> str:
    """Bits a second: 125e6 bytes/s -> '1 Gbit/s'."""
    if not math.isfinite(bytes_per_s):
        return "no known rate"
    shown = units.count(float(f"{8 * bytes_per_s:.3g}"))
    return f"{shown[:-1]} {shown[-1]}bit/s" if shown[-1].isalpha() else f"{shown} bit/s"


def share(part: float, total: float) -> str:
    return f"{part / total:.0%}" if total > 0 and math.isfinite(part) else "an unknown share"


def count(value: float) -> str:
    """Returns units.count of an integer; empty for NaN."""
    return units.count(round(float(value))) if math.isfinite(value) else ""


def duration(seconds: float) -> str:
    """Returns units.duration; empty for NaN."""
    return units.duration(seconds) if math.isfinite(seconds) else ""


def _known(values: Floats) -> Floats:
    return np.asarray(values[np.isfinite(values)])


def _last(values: Floats) -> float:
    known = _known(values)
    return float(known[-1]) if len(known) else math.nan


def _mean(values: Floats) -> float:
    known = _known(values)
    return float(known.mean()) if len(known) else math.nan


def _s(number: int) -> str:
    return "" if number == 1 else "s"
