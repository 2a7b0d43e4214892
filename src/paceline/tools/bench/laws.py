"""The laws that `paceline verify` checks, each a function of the records of five runs (verify.py starts them)."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.base import units
from paceline.tools.bench import runs
from paceline.world.config import SHARDS_WEIGHTS, UPDATES_ALONE
from paceline.world.env import is_loopback

NUM_STEPS, STOP_AT = 20, 10
CURVE_TOLERANCE = 1e-4  # nats a token, float32: worlds differ only in the order of sums
_NEEDS_TWO = "needs two ranks: --nproc 2, or torchrun"
_NOT_JUDGED = "not judged: the straight run failed"


@dataclass(frozen=True, kw_only=True)
class Seat:
    host: str
    device: str
    backend: str
    network: str  # interface and address of its transfers
    versions: str


@dataclass(frozen=True)
class Evidence:
    folder: Path  # has each run's folder by name; the resumed run is in `stopped`
    seats: list[Seat]  # by rank
    failures: Mapping[str, str]  # by run, if it was made; empty if it succeeded


Verdict = tuple[bool | None, str]  # whether the law holds (None: cannot be judged), and the observation


@dataclass(frozen=True)
class Law:
    name: str
    expected: str
    check: Callable[[Evidence], Verdict]
    hint: str  # where to look when it fails


def check_world(evidence: Evidence) -> Verdict:
    """The ranks are those that started this command, on equal devices, and all took part in every step."""
    each = {
        name: [getattr(seat, name) for seat in evidence.seats] for name in ("device", "backend", "network", "versions")
    }
    hosts = [seat.host for seat in evidence.seats]
    differing = [name for name in each if name != "network" and len(set(each[name])) > 1]
    problems = [f"{name} {_by_rank(each[name])}" for name in differing]
    if len(set(hosts)) > 1 and any(is_loopback(seat.network.split()[-1]) for seat in evidence.seats):
        problems.append(f"transfers over {_by_rank(each['network'])}")
    if not evidence.failures["straight"]:
        start = runs.events(evidence.folder / "straight", "start")[0]
        if start["world_size"] != len(hosts):
            problems.append(f"the run had {units.plural(start['world_size'], 'rank')}")
        if start.get("hosts", hosts) != hosts:
            problems.append(f"the run's ranks were on {_by_rank(start['hosts'])}")
        rows = runs.training_rows(evidence.folder / "straight")
        if idle := [row["step"] for row in rows if len(row["rank_compute_ms"]) != len(hosts)]:
            problems.append(f"not all ranks took part in step {idle[0]}")
    by_host = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
    values = "; ".join(", ".join(dict.fromkeys(values)) for values in each.values() if any(values))
    return not problems, "; ".join(problems) or f"{units.plural(len(hosts), 'rank')} ({by_host}): {values}"


def check_replicas(evidence: Evidence) -> Verdict:
    """The run compared the replicas after each step, and the replicated state is equal at the end."""
    if failure := evidence.failures["straight"]:  # first: of one rank, too, no other law names it
        return False, failure
    if len(evidence.seats) == 1:
        return None, _NEEDS_TWO
    straight = evidence.folder / "straight"
    num_steps, end = len(runs.training_rows(straight)), runs.events(straight, "end")[-1]
    strategy = _parallel(evidence)["strategy"]
    if num_steps != NUM_STEPS:
        return False, f"{num_steps} steps were made"
    if strategy not in (*UPDATES_ALONE, *SHARDS_WEIGHTS) and len(set(end["state_digests"])) > 1:
        return False, f"digests of the state at the end: {_by_rank(end['state_digests'])}"
    ranks = units.plural(len(evidence.seats), "rank")
    return True, f"equal on {ranks} after each of {num_steps} steps ({strategy}); digest {end['digest']}"


def _parallel(evidence: Evidence) -> dict[str, str]:
    """Returns this section of the straight run's config."""
    section: dict[str, str] = tomllib.loads((evidence.folder / "straight/config.toml").read_text())["parallel"]
    return section


def _bent(evidence: Evidence) -> str:
    """Returns why the curve may differ from that of one process; empty if it may not."""
    parallel = _parallel(evidence)
    if parallel["strategy"] == "local":
        return "strategy local is another algorithm"
    return "" if parallel["wire"] == "exact" else f"wire {parallel['wire']} rounds what ranks send"


def check_curve(evidence: Evidence) -> Verdict:
    """The loss of each step equals that of one process."""
    return _compare(evidence, "alone", "the run of one process")


def check_shares(evidence: Evidence) -> Verdict:
    """The loss of each step does not depend on how many of its sequences each rank computes."""
    return _compare(evidence, "shares", "the run with unequal shares")


def _compare(evidence: Evidence, other: str, shown: str) -> Verdict:
    if len(evidence.seats) == 1:
        return None, _NEEDS_TWO
    if other not in evidence.failures:
        return None, _NOT_JUDGED
    if failure := evidence.failures[other]:
        return False, f"{shown} failed: {failure}"
    one, many = (runs.training_rows(evidence.folder / name) for name in (other, "straight"))
    if [row["step"] for row in one] != [row["step"] for row in many]:
        return False, f"{len(one)} steps in {shown}, {len(many)} in the straight one"
    gaps = [_gap(a["loss"], b["loss"]) for a, b in zip(one, many, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    first, last = ("NaN" if row["loss"] is None else f"{row['loss']:.4f}" for row in (many[0], many[-1]))
    seen = f"at most {gaps[worst]:.1e} apart, at step {one[worst]['step']}; loss {first} to {last}"
    if other == "shares":
        seen += f"; {' and '.join(map(str, one[0]['rank_sequences']))} sequences by rank"
    skipped = [b["step"] for a, b in zip(one, many, strict=True) if a["skipped"] != b["skipped"]]
    if skipped:
        return False, f"{seen}; step {skipped[0]} was skipped in one of the two"
    if gaps[worst] <= CURVE_TOLERANCE:
        return True, seen
    bent = _bent(evidence)
    return (None, f"not judged: {bent}; {seen}") if bent else (False, seen)


def _gap(a: float | None, b: float | None) -> float:
    """Difference of two losses. A loss that was not finite is recorded as null, and is far from every finite one."""
    return 0.0 if a == b else float("inf") if a is None or b is None else abs(a - b)


def check_resume(evidence: Evidence) -> Verdict:
    """The stopped and resumed run ends with the weights, state and losses of the uninterrupted one."""
    if "stopped" not in evidence.failures:
        return None, _NOT_JUDGED
    if failure := evidence.failures["stopped"] or evidence.failures["resumed"]:
        return False, failure
    straight, resumed = evidence.folder / "straight", evidence.folder / "stopped"
    wanted, end = (runs.events(run, "end")[-1] for run in (straight, resumed))
    if end["digest"] != wanted["digest"]:
        return False, f"weights {end['digest']}, and {wanted['digest']} of the straight run"
    for rank, (digest, other) in enumerate(zip(end["state_digests"], wanted["state_digests"], strict=True)):
        if digest != other:
            return False, f"the weights are the same; the state of rank {rank} differs"
    if len({json.dumps([row["loss"] for row in runs.training_rows(run)]) for run in (straight, resumed)}) > 1:
        return False, "the weights are the same; the recorded losses differ"
    return True, f"the same: weights {end['digest']}, state, {NUM_STEPS} losses"


def _by_rank(values: list[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value} (rank {' '.join(of)})" for value, of in ranks.items())


LAWS = (
    Law(
        "the world",
        "all ranks take part, on the same device, backend and versions",
        check_world,
        "start one version on equal devices (--parallel.device); name each host's interface (--parallel.interface)",
    ),
    Law(
        "replicas are equal",
        f"weights, and state where replicated, bit-identical after each of {NUM_STEPS} steps",
        check_replicas,
        "a bit that no update changed comes from memory, a processor, or libraries that differ between hosts: run "
        "`paceline verify --nproc 2` on each host alone",
    ),
    Law(
        "the same curve",
        f"within {CURVE_TOLERANCE:g} nats a token of one process, {NUM_STEPS} steps",
        check_curve,
        "compare loss, grad_norm and skipped in straight/metrics.jsonl and alone/metrics.jsonl, step by step",
    ),
    Law(
        "shares do not matter",
        f"within {CURVE_TOLERANCE:g} nats a token of equal shares, {NUM_STEPS} steps",
        check_shares,
        "compare loss, grad_norm and rank_sequences in straight/metrics.jsonl and shares/metrics.jsonl, step by step",
    ),
    Law(
        "resume is exact",
        f"stopped at step {STOP_AT} and resumed: weights, state and losses of the straight run, bit for bit",
        check_resume,
        "a resume verifies each byte of stopped/checkpoints, so what differs was computed differently: compare "
        "metrics.jsonl of straight and stopped after the stop, and look for other hardware or threads on a rank",
    ),
)
