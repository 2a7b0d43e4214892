"""The network of a lab: a bridge in its own namespace, and a link with a rate to each host.

A link's rate counts Ethernet frames (without preamble and gap) in each direction. TCP's payload is 1448 of 1514 bytes,
95.6%: 100mbit is 11.95 MB/s. Each direction has a token bucket filter (tc-tbf(8)) at its sender: the host's interface,
and the bridge's port to the host, where traffic from several hosts meets as in a real switch.
"""

import os
import subprocess
from functools import partial
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.process import die_with_parent
from paceline.tools.lab.hosts import INTERFACE, Host
from paceline.tools.lab.system import attempt, call, inside, refusal

_BRIDGE = "switch"
_TCP = Path("/proc/sys/net/ipv4")
_IPV6 = Path("/proc/net/if_inet6")
BURST_S = 0.002  # of the rate, may leave at once: covers a timer's delay on a busy machine
_LEAST_BURST = 4096  # bytes; two frames
_LARGEST_PACKET = 65536  # that TCP hands to an interface (GSO); the interface cuts it into frames
_QUEUE_S = 0.05  # of the rate, may wait; later frames are dropped, as by a switch with a full buffer
# The least queues in bytes: a small switch's buffer for one port, and a host's 1000 frames before an interface
# (txqueuelen). With less, TCP would lose frames in its own host, as it never does on real ones.
_LEAST_QUEUES = (256 << 10, 1000 * 1514)


def start_switch() -> subprocess.Popen[str]:
    """Returns the process that holds the namespace of the bridge: when it ends, the bridge and all links are gone.
    Raises UserError if the kernel makes no network namespace or bridge."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo made; exec sleep infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if not process.stdout.readline():  # else the commands below would change this machine's own network
        raise UserError(refusal("a network namespace", process.stderr.read()))
    # No spanning tree and no delay, so that a restored link carries traffic at once.
    script = f"link add {_BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nlink set {_BRIDGE} up\n"
    call(inside(process.pid, "ip", "-batch", "-"), "a bridge", script)
    return process


def plug_in(switch: int, host: Host, pid: int) -> None:
    """Connects the host whose first process is `pid` to the bridge. Raises UserError if the kernel lacks a feature."""
    port = port_of(host.name)
    script = f"link add {port} type veth peer name {INTERFACE} netns {pid}\nlink set {port} master {_BRIDGE} up\n"
    call(inside(switch, "ip", "-batch", "-"), "a pair of virtual interfaces (veth)", script)
    # No IPv6 address, so that the first address is the one in /etc/hosts. A kernel without IPv6 does not know the word.
    no_ipv6 = "addrgenmode none " if _IPV6.exists() else ""
    script = f"link set lo up\nlink set {INTERFACE} {no_ipv6}up\naddr add {host.address}/24 dev {INTERFACE}\n"
    call(inside(pid, "ip", "-batch", "-"), f"an address of host {host.name}", script)
    _control_congestion(pid)
    set_rate(switch, host.name, pid, host.rate)


def _control_congestion(pid: int) -> None:
    """Makes the host's TCP share links as on most hosts. BBR, the default of some images, drains the link for 200 ms
    every 10 s (PROBE_RTT), so equal steps would take different times."""
    try:
        allowed = (_TCP / "tcp_allowed_congestion_control").read_text().split()
    except OSError:  # this kernel or container offers no choice
        return
    name = next((name for name in ("cubic", "reno") if name in allowed), "")
    if name:
        call(inside(pid, "sh", "-c", f"echo {name} > {_TCP / 'tcp_congestion_control'}"), f"TCP's {name}")


def set_rate(switch: int, name: str, pid: int, rate: int | None) -> None:
    """Sets the rate of a host's link in both directions, bits/s; None: no limit. In force at once.

    The bucket cuts packets that are larger than its burst into frames, and each frame then takes a timer's interrupt,
    where a network card would do this. So connections that are opened later send packets of half a burst: at 100mbit
    that takes an eighth of the kernel's time (docs/LOG.md)."""
    ends = ((switch, port_of(name)), (pid, INTERFACE))
    for (holder, device), least_queue in zip(ends, _LEAST_QUEUES, strict=True):
        burst = 2 * _LARGEST_PACKET if rate is None else max(_LEAST_BURST, round(rate / 8 * BURST_S))
        packet = ("gso_max_size", f"{min(_LARGEST_PACKET, burst // 2)}")
        call(inside(holder, "ip", "link", "set", device, *packet), "the size of an interface's packets")
        # A packet in the queue that is larger than the new burst would stay there for ever. TCP sends it again.
        attempt(inside(holder, "tc", "qdisc", "del", "dev", device, "root"))  # fails if it had no rate
        if rate is None:
            continue
        queue = max(least_queue, round(rate / 8 * _QUEUE_S)) + burst
        bucket = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}", "limit", f"{queue}")
        call(inside(holder, "tc", "qdisc", "add", "dev", device, "root", *bucket), "a link with a rate (tbf)")


def set_link(switch: int, name: str, *, is_up: bool) -> None:
    """Disconnects a host's cable, or connects it again; the host keeps its address."""
    state = "up" if is_up else "down"
    call(inside(switch, "ip", "link", "set", port_of(name), state), f"the link of host {name} {state}")


def port_of(name: str) -> str:
    return f"to-{name}"
