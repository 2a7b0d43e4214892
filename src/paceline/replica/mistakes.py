"""Mistakes that would stay silent in data-parallel scripts, found before or in the first step, with the script's line.

Others are found elsewhere: calls that not all ranks make, by the watchdog (world/calls.py); wrong averages, and
backward passes outside the replica, by the step (step.py).
"""

import functools
import math
import warnings
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.base.errors import nearest
from paceline.base.sums import exact_sum
from paceline.base.units import listed
from paceline.replica.batch import tensors_in
from paceline.replica.result import Exchanged
from paceline.sync.hooks import ModuleHook
from paceline.sync.replicas import broadcast, differences, take_strides_of_rank_0
from paceline.world.calls import Calls, caller, mistake
from paceline.world.config import SHARDS_WEIGHTS
from paceline.world.facts import unequal_kinds
from paceline.world.runtime import World

COMPILED = "_orig_mod."  # torch.compile's prefix of parameter names
_SCALED = "paceline_scaled"  # in the metadata of a loss's last operation: a GradScaler made it


def warn(text: str, world: World) -> None:
    frame = caller()
    if world.rank == 0 and frame is not None:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def check_model(model: nn.Module, optimizers: Sequence[Any], strategy: str, world: World) -> None:
    """Raises UserError if model or optimizers cannot be replicated with the strategy; warns of parameters that no
    optimizer has."""
    _check_modules(model)
    _check_kinds(model)
    if not is_on_the_host(model, strategy, world):
        _check_device(model, world)
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    _check_parameters(model, optimizers, world)
    _check_sharding(model, strategy, optimizers)


def is_on_the_host(model: nn.Module, strategy: str, world: World) -> bool:
    """Whether an `fsdp` model is in host memory; it may be too large for the device before it is sharded."""
    on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return strategy in SHARDS_WEIGHTS and on_host and world.device.type != "cpu"


def _check_sharding(model: nn.Module, strategy: str, optimizers: Sequence[Any]) -> None:
    """Raises UserError if the strategy cannot shard the model."""
    known = ("torch.", "paceline.")
    others = [type(each).__name__ for each in optimizers if not type(each).__module__.startswith(known)]
    if strategy in ("zero", *SHARDS_WEIGHTS) and others:
        raise mistake(
            f"strategy {strategy} shards the state of optimizers of torch.optim, which keep it by "
            f"parameter, and {listed(others)} may keep it otherwise: take strategy ddp, on processors of one kind"
        )
    parameters = dict(model.named_parameters())
    scalars = [name for name, parameter in parameters.items() if not parameter.dim()]
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    for names, why in (
        (scalars, "{} is a single number, which has no rows: make it of shape [1], or take strategy zero"),
        (frozen, "{} is frozen, and only trainable weights are saved: take strategy zero, or train all of them"),
    ):
        if strategy in SHARDS_WEIGHTS and names:
            raise mistake(f"strategy {strategy} shards parameters by rows, and {why.format(listed(names))}")


def _check_modules(model: nn.Module) -> None:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, wrappers) or type(module).__name__ == "FullyShardedDataParallel":
            where = f"its part {name} is" if name else "it is"
            raise mistake(
                f"the model is wrapped: {where} a {type(module).__name__}, which synchronises by itself "
                "and prefixes every name that is saved. Give the module inside it (`.module`)"
            )
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise mistake(
                "the model is sharded already, by fully_shard or an earlier Replica with strategy fsdp: "
                "make model, optimizer and Replica again"
            )


def _check_kinds(model: nn.Module) -> None:
    """Raises UserError for parameters that cannot be summed over ranks, and for tensors that cannot be compared or
    changed."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise mistake("the model has no parameters: nothing in it can be trained")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise mistake(
                f"{name} has no shape yet, because its layer is lazy: run the model on one sample first, then make "
                "optimizer and Replica"
            )
        if parameter.is_complex():
            raise mistake(
                f"{name} is of {parameter.dtype}, and gradients are summed and clipped as real numbers: make it a real "
                "parameter with a last dimension of 2, and use torch.view_as_complex(...) in the forward pass"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise mistake(
                f"the buffer {name} is of layout {buffer.layout}, which is neither compared between ranks nor saved: "
                "register its indices and values, or make it dense"
            )
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        if tensor.is_inference():
            raise mistake(
                f"{name} was made under torch.inference_mode(), outside of which torch lets nobody change it: make it "
                "outside, or register its clone()"
            )


def full_names(model: nn.Module, names: Iterable[str], argument: str) -> dict[str, str]:
    """Returns each parameter's first name in the model by the name that was given, with or without torch.compile's
    prefix. Raises UserError for an unknown one. argument: where they were given."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    known = {
        key: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        for key in (name, plain(name))
    }
    for name in names:
        if name not in known:
            raise mistake(f"{argument} names {name}, which is not a parameter of the model{nearest(name, known)}")
    return {name: known[name] for name in names}


def _check_device(model: nn.Module, world: World) -> None:
    for name, parameter in model.named_parameters():
        here, there = world.device, parameter.device
        if there.type != here.type or (None not in (there.index, here.index) and there.index != here.index):
            raise mistake(
                f"{name} is on {there}, and this rank computes on {here}: call "
                "`model.to(world.device)` first, then make the optimizer"
            )


def _check_optimizer(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "base_optimizer"):
        raise mistake(
            f"{name} makes several backward passes in a step (by a closure, or as SAM and Lookahead wrap "
            "another optimizer), and each would have to be synchronised: take one that makes one"
        )
    if not all(hasattr(optimizer, attribute) for attribute in ("param_groups", "state", "step")):
        raise mistake(f"a {name} is not an optimizer: it has no param_groups, state and step()")


def _check_parameters(model: nn.Module, optimizers: Sequence[Any], world: World) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    others = sum(parameter not in names for parameter in held)
    if others:
        raise mistake(
            f"{others} of the optimizer's {len(held)} parameters are not the model's: it was made "
            "before the model was moved, wrapped, tied or loaded with new parameters. Make the optimizer after that, "
            "from model.parameters(). If they are of another module, such as a criterion, put both into one nn.Module"
        )
    if len(set(held)) < len(held):
        raise mistake("a parameter is in two groups or two optimizers, and would be updated twice")
    idle = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in set(held)]
    if idle:
        warn(f"no optimizer has {listed(idle)}: give them to one, or call requires_grad_(False)", world)


def start_alike(model: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's parameters and buffers where they differ, and warns of it. Equal seeds are not enough:
    torch's normal_ differs in the last bits between processors with different vector units. Raises UserError on all
    ranks if models differ in shape. Collective."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    kinds = [f"{name} {list(t.shape)} {t.dtype} {t.requires_grad}" for name, t in {**parameters, **buffers}.items()]
    texts = world.group.share_text(" ".join(kinds))
    other = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if other:
        raise mistake(
            f"rank {listed(other)} made another model than rank 0: names, shapes or number formats differ. "
            "All ranks must make the same model, from the same settings",
            reach="world",
        )
    take_strides_of_rank_0(list(parameters.values()), world.group)
    tensors = {name: tensor.detach() for name, tensor in [*parameters.items(), *buffers.items()]}
    different = differences(tensors, world.group)
    broadcast([tensors[difference.name] for difference in different], world.group)
    seeds = [row[0] for row in world.group.share_integers([torch.initial_seed() % (1 << 63)])]
    if not different or unequal_kinds(world.facts):  # there equal seeds give weights that differ in the last bits
        return
    why = "the seeds are the same, so a rank read other weights, or drew more random numbers before"
    if len(set(seeds)) > 1:
        ranks = ", ".join(f"{seed} on rank {rank}" for rank, seed in enumerate(seeds[:4]))
        why = f"torch's seed before the model was made differs by rank ({ranks}); seed alike there"
    names = listed([difference.name for difference in different])
    warn(f"weights differ between ranks before training ({names}): {why}. All ranks start with rank 0's", world)


def check_loss(loss: torch.Tensor, num_micro_batches: int, is_first_step: bool, world: World) -> None:
    """Raises UserError if the loss cannot have a backward pass, or if a GradScaler has scaled it. Warns in the first
    step if the loss was divided by the number of micro-batches, this rank's or all ranks'. The loss's last operation
    shows both."""
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shape = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise mistake(f"the loss is {shape}; backward needs the mean, a tensor of one number")
    if not loss.requires_grad:
        raise mistake(
            "the loss depends on no weight that is trained: it was computed under torch.no_grad(), "
            "detached, or all its weights are frozen"
        )
    made_by = loss.grad_fn
    factor = getattr(made_by, "_saved_other", None)
    if made_by is None or not isinstance(factor, torch.Tensor) or factor.numel() != 1:
        return
    if _SCALED in _metadata(made_by):
        raise mistake(
            "the loss was scaled by a GradScaler, which looks at one rank's gradients only. Remove "
            'the GradScaler calls and use Replica(..., dtype="float16"), which scales for all ranks together'
        )
    if made_by.name() != "DivBackward0" or num_micro_batches == 1 or not is_first_step or factor.requires_grad:
        return
    size, divisor = world.world_size, float(factor)
    if divisor == num_micro_batches or (num_micro_batches - 1) * size < divisor <= num_micro_batches * size:
        warn(
            f"the loss is divided by {divisor:g}, the number of micro-batches of the step, and the replica averages "
            "over the global batch already: remove that division, or the gradient is too small by that factor",
            world,
        )


def check_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raises UserError for a block that is no module of the model: it would have no effect."""
    modules = set(model.modules())
    if foreign := [type(block).__name__ for block in blocks if block not in modules]:
        raise mistake(f"blocks has {listed(foreign)}, and the model has no such module: give modules of the model")


def checked_norm(max_norm: Any) -> float:
    """Returns the norm to clip to. Raises UserError, before any collective, for what is none."""
    if not isinstance(max_norm, int | float | np.number) or not max_norm >= 0:
        raise mistake(f"max_norm is {max_norm!r}; it is the norm to clip to, at least 0, and 0 clips nothing")
    return float(max_norm)


def check_order(replica: object, calls: Calls) -> None:
    """Raises UserError if another replica's gradients are on their way: a rank without a micro-batch sends its own in
    `finish`, so in another order."""
    if calls.reducing not in (None, replica):
        raise mistake(
            "the last step.backward of a step came between that of another replica and its step.finish(): call that "
            "step.finish() first, or ranks would send gradients in different orders"
        )


def check_step(
    rows: Sequence[Exchanged], unused: Sequence[str], num_trained: int, is_first: bool, world: World
) -> None:
    """Raises UserError on all ranks, or warns, for mistakes that a step's all-gather shows. rows: by rank; unused: of
    `num_trained` parameters, by any rank."""
    sizes = {int(size) for row in rows for size in (row.least_rows, row.most_rows) if size >= 0}
    if len(sizes) > 1:
        raise mistake(
            f"micro-batches of {min(sizes)} and of {max(sizes)} rows would have equal weight in this step: "
            "pass weight=len(x) to step.backward, or use replica.steps(loader), which knows the rows",
            reach="world",
        )
    digests = [int(row.digest) for row in rows]  # of the first micro-batch; 0: none
    if alike := [rank for rank, digest in enumerate(digests) if digest and digests.count(digest) > 1]:
        warn(
            f"ranks {listed(alike)} began with the same micro-batch, and each should have rows of its own. Use "
            "replica.steps(loader) or paceline.share(loader, world), or take a rank's own rows by BatchPlan",
            world,
        )
    if not any([row.num_losses for row in rows]):
        raise mistake("no rank had a micro-batch in this step", reach="world")
    if not any([row.weight for row in rows]):
        return
    if num_trained and len(unused) == num_trained:
        raise mistake(
            "no gradient of this step reached a parameter of the replica's model: its parameters were "
            "replaced since (assign=True, a new module), or the loss is another model's",
            reach="world",
        )
    if unused and is_first:
        warn(f"nothing used {listed(unused)} in the first step: they get no gradient and are not updated", world)


def check_total(rows: Sequence[Exchanged]) -> None:
    """Raises UserError on all ranks if the weights of a step's micro-batches do not add up to the total that each rank
    gave."""
    total = exact_sum(row.weight for row in rows)
    for rank, row in enumerate(rows):
        if not math.isclose(total, row.total, rel_tol=1e-4):
            raise mistake(
                f"the step's total= is {row.total:g} on rank {rank}, and the weights given to step.backward add up to "
                f"{total:g} over all ranks: gradients would be too small or too large by their ratio. Give the sum, or "
                "leave total= out",
                reach="world",
            )


def passes_others(loss: torch.Tensor, trained: Collection[nn.Parameter]) -> bool:
    """Returns whether the loss's graph has parameters other than these; every rank finds the same in its graph. Raises
    UserError if it has a reentrant checkpoint, too: no backward pass for some parameters alone goes through one."""
    known, nodes, seen = set(trained), [loss.grad_fn], set[Any]()
    has_others = has_reentrant = False
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        has_others = has_others or (isinstance(leaf, nn.Parameter) and leaf not in known)
        has_reentrant = has_reentrant or node.name() == "CheckpointFunctionBackward"
        nodes += [before for before, _ in node.next_functions]
    if has_others and has_reentrant:
        raise mistake(
            "the loss passed through another model, and through torch.utils.checkpoint with use_reentrant=True, which "
            "cannot leave that model's gradients out: pass use_reentrant=False"
        )
    return has_others


def mark_scaled_losses() -> None:
    """Makes GradScaler.scale mark what it returns, for `check_loss`: nothing else tells a scale from a factor."""
    scale = torch.amp.GradScaler.scale
    if hasattr(scale, _SCALED):
        return

    @functools.wraps(scale)
    def marked(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        for tensor in tensors_in(scaled) if scaler.is_enabled() else ():
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[_SCALED] = True
        return scaled

    setattr(marked, _SCALED, True)
    torch.amp.GradScaler.scale = marked  # type: ignore[assignment,method-assign]


def _metadata(node: Any) -> dict[str, Any]:
    """Returns what belongs to an operation of a graph; torch's stub takes the property for a method."""
    metadata: dict[str, Any] = node.metadata
    return metadata


def warn_of_batch_norm(model: nn.Module, world: World) -> None:
    """Warns that each rank normalises by its own batch."""
    norms = [
        each for each in model.modules() if isinstance(each, _BatchNorm) and not isinstance(each, nn.SyncBatchNorm)
    ]
    if norms and world.world_size > 1:
        warn(
            f"{len(norms)} batch norms normalise with what is in one rank's micro-batch, so the curve depends on the "
            "number of ranks; their running statistics are averaged over ranks after each step. On GPUs "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) makes them one; group or layer norms need none",
            world,
        )


def digest_of(batch: object) -> int:
    """Returns a hash of an array, bytes, or the dense tensors of a micro-batch, at least 1; 0 if it has none."""
    if isinstance(batch, np.ndarray | np.generic) and not batch.dtype.hasobject:
        batch = batch.tobytes()
    if isinstance(batch, bytes):
        return zlib.crc32(batch) or 1
    dense = [each for each in tensors_in(batch) if each.layout == torch.strided and not each.is_nested]
    flats = [tensor.detach().cpu().resolve_conj().contiguous().view(-1) for tensor in dense]
    arrays = [flat.view(torch.uint8).numpy() for flat in flats]
    return functools.reduce(lambda digest, data: zlib.crc32(data.data, digest), arrays, 0) or int(bool(arrays))


def warn_of_prefix(model: nn.Module, world: World) -> None:
    """Makes a compiled model warn when its state_dict has torch.compile's prefix, which no other program expects."""

    def check(_: nn.Module, state: Mapping[str, object], prefix: str, __: object) -> None:
        if not prefix and any(name.startswith(COMPILED) for name in state):
            warn(
                f"names of this state begin with {COMPILED}, which torch.compile put there; a model that is not "
                "compiled will not load it. Take replica.state_dict()",
                world,
            )

    if any(COMPILED in name for name, _ in model.named_parameters()):
        model.register_state_dict_post_hook(ModuleHook(check))  # type: ignore[no-untyped-call]


def plain(name: str) -> str:
    """Returns a parameter's name without torch.compile's prefix."""
    return name.replace(COMPILED, "")
