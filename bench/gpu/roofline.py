"""Estimates a GPU's time for a token by operations and bytes, without a GPU: `python bench/gpu/roofline.py`.

A forward and backward pass of a preset runs as fake tensors. Each kernel takes the longer of its bytes over the
memory's rate and its products over the units' rate; both are what an H100 SXM reaches, not its data sheet. What a
compiler fuses is not known here: elementwise kernels of blocks count half (torch 2.13's compiler, asked for a block of
gpt2-124m on the CPU, left 0.7), and the compiled loss as what it must move (model/loss.py, _fused_chunk). No launch
times, no update, no communication.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cuda"))
import no_gpu

from paceline.config import Config, load_preset
from paceline.model import cost, loss
from paceline.model.gpt import GPT

BYTES_PER_S, PRODUCTS, FLOAT8, ATTENTION = 2.8e12, 600e12, 1000e12, 300e12  # FLOP/s
PEAK = 989e12  # bfloat16, dense, by data sheet
FUSED = 0.5  # of the blocks' elementwise bytes are left when compiled
COMPILED_LOSS = "compiled loss"


class Roofline(TorchDispatchMode):
    """Adds up seconds by part."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self._head = head  # the vocabulary
        self.is_in_loss = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        moves_nothing = func.is_view or "view" in name or "empty" in name or func is torch.ops.prim.device.default
        if moves_nothing or self.is_in_loss:
            return out
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        num_bytes = sum(t.nbytes for t in tensors if all(t.stride()))
        if name.endswith("embedding"):  # reads the rows that it returns
            num_bytes = 2 * out.nbytes
        flops = 0.0
        if func._overloadpacket in flop_registry:
            given = [value for value in args if not isinstance(value, torch.dtype)]  # of mm's result
            flops = flop_registry[func._overloadpacket](*given, **(kwargs or {}), out_val=out)
        part, rate = "elementwise", PRODUCTS
        if "attention" in name:
            part, rate, flops = "attention", ATTENTION, flops / 2  # causal
        elif flops:
            part, rate = "products", FLOAT8 if "scaled_mm" in name else PRODUCTS
        if any(self._head in t.shape and t.dim() <= 2 for t in tensors):
            part = f"head and loss, {part}"
        self.seconds[part] += max(num_bytes / BYTES_PER_S, flops / rate)
        return out

    def compiled_loss(self, logits_RV: torch.Tensor, *rest: Any) -> Any:
        """Reads the logits twice and writes the gradient once."""
        self.is_in_loss = True
        found = loss._fused_chunk(logits_RV, *rest)
        self.is_in_loss = False
        self.seconds[f"head and loss, {COMPILED_LOSS}"] += 3 * logits_RV.nbytes / BYTES_PER_S
        return found


def estimate(preset: str, batch: int, *, compiled_loss: bool, float8: bool) -> None:
    config = load_preset(preset, Config()).replace("model", n_positions=1024)
    roofline = Roofline(config.model.vocab_size)
    cuda = torch.device("cuda", 0)
    with FakeTensorMode():
        with cuda:
            model = GPT(config.model)
        model.compute_dtype = torch.bfloat16
        if float8:
            model.use_float8()
        model._compiles_loss, loss._compiled = compiled_loss, lambda: roofline.compiled_loss  # type: ignore[assignment]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.zeros(batch, 1024, dtype=torch.int64, device=cuda)
        with roofline:
            (model(tokens, tokens) * 0.5).backward()
    roofline.seconds["elementwise"] *= FUSED
    num_tokens, total = batch * 1024, roofline.seconds.total()
    mfu = cost.flops_per_token(config.model, 1024) * num_tokens / total / PEAK
    print(f"{preset}, {'compiled' if compiled_loss else 'eager'} loss{', float8' if float8 else ''}: MFU {mfu:.1%}")
    for part, seconds in roofline.seconds.most_common():
        print(f"  {part:30s} {seconds / num_tokens * 1e6:6.3f} us a token {seconds / total:6.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1024 tokens")
    given = parser.parse_args()
    if reason := no_gpu.why_not():
        sys.exit(reason)
    no_gpu.pretend()

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal=True)[0]

    F.scaled_dot_product_attention = flash  # the kernel that an H100 takes; without one torch would choose another
    for compiled_loss, float8 in ((False, False), (True, False), (True, True)):
        estimate(given.preset, given.batch, compiled_loss=compiled_loss, float8=float8)
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the pretended device aborts a usual exit now and then
