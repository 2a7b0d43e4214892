"""What goes wrong silently in data-parallel scripts, found before the first step: an error, or a warning, with the
script's line.

Others are found where they happen: another verb on another rank by the watchdog (world/calls.py), batches that are
averaged wrongly and backward passes beside the replica by the step (replica.py), workers that draw alike by `share`.
"""

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.base.errors import UserError
from paceline.sync.replicas import differences
from paceline.world.calls import caller, place
from paceline.world.runtime import World

_SHOWN = 3  # names in a message
COMPILED = "_orig_mod."  # what torch.compile puts before the names of a module's parameters


def warn(text: str, world: World) -> None:
    """Warns once, on rank 0, at the script's line."""
    frame = caller()
    if world.is_main and frame is not None:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def check_sharding(model: nn.Module, strategy: str, need_whole: Sequence[torch.optim.Optimizer]) -> None:
    """Raises UserError where `fsdp` would leave something of the model behind, or give optimizers that need whole
    parameters rows of them."""
    if strategy == "fsdp" and need_whole:
        raise UserError(
            f"{place()}: strategy fsdp gives an optimizer a part of each parameter, and "
            f"{' or '.join(type(optimizer).__name__ for optimizer in need_whole)} needs whole ones: take strategy zero"
        )
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if strategy == "fsdp" and scalars:
        raise UserError(
            f"{place()}: strategy fsdp divides parameters by rows, and {listed(scalars)} is a single number: make it "
            "of shape [1], or take strategy zero"
        )
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if strategy == "fsdp" and frozen:
        raise UserError(
            f"{place()}: strategy fsdp keeps and saves trainable weights only, and {listed(frozen)} "
            "is frozen: take strategy zero, or train all of them"
        )


def check_wrapper(model: nn.Module) -> None:
    """Raises UserError where the model is in a wrapper that synchronises by itself, and whose state has its prefix."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, wrappers) or type(module).__name__ == "FullyShardedDataParallel":
            where = f"its part {name} is" if name else "it is"
            raise UserError(
                f"{place()}: the model comes wrapped: {where} a {type(module).__name__}, which synchronises by itself "
                "and puts a prefix before every name that is saved. Give the module inside it (`.module`)"
            )


def check_device(model: nn.Module, world: World) -> None:
    """Raises UserError where the model is not where this rank computes."""
    for name, parameter in model.named_parameters():
        here, there = world.device, parameter.device
        if there.type != here.type or (None not in (there.index, here.index) and there.index != here.index):
            raise UserError(
                f"{place()}: {name} is on {there}, and this rank computes on {here}: say "
                "`model.to(world.device)` first, then make the optimizer"
            )


def check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], world: World) -> None:
    """Raises UserError where an optimizer would update tensors that are not the model's; warns of what none updates."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    given = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(parameter not in names for parameter in given)
    if strangers:
        raise UserError(
            f"{place()}: {strangers} of the optimizer's {len(given)} parameters are not the model's: it was made "
            "before the model was moved, wrapped, tied or loaded with new parameters, and would train what nobody "
            "uses. Make the optimizer after that, from model.parameters()"
        )
    if len(set(given)) < len(given):
        raise UserError(f"{place()}: a parameter is in two groups or two optimizers, and would be updated twice")
    updated = set(given)
    idle = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in updated]
    if idle:
        warn(
            f"no optimizer has {listed(idle)}: gradients are made and nothing is updated by them; give them to the "
            "optimizer, or say requires_grad_(False)",
            world,
        )


def check_same_start(model: nn.Module, world: World) -> None:
    """Raises UserError on all ranks where they have made different models; warns where only the values differ, which
    are rank 0's on all ranks from here on. Collective."""
    tensors = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    mine = " ".join(f"{name} {list(t.shape)} {t.dtype} {t.requires_grad}" for name, t in model.named_parameters())
    buffers = " ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in model.named_buffers())
    texts = world.group.share_text(f"{mine} {buffers}")
    odd = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if odd:
        raise UserError(
            f"{place()}: rank {listed(odd)} made another model than rank 0: names, shapes or number formats of its "
            "parameters differ. All ranks must make the same model, from the same settings",
            reach="world",
        )
    found = differences(tensors, world.group, quick=True)
    seeds = [row[0] for row in world.group.share_integers([torch.initial_seed() % (1 << 63)])]
    if not found:
        return
    said = f"weights differ between ranks before training ({listed([difference.name for difference in found])})"
    if len(set(seeds)) > 1:
        ranks = ", ".join(f"{seed} on rank {rank}" for rank, seed in enumerate(seeds[:4]))
        why = f"torch was seeded otherwise on each rank before the model was made ({ranks}); seed alike there"
    else:
        why = "the seeds are the same, so a rank read other weights, or drew more random numbers before"
    warn(f"{said}: {why}. All ranks start with rank 0's", world)


def check_kind(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises UserError for an optimizer whose step needs more than gradients."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                f"{place()}: LBFGS makes several backward passes in a step, by a closure, and each would have to be "
                "synchronised; take an optimizer that makes one"
            )


def tell_of_batch_norm(model: nn.Module, world: World) -> list[torch.Tensor]:
    """Returns the running statistics of batch norms, which are averaged over ranks after each step; warns that the
    batch itself is each rank's own."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    own = [norm for norm in norms if not isinstance(norm, nn.SyncBatchNorm)]
    if own and world.world_size > 1:
        warn(
            f"{len(own)} batch norms normalise with what is in one rank's micro-batch, so the curve depends on the "
            "number of ranks; their running statistics are averaged over ranks after each step. On GPUs "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) makes them one; group or layer norms need none",
            world,
        )
    return [buffer for norm in norms for buffer in norm.buffers()]


def digest_of(batch: object) -> int:
    """Returns a number that tells micro-batches apart, at least 1; 0 for one without a tensor."""
    if isinstance(batch, torch.Tensor):
        return zlib.crc32(batch.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data) or 1
    inside: Iterable[object] = ()
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, tuple | list):
        inside = batch
    found = [digest for digest in map(digest_of, inside) if digest]
    return zlib.crc32(repr(found).encode()) or 1 if found else 0


def tell_of_same_rows(first_digests: Sequence[int], world: World) -> None:
    """Warns where ranks began with the same micro-batch, as a loader gives it that is not shared out. By rank; 0: not
    known."""
    alike = [rank for rank, digest in enumerate(first_digests) if digest and first_digests.count(digest) > 1]
    if alike:
        warn(
            f"ranks {listed(alike)} began with the same micro-batch: each is to have rows of its own. Draw them by "
            "paceline.share(loader, world), or take a rank's own rows by BatchPlan",
            world,
        )


def tell_of_prefix(model: nn.Module, world: World) -> None:
    """Warns where the state of a compiled model is taken with the prefix that no other program expects."""

    def after_state(module: nn.Module, state: Mapping[str, object], prefix: str, _: object) -> None:
        if not prefix and any(name.startswith(COMPILED) for name in state):
            warn(
                f"names of this state begin with {COMPILED}, which torch.compile put there; a model that is not "
                "compiled will not load it. Take replica.state_dict()",
                world,
            )

    model.register_state_dict_post_hook(after_state)  # type: ignore[no-untyped-call]


def plain(name: str) -> str:
    """Returns a parameter's name without what torch.compile put before it."""
    return name.replace(COMPILED, "")


def listed(items: Sequence[object]) -> str:
    """Returns the items for people, the first few by name."""
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
