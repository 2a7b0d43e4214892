"""Which elements are updated how, and the optimizer's state by parameter name.

An optimizer updates pieces: whole parameters where every rank makes the whole update, runs of a parameter's elements
where ranks share it out. AdamW takes any run; Muon takes whole matrices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.optim.adamw import MOMENTS as ADAMW_MOMENTS
from paceline.optim.adamw import AdamW
from paceline.optim.config import OptimConfig
from paceline.optim.muon import MOMENTS as MUON_MOMENTS
from paceline.optim.muon import Muon, update_cost


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements start .. stop-1 of the flattened parameter `name`, of this shape; `parameter` is what is updated, in
    place, by its `.grad`: the model's own, or a view of it."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    parameter: nn.Parameter


class Optimizer:
    """AdamW, or Muon for the layers' matrices beside AdamW, behind one update and one state keyed by parameter name.

    The state has no ranks in it, so a checkpoint of one world size is a checkpoint of any.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        config: OptimConfig,
        *,
        lr: float,
        weight_decay: float,
        compute_dtype: torch.dtype,
    ):
        self.lr = lr
        self.num_updates = 0
        whole = [piece for piece in pieces if is_updated_whole(config, piece.name, piece.shape)]
        by_slices = [piece for piece in pieces if not is_updated_whole(config, piece.name, piece.shape)]
        decayed = [piece.parameter for piece in by_slices if role(piece.name, piece.shape) != "vector"]
        vectors = [piece.parameter for piece in by_slices if role(piece.name, piece.shape) == "vector"]
        self._adamw = AdamW(decayed, vectors, decay=weight_decay, betas=(config.beta1, config.beta2), eps=config.eps)
        self._muon = Muon(
            [piece.parameter for piece in whole],
            decay=weight_decay,
            momentum=config.momentum,
            compute_dtype=compute_dtype,
        )
        self._moments = {piece: ADAMW_MOMENTS for piece in by_slices} | {piece: MUON_MOMENTS for piece in whole}

    def update(self, lr: float) -> None:
        """Changes every piece by its `.grad` at this learning rate."""
        self.num_updates += 1
        self._adamw.step(lr, self.num_updates)
        self._muon.step(lr)

    def state_slices(self) -> list[Slice]:
        """Returns `parameter name/moment`, and which elements of it, for all the state that these pieces need."""
        return [
            Slice(f"{piece.name}/{moment}", piece.start, piece.stop)
            for piece, moments in self._moments.items()
            for moment in moments
        ]

    def state(self) -> dict[Slice, torch.Tensor]:
        """Returns the state, flat. Empty before the first update."""
        if not self.num_updates:
            return {}
        return {
            Slice(f"{piece.name}/{moment}", piece.start, piece.stop): self._part(piece)
            .state[piece.parameter][moment]
            .view(-1)
            for piece, moments in self._moments.items()
            for moment in moments
        }

    def load_state(self, state: Mapping[Slice, torch.Tensor], num_updates: int) -> None:
        """Takes what `state` gave after this many updates; copied to the device of the pieces. None: before the first.

        Raises ValueError naming the first state that is missing, or sized otherwise, or of another number format.
        """
        self.num_updates = num_updates
        for part in (self._adamw, self._muon):
            part.state.clear()
        if not num_updates:
            return
        for piece, moments in self._moments.items():
            parameter = piece.parameter
            found = {name: self._checked(state, piece, name).to(parameter.device, copy=True) for name in moments}
            self._part(piece).state[parameter] = {name: tensor.view(parameter.shape) for name, tensor in found.items()}

    def state_bytes(self) -> int:
        """Returns the bytes of state that this rank holds, or will after the first update."""
        return sum(
            len(moments) * piece.parameter.numel() * piece.parameter.element_size()
            for piece, moments in self._moments.items()
        )

    def _part(self, piece: Piece) -> AdamW | Muon:
        return self._adamw if self._moments[piece] is ADAMW_MOMENTS else self._muon

    def _checked(self, state: Mapping[Slice, torch.Tensor], piece: Piece, moment: str) -> torch.Tensor:
        key = Slice(f"{piece.name}/{moment}", piece.start, piece.stop)
        if key not in state:
            raise ValueError(f"optimizer state {key.name} of elements {key.start} to {key.stop} is missing")
        found, wanted = state[key], piece.parameter
        if found.numel() != wanted.numel() or found.dtype != wanted.dtype:
            raise ValueError(
                f"optimizer state {key.name} has {found.numel()} elements of {found.dtype}, not {wanted.numel()} of "
                f"{wanted.dtype}"
            )
        return found


def role(name: str, shape: Sequence[int]) -> str:
    """Returns 'matrix' (a layer's weight), 'embedding' (tokens, positions, head) or 'vector' (norms, biases)."""
    if len(shape) < 2:
        return "vector"
    return "embedding" if name.startswith(("embed_", "lm_head")) else "matrix"


def is_updated_whole(config: OptimConfig, name: str, shape: Sequence[int]) -> bool:
    """Returns whether this parameter's update needs all of its elements in one place: Muon's."""
    return config.name == "muon" and role(name, shape) == "matrix"


def whole_costs(config: OptimConfig, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Returns name -> relative cost of the update, for the parameters that are updated whole."""
    return {
        name: update_cost(parameter.shape[0], parameter.shape[1])
        for name, parameter in parameters
        if parameter.requires_grad and is_updated_whole(config, name, parameter.shape)
    }


def num_state_elements(config: OptimConfig, parameters: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Returns the elements of state of an optimizer that updates all of these parameters."""
    return sum(
        len(MUON_MOMENTS if is_updated_whole(config, name, parameter.shape) else ADAMW_MOMENTS)
        * math.prod(parameter.shape)
        for name, parameter in parameters
        if parameter.requires_grad
    )
