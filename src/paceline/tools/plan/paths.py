"""The ways of exchanging gradients and weights that a config, or `bench link`, can choose from."""

from typing import get_args

from paceline.sync.wire import CODINGS, wire_bits
from paceline.tools.plan.schedule import Job, Path
from paceline.world.config import ParallelConfig, WireName


def path_of(parallel: ParallelConfig, job: Job, *, is_layered: bool, device: str = "cpu") -> Path:
    """Returns the path that a config takes. parallel.strategy is resolved, not auto."""
    strategy, rounds = parallel.strategy, parallel.sync_every or 1
    assert strategy != "auto"
    coding = CODINGS[parallel.wire if job.num_ranks > 1 else "exact"]
    encode_ns, update_ns = coding.encode_ns, coding.update_ns
    if strategy == "local":  # codes a whole fragment, after the update
        encode_ns, update_ns = 0.0, 2 * (encode_ns + update_ns) / rounds
    flags = f"--parallel.strategy {strategy}" + (f" --parallel.sync-every {rounds}" if parallel.sync_every else "")
    flags += f" --parallel.wire {parallel.wire}" if parallel.wire != "exact" else ""
    bits = wire_bits(
        strategy,
        parallel.wire,
        32 if job.shares_memory else job.compute_bits,
        sync_every=rounds,
        ranks_per_host=job.num_ranks / job.num_hosts,
        passes=job.num_micro_batches,
        by_gloo=device == "cpu",
    )
    return Path(
        flags=flags + (f" --train.layered-micro-batches {job.num_micro_batches}" if is_layered else ""),
        bits=bits,
        kind="another algorithm" if strategy == "local" else "exact" if parallel.wire == "exact" else "rounding",
        strategy=strategy,
        is_layered=is_layered,
        encode_s=encode_ns * 1e-9,
        update_codec_s=update_ns * 1e-9,
        bucket_bytes=parallel.bucket_bytes(device, shares_memory=job.shares_memory),
    )


def paths(job: Job, *, by_gloo: bool = True) -> list[Path]:
    """Returns all paths: the exact ones first, then those that round, then other algorithms. by_gloo: the backend is
    gloo; NCCL takes no other wire than exact."""
    device = "cpu" if by_gloo else "cuda"
    every = [path_of(ParallelConfig(strategy="ddp"), job, is_layered=False, device=device)]
    for wire in get_args(WireName) if by_gloo else ("exact",):
        if not CODINGS[wire].is_for_zero:
            continue
        parallel = ParallelConfig(strategy="zero", wire=wire)
        orders = (False, True)[: 1 + (job.num_micro_batches > 1)]
        every += [path_of(parallel, job, is_layered=is_layered, device=device) for is_layered in orders]
    rounds = [ParallelConfig(strategy="local", sync_every=steps) for steps in (8, 32)]
    rounds += [ParallelConfig(strategy="local", sync_every=32, wire="int4")] if by_gloo else []
    return every + [path_of(parallel, job, is_layered=False, device=device) for parallel in rounds]
