"""`paceline verify`: tests on these machines that replicas stay equal, curves agree and a resume is exact.

Every rank runs this, and starts `paceline train` processes that take its place in their own worlds, one after another:

    straight   all ranks, 20 steps, replicas compared after each
    alone      rank 0 by itself, the same 20 steps
    shares     all ranks, the same 20 steps, the first rank with most of each step's sequences
    stopped    all ranks, asked to stop after 10
    resumed    all ranks, from there to 20

Then rank 0 reads their records and checks the laws. Between runs the ranks meet in this program's own world, which only
carries text: each run's result, and the port of the next one's store. Each run has its own store: in this program's,
its ranks' places are taken.
"""

import dataclasses
import json
import os
import shutil
import socket
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import rich.box
import rich.table
import torch
from rich.text import Text

from paceline import __version__
from paceline.base import faults, units
from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, LOST_PEERS
from paceline.base.net import listen
from paceline.base.process import RANK_VARIABLES, environment_of_one, environment_of_rank
from paceline.config import Config, to_toml
from paceline.data.plan import in_proportion
from paceline.record.console import Console
from paceline.tools.bench import runs
from paceline.tools.bench.laws import LAWS, NUM_STEPS, STOP_AT, Evidence, Seat, Verdict
from paceline.world.device import choose_device
from paceline.world.env import Environment, listening_address, transfer_address
from paceline.world.runtime import World, open_world

_PATIENCE_S = 3600.0  # waiting for other ranks' runs, which have deadlines
_RUNS = ("straight", "alone", "shares", "stopped", "resumed")


def config_of(config: Config) -> Config:
    """Returns the config of the runs: this model, data and world for 20 steps in float32."""
    config = runs.only_steps(config, NUM_STEPS, dtype="float32", deterministic=True)
    return config.replace("parallel", check_every=1, shares="equal")


def verify(config: Config, env: Environment, console: Console, *, keep: bool = False) -> int:
    """Returns 0 if all laws that can be judged in this world hold, else 1; rank 0 prints a table. Collective.

    config: from `config_of`. The run folders, among the host's temporary files, are removed unless a law failed or
    `keep`. Raises UserError and RunError as opening a world does.
    """
    began = time.monotonic()
    quiet = dataclasses.replace(config.parallel, device="cpu", backend="gloo")  # this world carries only text
    with runs.tidy(), open_world(quiet, env) as world:
        world.group.set_timeout(_PATIENCE_S)
        made = tempfile.mkdtemp(prefix="paceline-verify-") if world.is_main else ""
        folder = Path(world.group.broadcast_json(made))  # the same path on all hosts, shared disk or not
        is_kept = keep
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            world.group.barrier()
            evidence = _make_runs(_Starter(config, env, world, folder, console))
            verdicts = [law.check(evidence) for law in LAWS] if world.is_main else []  # others may not see the records
            num_failed = world.group.broadcast_json(sum(passed is False for passed, _ in verdicts))
            is_kept = keep or num_failed > 0
            _show(verdicts, world.world_size, time.monotonic() - began, console)
            world.group.barrier()  # the records have been read
        finally:
            if is_kept:
                console.say(f"the runs and what they said are kept in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return EXIT_FAILED if num_failed else EXIT_DONE


def _show(verdicts: list[Verdict], world_size: int, seconds: float, console: Console) -> None:
    ranks = units.plural(world_size, "rank")
    table = rich.table.Table(title=f"Laws on {ranks}", title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for column in ("law", "", "expected", "seen"):
        table.add_column(column, overflow="fold")
    shown = {True: Text("pass", "green"), False: Text("FAIL", "bold red"), None: Text("open", "dim")}
    judged = list(zip(LAWS, verdicts, strict=False))  # on rank 0 only
    for law, (passed, seen) in judged:
        table.add_row(law.name, shown[passed], law.expected, Text(seen))  # Text: brackets are no markup
    console.say(table)
    num_failed, num_open = (sum(passed is value for passed, _ in verdicts) for value in (False, None))
    took = f"{ranks}, {units.duration(seconds)}"
    if num_failed:
        console.say(f"{num_failed} of {len(judged)} checks failed ({took})", style="bold")
    else:
        still = f"; {num_open} could not be judged" if num_open else ""
        console.say(f"{len(judged) - num_open} of {len(judged)} checks passed ({took}){still}", style="bold")
    for law, (passed, _) in judged:
        if passed is False:
            console.say(f"\n{law.name}: {law.hint}", style="yellow")


# ---- the runs ----


class _Starter:
    """Starts runs on all ranks, or on rank 0 only, and records their failures."""

    def __init__(self, config: Config, env: Environment, world: World, folder: Path, console: Console):
        self.config, self.env, self.world, self.folder, self.console = config, env, world, folder, console
        self.failures: dict[str, str] = {}
        self.setup = folder / f"rank-{env.rank:05d}.toml"  # its own, since interfaces differ between hosts
        self.setup.write_text(to_toml(config))

    def on_all_ranks(self, name: str, *verb: str, status: int = EXIT_DONE) -> bool:
        """Runs a paceline command; returns whether every rank ended with this status. Collective."""
        changes = {}
        if self.env.is_distributed:
            port = self.world.group.broadcast_json(self._free_port() if self.world.is_main else 0)
            changes = _with_port(self.env, port)
        return self._agree(name, self._run(name, verb, environment_of_rank(os.environ, **changes)), status)

    def on_rank_0(self, name: str, *verb: str) -> None:
        """Runs a paceline command in a world of one, while the others wait. It has no injected faults, as all other
        runs are compared with it. Collective."""
        environ = environment_of_one(os.environ)
        environ.pop(faults.VARIABLE, None)
        self._agree(name, self._run(name, verb, environ) if self.world.is_main else EXIT_DONE, EXIT_DONE)

    def _free_port(self) -> int:
        with listen(listening_address(self.env, self.config.parallel.interface), 0) as listener:
            port: int = listener.getsockname()[1]
        return port

    def _run(self, name: str, verb: tuple[str, ...], environ: Mapping[str, str]) -> int:
        number = _RUNS.index(name)
        self.console.advance(number, f"run {number + 1} of {len(_RUNS)}", name)
        process = runs.start([*runs.PACELINE, *verb], self._log(name), environ)
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}-rank-{self.env.rank:05d}.out"

    def _agree(self, name: str, code: int, status: int) -> bool:
        """Shares the run's result. A rank that lost the others is not the cause."""
        why = "" if code == status else f"{runs.reason(self._log(name)) or 'it said nothing'} (exit status {code})"
        told = [f"rank {rank}: {text}" for rank, text in enumerate(self.world.group.share_text(why)) if text]
        self.failures[name] = next((text for text in told if LOST_PEERS not in text), (told or [""])[0])
        return not told


def _with_port(env: Environment, port: int) -> dict[str, str]:
    """Returns the variables of this rank in a world with another store. All of them: where RANK follows from a
    scheduler's variables, the port does, too."""
    place = {name: str(getattr(env, name.lower())) for name in RANK_VARIABLES}
    return {**place, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _make_runs(starter: _Starter) -> Evidence:
    """Makes the five runs until one fails. Collective."""
    world, folder = starter.world, starter.folder
    seats = [
        Seat(**json.loads(text)) for text in world.group.share_text(json.dumps(dataclasses.asdict(_seat(starter))))
    ]
    train = ("train", "--config", str(starter.setup), "--out")
    with starter.console.progress(len(_RUNS), transient=True):
        if starter.on_all_ranks("straight", *train, str(folder / "straight")):
            if world.world_size > 1:
                one = ("--parallel.interface", "", "--parallel.expect-ranks", "0")
                starter.on_rank_0("alone", *train, str(folder / "alone"), *one)
                starter.on_all_ranks("shares", *train, str(folder / "shares"), *_unequal_shares(world, folder))
            stop = ("--train.stop-at-step", str(STOP_AT))
            stopped = str(folder / "stopped")
            if starter.on_all_ranks("stopped", *train, stopped, *stop, status=EXIT_RESUMABLE):
                interface = ("--parallel.interface", starter.config.parallel.interface)
                starter.on_all_ranks("resumed", "resume", stopped, *interface)
    return Evidence(folder, seats, starter.failures)


def _unequal_shares(world: World, folder: Path) -> tuple[str, ...]:
    """Returns flags for the straight run's batch with unequal shares. Collective: rank 0 reads its config."""
    config = tomllib.loads((folder / "straight/config.toml").read_text()) if world.is_main else {}
    batch = world.group.broadcast_json(config["train"]["global_batch_size"] if config else 0)
    shares = in_proportion(batch, [3.0] + [1.0] * (world.world_size - 1))
    return "--train.global-batch-size", str(batch), "--parallel.shares", ",".join(map(str, shares))


def _seat(starter: _Starter) -> Seat:
    """Returns this rank's seat. Raises UserError if the configured device is missing."""
    env, parallel = starter.env, starter.config.parallel
    device = choose_device(parallel.device, env.local_rank, env.local_world_size, env.world_size)
    backend = {"auto": "nccl" if device.type == "cuda" else "gloo"}.get(parallel.backend, parallel.backend)
    interface = parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return Seat(
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        backend=backend if env.is_distributed else "no process group",
        network=f"{interface} {transfer_address(interface)}".strip() if env.is_distributed else "",
        versions=f"paceline {__version__}, torch {torch.__version__}",
    )
