"""How fast a device computes: seconds for each unit of work, from a table for GPUs, by measurement for this machine."""

import contextlib
import hashlib
import json
import platform
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from paceline.base import units
from paceline.base.cache import cache_dir
from paceline.base.cores import cpu_name
from paceline.base.errors import UserError, nearest
from paceline.base.files import replace as replace_file
from paceline.config import Config
from paceline.optim.config import RULES
from paceline.tools.plan.work import Rates
from paceline.world.cores import usable_cores
from paceline.world.peaks import gpu_peak

THIS = "this"  # the machine that plans
PAYLOAD_FRAC = 0.957  # of a link's bits: the rest is headers of Ethernet, IP and TCP
ERROR_FRAC = 0.08  # of nine in ten predicted steps (bench/plan_points.py)
_UPDATE_BYTES = 40  # of an element: AdamW reads and writes weight, gradient and moments; the norm reads the gradient


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank."""

    name: str
    kind: Literal["cpu", "cuda"]
    dtype: str  # what train.dtype auto means
    peak_flops_per_s: float  # inf: not known
    memory_bytes: float
    forward: Mapping[str, Rates]  # by family of models
    backward: Mapping[str, Rates]
    update: Mapping[str, Rates]  # by optimizer
    # Seconds a step of all that is neither passes nor the update, by number of blocks: measured between ranks of one
    # host, as forward and backward were, which with sharded weights hold their gathers. Empty: it is simulated.
    exchange: Rates = field(default_factory=dict)
    copy_bytes_per_s: float  # of digests; and of snapshots, unless they go elsewhere:
    snapshot_bytes_per_s: float = 0.0  # of a GPU into the host's memory; 0: as copy_bytes_per_s
    inner_bytes_per_s: float  # between ranks of a host, each way
    inner_latency_s: float
    outer_frac: float = 1.0  # of a link's rate
    step_s: float = 0.0  # fixed cost of a step
    jitter_frac: float = 0.0  # standard deviation of a rank's step, of its mean
    watts: float = 0.0
    mtbf_hours: float = 0.0  # between failures of one device; 0: not known
    error_frac: float = 0.0  # how far predictions may be off
    source: str = ""
    traced: tuple[tuple[str, str, str], ...] = ()  # how these figures follow from a run: what, its value, how

    def slower(self, factor: float) -> "Device":
        """Returns a device whose passes and updates take so many times as long."""
        times: dict[str, Any] = {
            name: {family: scaled(rates, factor) for family, rates in getattr(self, name).items()}
            for name in ("forward", "backward", "update")
        }
        return replace(self, **times)


def scaled(rates: Rates, factor: float) -> Rates:
    return {kind: rate * factor for kind, rate in rates.items()}


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = (resources.files("paceline") / "tools" / "plan" / "devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def device_names() -> list[str]:
    return [name for name in _table() if name != "efficiency"]


def gpu(name: str, *, compiled: bool, dtype: str = "auto") -> Device:
    """Returns a GPU of the table, for matrix products of this dtype; compiled: torch.compile fuses elementwise
    operations. Raises UserError for another name."""
    if name not in device_names():
        raise UserError(
            f"no device is named '{name}'{nearest(name, device_names())}; there are: {', '.join(device_names())}, "
            f"and {THIS}: this machine, after the same command with --calibrate"
        )
    facts, share = _table()[name], _table()["efficiency"]
    peak = gpu_peak(name.replace("-", " "), "bfloat16" if dtype == "auto" else dtype).flops_per_s
    assert peak is not None
    byte_s = 1 / (share["memory"] * 1e9 * facts["bandwidth_gb_s"])
    moved = 1.0 if compiled else share["eager_bytes"]
    forward = {
        "products": 1 / (share["products"] * peak),
        "attention": 0.5 / (share["attention"] * peak),  # the causal half
        "bytes": moved * byte_s,
        "logits": moved * 10 * byte_s,  # written in bfloat16, read for maximum, sum and gradient
        "weights": 6 * byte_s,  # cast
        "calls": share["call_us"] * 1e-6,
    }
    backward = {kind: 2 * rate for kind, rate in forward.items()} | {"attention": 2.5 * forward["attention"]}
    update = {"elements": _UPDATE_BYTES * byte_s, "products": forward["products"]}
    families = ("gpt2", "llama")
    return Device(
        name=name,
        kind="cuda",
        dtype="bfloat16",
        peak_flops_per_s=peak,
        memory_bytes=1e9 * facts["memory_gb"],
        forward=dict.fromkeys(families, forward),
        backward=dict.fromkeys(families, backward),
        update=dict.fromkeys(RULES, update),
        copy_bytes_per_s=1e9 * facts["bandwidth_gb_s"] * share["memory"] / 2,
        snapshot_bytes_per_s=1e9 * share["host_gb_s"],
        inner_bytes_per_s=1e9 * facts["inner_gb_s"] * share["inner"],
        inner_latency_s=10e-6,
        outer_frac=share["outer"],
        jitter_frac=0.01,
        watts=facts["watts"],
        mtbf_hours=facts["mtbf_hours"],
        error_frac=0.3,
        source="data sheets and one table of efficiencies (devices.toml)",
    )


# ---- this machine ----


def _path(config: Config) -> Path:
    """The file of this machine and this config: its name has everything that was measured, but the number of blocks."""
    import torch  # takes a second, and planning for other machines does without

    from paceline.world.device import choose_dtype

    model, train = config.model, config.train
    facts = [socket.gethostname(), cpu_name(), torch.__version__, platform.machine(), str(usable_cores())]
    facts.append(torch.backends.cpu.get_cpu_capability())
    facts.append(str(choose_dtype("auto", torch.device("cpu"))[0]) if train.dtype == "auto" else f"torch.{train.dtype}")
    shape = {**vars(model), "vocab_size": model.vocab_size or config.data.expected_vocab}
    facts += [f"{name}={value}" for name, value in shape.items() if name not in ("n_layer", "n_positions", "size")]
    facts += map(str, (config.data.seq_len, train.device_batch_size, train.compile, config.optim.name))
    parallel = config.parallel
    facts += map(str, (parallel.strategy, parallel.wire, parallel.shared_memory))
    facts += map(str, (parallel.sync_every, parallel.bucket_mb))
    return cache_dir() / "plan" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def store(config: Config, num_ranks: int, device: Device) -> Path:
    """Writes what was measured, complete or not at all; returns the file. Raises UserError if it cannot."""
    path, key = entry(config, num_ranks)
    devices = {**_rows(path), key: asdict(device)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(devices, indent=1).encode())
    except OSError as error:
        raise UserError(f"cannot write the calibration {path}: {error.strerror}; set PACELINE_CACHE") from None
    return path


def stored(config: Config) -> dict[int, Device]:
    """Returns what was measured on this machine for a config, by number of ranks at once, each with as many threads as
    it would have now. Empty: nothing, or nothing that can be read."""
    devices = {}
    with contextlib.suppress(ValueError, TypeError):
        for key, device in _rows(_path(config)).items():
            num_ranks = int(key.partition(" ")[0])
            if key == _key(config, num_ranks):
                devices[num_ranks] = Device(**device)
    return devices


def _rows(path: Path) -> dict[str, Any]:
    """Returns what the file has; empty if it is not there or damaged."""
    with contextlib.suppress(OSError, ValueError):
        rows = json.loads(path.read_text())
        return rows if isinstance(rows, dict) else {}
    return {}


def _key(config: Config, num_ranks: int) -> str:
    """Returns ranks and threads of each, as in force: a flag and the environment may give the same threads."""
    from paceline.world.device import choose_threads  # imports torch

    return f"{num_ranks} ranks of {choose_threads(config.parallel.threads, num_ranks)[0]} threads"


def entry(config: Config, num_ranks: int) -> tuple[Path, str]:
    """Returns the file of this machine and this config, and the key of so many ranks in it."""
    return _path(config), _key(config, num_ranks)


def at_once(num_ranks: int) -> int:
    """Returns how many ranks are measured for so many on this machine: more than there are cores share these."""
    return min(num_ranks, usable_cores())


def calibration(config: Config, num_ranks: int) -> Device:
    """Returns one of so many ranks on this machine. Raises UserError if it was not measured, or cannot be read."""
    measured = at_once(num_ranks)
    device_then, sharing = stored(config).get(measured), num_ranks / measured
    if device_then is None:
        raise UserError(
            f"nothing was measured for this config on this machine yet with {units.plural(measured, 'rank')} at once: "
            "give the same command with --calibrate first (about 15 seconds for each number of ranks), or describe "
            "another device: --cluster FILE.toml"
        )
    if sharing == 1:
        return device_then
    return replace(
        device_then.slower(sharing),
        step_s=device_then.step_s * sharing,
        exchange=scaled(device_then.exchange, sharing),
        inner_bytes_per_s=device_then.inner_bytes_per_s / sharing,
        peak_flops_per_s=device_then.peak_flops_per_s / sharing,
        memory_bytes=device_then.memory_bytes / sharing,
    )
