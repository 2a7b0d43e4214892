"""Predicts a run before it starts: memory, the parts of a step, tokens/s, and the cost of the whole run.

The simplest prediction is FLOPs / peak + bytes / bandwidth. This one counts work by kind (work.py), plays the exchange
against backward and forward (schedule.py), waits for the slowest of ranks whose times scatter, and loses time to
failures (failures.py). Every number is a closed form or that simulation; `explained` has each with its inputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

from paceline.base import units
from paceline.config import Config
from paceline.data.plan import BatchPlan, in_proportion
from paceline.model import cost
from paceline.model.config import ModelConfig
from paceline.tools.plan import work
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device
from paceline.tools.plan.failures import Failures
from paceline.tools.plan.schedule import Job, Load, Path, Prediction, path_of, predict
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
    def mfu(self) -> float:
        config = self.settings.config
        flops = self.tokens_per_s * cost.flops_per_token(config.model, config.data.seq_len)
        return flops / (self.device.peak_flops_per_s * self.cluster.num_ranks)

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
    """Returns the prediction. vocab_size: the data's, where the config does not say. Raises UserError as a start of the
    run would."""
    facts = rank_facts(cluster, device)
    flops_per_s = 0.0
    if config.model.size == "auto":  # a run times the given shape, too
        given = plan(config.replace("model", size="given"), cluster, device, vocab_size=vocab_size)
        flops_per_s = given.mfu * device.peak_flops_per_s * cluster.num_ranks
    settings = resolve(config, vocab_size or config.data.tokenizer_vocab, facts, flops_per_s)
    batch_plan = _with_auto_shares(settings, cluster)
    job = job_of(settings, batch_plan, cluster, device)
    step = predict(job, path_for(settings, job, device))
    waited_s = waiting_s(cluster, device, step)
    failures = _failures(cluster, device, settings)
    parts = {
        "forward": step.forward_s,
        "backward": step.backward_s,
        "exposed communication": step.exposed_s + waited_s,
        "optimizer": step.update_s,
        "fixed": device.step_s,
        **_between_steps(settings, cluster, device, failures, step.step_s + waited_s),
    }
    interval_s = settings.config.checkpoint.every * step.step_s or settings.config.checkpoint.every_s or math.inf
    has_failures = not math.isinf(failures.between_s)
    alone = sum(cluster.speed(rank) for rank in range(0, cluster.num_ranks, cluster.ranks_per_host))
    alone *= cluster.ranks_per_host * _alone_tokens_per_s(settings, batch_plan, cluster, device)
    return Plan(
        label=label,
        settings=settings,
        cluster=cluster,
        device=device,
        memory=memory_bytes(settings, facts[0], len(facts), cluster.num_shards(settings.config.parallel.strategy)),
        parts=parts,
        step=step,
        alone_tokens_per_s=alone,
        goodput_frac=failures.goodput_frac(interval_s) if has_failures else 1.0,
        best_interval_s=failures.best_interval_s if has_failures else math.inf,
        bound=_bound(parts, settings, device, waited_s),
        explained=_explained(settings, job, step, device, failures, waited_s),
    )


def rank_facts(cluster: Cluster, device: Device) -> list[RankFacts]:
    facts = RankFacts(
        host="planned",
        device=device.kind,
        backend="nccl" if device.kind == "cuda" else "gloo",
        processor=device.name,
        instructions="",
        rounding="",
        threads=1,
        threads_reason="planned",
        free_bytes=device.memory_bytes,
        dtype=device.dtype,
        dtype_reason=f"a {device.name} has units for it",
        shares_memory=device.kind == "cpu" and cluster.hosts == 1 < cluster.num_ranks,
    )
    return [facts] * cluster.num_ranks


def _with_auto_shares(settings: Settings, cluster: Cluster) -> BatchPlan:
    """The plan that shares auto would come to: in proportion to the speeds."""
    if settings.config.parallel.shares != "auto":
        return settings.plan
    speeds = [cluster.speed(rank) for rank in range(cluster.num_ranks)]
    return settings.plan.with_shares(in_proportion(settings.plan.global_batch_size, speeds))


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


def job_of(settings: Settings, batch_plan: BatchPlan, cluster: Cluster, device: Device) -> Job:
    """Returns the step for the simulation: rank 0's stages, and how the other ranks' loads differ."""
    arch, optim, shape = settings.config.model.arch, settings.config.optim, shape_of(settings, device)
    sizes: dict[tuple[float, tuple[int, ...]], None] = {}
    for rank in range(cluster.num_ranks):
        if batch_plan.shares or rank % cluster.ranks_per_host == 0 or rank == cluster.num_ranks - 1:
            parts = tuple(map(len, batch_plan.micro_batches(rank)))
            sizes[cluster.speed(rank), parts] = None
    (speed, mine), *others = sizes
    own = device.slower(1 / speed)
    times = partial(work.pass_times, shape, forward=own.forward[arch], backward=own.backward[arch])
    reference = times(tokens=max(mine, default=1) * shape.seq_len)
    one_s = total_s(reference, shape.model)
    slower = []
    for other_speed, parts in others:
        all_s = sum(total_s(times(tokens=size * shape.seq_len), shape.model) for size in parts)
        slower.append(Load(len(parts), all_s * speed / other_speed / (len(parts) * one_s) if parts else 1.0))
    update_s = work.seconds(work.update_units(shape.model, optim.name), device.update[optim.name])
    slowest = min(cluster.speeds or (1.0,))
    parallel, is_across = settings.config.parallel, cluster.hosts > 1
    sends_nothing = parallel.shared_memory and parallel.wire == "exact" and device.kind == "cpu" and not is_across
    # NCCL gathers fsdp's weights in a ring of all ranks. Elsewhere those of a host send as one.
    is_ring = parallel.strategy == "fsdp" and device.kind == "cuda"
    exchange = work.seconds({"blocks": shape.model.n_layer, "ends": 1.0}, device.exchange) if device.exchange else None
    return Job(
        stages=work.stages(shape.model, reference),
        num_micro_batches=len(mine),
        update_s=update_s / slowest,
        num_ranks=cluster.num_ranks,
        num_hosts=cluster.hosts if is_across and not is_ring else cluster.num_ranks,
        latency_s=cluster.latency_us * 1e-6 if is_across else device.inner_latency_s,
        burst_s=cluster.burst_ms / 1e3 if is_across else 0.0,
        bytes_per_s=cluster.link_gbit / 8 * 1e9 * device.outer_frac if is_across else device.inner_bytes_per_s,
        compute_bits=8 * settings.item_bytes,
        inner_bytes_per_s=device.inner_bytes_per_s,
        exchange_s=None if exchange is None else exchange / slowest,
        is_across=is_across,
        shares_memory=sends_nothing and parallel.strategy in ("ddp", "zero"),
        slower=tuple(slower),
    )


def path_for(settings: Settings, job: Job, device: Device) -> Path:
    is_layered = settings.config.train.layered_micro_batches > 1 and job.num_micro_batches > 1
    return path_of(settings.config.parallel, job, is_layered=is_layered, device=device.kind)


def total_s(times: work.PassTimes, model: ModelConfig) -> float:
    once = {"embed": 1, "block": model.n_layer, "head": 1}
    return sum(count * (times.forward[part] + times.backward[part]) for part, count in once.items())


def waiting_s(cluster: Cluster, device: Device, step: Prediction) -> float:
    """What the slowest of n ranks takes longer than the mean one: the expected maximum of n normal times (Blom)."""
    if cluster.num_ranks == 1:
        return 0.0
    frac = device.jitter_frac if cluster.jitter_frac < 0 else cluster.jitter_frac
    most = NormalDist().inv_cdf((cluster.num_ranks - 0.375) / (cluster.num_ranks + 0.25))
    return frac * most * (step.forward_s + step.backward_s)


def _between_steps(
    settings: Settings, cluster: Cluster, device: Device, failures: Failures, step_s: float
) -> dict[str, float]:
    """Seconds a step of checks, saves and evaluations. Without failures a save costs its copy."""
    config = settings.config
    total = 4.0 * cost.num_parameters(config.model).total
    every = config.parallel.check_every if cluster.num_ranks > 1 else 0
    save_every = config.checkpoint.every or (config.checkpoint.every_s / step_s if config.checkpoint.every_s else 0)
    evaluations = max(0, config.train.eval_every)
    times = work.pass_times(shape_of(settings, device), config.data.seq_len, device.forward[config.model.arch], {})
    forward_s = times.forward["embed"] + config.model.n_layer * times.forward["block"] + times.forward["head"]
    sequences = config.train.eval_sequences / cluster.num_ranks
    return {
        "checks": _DIGEST_PASSES * total / device.copy_bytes_per_s / every if every else 0.0,
        "saves": failures.save_s / max(1.0, save_every) if save_every and math.isinf(failures.between_s) else 0.0,
        "evaluations": sequences * forward_s / evaluations if evaluations else 0.0,
    }


def _failures(cluster: Cluster, device: Device, settings: Settings) -> Failures:
    hours = cluster.mtbf_hours or device.mtbf_hours
    total = cost.num_parameters(settings.config.model).total
    part = cluster.num_shards(settings.config.parallel.strategy)
    return Failures(
        between_s=hours * 3600 / cluster.num_ranks if hours else math.inf,
        save_s=cluster.save_s or 12.0 * total / part / device.copy_bytes_per_s,
        restart_s=cluster.restart_s,
    )


def _alone_tokens_per_s(settings: Settings, batch_plan: BatchPlan, cluster: Cluster, device: Device) -> float:
    """One device of speed 1 that trains the same batch alone."""
    shape, arch, optim = shape_of(settings, device), settings.config.model.arch, settings.config.optim
    size = min(batch_plan.device_batch_size, batch_plan.global_batch_size)
    once = work.pass_times(shape, size * shape.seq_len, device.forward[arch], device.backward[arch])
    count = batch_plan.global_batch_size / size
    update_s = work.seconds(work.update_units(shape.model, optim.name), device.update[optim.name])
    return settings.tokens_per_step / (count * total_s(once, shape.model) + update_s + device.step_s)


def _bound(parts: Mapping[str, float], settings: Settings, device: Device, waiting_s: float) -> str:
    """Returns what takes most of the step, in words: of compute its kind of work, of communication its cause."""
    shape, model = shape_of(settings, device), settings.config.model
    found = {
        "optimizer": parts["optimizer"],
        "slowest rank": waiting_s,
        "link": parts["exposed communication"] - waiting_s,
        "data and records": parts["fixed"],
        **{name: parts[name] for name in ("checks", "saves", "evaluations")},
    }
    sequences = sum(map(len, settings.plan.micro_batches(0)))
    rates = device.forward[model.arch], device.backward[model.arch]
    made = work.forward_units(shape, sequences * shape.seq_len), work.backward_units(shape, sequences * shape.seq_len)
    for rate, by_part in zip(rates, made, strict=True):
        for part, amounts in by_part.items():
            for kind, amount in amounts.items():
                name = work.KINDS[kind]
                times = model.n_layer if part == "block" else 1
                found[name] = found.get(name, 0.0) + times * amount * rate.get(kind, 0.0)
    most = max(found, key=lambda name: found[name])
    return f"{most} {found[most] / sum(parts.values()):.0%}"


# ---- every number with its inputs ----


def _explained(
    settings: Settings, job: Job, step: Prediction, device: Device, failures: Failures, waiting_s: float
) -> tuple[Explained, ...]:
    config, arch = settings.config, settings.config.model.arch
    shape = shape_of(settings, device)
    tokens = max(map(len, settings.plan.micro_batches(0)), default=0) * config.data.seq_len
    rows: list[Explained] = [("device", device.name, device.source), *device.traced]
    for name, rates, made in (
        ("forward", device.forward[arch], work.forward_units(shape, tokens)),
        ("backward", device.backward[arch], work.backward_units(shape, tokens)),
    ):
        for part, amounts in made.items():
            terms = [
                f"{units.count(amount)} {kind} x {rates.get(kind, 0.0) * 1e9:.3g} ns"
                for kind, amount in amounts.items()
                if amount * rates.get(kind, 0.0)
            ]
            text = f"{1e3 * work.seconds(amounts, rates):.4g} ms"
            rows.append((f"{name} of {part}, a micro-batch of {units.count(tokens)} tokens", text, " + ".join(terms)))
    count, flags = job.num_micro_batches, step.path.flags
    wire = f"{job.num_elements / 1e6:.4g}M elements x ({step.path.bits.gradient:g} + {step.path.bits.weight:g}) bits"
    rows += [
        ("forward", f"{1e3 * step.forward_s:.4g} ms", f"{count} x (embed, {len(job.stages) - 2} blocks, head)"),
        ("backward", f"{1e3 * step.backward_s:.4g} ms", f"{count} micro-batches, the same stages"),
        ("sent by a host", units.size(step.wire_bytes), f"{wire} x (n-1)/n, n = {job.num_hosts}; {flags}"),
        (
            "link",
            f"{job.bytes_per_s / 1e6:.4g} MB/s",
            f"a collective takes {1e6 * job.hop_s:.3g} us + its bytes / rate",
        ),
        ("exposed communication", f"{1e3 * (step.exposed_s + waiting_s):.4g} ms", "simulated, schedule.py"),
        ("of it, the slowest rank", f"{1e3 * waiting_s:.4g} ms", f"expected maximum of {job.num_ranks} normal times"),
        (
            "optimizer",
            f"{1e3 * step.update_s:.4g} ms",
            " + ".join(
                f"{units.count(amount)} {kind} x {device.update[config.optim.name].get(kind, 0.0) * 1e9:.3g} ns"
                for kind, amount in work.update_units(config.model, config.optim.name).items()
            )
            + ("" if config.parallel.strategy in ("ddp", "naive", "local") else f", / {job.num_ranks} ranks"),
        ),
        (
            "failures",
            "none" if math.isinf(failures.between_s) else f"every {units.duration(failures.between_s)}",
            f"a save takes {failures.save_s:.3g} s, a restart {failures.restart_s:.4g} s; best interval: Young, Daly",
        ),
    ]
    return tuple(rows)
