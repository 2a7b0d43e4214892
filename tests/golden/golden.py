"""What the golden tests share: where the files are, how they are written, and where their floats must agree bit for
bit."""

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
SHARDS = HERE / "shards"  # the data sets that all runs here are trained on


@functools.cache
def rounding() -> str:
    """Returns a digest of what torch's own layers give here, forward and backward, in float32 and bfloat16: it differs
    where the vector units, the kernels chosen for them or torch's version round otherwise. Uses nothing of paceline,
    so no change of paceline changes it."""
    digest = hashlib.sha256(torch.__version__.encode())
    for dtype in (torch.float32, torch.bfloat16):
        for length, width in ((16, 32), (64, 128)):
            whole = torch.arange(4 * length * width)
            x = ((whole * 7919 % 10007).float() / 9973 - 0.5).view(4, length, width).requires_grad_()
            weight = ((whole[: width * width] * 104729 % 7919).float() / 7907 - 0.5).view(width, width).requires_grad_()
            y = F.linear(F.rms_norm(x, (width,)).to(dtype), weight.to(dtype)).view(4, length, 2, -1).transpose(1, 2)
            y = F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).reshape(4, length, width)
            y = F.linear(F.silu(y), weight.to(dtype)).float()
            loss = F.cross_entropy(y.view(-1, width), whole[: 4 * length] * 31 % width)
            loss.backward()
            optimizer = torch.optim.AdamW([weight], lr=0.01)
            torch.nn.utils.clip_grad_norm_([weight, x], 0.1)
            optimizer.step()
            for tensor in (loss, x.grad, weight):
                assert tensor is not None
                digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def tolerance(settings: dict[str, Any]) -> float:
    """Returns how much a number of a run may differ, relatively, on a processor that rounds otherwise. README.md has
    what was measured: 1e-6, 9e-4 and 4e-3."""
    if settings.get("parallel.wire") in ("int8", "int4"):
        return 1e-2  # a last bit of a gradient moves it to the next code
    return 3e-3 if settings["train.dtype"] == "bfloat16" else 1e-4


def load(name: str) -> Any:
    """Returns the content of a golden JSON file."""
    return json.loads((HERE / name).read_text())


def store(name: str, content: dict[str, Any]) -> None:
    """Writes a golden JSON file with a line for each entry of its tables. JSON's floats are exact: shortest digits
    that give the same 64 bits."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(inner, dict | list) for inner in value.values()):
            rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
            rows = ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in value)
            lines.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def difference(recorded: dict[str, Any], now: dict[str, Any], tolerance: float) -> str:
    """Returns where a curve, or another table of numbers and digests, differs from the recorded one; empty if it does
    not. tolerance: relative, of numbers; 0: all bits, and digests count, too."""
    if recorded.keys() != now.keys():
        return f"it has {sorted(now)}, recorded are {sorted(recorded)}"
    for name, before in recorded.items():
        after = now[name]
        if isinstance(before, str):
            if tolerance == 0 and before != after:
                return f"{name} is {after}, recorded is {before}"
            continue
        olds, news = (value if isinstance(value, list) else [value] for value in (before, after))
        if len(olds) != len(news):
            return f"{name} has {len(news)} values, recorded are {len(olds)}"
        for number, (old, new) in enumerate(zip(olds, news, strict=True)):
            if not (old == new or math.isclose(old, new, rel_tol=tolerance, abs_tol=0)):
                return f"{name}[{number}] is {new!r}, recorded is {old!r}: {abs(new / old - 1):.1e} of it"
    return ""
