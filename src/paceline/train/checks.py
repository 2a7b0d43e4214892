"""Compares the replicas of a run: with the other ranks', and with their own earlier state."""

import torch

from paceline.base.errors import RunError
from paceline.replica.contents import ReplicaContents
from paceline.replica.replica import Replica
from paceline.sync.replicas import differences, digests, flip_a_bit
from paceline.train.meet import Setup


class Checks:
    """Compares this rank's replica with the other ranks', and with its own earlier state."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._before: dict[str, int] | None = None  # digests of the optimizer state, until the next update

    def replicas(self, before_save: bool = False) -> None:
        """Compares the weights and the optimizer state that all ranks have in full. Collective.

        Raises RunError on every rank, naming ranks and a tensor, if they differ. Before a save, which must be fast,
        compares only the weights: different state changes the weights in the next update.
        """
        setup, sync, group = self._setup, self._setup.replica.sync, self._setup.group
        fault, step = setup.at("check"), setup.progress.step
        tensors = ReplicaContents(setup.replica, "").on_all_ranks()
        if not sync.shards_state and not before_save:
            tensors |= {name.partition("[")[0]: tensor for name, tensor in optimizer_state(setup.replica).items()}
        copied, holders = sync.copies()
        different = differences(tensors, group) if tensors else []
        different += differences(copied, group, holders) if copied else []
        if different:
            text = f"replicas are not equal at step {step}: {different[0]}"
            text += f", and {len(different) - 1} tensors more" if len(different) > 1 else ""
            setup.recorder.event("replicas differ", step=step, tensors=list(map(str, different[:20])))
            raise RunError(
                f"{text}. Nothing was saved since they differ; resume from the newest checkpoint", reach="world"
            )
        group.take_traffic()
        if not before_save:
            self._before = digests(optimizer_state(setup.replica))
        if fault == "flip-state":
            flip_a_bit(next(iter(optimizer_state(setup.replica).values())))

    def own_state(self) -> None:
        """Raises RunError if the optimizer state changed since the last comparison. Called before an update, to find a
        flipped bit in state that only this rank has."""
        before, self._before = self._before, None
        if before is None:
            return
        now = digests(optimizer_state(self._setup.replica))
        changed = [name for name, value in before.items() if now.get(name) != value]
        if changed:
            step = self._setup.progress.step
            raise RunError(
                f"rank {self._setup.world.rank}: the optimizer's state changed by itself between steps {step} and "
                f"{step + 1} ({changed[0]}): its memory is not to be trusted. Resume from the newest checkpoint, on "
                "another machine"
            )


def optimizer_state(replica: Replica) -> dict[str, torch.Tensor]:
    """Returns this rank's slices of the optimizer state, `name[start:stop]` -> tensor; also of weights that only this
    rank has."""
    contents = ReplicaContents(replica, "")
    tensors, _, _ = contents.state()
    if replica.sync.holds_rounded:
        tensors |= contents.weights()
    if replica.sync.diverges:
        tensors |= contents.private_state()[0]
    return {f"{item.name}[{item.start}:{item.stop}]": tensor for item, tensor in tensors.items()}
