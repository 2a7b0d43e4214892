"""The network of a lab: a bridge in a namespace of its own, and a link from it to each host, with a rate.

A link's rate counts bytes of Ethernet frames (without preamble and gap), in each direction by itself. TCP then brings
1448 of 1514 bytes of payload, 95.6%: 100mbit are 11.95 MB/s. Each direction has a token bucket filter (tc-tbf(8)) at
the end that sends: at the host's interface, and at the bridge's port toward the host, where the traffic of several
hosts for one meets as in a real switch.
"""

import os
import subprocess
from functools import partial
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.parent import die_with_parent
from paceline.lab.hosts import INTERFACE, Host
from paceline.lab.system import attempt, call, inside, refusal

_BRIDGE = "switch"
_TCP = Path("/proc/sys/net/ipv4")
_BURST_S = 0.002  # of the rate, that may leave at once: covers the delay of a timer on a busy machine
_LEAST_BURST = 4096  # bytes; two frames
_QUEUE_S = 0.05  # of the rate, that may wait; what comes then is dropped, as by a switch whose buffer is full
# But never less, in bytes: a small switch's buffer for one port; and of a host the 1000 frames that Linux keeps before
# an interface (txqueuelen), or TCP would lose frames in its own host, which it does on no real one.
_LEAST_QUEUES = (256 << 10, 1000 * 1514)


def start_switch() -> subprocess.Popen[str]:
    """Returns the process that holds the namespace of the bridge: when it ends, the bridge and all links are gone.

    Raises UserError where the kernel makes no network namespace or no bridge.
    """
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
    if not process.stdout.readline():  # else what follows would happen to this machine's own network
        raise UserError(refusal("a network namespace", process.stderr.read()))
    # No spanning tree and no delay: a link that comes back carries at once.
    script = f"link add {_BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nlink set {_BRIDGE} up\n"
    call(inside(process.pid, "ip", "-batch", "-"), "a bridge", script)
    return process


def plug_in(switch: int, host: Host, pid: int) -> None:
    """Joins the host whose first process is `pid` to the bridge. Raises UserError where the kernel lacks a part."""
    port = port_of(host.name)
    script = f"link add {port} type veth peer name {INTERFACE} netns {pid}\nlink set {port} master {_BRIDGE} up\n"
    call(inside(switch, "ip", "-batch", "-"), "a pair of virtual interfaces (veth)", script)
    # No IPv6 address of its own: what picks the first address finds the one that is in /etc/hosts.
    script = f"link set lo up\nlink set {INTERFACE} addrgenmode none up\naddr add {host.address}/24 dev {INTERFACE}\n"
    call(inside(pid, "ip", "-batch", "-"), f"an address of host {host.name}", script)
    _control_congestion(pid)
    set_rate(switch, host.name, pid, host.rate)


def _control_congestion(pid: int) -> None:
    """Makes the host's TCP share links as most hosts' does, whatever this machine's is: BBR, some images' default,
    drains the link for 200 ms every 10 s to measure it (PROBE_RTT), and steps of equal bytes then differ by 15%."""
    try:
        allowed = (_TCP / "tcp_allowed_congestion_control").read_text().split()
    except OSError:  # a kernel, or a container, that leaves nothing to choose
        return
    name = next((name for name in ("cubic", "reno") if name in allowed), "")
    if name:
        call(inside(pid, "sh", "-c", f"echo {name} > {_TCP / 'tcp_congestion_control'}"), f"TCP's {name}")


def set_rate(switch: int, name: str, pid: int, rate: int | None) -> None:
    """Gives a host's link this rate in both directions, bits/s; None: none. Takes force at once."""
    ends = ((switch, port_of(name)), (pid, INTERFACE))
    for (holder, device), least_queue in zip(ends, _LEAST_QUEUES, strict=True):
        if rate is None:
            attempt(inside(holder, "tc", "qdisc", "del", "dev", device, "root"))  # fails where it had no rate
            continue
        burst = max(_LEAST_BURST, round(rate / 8 * _BURST_S))
        queue = max(least_queue, round(rate / 8 * _QUEUE_S)) + burst
        bucket = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}", "limit", f"{queue}")
        call(inside(holder, "tc", "qdisc", "replace", "dev", device, "root", *bucket), "a link with a rate (tbf)")


def set_link(switch: int, name: str, *, is_up: bool) -> None:
    """Pulls a host's cable out, or puts it back: the host keeps its address and sees that nothing is connected."""
    state = "up" if is_up else "down"
    call(inside(switch, "ip", "link", "set", port_of(name), state), f"the link of host {name} {state}")


def port_of(name: str) -> str:
    """The bridge's port toward a host."""
    return f"to-{name}"
