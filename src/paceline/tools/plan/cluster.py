"""The machines that a plan is for: a short TOML file, or this machine."""

import json
import math
import tomllib
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path

from paceline.base.errors import UserError, nearest
from paceline.config import checked
from paceline.tools.plan import devices
from paceline.tools.plan.schedule import num_shards


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, ranks and links. Each rank has a device of its own."""

    device: str = devices.THIS  # a name of devices.toml, a run's folder, or this: this machine as measured
    hosts: int = 1
    ranks_per_host: int = 1
    link_gbit: float = 0.0  # Gbit/s of a host, each way
    latency_us: float = 20.0  # of a message between hosts
    burst_ms: float = 0.0  # of a shaped link, saved up in a pause and sent at once; but for hsdp and local
    speeds: tuple[float, ...] = ()  # of each host, of the device's; empty: all alike
    jitter_frac: float = -1.0  # standard deviation of a rank's step, of its mean; negative: the device's
    price: float = 0.0  # for a device and an hour
    watts: float = 0.0  # of a device; 0: the table's
    mtbf_hours: float = 0.0  # between failures of a device; 0: the table's
    restart_s: float = 300.0  # from a failure to the next step
    save_s: float = 0.0  # of training that a save takes; 0: a copy of the state in memory

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def speed(self, rank: int) -> float:
        """The speed of a rank's host."""
        return self.speeds[rank // self.ranks_per_host] if self.speeds else 1.0

    def num_shards(self, strategy: str) -> int:
        """Returns how many ranks divide the optimizer's state."""
        return num_shards(strategy, self.num_ranks, self.ranks_per_host)

    def of_ranks(self, num_ranks: int) -> "Cluster":
        """Returns so many ranks of such hosts, on as few hosts as hold them. Raises UserError if hosts would have
        different numbers."""
        per_host = min(num_ranks, self.ranks_per_host)
        if num_ranks % per_host:
            raise UserError(
                f"--ranks has {num_ranks}, and a host has {per_host}; give 1 to {per_host}, or a multiple of it"
            )
        hosts = num_ranks // per_host
        speeds = tuple(self.speeds[index % len(self.speeds)] for index in range(hosts)) if self.speeds else ()
        cluster = replace(self, hosts=hosts, ranks_per_host=per_host, speeds=speeds)
        cluster.check()
        return cluster

    def check(self) -> None:
        """Raises UserError for an impossible value."""
        for item in fields(self):
            values = getattr(self, item.name)
            least = {"hosts": 1, "ranks_per_host": 1, "jitter_frac": -1}.get(item.name, 0)
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, float | int) and not (math.isfinite(value) and value >= least):
                    raise UserError(f"the cluster's {item.name} is {value}; it must be at least {least}")
        if self.num_ranks > 1 << 20:
            raise UserError(f"the cluster has {self.num_ranks} ranks; plan at most {1 << 20}")
        if self.hosts > 1 and not self.link_gbit:
            raise UserError(
                f"the cluster has {self.hosts} hosts and no link between them: give --link-gbit, or link_gbit in its "
                "file, the rate of a host each way"
            )
        if self.speeds and (len(self.speeds) != self.hosts or min(self.speeds) <= 0):
            raise UserError(f"speeds are {list(self.speeds)}; give one above 0 for each of the {self.hosts} hosts")


def read(path: Path) -> Cluster:
    """Returns the cluster of a TOML file, or of what `paceline doctor --json` printed. Raises UserError, naming the
    field, for anything that is not one."""
    try:
        text = path.read_text(encoding="utf-8")
        document = {**json.loads(text)["cluster"]} if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read --cluster {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
        is_not = (
            "what `paceline doctor --json` prints; give that, or TOML" if path.suffix == ".json" else f"TOML: {error}"
        )
        raise UserError(f"--cluster {path} is not {is_not}") from None
    if path.suffix == ".json" and not document:
        raise UserError(
            f"--cluster {path} has an empty cluster: the doctor found hosts with different numbers of ranks, or no "
            "device that works; give what it prints for hosts with equally many ranks"
        )
    hints = typing.get_type_hints(Cluster)
    values: dict[str, typing.Any] = {}
    for raw_name, value in document.items():
        name, where = raw_name.replace("-", "_"), f"{path}: {raw_name}"
        if name not in hints:
            raise UserError(f"{path}: a cluster has no field '{raw_name}'{nearest(name, hints)}")
        if name == "speeds":
            elements = value if isinstance(value, list) else [value]
            values[name] = tuple(checked(where, float, each) for each in elements)
        else:
            values[name] = checked(where, hints[name], value)
    cluster = Cluster(**values)
    cluster.check()
    return cluster
