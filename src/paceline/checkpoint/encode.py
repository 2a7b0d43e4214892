"""Converts a nested state_dict to JSON plus named tensors, which a checkpoint's manifest and files can hold.

{"decay": 0.9, "average": {"w": tensor}, "milestones": {30: 1}}     the state of an object kept as `ema`
{"decay": 0.9, "average": {"w": {"(tensor)": "ema.average.w"}}, "milestones": {"(key, value)": [[30, 1]]}}
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PAIRS = "(key, value)"  # a dict with keys that JSON has not, such as MultiStepLR's, or that are one of these marks
_TENSOR, _ARRAY = "(tensor)", "(array)"  # a tensor or numpy array, by the name it is stored under


def encode(state: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns the state as JSON values, and its tensors by name: `name`, then the keys that lead to each, with dots.
    Raises TypeError or ValueError if it holds anything else than JSON values, tensors and arrays."""
    tensors: dict[str, torch.Tensor] = {}
    return json.loads(json.dumps(_encoded(state, name, tensors))), tensors


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the state that `encode` was given, with tuples as lists, except in keys."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if value.keys() == {_ARRAY}:
            return tensors[value[_ARRAY]].numpy()
        items = value[_PAIRS] if value.keys() == {_PAIRS} else value.items()
        return {_key(key): decode(item, tensors) for key, item in items}
    return [decode(item, tensors) for item in value] if isinstance(value, list) else value


def _key(value: Any) -> Any:
    """JSON has made a list of a tuple; no other key can be one."""
    return tuple(map(_key, value)) if isinstance(value, list) else value


def _encoded(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        while name in tensors:  # names can collide: {"a.b": x, "a": {"b": y}}
            name += "_"
        tensors[name] = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach()
        return {_TENSOR if isinstance(value, torch.Tensor) else _ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        pairs = [(key, _encoded(item, f"{name}.{key}", tensors)) for key, item in value.items()]
        is_plain = all(isinstance(key, str) and key not in (_PAIRS, _TENSOR, _ARRAY) for key in value)
        return dict(pairs) if is_plain else {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        return [_encoded(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
    return value
