"""How ranks become one run: the same facts on all of them, one folder, equal replicas."""

import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

from paceline.base.errors import EXIT_FAILED, UserError
from paceline.base.status import note_status
from paceline.checkpoint.manifest import list_steps
from paceline.checkpoint.seers import open_saver, who_sees
from paceline.config import Config, to_toml
from paceline.data.blend import Blend
from paceline.data.loader import FixedBatches, Loader
from paceline.model.gpt import build
from paceline.optim.optimizer import Optimizer, whole_costs
from paceline.record import folder as run_folder
from paceline.record.console import Console, cry
from paceline.record.folder import RunFolder
from paceline.sync.replicas import broadcast_parameters
from paceline.sync.strategy import make_strategy
from paceline.train import agree, banner
from paceline.train.feed import Feed
from paceline.train.initial import check_tokenizer, load_initial
from paceline.train.request import Request
from paceline.train.resolve import Settings, resolve
from paceline.train.scaler import LossScaler
from paceline.train.state import Run
from paceline.train.step import Replica, dropout_seed
from paceline.world.device import peak_flops
from paceline.world.runtime import World
from paceline.world.watchdog import Verdict, Watchdog


def meet(request: Request, world: World, feed: Feed, console: Console) -> Run:
    """Returns this rank's part of a run that all ranks have agreed on. Collective.

    Raises UserError on all ranks, naming them and both values, where they differ in what must be alike.
    """
    agree.require_same(world.group, agree.facts(request.config, feed.blend))
    settings = resolve(request.config, feed.blend, world)
    agree.require_same(world.group, agree.choices(settings))
    source = settings.config.train.init_from
    if source and not request.resume:  # whose own checkpoints have the weights
        check_tokenizer(world.group, Path(source), feed.blend.tokenizer_json, feed.blend.name)
    opened = open_folder(request, world, settings.config, feed.blend)
    folder, seers = opened.folder, opened.seers
    console.open_log(folder.rank_log(world.rank))
    for warning in world.warnings:
        console.say(warning, style="yellow")
    peak = peak_flops(world.device, settings.dtype)
    peaks = [row[0] for row in world.group.share([peak.flops_per_s or 0.0])]
    banner.start(console, world, settings, feed, peak, folder.shown)
    if world.is_main:
        folder.on_trouble = lambda sentence: console.say(sentence, style="yellow")
    replica = make_replica(settings, world, from_weights=opened.begins)
    return Run(
        request=opened.request,
        world=world,
        feed=feed,
        settings=settings,
        folder=folder,
        console=console,
        replica=replica,
        saver=open_saver(
            world.group,
            folder.checkpoints,
            settings.config.checkpoint,
            seers,
            opened.token,
            owns_alone=settings.config.parallel.strategy in ("zero", "fsdp"),
            before_publishing=folder.sync,
        ),
        watchdog=make_watchdog(settings.config, world, folder, console),
        shapes={name: tuple(parameter.shape) for name, parameter in replica.model.named_parameters()},
        writer=seers.index(world.rank) if world.rank in seers else None,
        num_seers=len(seers),
        loader=Loader(feed.training, settings.plan, world.rank, settings.config.train.seed, world.device),
        validation=FixedBatches(feed.validation, settings.config.train.eval_sequences, world.device),
        world_peak=sum(peaks) if all(peaks) else None,
    )


class Opened(NamedTuple):
    """The run's folder, as all ranks know it."""

    folder: RunFolder
    request: Request  # as rank 0 has it: whether the run goes on
    seers: list[int]  # the ranks that see rank 0's folder: those of its host, and others where disks are shared
    token: str  # random, of this life of the ranks
    begins: bool  # nothing was saved yet


def open_folder(request: Request, world: World, config: Config, blend: Blend) -> Opened:
    """Returns the run's folder, opened by all ranks.

    Rank 0 makes and locks it; a host that does not see it keeps the logs of its ranks in one of its own. Where no --out
    was given on a host it is rank 0's path. Collective; raises rank 0's refusal on all ranks.
    """
    path = request.out or Path("runs") / f"{request.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(path)
    goes_on = request.resume or request.goes_on
    answer: dict[str, Any] = {}
    if world.is_main:
        try:
            if not goes_on:
                run_folder.check_new(path)
                folder = run_folder.create(path)
            folder.lock(request.job)
            if not goes_on:  # which may yet turn out to be of other data: the folder stays as it was until then
                folder.write_setup(to_toml(config), blend.tokenizer_json)
            answer = {"path": str(path), "goes_on": request.goes_on, "resume_step": request.resume_step}
            answer["begins"] = not list_steps(folder.checkpoints)
        except UserError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"cannot write to the run folder {path}: {error.strerror}"}
    answer = world.group.broadcast_json(answer)
    if "error" in answer:
        raise UserError(answer["error"], reach="world")
    if not world.is_main:
        folder = run_folder.create(request.out or Path(answer["path"]))
        if world.local_rank == 0 and not folder.config.exists():  # another host, with a disk of its own
            folder.write_setup(to_toml(config), blend.tokenizer_json)
    seers, token = who_sees(world.group, folder.path)
    request = dataclasses.replace(request, goes_on=answer["goes_on"], resume_step=answer["resume_step"])
    return Opened(folder, request, seers, token, answer["begins"])


def make_watchdog(config: Config, world: World, folder: RunFolder, console: Console) -> Watchdog:
    """Returns what ends this rank when it, or another, hangs; not running yet."""

    def tell(verdict: Verdict) -> None:
        speakers = [peer.rank for peer in world.peers if peer.rank not in verdict.culprits]
        console.log(verdict.message)
        if world.is_main:
            folder.append_event("hang", message=verdict.message, ranks=list(verdict.culprits))
        if world.rank == min(speakers, default=world.rank):
            cry(f"error: {verdict.message}")
        note_status(EXIT_FAILED)

    return Watchdog(
        world.peers,
        world.rank,
        world.store,
        timeout_s=config.parallel.timeout_s,
        waiting_for=lambda: world.group.waiting_for,
        on_verdict=tell,
        log=console.log_file,
    )


def make_replica(settings: Settings, world: World, from_weights: bool = True) -> Replica:
    """Returns a replica with the initial weights, equal on all ranks. Collective.

    Those of train.init-from are read where `from_weights`; else a checkpoint of this run takes their place.
    """
    config = settings.config
    is_sharded = config.parallel.strategy == "fsdp"
    # What does not fit on a device is made in the host's memory, and goes from there to the device block by block.
    model = build(config.model, config.train.seed, "cpu" if is_sharded else world.device)
    model.compute_dtype = settings.dtype
    model.checkpoint_blocks = config.train.activation_checkpoint
    if not is_sharded:  # else each rank has weights that nobody else has
        broadcast_parameters(model, world.group)
    if config.train.init_from and from_weights:
        load_initial(model, Path(config.train.init_from), world.group, world.device)
    if config.train.compile:
        model.compile_blocks()
    costs = whole_costs(config.optim, model.named_parameters())
    sync = make_strategy(config.parallel, model, world.group, costs, list(model.layers))
    optimizer = Optimizer(
        sync.pieces(), config.optim, lr=settings.lr, weight_decay=settings.weight_decay, compute_dtype=settings.dtype
    )
    return Replica(
        model=model,
        sync=sync,
        optimizer=optimizer,
        scaler=LossScaler.for_dtype(settings.dtype),
        dropout_seed=dropout_seed(config.train.seed),
    )
