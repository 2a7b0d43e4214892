"""A step's micro-batches on one rank, each drawn when the step needs it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from paceline.replica.result import StepTimes
from paceline.world.calls import mistake


class Batch:
    """This rank's micro-batches of one step. `len` is their number, which may be 0. Not iterable itself: `for x, y in
    batch` would take two micro-batches for one."""

    def __init__(
        self,
        micro_batches: Sequence[Any] | Callable[[], Iterable[Any]],
        *,
        rows: Sequence[range] | None = None,
        num_rows: int | None = None,
        count: int | None = None,
        passes: int | None = None,
        stand_in: Callable[[], Any] | None = None,
    ) -> None:
        """micro_batches: a list, or a function that starts drawing them (needs `rows` or `count`). rows: of the global
        batch, by micro-batch. num_rows: of the global batch. passes: the most micro-batches of any rank in this step;
        None: not known. stand_in: makes the dummy micro-batch (weight 0) of a rank that has fewer passes (fsdp); None:
        its last one is used again."""
        self.given: list[Any] | None = None
        if not callable(micro_batches):
            self.given = given = list(micro_batches)
            micro_batches, count = (lambda: given), len(given)
            stand_in = stand_in or ((lambda: given[-1]) if given else None)
        self.rows, self.num_rows, self.passes, self.stand_in = rows, num_rows, passes, stand_in
        self.observe: Callable[[Sequence[StepTimes]], None] | None = None
        """Takes the times of the step that used this batch, by rank; None: nothing depends on them."""
        self._draw = micro_batches
        self._count = len(rows) if count is None and rows is not None else count or 0
        self._drawn: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def like(self, micro_batches: Sequence[Any]) -> "Batch":
        """Returns a batch of other micro-batches for the same rows, one for each pass over this batch, in order: for a
        second model, such as a discriminator that trains on generated samples."""
        given = list(micro_batches)
        if len(given) < len(self):
            raise mistake(f"{len(given)} micro-batches cannot stand for the {len(self)} of this batch")
        stand_in = (lambda: given[-1]) if given else None
        own = given[: len(self)]
        return Batch(own, rows=self.rows, num_rows=self.num_rows, passes=self.passes, stand_in=stand_in)

    def draw(self) -> Iterator[Any]:
        """Returns an iterator over the remaining micro-batches."""
        if self._drawn is None:
            self._drawn = iter(self._draw())
        return self._drawn

    def drain(self) -> None:
        """Draws the remaining micro-batches and drops them."""
        for _ in self.draw():
            pass

    def __iter__(self) -> NoReturn:
        raise mistake(
            "this is a step, not a micro-batch: write `for step in replica.steps(batches):` and in it "
            "`for x, y in step:`; to read samples without training write `for x, y in batches.flat():`, and to look "
            "at one micro-batch `batches.peek()`"
        )

    def __getitem__(self, index: object) -> NoReturn:
        self.__iter__()


def as_batch(given: Any) -> Batch:
    """Returns a Batch unchanged; anything else becomes a batch of one micro-batch."""
    return given if isinstance(given, Batch) else Batch([given])


def moved(micro_batch: Any, device: torch.device) -> Any:
    """Returns the micro-batch with its tensors on the device; tuples, lists and mappings keep their type."""
    if isinstance(micro_batch, torch.Tensor) or (hasattr(micro_batch, "to") and hasattr(micro_batch, "keys")):
        return micro_batch.to(device, non_blocking=True)
    if isinstance(micro_batch, tuple) and hasattr(micro_batch, "_fields"):
        return type(micro_batch)(*(moved(item, device) for item in micro_batch))
    if isinstance(micro_batch, list | tuple):
        return type(micro_batch)(moved(item, device) for item in micro_batch)
    if isinstance(micro_batch, dict):
        return {name: moved(item, device) for name, item in micro_batch.items()}
    return micro_batch


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a micro-batch, including those in nested tuples, lists and mappings."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping | list | tuple):
        for item in thing.values() if isinstance(thing, Mapping) else thing:
            yield from tensors_in(item)


def num_rows(batch: Any) -> int | None:
    """Returns the first dimension of the first tensor, or the length of a list of uncollated samples; None if there is
    neither. A guess (a batch may be sequence-first), so no loss is weighted by it (see Step.backward)."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, list) and batch and all(type(item) is tuple for item in batch):
        return len(batch)
    items: Iterable[Any] = batch if isinstance(batch, tuple | list) else ()
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        items = (batch[name] for name in batch.keys())  # noqa: SIM118 -- not only mappings have them
    found = next((rows for rows in map(num_rows, items) if rows is not None), None)
    return len(batch) if found is None and isinstance(batch, list) else found
