"""A run folder such as a run of 2,000 steps on four ranks and two hosts leaves it, made in a tenth of a second.

    restart      killed at step 1,513, gone on from 1,500 five minutes later
    straggler    rank 2 (host b) needs three times as long for forward in steps 901 to 1,240
    spike        the loss of step 777 alone is 14.5
    no update    step 424 has no finite loss

Its rows are what a reader of metrics.jsonl is promised, not what the writer makes: a change of one of both is noticed.
"""

import json
import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.config import Config, load_preset, to_toml

NUM_STEPS, NUM_RANKS, TOKENS = 2_000, 4, 32_768
HOSTS = ["a", "a", "b", "b"]
SLOW_RANK, SLOW_FROM, SLOW_TO = 2, 901, 1_240
SPIKE_AT, SPIKE = 777, 14.5
NOT_FINITE_AT = 424
SAVED_AT, KILLED_AT = 1_500, 1_513
COST_S = 41.5
_BEGUN = datetime(2026, 11, 20, 8, 0, tzinfo=UTC)


def write(folder: Path, num_steps: int = NUM_STEPS, **config: Any) -> Path:
    """Writes the run into a new folder and returns it: its first steps, or with more after it. config: other fields of
    `train`."""
    folder.mkdir(parents=True)
    preset = load_preset("gpt2-124m", Config())
    resolved = preset.replace("model", vocab_size=50_257, n_positions=1024).replace("parallel", strategy="ddp")
    resolved = resolved.replace("train", **({"dtype": "bfloat16"} | config))
    (folder / "config.toml").write_text(to_toml(resolved))
    draws = random.Random(5)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps(step_row(step, draws)) + "\n")
            if step % 50 == 0:
                file.write(json.dumps(_evaluation(step)) + "\n")
    with (folder / "events.jsonl").open("w") as file:
        for event in events(num_steps):
            file.write(json.dumps(event) + "\n")
    return folder


def step_row(step: int, draws: random.Random) -> dict[str, Any]:
    """A row of metrics.jsonl; its parts by rank add up to its step."""
    own = [_own_ms(step, rank, draws) for rank in range(NUM_RANKS)]
    exchange_ms = 22 + draws.expovariate(1 / 4)
    step_ms = max(map(sum, own)) + exchange_ms + 1.5
    exposed = [step_ms - sum(parts) - 1.5 for parts in own]
    data, forward, backward, optim = (list(column) for column in zip(*own, strict=True))
    loss: float | None = 2.9 + 8.1 * (1 + step / 40) ** -0.55 + draws.gauss(0, 0.06)
    loss = SPIKE if step == SPIKE_AT else None if step == NOT_FINITE_AT else loss
    return {
        "step": step,
        "loss": loss,
        "lr": 6e-4 * min(1, step / 70) * (0.55 + 0.45 * math.cos(math.pi * min(1, step / NUM_STEPS))),
        "grad_norm": None if loss is None else 0.5 + draws.expovariate(8),
        "skipped": loss is None,
        "tokens": step * TOKENS,
        "step_ms": step_ms,
        "tokens_per_s": TOKENS / step_ms * 1e3,
        "mfu": 60 / step_ms,
        "compute_ms": data[0] + forward[0] + backward[0],
        "data_ms": data[0],
        "forward_ms": forward[0],
        "backward_ms": backward[0],
        "comm_ms": exposed[0] + 60 + draws.random() * 9,
        "exposed_comm_ms": exposed[0],
        "optim_ms": optim[0],
        "other_ms": 1.5,
        "comm_bytes": 746_000_000,
        "world_size": NUM_RANKS,
        "rank_sequences": [8] * NUM_RANKS,
        "rank_step_ms": [sum(parts) + 1.5 for parts in own],
        "rank_compute_ms": [sum(parts[:3]) for parts in own],
        "rank_data_ms": data,
        "rank_forward_ms": forward,
        "rank_backward_ms": backward,
        "rank_exposed_comm_ms": exposed,
        "rank_optim_ms": optim,
    }


def _own_ms(step: int, rank: int, draws: random.Random) -> tuple[float, float, float, float]:
    """data, forward, backward, optimizer of one rank."""
    is_slow = rank == SLOW_RANK and SLOW_FROM <= step <= SLOW_TO
    hiccup = 400.0 if draws.random() < 2e-4 else 0.0
    forward = 60 * (3 if is_slow else 1) * (1 + 0.02 * abs(draws.gauss(0, 1)))
    return 2 + hiccup, forward, 118 * (1 + 0.02 * abs(draws.gauss(0, 1))), 9 + draws.random()


def _evaluation(step: int) -> dict[str, Any]:
    val_loss = 2.95 + 8.1 * (1 + step / 40) ** -0.55
    facts = {"tokens": step * TOKENS, "val_tokens": 262_144, "eval_ms": 900.0, "elapsed_s": 0.22 * step}
    return {"step": step, "val_loss": val_loss, "val_bpb": val_loss / 3.1, **facts}


def events(num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """What events.jsonl holds."""
    found: list[dict[str, Any]] = []

    def tell(kind: str, after_step: int, pause_s: float = 0.0, **facts: Any) -> None:
        moment = _BEGUN + timedelta(seconds=0.22 * after_step + pause_s)
        found.append({"time": moment.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts})

    tell("start", 0, world_size=NUM_RANKS, hosts=HOSTS, version="0.1.0", torch="2.13.0+cpu")
    slow = {"rank": SLOW_RANK, "host": "b"}
    lived = range(100, SAVED_AT + 1, 100)
    for step in sorted([*lived, NOT_FINITE_AT, SLOW_FROM, SLOW_TO]):
        if step == NOT_FINITE_AT:
            tell("skipped step", step, step=step, loss_scale=1.0, parameter="blocks.3.mlp.up.weight", ranks=[1])
        elif step == SLOW_FROM:
            since = {"step": step + 6, "since_step": step, "phase": "forward", "ms": 182.1, "median_ms": 61.0}
            tell("straggler", step, **slow, **since)
        elif step == SLOW_TO:
            tell("straggler over", step, step=step + 7, **slow, cost_s=COST_S)
        else:
            tell("checkpoint", step, step=step, seconds=2.41, bytes=1_493_000_000)
    tell("hang", KILLED_AT, step=KILLED_AT, rank=3, host="b")
    tell("failed", KILLED_AT, step=KILLED_AT, error="rank 0 lost the other ranks during an all-reduce")
    worlds = {"from_world_size": NUM_RANKS, "world_size": NUM_RANKS, "hosts": HOSTS}
    tell("resume", KILLED_AT, 300, step=SAVED_AT, reached=KILLED_AT, **worlds)
    for step in range(SAVED_AT + 100, NUM_STEPS + 1, 100):
        tell("checkpoint", step, 300, step=step, seconds=2.52, bytes=1_493_000_000)
    end = {"reason": "horizon reached", "digest": "c9ca11ceadd49d78", "state_digests": ["19050cea"] * NUM_RANKS}
    tell("end", num_steps, 301, step=num_steps, straggler_cost_s=0.0, **end)
    return found
