"""A lab's layout as plain values: hosts with names, addresses, rates, shares, cores and ranks."""

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.base.cores import physical_cores
from paceline.base.errors import UserError

MOST_HOSTS = len(string.ascii_lowercase)
INTERFACE = "eth0"  # of every host, besides loopback
LEAST_SHARE = 0.1  # below, the kernel's share is wrong by more than 5%
_LEAST_RATE, _MOST_RATE = 100_000, 400_000_000_000
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    address: str
    rate: int | None  # bits/s of its link in each direction; None: unlimited
    share: float | None  # of the processors, 1.0: the time of one core; None: unlimited
    cores: tuple[int, ...]  # the processors it may use
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The hosts of a lab, and whether each has its own cores."""

    hosts: tuple[Host, ...]
    has_own_cores: bool
    num_cores: int

    @property
    def is_crowded(self) -> bool:
        """Whether there are fewer cores than the hosts would use without each other."""
        return not self.has_own_cores and sum(host.share or 1 for host in self.hosts) > self.num_cores


def lay_out(num_hosts: int, num_ranks: int, rates: str, shares: str) -> Layout:
    """Returns the hosts: `a`, `b` ... at 10.0.0.1, 10.0.0.2 ..., with `num_ranks` ranks each, numbered host by host.

    rates and shares: one value for all, or one a host, separated by commas; an empty text sets no limit. Raises
    UserError for impossible values.
    """
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise UserError(f"--hosts is {num_hosts}; a lab has from 1 to {MOST_HOSTS} hosts")
    if not 1 <= num_ranks <= 64:
        raise UserError(f"--nproc is {num_ranks}; a host of a lab has from 1 to 64 ranks")
    per_host = [read_rate(text) for text in _each("--rate", rates, num_hosts)]
    cores = physical_cores()
    wanted = [read_share(text, len(cores)) for text in _each("--cpu", shares, num_hosts)]
    divided = divide_cores(cores, wanted)
    hosts = tuple(
        Host(
            name=string.ascii_lowercase[i],
            address=f"10.0.0.{i + 1}",
            rate=per_host[i],
            share=wanted[i],
            cores=tuple(divided[i] if divided else cores),
            first_rank=i * num_ranks,
            num_ranks=num_ranks,
        )
        for i in range(num_hosts)
    )
    return Layout(hosts=hosts, has_own_cores=divided is not None, num_cores=len(cores))


def _each(flag: str, text: str, num_hosts: int) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if len(values) == 1:
        return values * num_hosts
    if len(values) != num_hosts:
        raise UserError(
            f"{flag} {text} has {len(values)} values for {num_hosts} hosts; give one for all, or one a host"
        )
    if "" in values:
        raise UserError(
            f"{flag} {text} has no value for host {string.ascii_lowercase[values.index('')]}; where there is to be no "
            "limit write unlimited"
        )
    return values


def read_rate(text: str) -> int | None:
    """'1gbit', '2.5gbit', '100mbit', '500kbit' -> bits/s; 'unlimited' or '' -> None. Raises UserError."""
    if text in ("", "unlimited"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if not match:
        raise UserError(f"'{text}' is not a rate; write it as 1gbit, 2.5gbit, 100mbit, 500kbit or unlimited")
    rate = float(match[1]) * _UNITS[match[2]]
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise UserError(f"the rate {text} cannot be kept here; a link has from 100kbit to 400gbit, or unlimited")
    return round(rate)


def rate_text(rate: int | None) -> str:
    """1000000000 -> '1gbit'; None -> 'unlimited'."""
    if rate is None:
        return "unlimited"
    unit = next(unit for unit in ("gbit", "mbit", "kbit") if rate >= _UNITS[unit])
    return f"{rate / _UNITS[unit]:g}{unit}"


def read_share(text: str, num_cores: int) -> float | None:
    """'0.35' -> 0.35, of the time of one core; 'unlimited' or '' -> None. Raises UserError."""
    if text in ("", "unlimited"):
        return None
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not LEAST_SHARE <= share <= num_cores:
        raise UserError(
            f"the share of processors '{text}' cannot be had; 1.0 is the time of one core, and a host here may have "
            f"from {LEAST_SHARE} to {num_cores}, or unlimited"
        )
    return share


# ---- cores ----


def divide_cores(cores: Sequence[int], shares: Sequence[float | None]) -> list[tuple[int, ...]] | None:
    """Returns each host's own cores; cores beyond the shares go to hosts without a share. None if there are too few:
    then all hosts use all cores, and the scheduler divides the time."""
    counts = [math.ceil(share) if share else 1 for share in shares]
    spare = len(cores) - sum(counts)
    if spare < 0:
        return None
    unlimited = [i for i, share in enumerate(shares) if share is None]
    for place, i in enumerate(unlimited):
        counts[i] += spare // len(unlimited) + (place < spare % len(unlimited))
    left = iter(cores)
    return [tuple(next(left) for _ in range(count)) for count in counts]
