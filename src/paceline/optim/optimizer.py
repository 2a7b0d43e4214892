"""Which parameter is updated how, and the optimizer's state by parameter name."""

import torch
from torch import nn

from paceline.optim.config import OptimConfig
from paceline.optim.muon import Muon


class Optimizer:
    """AdamW, or Muon for the layers' matrices beside AdamW, behind one update and one state keyed by parameter name.

    The state has no ranks in it, so a checkpoint of one world size is a checkpoint of any.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        *,
        lr: float,
        weight_decay: float,
        compute_dtype: torch.dtype,
    ):
        self.lr = lr
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        roles = {name: role(name, parameter) for parameter, name in self._names.items()}

        def members(*wanted: str) -> list[nn.Parameter]:
            return [p for p, name in self._names.items() if roles[name] in wanted]

        decayed = members("matrix", "embedding") if config.name == "adamw" else members("embedding")
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    {"params": decayed, "weight_decay": weight_decay},
                    {"params": members("vector"), "weight_decay": 0.0},
                ],
                lr=lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=next(iter(self._names)).device.type in ("cpu", "cuda", "mps"),
            )
        ]
        if config.name == "muon":
            self._parts.append(
                Muon(
                    members("matrix"),
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=config.momentum,
                    compute_dtype=compute_dtype,
                )
            )

    def update(self, lr: float) -> None:
        """Changes every parameter by its `.grad` at this learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns `parameter name` + `/` + `moment` -> tensor. Empty before the first update."""
        return {
            f"{self._names[parameter]}/{key}": value  # type: ignore[index]
            for part in self._parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes what state_tensors gave; the tensors are moved to the parameters' device.

        No tensors are the state before the first update. Raises ValueError naming the first parameter whose state is
        missing, shaped otherwise, or of a parameter that is not there.
        """
        if not tensors:
            for part in self._parts:
                part.state.clear()
            return
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("/")
            by_name.setdefault(name, {})[key] = tensor
        unknown = by_name.keys() - set(self._names.values())
        if unknown:
            raise ValueError(f"optimizer state of {min(unknown)}, which this model does not have")
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    self._load_one(part, parameter, by_name.get(self._names[parameter], {}))

    def _load_one(self, part: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        name = self._names[parameter]
        wanted = {"momentum"} if isinstance(part, Muon) else {"step", "exp_avg", "exp_avg_sq"}
        if set(state) != wanted:
            raise ValueError(f"optimizer state of {name} has {sorted(state)}, this optimizer needs {sorted(wanted)}")
        for key, tensor in state.items():
            if key != "step" and tensor.shape != parameter.shape:
                raise ValueError(f"{name}/{key} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            part.state[parameter][key] = tensor.to(parameter.device, copy=True)


def role(name: str, parameter: torch.Tensor) -> str:
    """Returns 'matrix' (a layer's weight), 'embedding' (tokens, positions, head) or 'vector' (norms, biases)."""
    if parameter.ndim < 2:
        return "vector"
    return "embedding" if name.startswith(("embed_", "lm_head")) else "matrix"
