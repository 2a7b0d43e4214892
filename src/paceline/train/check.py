"""Are the replicas still equal, and is the state still what it was? Asked every `parallel.check-every` steps."""

import torch

from paceline.base.errors import RunError
from paceline.sync.replicas import differences, digests, repair
from paceline.train.state import Run
from paceline.train.trouble import flip_a_bit


def check_replicas(run: Run, before_save: bool = False) -> None:
    """Returns if all replicas are bit-identical, or were made so (parallel.repair). Collective.

    Else raises RunError on every rank, naming ranks and a tensor. What is compared: the weights where every rank has
    all of them, and the optimizer's state where every rank has all of it. Before a save, which a step waits for, the
    weights alone and quickly: where state differed, the weights do since the update after.
    """
    fault = run.at("check")
    step, sync = run.progress.step, run.replica.sync
    tensors = {} if sync.shards_weights else sync.full_weights()
    if not sync.shards_state and not before_save:
        tensors |= {item.name: tensor for item, tensor in run.replica.optimizer.state().items()}
    found = differences(tensors, run.group, quick=before_save) if tensors else []
    if found:
        text = f"replicas are not equal at step {step}: {found[0]}"
        text += f", and {len(found) - 1} tensors more" if len(found) > 1 else ""
        run.event("replicas differ", step=step, tensors=[str(difference) for difference in found[:20]])
        if not run.config.parallel.repair or any(difference.model_rank is None for difference in found):
            advice = (
                "" if run.config.parallel.repair or not found[0].odd else " (--parallel.repair copies the majority's)"
            )
            raise RunError(
                f"{text}. Nothing was saved since they differ; resume from the newest checkpoint{advice}", reach="world"
            )
        repair(found, tensors, run.group)
        run.console.say(f"{text}. Repaired: they have the majority's values now", style="yellow")
        run.event("repaired", step=step)
    run.group.take_traffic()
    if not before_save:
        run.state_before = digests(_own_state(run))
    if fault == "flip-state":
        flip_a_bit(next(iter(run.replica.optimizer.state().values())))


def check_own_state(run: Run) -> None:
    """Returns if the optimizer's state is bit for bit what it was after the last check, and no update was between.

    Nobody else has this rank's share of it, so a bit that flips in memory shows only like this. Raises RunError.
    """
    before, run.state_before = run.state_before, None
    if before is None:
        return
    now = digests(_own_state(run))
    changed = [name for name, value in before.items() if now.get(name) != value]
    if changed:
        raise RunError(
            f"rank {run.world.rank}: the optimizer's state changed by itself between steps {run.progress.step} and "
            f"{run.progress.step + 1} ({changed[0]}): its memory is not to be trusted. Resume from the newest "
            "checkpoint, on another machine"
        )


def _own_state(run: Run) -> dict[str, torch.Tensor]:
    return {f"{item.name}[{item.start}:{item.stop}]": tensor for item, tensor in run.replica.optimizer.state().items()}
