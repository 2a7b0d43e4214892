"""Checks for two weaknesses of torchrun: its rendezvous compares clocks, and a lost host cannot always return."""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from paceline.base.errors import UserError
from paceline.world.env import Environment
from paceline.world.group import Group
from paceline.world.peer import Peer

_NAMES = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MOST_CLOCK_OFFSET_S = 5.0  # torchrun's c10d rendezvous takes a host for dead after 15 s of silence, by its own clock


@dataclass(frozen=True)
class Torchrun:
    """torchrun's options. They are read from the parent's command line, because no variable has them."""

    nodes: str = ""  # as given: "2", "1:4"; empty: not under torchrun
    rendezvous: str = ""  # "static", "c10d", ...; empty: not under torchrun

    @property
    def is_dynamic(self) -> bool:
        """Whether hosts may come and go, and compare wall clocks to know who is alive."""
        return self.rendezvous not in ("", "static") and self.nodes not in ("", "1", "1:1")

    @classmethod
    def of_this_process(cls) -> "Torchrun":
        """Returns the options of the torchrun that started this rank."""
        with contextlib.suppress(psutil.Error, OSError):
            for parent in psutil.Process().parents()[:3]:  # a wrapper such as numactl may be in between
                command = parent.cmdline()
                for place, word in enumerate(command[:4], start=1):
                    if PurePath(word).name in _NAMES:
                        return cls.read(command[place:])
        return cls()

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "Torchrun":
        """Parses torchrun's arguments, and the PET_ variables that replace them, with torchrun's own parser."""
        try:
            from torch.distributed.run import get_args_parser
        except ImportError:  # not documented by torch
            return cls()
        parsed, _ = get_args_parser().parse_known_args(arguments)
        return cls("1", "c10d") if parsed.standalone else cls(parsed.nnodes, parsed.rdzv_backend)


def check_nodes(env: Environment) -> None:
    """Raises UserError if torchrun was asked for more nodes than this world has. With clocks 20 s apart each agent
    takes the other for dead, and the hosts would train separately."""
    come = os.environ.get("GROUP_WORLD_SIZE", "")
    if not env.is_distributed or not come.isdigit():
        return
    asked = Torchrun.of_this_process().nodes
    if asked.isdigit() and int(come) < int(asked):  # "1:2" accepts either
        raise UserError(
            f"torchrun was asked for {asked} nodes (--nnodes), and this world has {come}: {socket.gethostname()} would "
            "train without the others. Clocks that are seconds apart are one cause (compare `date` on all hosts), "
            "another is a host that gave up; for a world that may shrink give a range, as in --nnodes 1:2"
        )


def compare_clocks(group: Group, peers: Sequence[Peer]) -> tuple[str, ...]:
    """Returns a warning for each host whose wall clock is far from rank 0's. Raises UserError on all ranks if
    torchrun's rendezvous compares those clocks: it would take living hosts for dead. Collective."""
    group.barrier()
    ahead = [row[0] for row in group.share([time.time()])]
    is_trusted = any(row[0] for row in group.share_integers([int(Torchrun.of_this_process().is_dynamic)]))
    offsets = [seconds - ahead[0] for seconds in ahead]
    far = {peers[rank].host: offset for rank, offset in enumerate(offsets) if abs(offset) > MOST_CLOCK_OFFSET_S}
    texts = tuple(
        f"the clock of {host} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of {peers[0].host}"
        for host, offset in far.items()
    )
    if texts and is_trusted:
        raise UserError(
            f"{'; '.join(texts)}. torchrun's rendezvous compares them, and takes hosts for dead that are not; set the "
            "clocks (NTP), or use its static rendezvous (--node-rank, --master-addr)",
            reach="world",
        )
    return texts


def warn_of_lost_hosts(env: Environment) -> tuple[str, ...]:
    """Returns a warning if a lost host could not return: torch 2.13's agents exchange the store's address only in the
    first round of their rendezvous, and both die after 60 s when a new agent joins a later one."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not env.agent_holds_store or restarts == "0" or not Torchrun.of_this_process().is_dynamic:
        return ()
    return (
        "a host that is lost and comes back could not join again: start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all hosts",
    )
