"""The machines of an earlier run, from its records: seconds of work from the times of the ranks' passes, and the link's
rate as the one with which the simulated step takes as long as the run's did."""

import contextlib
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.jsonl import Row, rows
from paceline.config import Config, load_run
from paceline.model import cost
from paceline.record import folder
from paceline.record.events import hosts, starts
from paceline.record.read import step_of
from paceline.record.rows import MOST_LISTED
from paceline.tools.plan import devices, work
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import ERROR_FRAC, PAYLOAD_FRAC, Device
from paceline.tools.plan.plan import job_of, path_for, plan, rank_facts, shape_of, update_s, waiting_s
from paceline.tools.plan.schedule import predict
from paceline.train.resolve import Settings, resolve
from paceline.train.size import sized

_LEAST_STEPS = 10  # behind a median
_MOST_STEPS = 2000  # the last ones
_LISTS = ("sequences", "forward_ms", "backward_ms", "optim_ms")  # by rank, of each row
_NUMBERS = ("step_ms", "comm_ms", "data_ms", "other_ms", "tokens_per_s")
_ABOVE_0 = ("step_ms", "tokens_per_s", "forward_ms", "backward_ms")  # where a rank computed anything
_MOST_MS = 1e12  # 30 years; also tokens/s
_SLOWEST, _FASTEST = 1e4, 1e13  # bytes a second of a link that is searched for
_HALVINGS = 50
_CPU_COPY_BYTES_PER_S = 2e9  # of digests and snapshots, which the records do not tell: this repository's machines
_INNER_LATENCY_S, _LATENCY_US = 1e-5, 50.0  # assumed: a step's time shows the sum of latency and bytes
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Machines:
    config: Config  # of the run
    cluster: Cluster
    device: Device


def device_of_rank(cluster: Cluster, config: Config) -> Device:
    """Returns the cluster's device. Raises UserError for an unknown name, a machine that was not calibrated, or a run
    that did not measure such a config."""
    if cluster.device == devices.THIS:
        return devices.calibration(_in(cluster, config), cluster.ranks_per_host)
    if cluster.device in devices.device_names() or not Path(cluster.device).is_dir():
        return devices.gpu(cluster.device, compiled=config.train.compile, dtype=config.train.dtype)
    run = read_run(Path(cluster.device))
    for section, name in (("model", "arch"), ("optim", "name"), ("train", "dtype"), ("train", "compile")):
        was, wanted = (getattr(getattr(each, section), name) for each in (run.config, config))
        if wanted not in (was, "auto"):
            raise UserError(
                f"{cluster.device} trained with {section}.{name} {was}, so its records do not tell how fast its "
                f"machines are with {wanted}; leave --{section}.{name} out, or name a run that had it"
            )
    return run.device


def shaped(cluster: Cluster, config: Config) -> Config:
    """Returns the config with the shape that a run of it chooses on this cluster where model.size is auto: it times the
    given one, too. Raises UserError as `device_of_rank` and a start of the run would."""
    if config.model.size == "given":
        return config
    speed = plan(config, cluster, device_of_rank(cluster, config)).flops_per_s
    return sized(config, config.data.expected_vocab, speed, cluster.num_ranks)[0]


def to_measure(clusters: Sequence[Cluster], configs: Sequence[Config]) -> Iterator[tuple[Config, int]]:
    """Yields what plans for these clusters take from measurements of this machine: configs, each with the number of
    ranks at once. The shape that a run chooses is one of them as soon as the given one was measured."""
    for cluster, config in itertools.product(clusters, configs):
        if cluster.device == devices.THIS:
            count = devices.at_once(cluster.ranks_per_host)
            yield _in(cluster, config), count
            if count in devices.stored(_in(cluster, config)):
                with contextlib.suppress(UserError):  # the plan itself says what is refused
                    yield _in(cluster, shaped(cluster, config)), count


def _in(cluster: Cluster, config: Config) -> Config:
    """Returns the config as it is measured for this cluster: ranks of several hosts share no memory."""
    shares = config.parallel.shared_memory and cluster.hosts == 1
    return config.replace("parallel", shared_memory=shares)


@cache
def read_run(path: Path) -> Machines:
    """Returns what the run in this folder shows of its machines. Raises UserError where it shows too little."""
    run = folder.find(path)
    config = load_run(run.config)
    begun = starts([event for event in rows(run.events) if event and isinstance(event.get("event"), str)])
    if not begun or not isinstance(begun[-1].get("devices"), list):
        raise UserError(f"{path} does not tell its devices: it is of an older paceline, or never trained")
    steps = _steady(path, _with_lists(run, len(begun[-1]["devices"])), begun[-1])
    names = hosts(begun[-1:])
    if len(set(Counter(names).values())) > 1 or len(list(itertools.groupby(names))) > len(set(names)):
        raise UserError(f"{path} had unequal numbers of ranks on its hosts ({', '.join(names)}): plan knows equal ones")
    return _Reader(path, config, steps, names, begun[-1]["devices"]).machines()


def _with_lists(run: folder.RunFolder, num_ranks: int) -> list[Row]:
    """Returns the rows of steps and evaluations. Those of many ranks have no times by rank: only the steps that stand
    in ranks.jsonl, too, are returned."""
    found = [row for row in rows(run.metrics) if row]
    if num_ranks <= MOST_LISTED:
        return found
    by_step = {step_of(row): row for row in rows(run.ranks) if row}
    return [row | by_step[step_of(row)] for row in found if step_of(row) in by_step]


def _steady(path: Path, rows: list[Row], start: Row) -> dict[str, Floats]:
    """Returns columns of the last attempt's steps, (rows,) or (rows, ranks), without the first one, which warms up."""
    chosen: deque[Row] = deque(maxlen=_MOST_STEPS)
    for row in rows:
        if "loss" in row and step_of(row) > step_of(start) + 1 and not row.get("skipped"):
            chosen.append(row)
    if len(chosen) < _LEAST_STEPS:
        is_by_rank = len(start["devices"]) > MOST_LISTED
        option, which = ("ranks-every", " with times by rank") if is_by_rank else ("every", "")
        raise UserError(
            f"{path} has {units.plural(len(chosen), 'recorded step')}{which} after the first one of its last attempt; "
            f"a plan needs {_LEAST_STEPS}: train more steps, with a smaller --log.{option}"
        )
    try:
        columns = {name: np.array([row[name] for row in chosen], dtype=float) for name in _NUMBERS}
        columns |= {name: np.array([row[f"rank_{name}"] for row in chosen], dtype=float) for name in _LISTS}
        columns["mfu"] = np.array([row["mfu"] or math.nan for row in chosen], dtype=float)
        are_possible = all((np.abs(values) < _MOST_MS).all() for name, values in columns.items() if name != "mfu")
    except (KeyError, TypeError, ValueError):
        are_possible = False
    if are_possible and not (columns["sequences"] > 0).all():
        raise UserError(f"{path} has ranks that computed nothing, so their speed is not known; train a larger batch")
    if not are_possible or not all((columns[name] > 0).all() for name in _ABOVE_0):
        raise UserError(f"{path} has damaged rows, or rows of another paceline; train 20 steps again")
    return columns


@dataclass(frozen=True)
class _Reader:
    path: Path
    config: Config
    steps: dict[str, Floats]
    hosts: list[str]  # by rank
    ranks: list[dict[str, Any]]  # the device of each

    def mean(self, name: str) -> Any:
        """Returns the mean, by rank or of rank 0, over the half of the steps that are neither short nor long. Means of
        parts add up to that of the step, which medians do not."""
        step_ms = self.steps["step_ms"]
        low, high = np.percentile(step_ms, [25, 75])
        return self.steps[name][(step_ms >= low) & (step_ms <= high)].mean(axis=0)

    def machines(self) -> Machines:
        steps, per_host = self.steps, len(self.hosts) // len(set(self.hosts))
        passes_s = (steps["forward_ms"] + steps["backward_ms"]) / steps["sequences"] / 1e3
        typical_ms = (self.mean("forward_ms") + self.mean("backward_ms")) / self.mean("sequences")
        by_host = typical_ms.reshape(-1, per_host)
        # A rank waits for the slowest one of its host.
        slowest, fastest = by_host.max(axis=1), int(by_host.max(axis=1).argmin())
        rank = fastest * per_host + int(by_host[fastest].argmax())
        speeds = tuple(float(slowest.min() / each) for each in slowest)
        cluster = Cluster(
            device=str(self.path),
            hosts=len(slowest),
            ranks_per_host=per_host,
            link_gbit=1.0 if len(slowest) > 1 else 0.0,  # replaced below
            latency_us=_LATENCY_US,
            speeds=speeds if len(slowest) > 1 else (),
        )
        known = self._known_gpu()
        shown = replace(known, **self._facts(), traced=()) if known else self._cpu()
        settings = resolve(self.config, self.config.model.vocab_size, rank_facts(self.config, cluster, shown))
        shares = tuple(int(count) for count in self.steps["sequences"][-1])
        if self.config.parallel.shares == "auto" and sum(shares) == settings.plan.global_batch_size:
            settings = replace(settings, plan=settings.plan.with_shares(shares))
        num_shards = cluster.num_shards(self.config.parallel.strategy)
        device = replace(self._timed(settings, shown, rank, num_shards), jitter_frac=_jitter(passes_s))
        return self._linked(settings, cluster, device)

    def _facts(self) -> dict[str, Any]:
        num_steps, mfus = len(self.steps["step_ms"]), self.steps["mfu"]
        known_mfus = mfus[np.isfinite(mfus)]  # none where the processor's peak is not known
        flops = cost.flops_per_token(self.config.model, self.config.data.seq_len)
        flops_per_s = flops * float(np.median(self.steps["tokens_per_s"]))
        seconds = float(self.mean("data_ms") + self.mean("other_ms")) / 1e3
        halves = [float(np.median(half)) for half in np.array_split(self.steps["step_ms"], 2)]
        return {
            "name": str(self.ranks[0]["processor"]),
            "dtype": self.config.train.dtype,
            "peak_flops_per_s": flops_per_s / float(np.median(known_mfus)) / len(self.hosts)
            if (known_mfus > 0).any()
            else math.inf,
            "memory_bytes": min(float(each["free_bytes"]) for each in self.ranks),
            "inner_latency_s": _INNER_LATENCY_S,
            "inner_bytes_per_s": _FASTEST,
            "step_s": seconds,
            "error_frac": max(ERROR_FRAC, max(halves) / min(halves) - 1),
            "source": f"measured by {self.path}, {num_steps} steps of {units.plural(len(self.hosts), 'rank')}",
        }

    def _known_gpu(self) -> Device | None:
        """Returns the table's device of this name, whose rates have the right proportions."""
        words = set(str(self.ranks[0]["processor"]).replace("-", " ").split())
        name = next((each for each in devices.device_names() if words.issuperset(each.replace("-", " ").split())), None)
        train = self.config.train
        return devices.gpu(name, compiled=train.compile, dtype=train.dtype) if name else None

    def _cpu(self) -> Device:
        """A device whose time goes into FLOPs, all alike."""
        flops, arch = {"products": 1.0, "attention": 1.0}, self.config.model.arch
        return Device(
            kind="cuda" if self.ranks[0]["device"] == "cuda" else "cpu",
            forward={arch: flops},
            backward={arch: flops},
            update={self.config.optim.name: {"elements": 1.0, "products": 1.0}},
            copy_bytes_per_s=_CPU_COPY_BYTES_PER_S,
            outer_frac=PAYLOAD_FRAC,
            **self._facts(),
        )

    def _timed(self, settings: Settings, shown: Device, rank: int, num_shards: int) -> Device:
        """Returns the device with rates by which this rank's passes and update take what they took."""
        model, optimizer = self.config.model, self.config.optim.name
        num_sequences = settings.plan.num_sequences()[rank]
        tokens = num_sequences * self.config.data.seq_len
        forward_s, backward_s = (
            num_sequences * float(self.mean(name)[rank] / self.mean("sequences")[rank]) / 1e3
            for name in ("forward_ms", "backward_ms")
        )
        optim_s = float(self.mean("optim_ms")[rank]) / 1e3
        rates = shown.forward[model.arch], shown.backward[model.arch]
        shape = replace(shape_of(settings, shown), checkpoint=False)
        sizes = [len(each) * shape.seq_len for each in settings.plan.micro_batches(rank)]
        times = [work.pass_times(shape, size, *rates) for size in sizes]
        first, second = sum(each.forward_s for each in times), sum(each.backward_s for each in times)
        recomputed = model.n_layer * self.config.train.activation_checkpoint
        again = recomputed * sum(each.forward["block"] for each in times)
        update = num_shards * optim_s / update_s(settings, shown)
        who = f"rank {rank} on {self.hosts[rank]}, mean of the middle half of {len(self.steps['step_ms'])} steps"
        traced = (
            ("forward of a step in the run", f"{1e3 * forward_s:.4g} ms", f"{who}, {tokens:,.0f} tokens"),
            ("backward of a step in the run", f"{1e3 * backward_s:.4g} ms", who),
            ("optimizer in the run", f"{1e3 * optim_s:.4g} ms", f"{who}, of 1/{num_shards} of the weights"),
            ("fixed", f"{1e3 * shown.step_s:.4g} ms", "data and the rest of a step, rank 0's mean"),
        )
        return replace(
            shown,
            forward={model.arch: devices.scaled(rates[0], forward_s / first)},
            backward={model.arch: devices.scaled(rates[1], (backward_s - forward_s * again / first) / second)},
            update={optimizer: devices.scaled(shown.update[optimizer], update)},
            traced=traced,
        )

    def _linked(self, settings: Settings, cluster: Cluster, device: Device) -> Machines:
        """Returns the machines with the link by which a step takes what it took."""
        step_s = float(self.mean("step_ms")) / 1e3
        speeds = ", ".join(f"{each:.3g}" for each in cluster.speeds)
        traced = [("speeds of the hosts", speeds or "1", "passes, means")]
        if len(self.hosts) > 1:
            job = job_of(settings, cluster, device)
            path = path_for(settings, job, device)

            def seconds(rate: float) -> float:
                predicted = predict(replace(job, bytes_per_s=rate), path)
                return predicted.step_s + waiting_s(cluster, device, predicted) + device.step_s

            # Waits for the slowest rank are no longer than what is exposed.
            waited_s = waiting_s(cluster, device, predict(job, path))
            over_s = max(0.0, seconds(_FASTEST) - step_s)
            device = replace(device, jitter_frac=device.jitter_frac * max(0.0, 1 - over_s / max(waited_s, 1e-9)))
            rate, how = _rate(seconds, step_s), "the simulated step takes as long as the run's with it"
            if rate is None:
                rate = predict(job, path).wire_bytes / max(1e-6, float(self.mean("comm_ms")) / 1e3)
                how = "at least: passes hid the exchange; the bytes over the time of collectives"
            traced.append(("link in the run", f"{rate / 1e6:.4g} MB/s", f"{how} ({1e3 * step_s:.4g} ms)"))
            traced.append(("jitter", f"{device.jitter_frac:.2%}", "deviation of a rank's passes from the ranks' mean"))
            if cluster.hosts > 1:
                cluster = replace(cluster, link_gbit=8e-9 * rate / device.outer_frac)
            else:
                device = replace(device, inner_bytes_per_s=rate)
        device = replace(device, traced=(*device.traced, *traced))
        return Machines(self.config, cluster, device)


def _rate(seconds: Any, target_s: float) -> float | None:
    """Returns the rate with which a step takes so long; None: the fastest link is too slow."""
    if seconds(_FASTEST) >= target_s:
        return None
    low, high = math.log(_SLOWEST), math.log(_FASTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(math.exp(middle)) > target_s else (low, middle)
    return math.exp(low)


def _jitter(passes_s: Floats) -> float:
    """Returns the deviation of ranks' passes, of their medians, without what all ranks have in common."""
    num_ranks = passes_s.shape[1]
    relative = passes_s / np.median(passes_s, axis=0)
    common = relative.mean(axis=1, keepdims=True) if num_ranks > 1 else 1.0
    low, high = np.percentile(relative - common, [16, 84], axis=0)  # one outlier does not count
    return float(np.mean(high - low)) / 2 * math.sqrt(num_ranks / max(1, num_ranks - 1))
