"""Ranks agree on facts, config, data and run folder, and start with equal replicas."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.base import faults
from paceline.base.errors import EXIT_FAILED, PacelineError, UserError
from paceline.base.process import record_status
from paceline.checkpoint.steps import list_steps
from paceline.config import Config, flatten, from_toml, to_toml, with_size_of
from paceline.data.loader import FixedBatches, Loader
from paceline.data.mixture import Blend
from paceline.model import cost
from paceline.model.gpt import build
from paceline.optim.optimizer import make_optimizers
from paceline.record import folder as run_folder
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.record.output import print_error
from paceline.replica.folder import CheckpointFolder
from paceline.replica.recorder import peak_of_all_ranks
from paceline.replica.replica import Replica
from paceline.replica.stopping import StopRequest
from paceline.replica.updates import LossScaler
from paceline.train import banner
from paceline.train.changes import LOCAL
from paceline.train.data import TrainingData
from paceline.train.initial import load_initial, require_same_tokenizer
from paceline.train.progress import Progress
from paceline.train.recorder import Recorder
from paceline.train.request import RUNS, Request
from paceline.train.resolve import Settings, chosen_dtype, out_of_memory, resolve
from paceline.train.size import sized
from paceline.world.config import SHARDS_WEIGHTS
from paceline.world.device import product_dtype, use_deterministic_kernels
from paceline.world.device_clock import DeviceClock
from paceline.world.group import SPEAKS_FIRST_S, Group, from_rank_0
from paceline.world.processor import peak_flops
from paceline.world.runtime import World
from paceline.world.watchdog import Verdict, Watchdog

_TIMED_MS = 50.0
_CONTENT = "data content (paceline data info DIR --verify says which shard)"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One rank's part of a run. Only `progress` changes during training."""

    request: Request
    world: World
    data: TrainingData
    settings: Settings
    folder: RunFolder
    console: Console
    recorder: Recorder
    replica: Replica
    checkpoints: CheckpointFolder
    watchdog: Watchdog
    loader: Loader
    validation: FixedBatches
    progress: Progress = field(default_factory=Progress)

    @property
    def config(self) -> Config:
        """The run's config, including every automatic choice that changes its curve."""
        return self.settings.config

    @property
    def group(self) -> Group:
        return self.world.group

    def at(self, phase: str) -> str | None:
        """Reports a phase to the watchdog. Returns the fault that a test injects here, if any."""
        step = self.progress.step + 1
        self.watchdog.enter(phase, step)
        return faults.strike(phase, step)


def meet(request: Request, world: World, data: TrainingData, console: Console, stop: StopRequest) -> Setup:
    """Returns this rank's part of an agreed run. Collective. Raises UserError on all ranks, naming them and both
    values, if required facts differ."""
    # The data was opened with this host's config; all else of a run that continues is rank 0's.
    require_alike(world.group, replace(request.asked or request.config, data=request.config.data), data.blend)
    asked = _config_of_rank_0(request, world)
    asked = replace(asked, data=asked.data.absolute())  # as recorded: a resume may start in another folder
    vocab_size, dtype = data.blend.first.vocab_size, product_dtype(chosen_dtype(asked, world.facts, []))
    peak = peak_flops(world.device, dtype)
    speed = _training_flops_per_s(asked, vocab_size, dtype, world) if asked.model.size == "auto" else 0.0
    settings = resolve(asked, vocab_size, world.facts, speed, int(data.blend.read_most(data.training)[1]))
    config = settings.config
    if config.train.deterministic:
        use_deterministic_kernels()
    request, folder, is_new = open_folder(request, world, config, data.blend)
    source = config.train.init_from
    if source and is_new:  # else the weights come from the run's own checkpoints
        first = data.blend.first
        from_rank_0(world.group, partial(require_same_tokenizer, Path(source), first.tokenizer_json, data.blend.name))
    console.open_log(folder.rank_log(world.rank))
    for warning in world.warnings:
        console.say(warning, style="yellow")
    if request.is_restart:
        banner.start_again(console, world, settings, folder.shown)
    else:
        banner.start(console, world, settings, data, peak, folder.shown, is_new)
    if world.is_main:
        folder.on_trouble = lambda sentence: console.say(sentence, style="yellow")
    try:
        replica = make_replica(settings, world, console, is_new)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, settings, world.facts[world.rank]) from error
    # One unnamed replica. No random generators are saved, since nothing here draws from a global one.
    checkpoints = CheckpointFolder(
        folder.path, config.checkpoint, {"": replica}, {}, keeps_generators=False, resume_step=request.resume_step
    )
    checkpoints.before_publishing = folder.sync
    setup = Setup(
        request=request,
        world=world,
        data=data,
        settings=settings,
        folder=folder,
        console=console,
        recorder=Recorder(world, folder, console, settings, peak_of_all_ranks(world, dtype)),
        replica=replica,
        checkpoints=checkpoints,
        watchdog=make_watchdog(config, world, folder, console, checkpoints.writers),
        loader=Loader(data.training, settings.plan, world.rank, config.train.seed, world.device),
        validation=FixedBatches(data.validation, config.train.eval_sequences, world.device),
    )
    replica.at, replica.stop = setup.at, stop
    return setup


def _config_of_rank_0(request: Request, world: World) -> Config:
    """Returns rank 0's config with this host's own paths and devices: a host that is new to the run has only what the
    command says. With model.size auto, a command that is started again keeps the size that its first attempt chose.
    Collective."""

    def text() -> str:
        config = request.config
        stored = RunFolder(request.out).config if request.is_restart and request.out else None
        if config.model.size == "auto" and stored and stored.exists():
            begun = from_toml(stored.read_text(encoding="utf-8"), "config.toml of the run", Config())
            config = with_size_of(begun, config)
        return to_toml(config)

    config = from_toml(from_rank_0(world.group, text), "the config of rank 0", Config())
    for name in LOCAL:
        section, item = name.replace("-", "_").split(".")
        config = config.replace(section, **{item: getattr(getattr(request.config, section), item)})
    return replace(config, track=request.config.track)


def open_folder(request: Request, world: World, config: Config, blend: Blend) -> tuple[Request, RunFolder, bool]:
    """Returns rank 0's request, the run's folder, and whether nothing was saved in it yet.

    Rank 0 makes and locks the folder. A host that does not see it keeps its ranks' logs in a folder of its own; without
    --out on that host, at rank 0's path. Collective; raises rank 0's UserError on all ranks, and on a rank alone if it
    cannot write to its own folder.
    """
    folder = RunFolder(request.out or RUNS)
    num_saved, has_heard = 0, False
    with suppress(OSError):  # rank 0 says what is wrong with its folder
        num_saved = len(list_steps(folder.checkpoints)) if request.out else 0
        has_heard = bool(request.out) and folder.saved_elsewhere.exists()
    rows = world.group.share([num_saved, has_heard])
    with_saves = [rank for rank, row in enumerate(rows) if row[0]]
    knowing = sorted({world.peers[rank].host for rank, row in enumerate(rows) if row[1]})

    def make() -> dict[str, Any]:
        nonlocal folder
        resumes = request.resume or request.is_restart
        with writing_to(request.out or RUNS, UserError):
            path = request.out or request.new_folder()
            if with_saves and not num_saved:  # no silent start from step 0
                host, others = world.peers[0].host, sorted({world.peers[rank].host for rank in with_saves})
                raise UserError(
                    f"host {', '.join(others)} has checkpoints in {path}, and host {host}, which has rank 0, has none. "
                    f"To continue that run, copy the folder to {host} or give rank 0 to a host that has it; for a new "
                    "run choose another --out"
                )
            if knowing and not num_saved and (has_heard or not folder.config.exists()):
                raise UserError(
                    f"the run in {path} was saved, as host {', '.join(knowing)} knows, and no host here has its "
                    f"checkpoints: copy the folder of the host that had rank 0 to {world.peers[0].host}; for a new run "
                    "choose another --out"
                )
            if not resumes:
                run_folder.check_new(path)
                folder = run_folder.create(path)
            folder.lock(request.job)
            if not resumes:  # a resumed run may turn out to have other data: write nothing before that is checked
                folder.write_setup(to_toml(config), blend.first.tokenizer_json)
        is_new = not list_steps(folder.checkpoints)
        return {"path": str(path), "is_new": is_new, "request": [request.is_restart, request.resume_step]}

    answer = from_rank_0(world.group, make)
    if not world.is_main:
        folder = run_folder.create(request.out or Path(answer["path"]))
    is_restart, resume_step = answer["request"]
    return replace(request, is_restart=is_restart, resume_step=resume_step), folder, answer["is_new"]


@contextmanager
def writing_to(path: Path, refusal: type[PacelineError]) -> Iterator[None]:
    """Turns an OSError inside into such an error: the run folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise refusal(f"cannot write to the run folder {path}: {error.strerror or error}") from None


def make_watchdog(
    config: Config, world: World, folder: RunFolder, console: Console, writers: Sequence[int]
) -> Watchdog:
    """Returns the watchdog, not started yet; it ends this rank if any rank hangs. writers: ranks that see rank 0's run
    folder; the first that is not to blame records the event."""

    def report(verdict: Verdict) -> None:
        speaker = verdict.speaker(world.world_size)
        console.log(verdict.message)
        if world.rank == next((rank for rank in writers if rank not in verdict.culprits), speaker):
            folder.append_event("hang", message=verdict.message, ranks=list(verdict.culprits))
        if world.rank == speaker:
            print_error(f"error: {verdict.message}")
        record_status(EXIT_FAILED)

    world.group.set_timeout(config.parallel.timeout_s + SPEAKS_FIRST_S)
    return Watchdog(world, timeout_s=config.parallel.timeout_s, on_verdict=report, log=console.log_file)


def make_replica(settings: Settings, world: World, console: Console, is_new: bool) -> Replica:
    """Returns a replica with the initial weights, equal on all ranks. Collective. is_new: nothing was saved yet, so
    train.init-from is used if set."""
    config = settings.config
    strategy = config.parallel.strategy
    assert strategy != "auto"
    # An fsdp model may not fit on the device: it is made on the host and moved block by block.
    model = build(config.model, config.train.seed, "cpu" if strategy in SHARDS_WEIGHTS else world.device)
    model.compute_dtype = product_dtype(config.train.dtype)
    model.checkpoint_blocks = config.train.activation_checkpoint
    if config.train.init_from and is_new:
        for problem in load_initial(model, Path(config.train.init_from), world.group, world.device):
            console.say(f"passed over a damaged checkpoint: {problem}", style="yellow")
    if config.train.dtype == "float8":
        model.use_float8()
    if config.train.compile:
        model.compile_blocks()
    optimizers = make_optimizers(
        config.optim,
        model.named_parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        compute_dtype=model.compute_dtype,
    )
    # With zero each waits for its own weights; fsdp gathers whole blocks, and the rest at once.
    blocks = model.stages() if strategy == "zero" else list(model.layers)
    replica = Replica(
        model,
        optimizers,
        world,
        strategy=strategy,
        blocks=blocks,
        bucket_mb=config.parallel.bucket_mb,
        wire=config.parallel.wire,
        read_as=model.read_as(),
        sync_every=config.parallel.sync_every,
        rounded_gradients=model.rounded_gradients(),
    )
    replica.waits_at_once = False  # the trainer calls the whole model only
    replica.scaler = LossScaler.for_dtype(model.compute_dtype)  # the model casts its own products
    replica.compare_every = 0  # checks.py compares more
    return replica


def require_alike(group: Group, config: Config, blend: Blend) -> None:
    """Raises UserError on all ranks, naming them and their values, if data or configs differ. One rank of each host
    has looked at the data; the others take the fingerprint from it. Collective."""
    facts = {
        "data": blend.listing[:16],
        **({_CONTENT: blend.content_digest[:16]} if blend.is_checked else {}),  # one rank of each host
        **{
            name: value
            for name, value in flatten(config).items()
            if name not in LOCAL and not name.startswith("track.")
        },
    }
    rows, differences = group.share_json(facts), []
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks_by_value: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            if name == _CONTENT and name not in row:
                continue
            ranks_by_value.setdefault(json.dumps(row.get(name, "not there")), []).append(str(rank))
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
            differences.append(f"{name}: {values}")
    if differences:
        text = ". ".join(differences)
        raise UserError(f"ranks differ, and would train different models: {text}. Make them equal", reach="world")
    blend.fingerprint = group.broadcast_json(blend.fingerprint if blend.is_checked else "")


def _training_flops_per_s(config: Config, vocab_size: int, dtype: torch.dtype, world: World) -> float:
    """Returns the FLOP/s that all ranks reach together in forward and backward of the given shape. A peak says little
    of it: training reaches 43% of AVX2's and 9% of AMX's (docs/LOG.md). A GPU waits for its host unless the batch is
    large, so the batch grows up to the one that would be chosen. Collective."""
    length, vocab_size = config.data.seq_len, config.model.vocab_size or vocab_size
    model_config = replace(config.model, vocab_size=vocab_size, n_positions=length)
    model = build(model_config, 0, world.device)
    model.compute_dtype = dtype
    clock, num_sequences, took_ms, chosen = DeviceClock(world.device), 2, 0.0, math.inf
    while took_ms < _TIMED_MS and num_sequences < chosen:
        num_sequences *= 2
        tokens = (torch.arange(num_sequences * length, device=world.device) % vocab_size).view(num_sequences, -1)
        took_ms = math.inf
        for _ in range(3):  # the first of a shape is slow: on a GPU attention's kernel is prepared
            start = clock.stamp()
            (model(tokens, tokens) / tokens.numel()).backward()
            end = clock.stamp()
            clock.finish()
            took_ms = min(took_ms, clock.ms(start, end))
        flops_per_s = 1e3 * tokens.numel() / took_ms * cost.flops_per_token(model_config, length)
        chosen = sized(config, vocab_size, flops_per_s, 1)[0].train.global_batch_size
    return sum(row[0] for row in world.group.share([flops_per_s]))
