"""How ranks become one run: the same facts on all of them, one folder, equal replicas."""

import time
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.files import replace
from paceline.config import Config, to_toml
from paceline.data.blend import Blend
from paceline.data.loader import FixedBatches, Loader
from paceline.model.gpt import build
from paceline.optim.optimizer import Optimizer
from paceline.record import folder as run_folder
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.sync.replicas import broadcast_parameters
from paceline.sync.strategy import make_strategy
from paceline.train import agree, banner
from paceline.train.feed import Feed
from paceline.train.request import Request
from paceline.train.resolve import Settings, resolve
from paceline.train.scaler import LossScaler
from paceline.train.state import Run
from paceline.train.step import Replica, dropout_seed
from paceline.world.device import peak_flops
from paceline.world.runtime import World


def meet(request: Request, world: World, feed: Feed, console: Console) -> Run:
    """Returns this rank's part of a run that all ranks have agreed on. Collective.

    Raises UserError on all ranks, naming them and both values, where they differ in what must be alike.
    """
    agree.require_same(world.group, agree.facts(request.config, feed.blend))
    settings = resolve(request.config, feed.blend, world)
    agree.require_same(world.group, agree.choices(settings))
    folder = open_folder(request, world, settings.config, feed.blend)
    console.open_log(folder.rank_log(world.rank))
    peak = peak_flops(world.device, settings.dtype)
    peaks = [row[0] for row in world.group.share([peak.flops_per_s or 0.0])]
    banner.start(console, world, settings, feed, peak, folder.shown)
    return Run(
        request=request,
        world=world,
        feed=feed,
        settings=settings,
        folder=folder,
        console=console,
        replica=make_replica(settings, world),
        loader=Loader(feed.training, settings.plan, world.rank, settings.config.train.seed, world.device),
        validation=FixedBatches(feed.validation, settings.config.train.eval_sequences, world.device),
        world_peak=sum(peaks) if all(peaks) else None,
    )


def open_folder(request: Request, world: World, config: Config, blend: Blend) -> RunFolder:
    """Rank 0 makes and locks the folder; the others keep their logs in theirs, the same one or one of their host.

    Where no --out was given on a host it is rank 0's path. Collective; raises rank 0's refusal on all ranks.
    """
    path = request.out or Path("runs") / f"{request.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(path)
    answer: dict[str, str] = {}
    if world.is_main:
        try:
            if not request.resume:
                run_folder.check_new(path)
                folder = run_folder.create(path)
            folder.lock()
            if not request.resume:  # which may yet turn out to be of other data: the folder stays as it was until then
                write_setup(folder, config, blend)
            answer = {"path": str(path)}
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
            write_setup(folder, config, blend)
    return folder


def write_setup(folder: RunFolder, config: Config, blend: Blend) -> None:
    """Writes what the run is made with: its config and its tokenizer."""
    replace(folder.config, to_toml(config).encode())
    if blend.tokenizer_json is not None:
        replace(folder.tokenizer, blend.tokenizer_json.encode())


def make_replica(settings: Settings, world: World) -> Replica:
    """Returns a replica with the initial weights, equal on all ranks. Collective."""
    config = settings.config
    model = build(config.model, config.train.seed, world.device)
    model.compute_dtype = settings.dtype
    model.checkpoint_blocks = config.train.activation_checkpoint
    broadcast_parameters(model, world.group)
    if config.train.compile:
        model.compile_blocks()
    return Replica(
        model=model,
        sync=make_strategy(config.parallel, model, world.group),
        optimizer=Optimizer(
            model, config.optim, lr=settings.lr, weight_decay=settings.weight_decay, compute_dtype=settings.dtype
        ),
        scaler=LossScaler.for_dtype(settings.dtype),
        dropout_seed=dropout_seed(config.train.seed),
    )
