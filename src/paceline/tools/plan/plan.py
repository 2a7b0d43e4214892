"""Predicts a run before it starts: memory, the parts of a step, tokens/s, and the cost of the whole run.

The simplest prediction is FLOPs / peak + bytes / bandwidth. This one counts work by kind (work.py), plays the exchange
against backward and forward (schedule.py), waits for the slowest of ranks whose times scatter, and loses time to
failures (failures.py). Every number is a closed form or that simulation; `explained` has each with its inputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from paceline.base import units
from paceline.config import Config
from paceline.data.plan import in_proportion
from paceline.model import cost
from paceline.tools.plan import work
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device
from paceline.tools.plan.failures import Failures
from paceline.tools.plan.paths import path_of
from paceline.tools.plan.schedule import Job, Load, Path, Prediction, predict
from paceline.tools.plan.work import memory_bytes
from paceline.train.resolve import Settings, resolve
from paceline.world.facts import RankFacts

_DIGEST_PASSES = 4  # a check reads weights, gradients' places and state
Explained = tuple[str, str, str]  # what, its value, how it follows


@dataclass(frozen=True, kw_only=True)
class Plan:
    label: str
    settings: Settings
    cluster: Cluster
    device: Device
    memory: Mapping[str, float]  # bytes of a rank by kind
    parts: Mapping[str, float]  # seconds of a mean step by part; checks, saves and evaluations by their share
    step: Prediction
    alone_tokens_per_s: float  # of all ranks' devices, if each trained alone
    goodput_frac: float  # of the time that makes progress in spite of failures
    best_interval_s: float  # between saves; inf: without failures
    bound: str  # what takes most of a step
    explained: tuple[Explained, ...] = field(repr=False)

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.device.memory_bytes

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.settings.tokens_per_step / self.step_s

    @property
    def flops_per_s(self) -> float:
        config = self.settings.config
        return self.tokens_per_s * cost.flops_per_token(config.model, config.data.seq_len)

    @property
    def mfu(self) -> float | None:
        """None where the device's peak is not known."""
        most = self.device.peak_flops_per_s * self.cluster.num_ranks
        return None if math.isinf(most) else self.flops_per_s / most

    @property
    def efficiency_frac(self) -> float:
        """Of the tokens/s of all devices, if each trained alone."""
        return self.tokens_per_s / self.alone_tokens_per_s

    @property
    def seconds(self) -> float:
        """Of the whole run, failures included."""
        steps = self.settings.num_steps
        if steps is None:
            return self.settings.config.train.time_budget / max(self.goodput_frac, 1e-9)
        return steps * self.step_s / max(self.goodput_frac, 1e-9)

    @property
    def device_hours(self) -> float:
        return self.seconds / 3600 * self.cluster.num_ranks

    @property
    def kwh(self) -> float:
        return self.device_hours * (self.cluster.watts or self.device.watts) / 1e3

    @property
    def money(self) -> float:
        return self.device_hours * self.cluster.price


def plan(config: Config, cluster: Cluster, device: Device, *, label: str = "", vocab_size: int = 0) -> Plan:
    """Returns the prediction, where model.size is auto of the given shape. vocab_size: the data's, where the config
    does not say. Raises UserError as a start of the run would."""
    config.parallel.check_num_ranks(cluster.num_ranks)
    facts = rank_facts(config, cluster, device)
    settings = resolve(config, vocab_size or config.data.expected_vocab, facts)
    if config.parallel.shares == "auto":  # a run comes to shares in proportion to the speeds
        speeds = [cluster.speed(rank) for rank in range(cluster.num_ranks)]
        shares = in_proportion(settings.plan.global_batch_size, speeds)
        settings = replace(settings, plan=settings.plan.with_shares(shares))
    num_shards = cluster.num_shards(settings.config.parallel.strategy)
    job = job_of(settings, cluster, device)
    step = predict(job, path_for(settings, job, device))
    waited_s = waiting_s(cluster, device, step)
    failures = _failures(cluster, device, settings, num_shards)
    parts = {
        "forward": step.forward_s,
        "backward": step.backward_s,
        "exposed communication": step.exposed_s + waited_s,
        "optimizer": step.update_s,
        "fixed": device.step_s,
        **_between_steps(settings, device, failures, step.step_s + waited_s),
    }
    step_s, saves = sum(parts.values()), settings.config.checkpoint
    run_s = settings.num_steps * step_s if settings.num_steps else settings.config.train.time_budget
    interval_s = min(run_s, saves.every * step_s or saves.every_s or math.inf)  # the end of a run saves, too
    has_failures = not math.isinf(failures.between_s)
    alone = sum(cluster.speed(rank) for rank in range(0, cluster.num_ranks, cluster.ranks_per_host))
    alone *= cluster.ranks_per_host * _alone_tokens_per_s(settings, device)
    return Plan(
        label=label,
        settings=settings,
        cluster=cluster,
        device=device,
        memory=memory_bytes(settings, facts[0], len(facts), num_shards),
        parts=parts,
        step=step,
        alone_tokens_per_s=alone,
        goodput_frac=failures.goodput_frac(interval_s) if has_failures else 1.0,
        best_interval_s=failures.best_interval_s if has_failures else math.inf,
        bound=_bound(parts, settings, device, waited_s),
        explained=_explained(settings, job, step, device, failures, waited_s, num_shards),
    )


def rank_facts(config: Config, cluster: Cluster, device: Device) -> list[RankFacts]:
    is_gpu, backend = device.kind == "cuda", config.parallel.backend
    usual_backend = "nccl" if is_gpu else "gloo"
    facts = RankFacts(
        host="planned",
        device=device.kind,
        backend=usual_backend if backend == "auto" else backend,
        processor=device.name,
        instructions="",
        rounding="",
        threads=1,
        threads_reason="planned",
        free_bytes=device.memory_bytes,
        dtype=device.dtype,
        dtype_reason=f"a {device.name} has units for it",
        num_gpus=cluster.ranks_per_host if is_gpu else 0,
        why_no_float8="" if device.dtype == "float8" else "plan does not know its speed with float8",
        shares_memory=config.parallel.shared_memory and not is_gpu and cluster.hosts == 1 < cluster.num_ranks,
    )
    return [facts] * cluster.num_ranks


# ---- a step ----


def shape_of(settings: Settings, device: Device) -> work.Shape:
    is_half = settings.item_bytes == 2
    return work.Shape(
        model=settings.config.model,
        seq_len=settings.config.data.seq_len,
        compute_bytes=settings.item_bytes,
        keeps_scores=is_half and device.kind == "cpu",
        checkpoint=settings.config.train.activation_checkpoint,
    )


def pass_times(settings: Settings, device: Device, num_sequences: int) -> work.PassTimes:
    """Returns the times of a micro-batch of so many sequences."""
    shape, arch = shape_of(settings, device), settings.config.model.arch
    return work.pass_times(shape, num_sequences * shape.seq_len, device.forward[arch], device.backward[arch])


def update_s(settings: Settings, device: Device) -> float:
    """Returns the seconds in which one rank updates all weights."""
    optimizer = settings.config.optim.name
    return work.seconds(work.update_units(settings.config.model, optimizer), device.update[optimizer])


def job_of(settings: Settings, cluster: Cluster, device: Device) -> Job:
    """Returns the step for the simulation: rank 0's stages, and how the other ranks' loads differ."""
    sizes: dict[tuple[float, tuple[int, ...]], None] = {}
    for rank in range(cluster.num_ranks):
        if settings.plan.shares or rank % cluster.ranks_per_host == 0 or rank == cluster.num_ranks - 1:
            micro_batches = tuple(map(len, settings.plan.micro_batches(rank)))
            sizes[cluster.speed(rank), micro_batches] = None
    (speed, sizes_here), *others = sizes
    device_there = device.slower(1 / speed)
    reference = pass_times(settings, device_there, max(sizes_here, default=1))
    slower = []
    for other_speed, theirs in others:
        all_s = sum(pass_times(settings, device_there, size).total_s for size in theirs) * speed / other_speed
        slower.append(Load(len(theirs), all_s / (len(theirs) * reference.total_s) if theirs else 1.0))
    slowest = min(cluster.speeds or (1.0,))
    parallel, is_across = settings.config.parallel, cluster.hosts > 1
    sends_nothing = parallel.shared_memory and parallel.wire == "exact" and device.kind == "cpu" and not is_across
    # NCCL gathers fsdp's weights in a ring of all ranks. Elsewhere those of a host send as one.
    is_ring = parallel.strategy == "fsdp" and device.kind == "cuda"
    parts = {"blocks": float(settings.config.model.n_layer), "ends": 1.0}
    return Job(
        stages=work.stages(settings.config.model, reference),
        num_micro_batches=len(sizes_here),
        update_s=update_s(settings, device) / slowest,
        num_ranks=cluster.num_ranks,
        num_hosts=cluster.hosts if is_across and not is_ring else cluster.num_ranks,
        latency_s=cluster.latency_us * 1e-6 if is_across else device.inner_latency_s,
        burst_s=cluster.burst_ms / 1e3 if is_across else 0.0,
        bytes_per_s=cluster.link_gbit / 8 * 1e9 * device.outer_frac if is_across else device.inner_bytes_per_s,
        compute_bits=8 * settings.item_bytes,
        inner_bytes_per_s=device.inner_bytes_per_s,
        exchange_s=work.seconds(parts, device.exchange) / slowest if device.exchange else None,
        is_across=is_across,
        shares_memory=sends_nothing and parallel.strategy in ("ddp", "zero"),
        slower=tuple(slower),
    )


def path_for(settings: Settings, job: Job, device: Device) -> Path:
    is_layered = settings.config.train.layered_micro_batches > 1 and job.num_micro_batches > 1
    return path_of(settings.config.parallel, job, is_layered=is_layered, device=device.kind)


def waiting_s(cluster: Cluster, device: Device, step: Prediction) -> float:
    """What the slowest of n ranks takes longer than the mean one: the expected maximum of n normal times (Blom)."""
    if cluster.num_ranks == 1:
        return 0.0
    frac = device.jitter_frac if cluster.jitter_frac < 0 else cluster.jitter_frac
    most = NormalDist().inv_cdf((cluster.num_ranks - 0.375) / (cluster.num_ranks + 0.25))
    return frac * most * (step.forward_s + step.backward_s)


def _between_steps(settings: Settings, device: Device, failures: Failures, step_s: float) -> dict[str, float]:
    """Seconds a step of checks, saves and evaluations. Without failures a save costs its copy."""
    config, num_ranks = settings.config, settings.plan.world_size
    total = 4.0 * cost.num_parameters(config.model).total
    every = config.parallel.check_every if num_ranks > 1 else 0
    save_every = config.checkpoint.every or (config.checkpoint.every_s / step_s if config.checkpoint.every_s else 0)
    evaluate_every = max(0, config.train.eval_every)
    evaluation_s = config.train.eval_sequences / num_ranks * pass_times(settings, device, 1).forward_s
    return {
        "checks": _DIGEST_PASSES * total / device.copy_bytes_per_s / every if every else 0.0,
        "saves": failures.save_s / max(1.0, save_every) if save_every and math.isinf(failures.between_s) else 0.0,
        "evaluations": evaluation_s / evaluate_every if evaluate_every else 0.0,
    }


def _failures(cluster: Cluster, device: Device, settings: Settings, num_shards: int) -> Failures:
    hours = cluster.mtbf_hours or device.mtbf_hours
    total = cost.num_parameters(settings.config.model).total
    snapshot_bytes_per_s = device.snapshot_bytes_per_s or device.copy_bytes_per_s
    return Failures(
        between_s=hours * 3600 / cluster.num_ranks if hours else math.inf,
        save_s=cluster.save_s or 12.0 * total / num_shards / snapshot_bytes_per_s,
        restart_s=cluster.restart_s,
    )


def _alone_tokens_per_s(settings: Settings, device: Device) -> float:
    """One device of speed 1 that trains the same batch alone."""
    batch = settings.plan.global_batch_size
    size = min(settings.plan.device_batch_size, batch)
    passes_s = batch / size * pass_times(settings, device, size).total_s
    return settings.tokens_per_step / (passes_s + update_s(settings, device) + device.step_s)


def _work(settings: Settings, device: Device, tokens: int) -> list[tuple[str, work.Rates, dict[str, work.Units]]]:
    """Returns of both passes their names, the device's rates, and the work of a micro-batch by part."""
    shape, arch = shape_of(settings, device), settings.config.model.arch
    return [
        ("forward", device.forward[arch], work.forward_units(shape, tokens)),
        ("backward", device.backward[arch], work.backward_units(shape, tokens)),
    ]


def _bound(parts: Mapping[str, float], settings: Settings, device: Device, waited_s: float) -> str:
    """Returns what takes most of the step, in words: of compute its kind of work, of communication its cause."""
    shares = {
        "optimizer": parts["optimizer"],
        "slowest rank": waited_s,
        "link": parts["exposed communication"] - waited_s,
        "data and records": parts["fixed"],
        **{name: parts[name] for name in ("checks", "saves", "evaluations")},
    }
    sequences = sum(map(len, settings.plan.micro_batches(0)))
    for _, rates, by_part in _work(settings, device, sequences * settings.config.data.seq_len):
        for part, amounts in by_part.items():
            times = settings.config.model.n_layer if part == "block" else 1
            for kind, amount in amounts.items():
                name = work.KINDS[kind]
                shares[name] = shares.get(name, 0.0) + times * amount * rates.get(kind, 0.0)
    most = max(shares, key=lambda name: shares[name])
    return f"{most} {shares[most] / sum(parts.values()):.0%}"


# ---- every number with its inputs ----


def _explained(
    settings: Settings, job: Job, step: Prediction, device: Device, failures: Failures, waited_s: float, num_shards: int
) -> tuple[Explained, ...]:
    optimizer = settings.config.optim.name
    tokens = max(map(len, settings.plan.micro_batches(0)), default=0) * settings.config.data.seq_len
    rows: list[Explained] = [("device", device.name, device.source), *device.traced]
    for name, rates, by_part in _work(settings, device, tokens):
        for part, amounts in by_part.items():
            what = f"{name} of {part}, a micro-batch of {units.count(tokens)} tokens"
            rows.append((what, _ms(work.seconds(amounts, rates)), _terms(amounts, rates)))
    count, flags = job.num_micro_batches, step.path.flags
    wire = f"{job.num_elements / 1e6:.4g}M elements x ({step.path.bits.gradient:g} + {step.path.bits.weight:g}) bits"
    collective = f"a collective takes {1e6 * job.hop_s:.3g} us + its bytes / rate"
    update = _terms(work.update_units(settings.config.model, optimizer), device.update[optimizer])
    update += f", / {num_shards} ranks" if num_shards > 1 else ""
    between = "none" if math.isinf(failures.between_s) else f"every {units.duration(failures.between_s)}"
    lost = f"a save takes {failures.save_s:.3g} s, a restart {failures.restart_s:.4g} s; best interval: Young, Daly"
    return (
        *rows,
        ("forward", _ms(step.forward_s), f"{count} x (embed, {len(job.stages) - 2} blocks, head)"),
        ("backward", _ms(step.backward_s), f"{count} micro-batches, the same stages"),
        ("sent by a host", units.size(step.wire_bytes), f"{wire} x (n-1)/n, n = {job.num_hosts}; {flags}"),
        ("link", f"{job.bytes_per_s / 1e6:.4g} MB/s", collective),
        ("exposed communication", _ms(step.exposed_s + waited_s), "simulated, schedule.py"),
        ("of it, the slowest rank", _ms(waited_s), f"expected maximum of {job.num_ranks} normal times"),
        ("optimizer", _ms(step.update_s), update),
        ("failures", between, lost),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _terms(amounts: work.Units, rates: work.Rates) -> str:
    """Returns the sum behind a time, as text."""
    return " + ".join(
        f"{units.count(amount)} {kind} x {rates[kind] * 1e9:.3g} ns"
        for kind, amount in amounts.items()
        if amount * rates.get(kind, 0.0)
    )
