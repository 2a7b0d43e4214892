"""`paceline verify`: what the laws say, proven on the machines at hand.

Every rank of the world runs this, and starts `paceline train` processes that take its place in worlds of their own, one
after the other, as a person would:

    straight   all ranks, 20 steps, replicas compared after each
    alone      rank 0 by itself, the same 20 steps
    stopped    all ranks, asked to stop after 10
    resumed    all ranks, from there to 20

Then the records of these runs are read and judged. Between them the ranks meet in a world of this program's own, which
carries nothing but words: how each run ended, and at which port of rank 0's host the next one's ranks find each other.
Each run has a store of its own there: in one that they shared, a rank of a late run would find its own place taken, by
this program, which is alive.
"""

import contextlib
import dataclasses
import os
import shutil
import socket
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rich.box
import rich.markup
import rich.table
import torch

from paceline import __version__
from paceline.base import faults, units
from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from paceline.base.net import listen
from paceline.bench import runs
from paceline.config import Config, to_toml
from paceline.record.console import Console
from paceline.world.device import choose_device
from paceline.world.env import Environment, is_loopback, listening_address, transfer_address
from paceline.world.runtime import World, open_world

NUM_STEPS, STOP_AT = 20, 10
CURVE_TOLERANCE = 1e-4  # nats a token, float32: the order of sums differs between worlds, and nothing else
_PATIENCE_S = 3600.0  # ranks wait for each other's runs, which have deadlines of their own
_RUNS = ("straight", "alone", "stopped", "resumed")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One law, and what was found of it here."""

    law: str
    passed: bool | None  # None: could not be judged, as `seen` says
    expected: str
    seen: str
    hint: str = ""  # what to look at, where it failed


@dataclass(frozen=True)
class Ended:
    """How a run of all ranks ended."""

    passed: bool
    trouble: str = ""  # the words of the rank concerned


def config_of(config: Config) -> Config:
    """Returns the config that the runs train with: the model, data and world of this one, for 20 steps in float32."""
    config = config.replace(
        "train",
        steps=NUM_STEPS,
        tokens=0,
        tokens_per_param=0.0,
        time_budget=0.0,
        dtype="float32",
        eval_every=-1,
        sample_tokens=0,
        stop_at_step=0,
        stop_after=0.0,
        init_from="",
    )
    config = config.replace("checkpoint", every=0, keep_best=False)
    return config.replace("parallel", check_every=1, repair=False).replace("log", every=1)


def verify(config: Config, env: Environment, console: Console, *, keep: bool = False) -> int:
    """Returns 0 if all that can be judged in this world holds, 1 if not; rank 0 says a table of it. Collective.

    config: as `config_of` returns it. The run folders, in the host's folder for temporary files, are removed unless
    something failed or `keep`. Raises UserError and RunError as opening a world does.
    """
    began = time.monotonic()
    quiet = dataclasses.replace(config.parallel, device="cpu", backend="gloo")  # in this world there are only words
    with runs.tidy(), open_world(quiet, env) as world:
        world.group.set_timeout(_PATIENCE_S)
        with _scratch(world) as folder:
            rows = _judged(_Runs(config, env, world, folder, console))
            num_failed = world.group.share_integers([sum(row.passed is False for row in rows)])[0][0]
            console.say(table(rows, world.world_size))
            console.say(_verdict(rows, world.world_size, time.monotonic() - began), style="bold")
            for row in rows:
                if row.passed is False:
                    console.say(f"\n{row.law}: {row.hint}", style="yellow")
            if num_failed or keep:
                folder.is_kept = True
                console.say(f"the runs and what they said are kept in {folder.path}")
    return EXIT_FAILED if num_failed else EXIT_DONE


# ---- the runs ----


@dataclass
class _Folder:
    """Where the runs are, at the same path on all hosts, whether or not these share a disk."""

    path: Path
    is_kept: bool = False


@contextlib.contextmanager
def _scratch(world: World) -> Iterator[_Folder]:
    made = tempfile.mkdtemp(prefix="paceline-verify-") if world.is_main else ""
    folder = _Folder(Path(world.group.broadcast_json(made)))
    try:
        folder.path.mkdir(mode=0o700, exist_ok=True)
        world.group.barrier()
        yield folder
        world.group.barrier()  # nobody reads there any more
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


class _Runs:
    """Starts the runs, each in all ranks' places or in rank 0's alone, and knows how they ended."""

    def __init__(self, config: Config, env: Environment, world: World, folder: _Folder, console: Console):
        self.config, self.env, self.world, self.folder, self.console = config, env, world, folder.path, console
        self._setup = self.folder / f"rank-{env.rank:05d}.toml"  # each has its own: interfaces differ between hosts
        self._setup.write_text(to_toml(config))

    def run(self, name: str) -> Path:
        """The folder of the run with this name."""
        return self.folder / name

    def said(self, name: str) -> Path:
        """The file that has what this rank's process of a run said."""
        return self.folder / f"{name}-rank-{self.env.rank:05d}.out"

    def train(self, name: str, *flags: str, status: int = EXIT_DONE) -> Ended:
        """Trains in all ranks' places. Collective; it passed where every rank ended with this status."""
        return self._shared(name, self._command(name, "train", "--config", str(self._setup), *flags), status)

    def resume(self, name: str) -> Ended:
        """Goes on with the run of this name in all ranks' places. Collective."""
        own = ("--parallel.interface", self.config.parallel.interface)
        return self._shared("resumed", [*runs.PACELINE, "resume", str(self.run(name)), *own], EXIT_DONE)

    def train_alone(self, name: str) -> Ended:
        """Trains in a world of rank 0 alone, for which the others wait. Collective.

        It is what the others are held against, so no injected fault strikes it."""
        code = EXIT_DONE
        if self.world.is_main:
            flags = ("--config", str(self._setup), "--parallel.interface", "", "--parallel.expect-ranks", "0")
            environ = runs.environment_of_one(os.environ)
            environ.pop(faults.VARIABLE, None)
            code = self._wait(name, self._command(name, "train", *flags), environ)
        return self._agreed(name, code, EXIT_DONE)

    def _command(self, name: str, verb: str, *flags: str) -> list[str]:
        return [*runs.PACELINE, verb, *flags, "--out", str(self.run(name))]

    def _shared(self, name: str, command: list[str], status: int) -> Ended:
        port = self.world.group.broadcast_json(self._free_port() if self.world.is_main else 0)
        changes = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"} if self.env.is_distributed else {}
        return self._agreed(name, self._wait(name, command, runs.environment_of_rank(os.environ, **changes)), status)

    def _free_port(self) -> int:
        if not self.env.is_distributed:
            return 0
        with listen(listening_address(self.env, self.config.parallel.interface), 0) as listener:
            port: int = listener.getsockname()[1]
        return port

    def _wait(self, name: str, command: list[str], environ: dict[str, str]) -> int:
        self.console.advance(_RUNS.index(name), f"run {_RUNS.index(name) + 1} of {len(_RUNS)}", name)
        process = runs.start(command, self.said(name), environ)
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()

    def _agreed(self, name: str, code: int, status: int) -> Ended:
        """How it ended for all ranks: the trouble is the first rank's that has said what it is."""
        passed = code == status
        troubles = self.world.group.share_text("" if passed else _trouble(code, runs.reason(self.said(name))))
        told = [f"rank {rank}: {trouble}" for rank, trouble in enumerate(troubles) if trouble]
        # A rank that lost the others only suffered; what made one end is the news.
        causes = [text for text in told if "lost the other ranks" not in text]
        return Ended(not told, (causes or told or [""])[0])


def _trouble(code: int, said: str) -> str:
    return f"{said or 'it said nothing'} (exit status {code})"


# ---- the judgement ----


def _judged(made: _Runs) -> list[Row]:
    """Makes the runs and returns what they show. Collective; what only rank 0 can read is judged by it alone."""
    seats = [Seat.from_text(text) for text in made.world.group.share_text(Seat.of(made).as_text())]
    world_size = made.world.world_size
    with made.console.progress(len(_RUNS), transient=True):
        straight = made.train("straight")
        alone = made.train_alone("alone") if world_size > 1 and straight.passed else None
        stopped = resumed = None
        if straight.passed:
            stopped = made.train("stopped", "--train.stop-at-step", str(STOP_AT), status=EXIT_RESUMABLE)
            resumed = made.resume("stopped") if stopped.passed else stopped
    if not made.world.is_main:
        return []
    return [
        judge_world(seats, made.run("straight"), straight),
        judge_replicas(made.run("straight"), straight, world_size),
        judge_curve(made.run("alone"), made.run("straight"), alone, world_size),
        judge_resume(made.run("straight"), made.run("stopped"), resumed),
    ]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank sits."""

    host: str
    device: str
    backend: str
    network: str  # interface and address of its transfers
    versions: str

    @classmethod
    def of(cls, made: _Runs) -> "Seat":
        """This rank's. Raises UserError where the device that was asked for is not here."""
        env, parallel = made.env, made.config.parallel
        device = choose_device(parallel.device, env.local_rank, env.local_world_size, env.world_size)
        backend = {"auto": "nccl" if device.type == "cuda" else "gloo"}.get(parallel.backend, parallel.backend)
        name = parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        address = transfer_address(name)
        return cls(
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            backend=backend if env.is_distributed else "no process group",
            network=f"{name} {address}".strip() if env.is_distributed else "",
            versions=f"paceline {__version__}, torch {torch.__version__}",
        )

    def as_text(self) -> str:
        return "\n".join(dataclasses.astuple(self))

    @classmethod
    def from_text(cls, text: str) -> "Seat":
        names = [item.name for item in dataclasses.fields(cls)]
        return cls(**dict(zip(names, text.split("\n"), strict=True)))


def judge_world(seats: list[Seat], straight: Path, ended: Ended) -> Row:
    """Returns whether the ranks that trained are those that came here, on equal devices, and all of them trained."""
    hosts = [seat.host for seat in seats]
    by_host = [f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts)]
    wanted = f"{_plural(len(seats), 'rank')} ({', '.join(by_host)}), on the same device, backend and versions"
    each = {
        "device": [seat.device for seat in seats],
        "backend": [seat.backend for seat in seats],
        "network": [seat.network for seat in seats],
        "versions": [seat.versions for seat in seats],
    }
    said = [", ".join(filter(None, dict.fromkeys(values))) for values in each.values()]
    problems = [f"{name} {_by_rank(values)}" for name, values in each.items() if name != "network" and _differ(values)]
    if len(set(hosts)) > 1 and any(is_loopback(seat.network.split()[-1]) for seat in seats):
        problems.append(f"transfers over {_by_rank(each['network'])}")
    problems += _who_trained(straight, hosts) if ended.passed else []
    return Row(
        law="the world",
        passed=not problems,
        expected=wanted,
        seen="; ".join(problems) or f"{_plural(len(seats), 'rank')}: " + "; ".join(filter(None, said)),
        hint="start the same version on all hosts, on equal devices (--parallel.device), and name the interface of "
        "each (--parallel.interface)",
    )


def _who_trained(straight: Path, hosts: list[str]) -> list[str]:
    """What the run's own records say of its ranks, where it is not what was expected."""
    problems = []
    start = runs.events(straight, "start")[0]
    if start["world_size"] != len(hosts):
        problems.append(f"the run had {_plural(start['world_size'], 'rank')}")
    if start.get("hosts", hosts) != hosts:
        problems.append(f"the run's ranks were on {_by_rank(start['hosts'])}")
    if idle := [row["step"] for row in runs.training_rows(straight) if len(row["rank_compute_ms"]) != len(hosts)]:
        problems.append(f"not all ranks took part in step {idle[0]}")
    return problems


def judge_replicas(straight: Path, ended: Ended, world_size: int) -> Row:
    """Returns whether all ranks had the same weights, and the same state where each has all of it, after each step."""
    strategy = tomllib.loads((straight / "config.toml").read_text())["parallel"]["strategy"] if ended.passed else "ddp"
    what = {"zero": "weights bit-identical", "fsdp": "each rank's share as it left it"}
    expected = f"{what.get(strategy, 'weights and state bit-identical')} after each of {NUM_STEPS} steps"
    hint = (
        "a bit that no update changed comes from memory, a processor, or libraries that differ between hosts: run "
        "`paceline verify --nproc 2` on each host alone"
    )
    row = Row(law="replicas are equal", passed=False, expected=expected, seen=ended.trouble, hint=hint)
    if world_size == 1:
        return dataclasses.replace(row, passed=None, seen="needs two ranks: --nproc 2, or torchrun")
    if not ended.passed:
        return row
    made, end = len(runs.training_rows(straight)), runs.events(straight, "end")[-1]
    states = end["state_digests"]
    if made != NUM_STEPS:
        return dataclasses.replace(row, seen=f"{made} steps were made")
    if strategy in ("ddp", "naive") and len(set(states)) > 1:
        return dataclasses.replace(row, seen=f"digests of the state at the end: {_by_rank(states)}")
    found = f"equal on {_plural(world_size, 'rank')} after each of {made} steps ({strategy}); digest {end['digest']}"
    return dataclasses.replace(row, passed=True, seen=found)


def judge_curve(alone: Path, straight: Path, ended: Ended | None, world_size: int) -> Row:
    """Returns whether the loss of each step was one process's. ended: of the lone run; None: there is none."""
    row = Row(
        law="the same curve",
        passed=None,
        expected=f"within {CURVE_TOLERANCE:g} nats a token of one process, {NUM_STEPS} steps",
        seen="needs two ranks: --nproc 2, or torchrun" if world_size == 1 else _NOT_JUDGED,
        hint=f"compare the loss, grad_norm and skipped of each step in {straight}/metrics.jsonl and "
        f"{alone}/metrics.jsonl: where they part first is where the ranks did something else",
    )
    if ended is None:
        return row
    if not ended.passed:
        return dataclasses.replace(row, passed=False, seen=f"the run of one process failed: {ended.trouble}")
    one, many = (runs.training_rows(run) for run in (alone, straight))
    if [a["step"] for a in one] != [b["step"] for b in many]:
        return dataclasses.replace(row, passed=False, seen=f"{len(one)} steps alone, {len(many)} on all ranks")
    gaps = {a["step"]: _gap(a["loss"], b["loss"]) for a, b in zip(one, many, strict=True)}
    worst = max(gaps, key=lambda step: gaps[step])
    skipped = [b["step"] for a, b in zip(one, many, strict=True) if a["skipped"] != b["skipped"]]
    seen = f"at most {gaps[worst]:.1e} apart, at step {worst}; loss {many[0]['loss']:.4f} to {many[-1]['loss']:.4f}"
    if skipped:
        seen += f"; step {skipped[0]} was skipped in one of the two"
    return dataclasses.replace(row, passed=gaps[worst] <= CURVE_TOLERANCE and not skipped, seen=seen)


def judge_resume(straight: Path, resumed: Path, ended: Ended | None) -> Row:
    """Returns whether the run that was stopped ended with the weights, state and curve of the one that was not."""
    row = Row(
        law="resume is exact",
        passed=None,
        expected=f"stopped at step {STOP_AT} and resumed: weights, state and losses of the straight run, bit for bit",
        seen=_NOT_JUDGED,
        hint=f"a resume reads {resumed}/checkpoints and verifies each byte, so what differs was computed otherwise: "
        "compare metrics.jsonl of both runs from the stop on, and look for other hardware or threads on a rank",
    )
    if ended is None:
        return row
    if not ended.passed:
        return dataclasses.replace(row, passed=False, seen=ended.trouble)
    wanted, found = (runs.events(run, "end")[-1] for run in (straight, resumed))
    if found["digest"] != wanted["digest"]:
        seen = f"weights {found['digest']}, and {wanted['digest']} of the straight run"
        return dataclasses.replace(row, passed=False, seen=seen)
    if found["state_digests"] != wanted["state_digests"]:
        rank = [a != b for a, b in zip(found["state_digests"], wanted["state_digests"], strict=True)].index(True)
        return dataclasses.replace(
            row, passed=False, seen=f"the weights are the same; the state of rank {rank} differs"
        )
    losses = [[step["loss"] for step in runs.training_rows(run)] for run in (straight, resumed)]
    if losses[0] != losses[1]:
        return dataclasses.replace(row, passed=False, seen="the weights are the same; the recorded losses differ")
    return dataclasses.replace(row, passed=True, seen=f"the same: weights {found['digest']}, state, {NUM_STEPS} losses")


_NOT_JUDGED = "not judged: the straight run failed"


def _gap(a: float | None, b: float | None) -> float:
    """How far two losses are apart; one that was not finite stands as null, and is far from everything."""
    return 0.0 if a == b else float("inf") if a is None or b is None else abs(a - b)


def _differ(values: list[str]) -> bool:
    return len(set(values)) > 1


def _by_rank(values: list[str]) -> str:
    """Values with the ranks that have them."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value} (rank {' '.join(of)})" for value, of in ranks.items())


def _plural(count: int, noun: str) -> str:
    """A number of things, for people."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ---- the table ----


def table(rows: list[Row], world_size: int) -> rich.table.Table:
    """Returns the rows for a terminal."""
    title = f"What holds here, on {_plural(world_size, 'rank')}"
    made = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for column in ("law", "", "expected", "seen"):
        made.add_column(column, overflow="fold")
    shown = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[dim]open[/]"}
    for row in rows:
        texts = [rich.markup.escape(text) for text in (row.law, row.expected, row.seen)]
        made.add_row(texts[0], shown[row.passed], *texts[1:])
    return made


def _verdict(rows: list[Row], world_size: int, seconds: float) -> str:
    num_failed, num_open = (sum(row.passed is value for row in rows) for value in (False, None))
    took = f"{_plural(world_size, 'rank')}, {units.duration(seconds)}"
    if num_failed:
        return f"{num_failed} of {len(rows)} checks failed ({took})"
    still = f"; {num_open} could not be judged in a world of one" if num_open else ""
    return f"{len(rows) - num_open} of {len(rows)} checks passed ({took}){still}"
