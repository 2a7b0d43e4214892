"""Estimates a GPU's time for a token by operations and bytes, without a GPU: `python bench/gpu/roofline.py`.

A forward and backward pass of a preset, compiled: each kernel that torch's compiler plans for an H100 (compiler.py)
takes the longer of its bytes over the memory's rate and its FLOPs over the units'; what is not compiled is counted by
operation, as fake tensors. The rates are what an H100 SXM reached in a trace (docs/LOG.md, 2026-11-24), not its data
sheet's. Then the same with what fused.py puts in place of the compiler's kernels: what it could gain at these rates. No
launch times, no update, no communication. Needs the package triton.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cuda"))
import no_gpu

from paceline.config import Config, load_preset
from paceline.model import cost, gpt, loss
from paceline.model.gpt import GPT

BYTES_PER_S = 2.5e12  # GELU's kernels; the loss's 2.1e12
PRODUCTS, FLOAT8, ATTENTION = 700e12, 1000e12, 225e12  # FLOP/s; float8's is a guess
PEAK = 989e12  # bfloat16, dense, by data sheet
SEQ_LEN = 1024


def seconds_of(num_bytes: float, flops: float, rate: float) -> float:
    return max(num_bytes / BYTES_PER_S, flops / rate)


class Uncompiled(TorchDispatchMode):
    """Adds up the seconds of operations that are not compiled, all of them outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self.is_in_loss = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        moves_nothing = func.is_view or "view" in name or "empty" in name or func is torch.ops.prim.device.default
        if moves_nothing or self.is_in_loss:
            return out
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        num_bytes = sum(t.nbytes for t in tensors if all(t.stride()))
        if name.endswith("embedding"):  # reads the rows that it returns
            num_bytes = 2 * out.nbytes
        flops = 0.0
        if func._overloadpacket in flop_registry:
            values = [value for value in args if not isinstance(value, torch.dtype)]  # of mm's result
            flops = flop_registry[func._overloadpacket](*values, **(kwargs or {}), out_val=out)
        part = "products of the head" if flops else "embeddings, last norm, casts"
        self.seconds[part] += seconds_of(num_bytes, flops, PRODUCTS)
        return out


def part_of(operations: frozenset[str], is_call: bool) -> str:
    """Returns the part of a block to which a kernel belongs."""
    said = " ".join(operations)
    if is_call:
        return "attention" if "attention" in said else "products of blocks"
    if any(f"aten.{word}" in operations for word in ("erf", "exp", "tanh")):
        return "GELU or SwiGLU"
    if all(name.startswith(("aten.permute", "aten.view", "prims.convert", "paceline_bench.")) for name in operations):
        return "casts of weights and gradients"
    return "norms, residuals, rotation"


def of_block(model: GPT, batch: int) -> Counter[str]:
    """Returns the seconds of one compiled block's two passes."""
    from compiler import kernels_of, pretended

    block, dtype = model.layers[0], model.compute_dtype
    names = [name for name, _ in block.named_parameters()]
    x_BTC = torch.zeros(batch, SEQ_LEN, model.config.n_embd, device="cuda", requires_grad=True)
    rotary = [] if (tables := model._rotary(0, SEQ_LEN, x_BTC.device)) is None else [tables]

    def run(x_BTC: Tensor, *rest: Tensor) -> Tensor:
        parameters = dict(zip(names, rest[: len(names)], strict=True))
        out: Tensor = functional_call(block, parameters, (x_BTC, dtype, *(rest[len(names) :] or [None])))
        return out

    seconds: Counter[str] = Counter()
    with pretended(gpt._compiler_options()):
        for kernel in kernels_of(run, [x_BTC, *block.parameters(), *rotary]):
            part = part_of(kernel.operations, kernel.is_call)
            is_float8 = any("scaled_mm" in name for name in kernel.operations)
            rate = ATTENTION if part == "attention" else FLOAT8 if is_float8 else PRODUCTS
            flops = kernel.flops / 2 if part == "attention" else kernel.flops  # causal
            seconds[part] += seconds_of(kernel.num_bytes, flops, rate)
    added_up = 12 * sum(p.numel() for p in block.parameters())  # float32: read, read, written
    seconds["gradients added to .grad"] = added_up / BYTES_PER_S
    return seconds


def estimate(
    preset: str,
    batch: int,
    width: int,
    *,
    gelu: bool = False,
    residual: bool = False,
    loss_kernel: bool = False,
    float8: bool = False,
) -> None:
    """Prints a preset's estimate, with the kernels of fused.py that are named."""
    config = load_preset(preset, Config()).replace("model", n_positions=SEQ_LEN, n_embd=width, n_head=width // 64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda", 0):
            model = GPT(config.model)
        model.compute_dtype = torch.bfloat16
        if float8:
            model.use_float8()
        if gelu or residual:
            from fused import How, use_mlp

            use_mlp(model, How(gelu, residual))
        seconds = Counter({part: s * len(model.layers) for part, s in of_block(model, batch).items()})
        seconds += outside_blocks(model, batch, passes_over_logits=2 if loss_kernel else 3)
    num_tokens, total = batch * SEQ_LEN, seconds.total()
    mfu = cost.flops_per_token(config.model, SEQ_LEN) * num_tokens / total / PEAK
    titles = {"float8": float8, "GELU in products": gelu, "residual in products": residual, "loss kernel": loss_kernel}
    title = ", ".join([preset, *(name for name, is_on in titles.items() if is_on)])
    print(f"{title}: {num_tokens / total:,.0f} tokens/s, MFU {mfu:.1%}")
    for part, each in seconds.most_common():
        print(f"  {part:32s} {each / num_tokens * 1e6:6.3f} us a token {each / total:6.1%}")


def outside_blocks(model: GPT, batch: int, passes_over_logits: int) -> Counter[str]:
    """Returns the seconds of the embedding, the last norm, the head and the loss."""
    counted = Uncompiled()

    def compiled_loss(logits_RV: Tensor, *rest: Any) -> Any:
        counted.is_in_loss = True
        result = loss._fused_chunk(logits_RV, *rest)
        counted.is_in_loss = False
        counted.seconds["loss"] += passes_over_logits * logits_RV.nbytes / BYTES_PER_S
        return result

    model.layers = nn.ModuleList()
    model._is_compiled, loss._compiled = True, lambda: compiled_loss  # type: ignore[assignment]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.zeros(batch, SEQ_LEN, dtype=torch.int64, device="cuda")
    with counted:
        (model(tokens, tokens) * 0.5).backward()
    return counted.seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32, help=f"sequences of {SEQ_LEN} tokens")
    parser.add_argument("--width", type=int, default=768, help="of the model, with heads of 64")
    options = parser.parse_args()
    if reason := no_gpu.why_not():
        sys.exit(reason)
    no_gpu.pretend()

    def flash(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal=True)[0]

    F.scaled_dot_product_attention = flash  # what torch would choose for an H100 moves the same bytes
    estimate(options.preset, options.batch, options.width)
    estimate(options.preset, options.batch, options.width, float8=True)
    has_gelu = load_preset(options.preset, Config()).model.arch == "gpt2"
    for names in (("gelu",), ("residual",), ("loss_kernel",), ("gelu", "residual", "loss_kernel")):
        if has_gelu or names != ("gelu",):
            usable = [name for name in names if has_gelu or name != "gelu"]
            estimate(options.preset, options.batch, options.width, **dict.fromkeys(usable, True))
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the pretended device aborts a usual exit now and then
