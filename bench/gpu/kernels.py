#!/usr/bin/env python3
"""Checks, builds and times the kernels of fused.py.

    python bench/gpu/kernels.py check                # against float64; without a GPU in Triton's interpreter, small
    python bench/gpu/kernels.py build                # for Hopper, without one: registers, what they spill, instructions
    python bench/gpu/kernels.py time [--batch 32] [--width 768] [--only WORD]    # needs a GPU, or --rehearse

`time` trains with each variant in turn: tokens/s and MFU of a micro-batch's forward and backward pass, as a ratio to
what paceline does today in the same round, and how far the losses of a few updates are apart. Needs the package triton;
QuACK's and FlashAttention's variants need quack-kernels and flash-attn-4 (`pip install --pre`), and fail without. The
exit status is 0 if all others ran.
"""

import argparse
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import Config, load_preset
from paceline.model import cost, gpt, loss
from paceline.model.config import ModelConfig
from paceline.world.peaks import gpu_peak

BFLOAT16 = torch.bfloat16
PEAK = gpu_peak("NVIDIA H100 80GB HBM3", "bfloat16").flops_per_s or math.nan  # to which MFU is relative


# ---- check ----


def check(fused: ModuleType) -> bool:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [*check_loss(fused, device), *check_mlp(fused, device)]
    good = [error <= 1.02 * today + 1e-6 for _, error, today in rows]  # 1e-6: sums of float32 in another order
    for is_good, (name, error, today) in zip(good, rows, strict=True):
        print(f"{'ok  ' if is_good else 'FAIL'} {name:50s} wrong by {error:.1e}; today's by {today:.1e}")
    return all(good)


Errors = tuple[str, float, float]  # what, its largest error, that of what paceline does today


def check_loss(fused: ModuleType, device: str) -> list[Errors]:
    """The loss of a few rows and its gradient, beside the uncompiled one's errors. The interpreter cuts off what
    bfloat16 lacks (Triton 3.9), where a GPU rounds, so there in float16."""
    rows: list[Errors] = []
    dtypes = (torch.float16,) if device == "cpu" else (BFLOAT16, torch.float16)
    for num_columns, dtype in itertools.product((50304, 50257, 65536, 512, 40), dtypes):
        generator = torch.Generator().manual_seed(num_columns)
        logits = (4 * torch.randn(3, num_columns, generator=generator)).to(dtype).to(device)
        targets = torch.tensor([0, num_columns - 1, num_columns // 2], device=device)
        exact = logits.double().requires_grad_()
        loss_exact = F.cross_entropy(exact, targets, reduction="sum")
        loss_exact.backward()
        label = f"loss of {num_columns} columns, {str(dtype)[6:]}"
        for needs in (True, False):
            (ours, grad), (today, grad_today) = (
                of_chunk(logits.clone(), targets, needs) for of_chunk in (fused.loss_chunk, loss._chunk)
            )
            rows.append(
                (f"{label}, {'with' if needs else 'without'} gradient", *(_gap(x, loss_exact) for x in (ours, today)))
            )
            if needs:
                rows.append((f"{label}, its gradient", _gap(grad, exact.grad), _gap(grad_today, exact.grad)))
    return rows


def check_mlp(fused: ModuleType, device: str) -> list[Errors]:
    """An MLP with its residual, and the four gradients, at values from far below to far above GELU's bend. The
    interpreter multiplies bfloat16's bits as integers (Triton 3.9), so there in float16."""
    num_rows, width, inside = (256, 128, 512) if device == "cpu" else (8192, 768, 3072)
    dtype = torch.float16 if device == "cpu" else BFLOAT16
    generator = torch.Generator().manual_seed(0)
    scales = {"stream": 1.0, "x": 3.0, "up": width**-0.5, "down": inside**-0.5, "grad": 1.0}
    shapes = {"up": (inside, width), "down": (width, inside)}
    values = {
        name: (scale * torch.randn(shapes.get(name, (num_rows, width)), generator=generator)).to(device)
        for name, scale in scales.items()
    }
    values |= {name: values[name].to(dtype).float() for name in ("x", "up", "down", "grad")}  # what no side rounds

    def plain(stream: Tensor, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return stream + F.gelu(x @ up.to(x.dtype).t()) @ down.to(x.dtype).t()

    def run(how: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        stream, x, up, down = (
            values[name].to(dtype if name == "x" else kept, copy=True).requires_grad_()
            for name in ("stream", "x", "up", "down")
        )
        out = how(stream, x, up, down)
        out.backward(values["grad"].to(kept))
        return [out.detach(), *(t.grad for t in (stream, x, up, down) if t.grad is not None)]

    exact, today = run(plain, torch.float64), run(plain, dtype)
    names = ("output", "gradient of the stream", "gradient of x", "gradient of up", "gradient of down")
    return [
        (f"{title} in products: {name}", _gap(a, c), _gap(b, c))
        for title, how in {
            "residual": lambda stream, x, up, down: fused._AddProduct.apply(stream, F.gelu(x @ up.to(dtype).t()), down),
            "GELU": lambda stream, x, up, down: stream + fused._GeluMlp.apply(x, up, down, None),
            "GELU and residual": lambda stream, x, up, down: fused._GeluMlp.apply(x, up, down, stream),
        }.items()
        for name, a, b, c in zip(names, run(how, dtype), today, exact, strict=True)
    ]


def _gap(value: Tensor | None, exact: Tensor | None) -> float:
    """The root mean square of the differences, as a part of that of the exact values: a largest one differs by luck."""
    assert value is not None
    assert exact is not None
    exact = exact.detach().double()
    return float((value.detach().double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


# ---- build ----


def build(fused: ModuleType) -> bool:
    """Builds each kernel at gpt2-124m's sizes. False if a product spills or has no tensor cores, or a thread of the
    loss spills 100 bytes (its part of a row has 98)."""
    A, B, C = fused.parts(50304)
    tile = {name: value for name, value in fused.TILE.items() if name.isupper()}
    rows, columns, depth = tile.values()
    options = {"num_warps": fused.TILE["num_warps"], "num_stages": fused.TILE["num_stages"]}
    names = ("a", "b", "before", "after", "num_rows", "num_columns", "K", *tile, "PROGRAMS", "backward")
    good = True
    for needs in (False, True):
        kinds = ("*bf16", "*i64", "*fp32", *["constexpr"] * 5)
        signature = dict(zip(("logits", "targets", "losses", "V", "A", "B", "C", "backward"), kinds, strict=True))
        constants = {"V": 50304, "A": A, "B": B, "C": C, "backward": needs}
        aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
        title = "loss and gradient" if needs else "loss alone"
        good &= _built(title, fused.loss_kernel, signature, constants, aligned, num_warps=fused.LOSS_WARPS)
    for backward in (False, True):
        quarter = f"tensordesc<bf16[{rows},{columns // 4}]>"
        of_b = f"[{depth},{columns}]" if backward else f"[{columns},{depth}]"
        kinds = (f"tensordesc<bf16[{rows},{depth}]>", f"tensordesc<bf16{of_b}>", quarter, quarter, "i32", "i32")
        signature = dict(zip(names, (*kinds, *["constexpr"] * (len(names) - 6)), strict=True))
        constants = {"K": 768, **tile, "PROGRAMS": 132, "backward": backward}
        title = f"product with GELU, {'backward' if backward else 'forward'}"
        good &= _built(title, fused.gelu_product_kernel, signature, constants, {}, **options)
    return good


def _built(title: str, kernel: Any, signature: Any, constants: Any, attributes: Any, **options: int) -> bool:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        says = [
            subprocess.run([dump, how, file.name], capture_output=True, text=True, check=True).stdout
            for how in ("--dump-resource-usage", "-sass")
        ]
    registers, stack = (int(re.findall(rf"{name}:(\d+)", says[0])[0]) for name in ("REG", "STACK"))
    counts = {
        word: len(re.findall(rf"\b{word}\b", says[1])) for word in ("LDL", "STL", "HGMMA", "MUFU", "FFMA", "FMUL")
    }
    print(
        f"{title:32s} {registers} registers, {stack} bytes of stack, {done.metadata.shared >> 10} KiB shared, "
        + ", ".join(f"{count} {word}" for word, count in counts.items())
    )
    is_product = "product" in title
    return (stack == 0 and counts["HGMMA"] > 0) if is_product else stack < 100


# ---- time ----


def variants(fused: ModuleType) -> dict[str, Callable[[gpt.GPT], None]]:
    """Returns what to do to a model before its blocks are compiled, by name. The first is what paceline does."""

    def autotuned(_: gpt.GPT) -> None:
        import torch._inductor.config as inductor

        inductor.max_autotune_gemm = True  # the compiler's own products in Triton, with what follows them inside

    def split_norms(_: gpt.GPT) -> None:
        gpt._compiler_options = lambda: {}  # type: ignore[assignment]

    def flash_4(_: gpt.GPT) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # which torch prefers on Hopper
        torch.nn.attention.activate_flash_attention_impl("FA4")  # raises without the package flash-attn-4

    def all_of_ours(model: gpt.GPT) -> None:
        fused.use_loss_kernel()
        fused.use_mlp(model, fused.How(gelu=model.config.arch == "gpt2", residual=True))

    return {
        "today": lambda _: None,
        "loss kernel": lambda _: fused.use_loss_kernel(),
        "GELU in products": lambda model: fused.use_mlp(model, fused.How(gelu=True)),
        "residual in products": lambda model: fused.use_mlp(model, fused.How(residual=True)),
        "all of ours": all_of_ours,
        "float8": lambda model: model.use_float8(),
        "autotuned products": autotuned,
        "norms as torch 2.13 splits them": split_norms,
        "FlashAttention 4": flash_4,
        "QuACK's loss": lambda _: fused.use_quack_loss(),
        "QuACK's SwiGLU in products": lambda model: fused.use_quack_mlp(model),
    }


REHEARSED = ("today", "loss kernel", "GELU in products", "residual in products", "all of ours")
OF_OTHERS = ("FlashAttention 4", "QuACK's loss", "QuACK's SwiGLU in products")  # packages, which may be absent
OF_ONE_FAMILY = {"GELU in products": "gpt2", "QuACK's SwiGLU in products": "llama"}


def one_variant(name: str, fused: ModuleType, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Returns (seconds of a micro-batch's two passes, the losses of a few updates before)."""
    device = "cpu" if options.rehearse else "cuda"
    config = model_config(options)
    model = gpt.build(config, 0, device)
    model.compute_dtype = torch.float16 if options.rehearse else BFLOAT16
    variants(fused)[name](model)
    if not options.rehearse:
        model.compile_blocks()
    elif loss._compiled.__module__ == fused.__name__:
        loss._chunk = loss._compiled()  # what is not compiled takes this one
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (options.batch, config.n_positions + 1), generator=generator).to(device)

    def passes() -> Tensor:
        mean: Tensor = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        mean.backward()
        return mean.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    losses = []
    for _ in range(options.updates):
        losses.append(float(passes()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # as in training: gradients are added up
    times = []
    for _ in range(1 if options.rehearse else 20):
        began = time.perf_counter()
        for _ in range(5):
            mean = passes()
        float(mean)  # waits for a GPU
        times.append((time.perf_counter() - began) / 5)
    return statistics.median(times), losses


def apart(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def model_config(options: argparse.Namespace) -> ModelConfig:
    """Returns the preset's; in a rehearsal a model that an interpreter can train."""
    config = load_preset(options.preset, Config()).replace("model", n_positions=1024).model
    if options.rehearse:
        return replace(config, n_layer=1, n_head=2, n_embd=64, vocab_size=320, n_positions=32)
    return replace(config, n_embd=options.width, n_head=options.width // 64)


def time_variants(options: argparse.Namespace) -> int:
    """Each variant in a process of its own, in turn: what one compiles, the next does not have."""
    names = list(variants(SimpleNamespace())) if not options.rehearse else list(REHEARSED)  # type: ignore[arg-type]
    config = model_config(options)
    names = [name for name in names if OF_ONE_FAMILY.get(name, config.arch) == config.arch]
    names = [name for name in names if options.only in name or name == "today"]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"round {number + 1}: {name} failed: {done.stderr.strip()[-600:]}")
                if name == "today":
                    return 1  # nothing to compare with
                continue
            seconds, *losses = map(float, done.stdout.split())
            if name == "today":
                seconds_today, losses_today = seconds, losses
            ratios[name].append(seconds_today / seconds)
            rate = options.batch * config.n_positions / seconds
            mfu = rate * cost.flops_per_token(config, config.n_positions) / PEAK
            print(
                f"round {number + 1}: {name:22s} {rate:9,.0f} tokens/s, MFU {mfu:.1%}, {ratios[name][-1]:.3f} times "
                f"today; losses {losses[0]:.4f} to {losses[-1]:.4f}, at most {apart(losses, losses_today):.1e} apart",
                flush=True,
            )
    for name, each in ratios.items():
        if each:
            print(f"{name:22s} {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})")
    return 0 if all(each for name, each in ratios.items() if name not in OF_OTHERS) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "build", "time"))
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32, help="sequences of 1024 tokens")
    parser.add_argument("--width", type=int, default=768, help="of the model, with heads of 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="variants with this word in their names, beside today's")
    parser.add_argument("--updates", type=int, default=10, help="whose losses are shown")
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)  # time: this one, in this process
    parser.add_argument("--rehearse", action="store_true", help="time: a tiny model on the CPU, in the interpreter")
    options = parser.parse_args()
    if options.rehearse or (options.what == "check" and not torch.cuda.is_available()):
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    elif options.what == "time" and not torch.cuda.is_available():
        print(f"no GPU here (torch {torch.__version__}); see check, build, --rehearse", file=sys.stderr)
        return 2
    if options.what == "time" and not options.variant:
        return time_variants(options)
    import fused

    if options.variant:
        seconds, losses = one_variant(options.variant, fused, options)
        print(seconds, *losses)
        return 0
    return 0 if (check if options.what == "check" else build)(fused) else 1


if __name__ == "__main__":
    sys.exit(main())
