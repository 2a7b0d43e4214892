"""What a run's records say in words and a few numbers. Plain text: the page escapes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.base import units
from paceline.record.folder import COMPLETE
from paceline.report.curves import lower_median, median
from paceline.report.read import Floats, Records

# Parts of a step in the order of a step: name, column of rank 0, column by rank.
PARTS = (
    ("data", "data_ms", "rank_data_ms"),
    ("forward", "forward_ms", "rank_forward_ms"),
    ("backward", "backward_ms", "rank_backward_ms"),
    ("exposed communication", "exposed_comm_ms", "rank_exposed_comm_ms"),
    ("optimizer", "optim_ms", "rank_optim_ms"),
)
OWN_WORK = ("rank_data_ms", "rank_forward_ms", "rank_backward_ms", "rank_optim_ms")
_BEGINS = ("start", "resume")
_FLOAT32_BYTES = 4
_MOSTLY = 0.5  # of the steps: a rank is slow throughout
_FELT = 0.05  # slower than the median rank by so much: less is the noise of a machine


@dataclass(frozen=True)
class Fact:
    """One large figure: what it is, its value, what it is counted in, what else is to be said of it."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Slow:
    """A stretch of steps in which a rank was named as slow."""

    rank: int
    host: str
    phase: str
    ms: float
    median_ms: float
    since_step: float
    until_step: float  # where it was found as fast as the others again, or the records end
    cost_s: float  # NaN: it was not said

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f" (host {self.host})" if self.host else "")
        text = f"{where} was slow in steps {self.since_step:,.0f} to {self.until_step:,.0f}"
        if self.phase and math.isfinite(self.ms) and math.isfinite(self.median_ms):
            text += f": {self.phase} took it {self.ms:,.3g} ms, the median rank {self.median_ms:,.3g} ms"
        return text + (f"; it cost {units.duration(self.cost_s)}" if math.isfinite(self.cost_s) else "")


@dataclass(frozen=True)
class Traffic:
    """Communication of a step of the last world, as medians; of rank 0."""

    world_size: int
    num_bytes: float  # that a rank sends in a step
    comm_ms: float  # in which at least one collective was under way
    exposed_ms: float  # the part of it that no compute hid
    step_ms: float
    computed_bytes: float  # what a ring all-reduce of the gradients sends; NaN where that is not known

    @property
    def bytes_per_s(self) -> float:
        """What one rank sent in the time in which collectives were under way."""
        return 1e3 * self.num_bytes / self.comm_ms if self.comm_ms > 0 else math.nan


class Summary:
    """What is computed from one run's records."""

    def __init__(self, records: Records, num_parameters: int | None = None):
        """num_parameters: of the run's model, where its config says it."""
        self.records = records
        self.training_s = records.training_s()
        self.lives = [event for event in records.events if event["event"] in _BEGINS]
        self.hosts = _hosts(self.lives)
        self.slow = _slow_stretches(records)
        self.work_ms = _own_work(records)
        self.steady = _steady(records, self.lives)
        self.traffic = self._traffic(num_parameters)

    # ---- how it went ----

    @property
    def status(self) -> tuple[str, str]:
        """(good, open or bad; what the events say of how the run stands)."""
        told = [event for event in self.records.events if event["event"] in (*_BEGINS, "end", "failed", "hang")]
        last = told[-1] if told else {"event": ""}
        if last["event"] == "end":
            reason = text(last.get("reason"))
            return ("good", "finished") if reason == COMPLETE else ("open", f"stopped: {reason}")
        if last["event"] in ("failed", "hang"):
            return "bad", "failed"
        return "open", "no end is recorded: still running, or cut short"

    @property
    def restarts(self) -> tuple[int, int]:
        """(how often it began again or went on, steps that were made twice)."""
        again = self.lives[1:]
        reached = np.nan_to_num([number(life, "reached") for life in again])
        begun = np.nan_to_num([number(life, "step") for life in again])  # a `start` begins at 0 and says no step
        return len(again), int(np.maximum(reached - begun, 0).sum())

    @property
    def straggler_cost_s(self) -> float:
        """Seconds by which steps were longer since ranks were named; NaN where no record says."""
        costs, life = [], [math.nan, math.nan]  # of a life: told at its end, told stretch by stretch
        for event in [*self.records.events, {"event": "start"}]:
            if event["event"] in _BEGINS:
                costs.append(life[0] if math.isfinite(life[0]) else life[1])
                life = [math.nan, math.nan]
            elif event["event"] == "end":
                life[0] = number(event, "straggler_cost_s")
            elif event["event"] == "straggler over":
                life[1] = np.nansum([life[1], number(event, "cost_s")])
        known = [cost for cost in costs if math.isfinite(cost)]
        return sum(known) if known else math.nan

    @property
    def is_uneven(self) -> bool:
        """Whether some rank had more sequences of a step to compute than another, by the config and the world sizes.

        Micro-batches are dealt out whole, so all have as many only where those of all ranks make up the batch."""
        batch, micro = (number(self.records.config, f"train.{name}-batch-size") for name in ("global", "device"))
        sizes = np.unique(self.records.column("world_size"))
        return any(batch % (micro * size) > 0 for size in sizes[sizes > 1].tolist() if micro > 0)

    def label(self, rank: int) -> str:
        """The rank, with its host where that is known."""
        return f"{rank} · {self.hosts[rank]}" if rank < len(self.hosts) else f"{rank}"

    def facts(self) -> list[Fact]:
        """Returns the large figures; those that the records do not give are left out."""
        records, steps = self.records, self.records.steps["step"]
        loss, lowest = _last(records.column("loss")), np.nan_to_num(records.column("loss"), nan=math.inf)
        val_loss, val_bpb = _last(records.evaluation("val_loss")), _last(records.evaluation("val_bpb"))
        lowest_at = steps[int(lowest.argmin())] if records.num_steps else math.nan
        tokens, rate = _last(records.column("tokens")), median(records.column("tokens_per_s")[self.steady])
        mfu, cost_s = median(records.column("mfu")[self.steady]), self.straggler_cost_s
        total_s = float(self.training_s[-1]) if records.num_steps else math.nan
        num_restarts, num_twice = self.restarts
        found = [
            (loss, Fact("Loss", f"{loss:.3f}", "nats a token", f"lowest at step {lowest_at:,.0f}")),
            (val_loss, Fact("Validation loss", f"{val_loss:.3f}", "nats a token", _bits_text(val_bpb))),
            (tokens, Fact("Tokens", _count(tokens), "", _steps_text(steps))),
            (total_s, Fact("Training time", _duration(total_s), "without pauses")),
            (rate, Fact("Throughput", _count(rate), "tokens a second, median")),
            (mfu, Fact("MFU", f"{100 * mfu:.1f}%", "of the ranks' peak, median")),
            (1.0 if self.lives else math.nan, Fact("Ranks", self._world_text(), "", self._hosts_text())),
            (
                cost_s,
                Fact("Stragglers cost", _duration(cost_s), "", self._slow_text()),
            ),
            (1.0, Fact("Restarts", f"{num_restarts}", "", f"{num_twice} steps made twice" if num_twice else "")),
        ]
        return [fact for value, fact in found if math.isfinite(value)]

    def _world_text(self) -> str:
        sizes = [int(number(life, "world_size")) for life in self.lives if number(life, "world_size") > 0]
        changes = [size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1]]
        return " → ".join(map(str, changes)) or "?"

    def _hosts_text(self) -> str:
        names = list(dict.fromkeys(self.hosts))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"on {shown}" if names else ""

    def _slow_text(self) -> str:
        ranks = sorted({stretch.rank for stretch in self.slow})
        return f"named: rank {', '.join(map(str, ranks[:6]))}" if ranks else "no rank was named"

    # ---- findings, one sentence each ----

    def loss_text(self) -> str:
        """How the loss went."""
        loss = self.records.column("loss")
        known = loss[np.isfinite(loss)]
        if not len(known):
            return "No step has a finite loss."
        said = f"Loss went from {known[0]:.2f} to {known[-1]:.2f} in {units.count(len(loss))} recorded steps"
        values = self.records.evaluation("val_loss")
        if np.isfinite(values).any():
            best = int(np.nanargmin(values))
            said += (
                f"; validation is best at step {self.records.evaluations['step'][best]:,.0f} with {values[best]:.3f}"
            )
        num_missing = len(loss) - len(known)
        return (
            said + "." + (f" {num_missing} step{'s'[: num_missing != 1]} without a finite loss." if num_missing else "")
        )

    def rate_text(self) -> str:
        """How fast it was, and how evenly."""
        rates = self.records.column("tokens_per_s")[self.steady]
        if not np.isfinite(rates).any():
            return "No step has a throughput."
        low, middle, high = np.nanpercentile(rates, [5, 50, 95])
        slowest = int(np.nanargmin(rates))
        return (
            f"Half of the steps made {_count(middle)} tokens a second or more, nine of ten between {_count(low)} and "
            f"{_count(high)}; the slowest is step {self.records.steps['step'][self.steady][slowest]:,.0f} with "
            f"{_count(rates[slowest])}."
        )

    def parts(self) -> list[tuple[str, float]]:
        """Returns the mean milliseconds of each part of rank 0's step, `other` last; the steps that warm up left out.

        Empty where no row has them. They add up to the mean step."""
        chosen = self.steady
        means = [(name, _mean(self.records.column(column)[chosen])) for name, column, _ in PARTS]
        step_ms = _mean(self.records.column("step_ms")[chosen])
        if not math.isfinite(step_ms) or not all(math.isfinite(ms) for _, ms in means):
            return []
        return [*means, ("other", step_ms - sum(ms for _, ms in means))]

    def parts_text(self) -> str:
        """Where most of a step goes."""
        parts = self.parts()
        if not parts:
            return "The records do not say where a step's time went."
        step_ms = sum(ms for _, ms in parts)
        largest = sorted(parts, key=lambda part: part[1], reverse=True)[:3]
        shares = ", ".join(f"{name} {_share(ms, step_ms)}" for name, ms in largest)
        return f"A step of {step_ms:,.3g} ms on average goes into {shares}."

    def ranks_text(self) -> str:
        """Whether one rank is slow."""
        chosen = self.steady & np.isfinite(self.work_ms).any(axis=1)
        work, num_steps = self.work_ms[chosen], self.records.steps_per_row()[chosen]
        if work.shape[1] < 2 or not len(work):
            return "One rank: nobody to wait for."
        slowest_ms, usual_ms = np.nanmax(work, axis=1), lower_median(work)
        times_slowest = np.bincount(np.nanargmax(work, axis=1), minlength=work.shape[1])
        rank = int(times_slowest.argmax())
        frac = times_slowest[rank] / len(work)
        behind = median((slowest_ms / usual_ms - 1.0)[np.nanargmax(work, axis=1) == rank])
        host = f" (host {self.hosts[rank]})" if rank < len(self.hosts) else ""
        who = f"rank {rank}{host}"
        by = f"and then takes {behind:.0%} longer than the median rank" if math.isfinite(behind) else "by no measure"
        waited = _duration(float(np.nansum((slowest_ms - usual_ms) * num_steps)) / 1e3) or "an unknown time"
        cost = f"Were each step's slowest rank as fast as its median one, training would take {waited} less."
        if self.is_uneven:
            cost += " Some ranks compute more sequences of a step than others, which is a part of that."
        if frac >= _MOSTLY and behind >= _FELT:
            return f"{who[:1].upper()}{who[1:]} was the slowest in {frac:.0%} of the steps, {by}. {cost}"
        return f"No rank is slow throughout: {who} is the slowest most often, in {frac:.0%} of the steps, {by}. {cost}"

    # ---- communication ----

    def _traffic(self, num_parameters: int | None) -> Traffic | None:
        records = self.records
        sizes = records.column("world_size")
        size = _last(sizes)
        chosen = self.steady & (sizes == size)
        num_bytes, comm_ms = (median(records.column(name)[chosen]) for name in ("comm_bytes", "comm_ms"))
        if not size > 1 or not math.isfinite(num_bytes) or not math.isfinite(comm_ms):
            return None
        exposed_ms, step_ms = (median(records.column(name)[chosen]) for name in ("exposed_comm_ms", "step_ms"))
        computed = math.nan
        # fsdp gathers the weights in every micro-step; how many of them there were the records do not say.
        if num_parameters and self.records.config.get("parallel.strategy") != "fsdp":
            computed = ring_bytes(num_parameters * _FLOAT32_BYTES, int(size))
        return Traffic(int(size), num_bytes, comm_ms, exposed_ms, step_ms, computed)

    def traffic_text(self) -> str:
        """What communication takes, and what of it is felt."""
        traffic = self.traffic
        if traffic is None:
            return "One rank sends nothing."
        said = (
            f"A rank sends {units.size(traffic.num_bytes)} a step in {traffic.comm_ms:,.3g} ms: "
            f"{rate_text(traffic.bytes_per_s)}. {_share(traffic.exposed_ms, traffic.comm_ms)} of that time is exposed, "
            f"which is {_share(traffic.exposed_ms, traffic.step_ms)} of the step."
        )
        if math.isfinite(traffic.computed_bytes):
            said += f" The model's gradients alone come to {units.size(traffic.computed_bytes)} by the ring's formula."
        return said


def ring_bytes(num_bytes: float, world_size: int) -> float:
    """Returns what each rank sends in a ring all-reduce: 2 (n-1)/n of the data (nccl-tests, PERFORMANCE.md)."""
    return 2 * num_bytes * (world_size - 1) / world_size


def rate_text(bytes_per_s: float) -> str:
    """Bits a second, as links are sold: 125e6 -> '1 Gbit/s'."""
    if not math.isfinite(bytes_per_s):
        return "no known rate"
    shown = units.count(float(f"{8 * bytes_per_s:.3g}"))
    return f"{shown[:-1]} {shown[-1]}bit/s" if shown[-1].isalpha() else f"{shown} bit/s"


def number(event: dict[str, Any], name: str) -> float:
    """Returns a number of an event; NaN where it has none."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def text(value: Any) -> str:
    """Returns a short text for any value of a record."""
    if isinstance(value, float):
        return f"{value:,.6g}"
    shown = value if isinstance(value, str) else "" if value is None else str(value)
    return shown if len(shown) <= 400 else shown[:399] + "…"


def _hosts(lives: Sequence[dict[str, Any]]) -> list[str]:
    """Of the last life that says them: ranks may move when a run goes on."""
    for life in reversed(lives):
        hosts = life.get("hosts")
        if isinstance(hosts, list) and hosts:
            return [text(host) for host in hosts]
    return []


def _slow_stretches(records: Records) -> list[Slow]:
    found: list[Slow] = []
    named: dict[int, dict[str, Any]] = {}
    last_step = float(records.steps["step"][-1]) if records.num_steps else math.nan

    def close(rank: int, until: float, cost_s: float) -> None:
        event = named.pop(rank)
        since, step = number(event, "since_step"), number(event, "step")
        since = since if math.isfinite(since) else step
        until = until if math.isfinite(until) else max(since, last_step)
        facts = text(event.get("host")), text(event.get("phase")), number(event, "ms"), number(event, "median_ms")
        if math.isfinite(since):
            found.append(Slow(rank, *facts, since, max(since, until), cost_s))

    for event in records.events:
        rank = number(event, "rank")
        if event["event"] == "straggler" and rank >= 0:
            named.setdefault(int(rank), event)
        elif event["event"] == "straggler over" and rank in named:
            close(int(rank), number(event, "step"), number(event, "cost_s"))
        elif event["event"] in (*_BEGINS, "end", "failed", "hang"):
            until = number(event, "reached" if event["event"] in _BEGINS else "step")
            for known in list(named):
                close(known, until, math.nan)
    for known in list(named):
        close(known, last_step, math.nan)
    return found


def _own_work(records: Records) -> Floats:
    """(rows, ranks): what each rank did without waiting for others. Older rows have no parts by rank, but the sum of
    data, forward and backward."""
    whole = np.sum([records.by_rank(name) for name in OWN_WORK], axis=0)
    return np.where(np.isfinite(whole), whole, records.by_rank("rank_compute_ms"))


def _steady(records: Records, lives: Sequence[dict[str, Any]]) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """(rows,): without the first step of each life, which compiles and allocates. Of a single row, that row."""
    steps = records.steps["step"]
    begun = [number(life, "step") if life["event"] == "resume" else 0.0 for life in lives] or [0.0]
    first = np.isin(steps, np.array(begun) + 1.0)
    return ~first if not first.all() else np.ones(len(steps), dtype=np.bool_)


def _last(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 and math.isfinite(part) else "an unknown share"


def _count(value: float) -> str:
    return units.count(round(float(value))) if math.isfinite(value) else ""


def _duration(seconds: float) -> str:
    return units.duration(seconds) if math.isfinite(seconds) else ""


def _bits_text(bpb: float) -> str:
    return f"{bpb:.3f} bits a byte" if math.isfinite(bpb) else ""


def _steps_text(steps: Floats) -> str:
    return f"in {steps[-1]:,.0f} steps" if len(steps) else ""
