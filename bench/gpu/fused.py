"""What may make a GPU's step shorter. paceline uses none of it: whoever has a GPU measures it with
bench/gpu/kernels.py, and what wins moves into src/paceline/model.

- The loss of a chunk, in Triton, keeps each row of logits in a multiprocessor's registers: it reads them once and
  writes the gradient in their place. The compiler's own kernel reads them twice (model/loss.py, `_fused_chunk`).
- The MLP's products, in Triton, compute GELU, and backward its slope, where their results leave the registers. The
  compiler's own kernels move 30 KiB for that a token and layer of 768 wide, of which 18 go.
- cuBLAS adds the residual stream in the MLP's last product: 9 KiB less a token and layer.

N tokens, R tokens of one chunk, C width, F width inside the MLP, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.model import loss
from paceline.model.gpt import GPT
from paceline.model.layers import MLP, Block

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
MOST_COLUMNS = 65536  # of bfloat16 in the registers of one multiprocessor: half of them


# ---- the loss ----


@triton.jit
def loss_kernel(
    logits, targets, losses, V: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, backward: tl.constexpr
):
    """One row. It is held in three parts of A, B and C columns, powers of two that leave few registers empty."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    start = logits + row * V
    target_logit = tl.load(start + target).to(tl.float32)
    a = _load(start, 0, A, V)
    b = _load(start, A, B, V)
    c = _load(start, A + B, C, V)
    tl.debug_barrier()  # other threads write where this one has read
    largest = tl.maximum(tl.maximum(tl.max(a, 0), tl.max(b, 0)), tl.max(c, 0)).to(tl.float32)
    total = _sum_of_exp(a, largest) + _sum_of_exp(b, largest) + _sum_of_exp(c, largest)
    log_total = largest + tl.log(total)
    tl.store(losses + row, log_total - target_logit)
    if backward:
        _store_gradient(start, 0, a, A, V, log_total, target)
        _store_gradient(start, A, b, B, V, log_total, target)
        _store_gradient(start, A + B, c, C, V, log_total, target)


@triton.jit
def _load(start, first, size: tl.constexpr, V: tl.constexpr):
    columns = first + tl.arange(0, size)
    return tl.load(start + columns, mask=columns < V, other=-float("inf"))


@triton.jit
def _sum_of_exp(x, largest):
    return tl.sum(tl.exp2((x.to(tl.float32) - largest) * LOG2_E), 0)


@triton.jit
def _store_gradient(start, first, x, size: tl.constexpr, V: tl.constexpr, log_total, target):
    columns = first + tl.arange(0, size)
    softmax = tl.exp2((x.to(tl.float32) - log_total) * LOG2_E)
    gradient = tl.where(columns == target, softmax - 1.0, softmax)
    tl.store(start + columns, gradient.to(x.dtype), mask=columns < V)


def parts(num_columns: int) -> tuple[int, int, int]:
    """Returns the sizes of a row's three parts."""
    sizes, rest = [], num_columns
    for _ in range(2):
        sizes.append(1 << max(4, rest.bit_length() - 1))
        rest = max(0, rest - sizes[-1])
    return sizes[0], sizes[1], max(16, triton.next_power_of_2(rest))


def loss_chunk(logits_RV: Tensor, targets_R: Tensor, need_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """As `_fused_chunk` of model/loss.py, but the gradient is written over the logits."""
    num_rows, num_columns = logits_RV.shape
    assert num_columns <= MOST_COLUMNS
    losses_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    sizes = parts(num_columns)
    loss_kernel[(num_rows,)](logits_RV, targets_R, losses_R, num_columns, *sizes, need_gradients, num_warps=LOSS_WARPS)
    return losses_R.sum(), logits_RV if need_gradients else None


LOSS_WARPS = 32


# ---- GELU in the MLP's products ----


@triton.jit
def gelu_product_kernel(
    a, b, before, after, num_rows, num_columns, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    """Forward: before = a @ b.T, after = gelu(before). Backward: after = (a @ b) * gelu'(before). All are descriptors
    of matrices; each program computes tiles of ROWS x COLUMNS one after the other, and ends each in four parts: whole,
    GELU's temporaries would not fit beside the sums, and two tiles on their way not into shared memory."""
    tiles_down = tl.cdiv(num_rows, ROWS)
    tiles_across = tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, PROGRAMS, flatten=True):
        first = tile // (8 * tiles_across) * 8  # eight tiles down, then the next across: their rows stay in the cache
        down = min(tiles_down - first, 8)
        row = (first + tile % (8 * tiles_across) % down) * ROWS
        column = tile % (8 * tiles_across) // down * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, K, DEPTH):
            if backward:
                total = tl.dot(a.load([row, k]), b.load([k, column]), total)
            else:
                total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
        HALF: tl.constexpr = COLUMNS // 2
        QUARTER: tl.constexpr = COLUMNS // 4
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
        first_part, second = tl.split(tl.permute(tl.reshape(left, (ROWS, 2, QUARTER)), (0, 2, 1)))
        third, fourth = tl.split(tl.permute(tl.reshape(right, (ROWS, 2, QUARTER)), (0, 2, 1)))
        _end_product(first_part, before, after, row, column, backward)
        _end_product(second, before, after, row, column + QUARTER, backward)
        _end_product(third, before, after, row, column + HALF, backward)
        _end_product(fourth, before, after, row, column + HALF + QUARTER, backward)


@triton.jit
def _end_product(total, before, after, row, column, backward: tl.constexpr):
    if backward:
        x = before.load([row, column]).to(tl.float32)
        below, density = _normal(x)
        after.store([row, column], (total * (below + x * density)).to(after.dtype))
    else:
        rounded = total.to(before.dtype)
        before.store([row, column], rounded)
        x = rounded.to(tl.float32)
        below, _ = _normal(x)
        after.store([row, column], (x * below).to(after.dtype))


@triton.jit
def _normal(x):
    """Returns (the share of a normal distribution below x, its density at x)."""
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return below, tl.exp2(x * x * (-0.5 * LOG2_E)) * 0.3989422804014327


TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "num_warps": 8, "num_stages": 3}


def _multiply(a_NK: Tensor, b: Tensor, before_NF: Tensor, after_NF: Tensor, *, backward: bool) -> None:
    """N, F and K are multiples of the tile's sides."""
    (num_rows, depth), num_columns = a_NK.shape, after_NF.shape[1]
    rows, columns, deep = TILE["ROWS"], TILE["COLUMNS"], TILE["DEPTH"]
    programs = torch.cuda.get_device_properties().multi_processor_count if a_NK.is_cuda else 3
    quarter = [rows, columns // 4]
    gelu_product_kernel[(programs,)](
        TensorDescriptor.from_tensor(a_NK, [rows, deep]),
        TensorDescriptor.from_tensor(b, [deep, columns] if backward else [columns, deep]),
        TensorDescriptor.from_tensor(before_NF, quarter),
        TensorDescriptor.from_tensor(after_NF, quarter),
        num_rows, num_columns, depth, PROGRAMS=programs, backward=backward, **TILE,
    )  # fmt: skip


@torch.library.custom_op("paceline_bench::up_gelu", mutates_args=())
def up_gelu(x_NC: Tensor, up_FC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x @ up.T and its GELU, [N, F] each."""
    before_NF = x_NC.new_empty(len(x_NC), len(up_FC))
    after_NF = torch.empty_like(before_NF)
    _multiply(x_NC, up_FC, before_NF, after_NF, backward=False)
    return before_NF, after_NF


@torch.library.custom_op("paceline_bench::down_gelu_backward", mutates_args=())
def down_gelu_backward(grad_NC: Tensor, down_CF: Tensor, before_NF: Tensor) -> Tensor:
    """Returns (grad @ down) * gelu'(before), [N, F]."""
    grad_NF = torch.empty_like(before_NF)
    _multiply(grad_NC, down_CF, before_NF, grad_NF, backward=True)
    return grad_NF


@torch.library.custom_op("paceline_bench::add_product", mutates_args=())
def add_product(stream_NC: Tensor, a_NF: Tensor, b_CF: Tensor) -> Tensor:
    """Returns stream + a @ b.T in float32. One operation for the compiler, which knows no sum of a product of 16 bits
    in float32 (torch 2.13); on a GPU cuBLAS adds the stream itself, unrounded."""
    if a_NF.is_cuda:
        return torch.addmm(stream_NC, a_NF, b_CF.t(), out_dtype=torch.float32)
    return stream_NC + a_NF @ b_CF.t()


@up_gelu.register_fake
def _(x_NC: Tensor, up_FC: Tensor) -> tuple[Tensor, Tensor]:
    return x_NC.new_empty(len(x_NC), len(up_FC)), x_NC.new_empty(len(x_NC), len(up_FC))


@down_gelu_backward.register_fake
def _(grad_NC: Tensor, down_CF: Tensor, before_NF: Tensor) -> Tensor:
    return torch.empty_like(before_NF)


@add_product.register_fake
def _(stream_NC: Tensor, a_NF: Tensor, b_CF: Tensor) -> Tensor:
    return torch.empty_like(stream_NC)


@register_flop_formula([torch.ops.paceline_bench.add_product])
def _(stream: Any, a: Any, b: Any, **_: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


@register_flop_formula([torch.ops.paceline_bench.up_gelu])
def _(x: Any, up: Any, **_: Any) -> int:
    return 2 * x[0] * x[1] * up[0]


@register_flop_formula([torch.ops.paceline_bench.down_gelu_backward])
def _(grad: Any, down: Any, before: Any, **_: Any) -> int:
    return 2 * grad[0] * grad[1] * down[1]


class _AddProduct(torch.autograd.Function):
    """stream + a @ weight.T, float32; a has the products' dtype, the weight is float32."""

    @staticmethod
    def forward(ctx: Any, stream_NC: Tensor, a_NF: Tensor, weight_CF: Tensor) -> Tensor:
        weight = weight_CF.to(a_NF.dtype)
        ctx.save_for_backward(a_NF, weight)
        return torch.ops.paceline_bench.add_product(stream_NC, a_NF, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a_NF, weight = ctx.saved_tensors
        half_NC = grad_NC.to(a_NF.dtype).contiguous()
        return grad_NC, half_NC @ weight, loss._add_product(None, half_NC.t(), a_NF, torch.float32)


class _GeluMlp(torch.autograd.Function):
    """gelu(x @ up.T) @ down.T; x has the products' dtype, the weights are float32. stream: what the last product is
    added to, float32, or None."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, up_FC: Tensor, down_CF: Tensor, stream_NC: Tensor | None) -> Tensor:
        up, down = up_FC.to(x_NC.dtype), down_CF.to(x_NC.dtype)
        before_NF, after_NF = torch.ops.paceline_bench.up_gelu(x_NC, up)
        ctx.adds = stream_NC is not None
        ctx.save_for_backward(x_NC, up, down, before_NF, after_NF)
        if stream_NC is None:
            return after_NF @ down.t()
        return torch.ops.paceline_bench.add_product(stream_NC, after_NF, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x_NC, up, down, before_NF, after_NF = ctx.saved_tensors
        half_NC = grad_NC.to(x_NC.dtype).contiguous()
        grad_NF = torch.ops.paceline_bench.down_gelu_backward(half_NC, down, before_NF)
        grad_up = loss._add_product(None, grad_NF.t(), x_NC, torch.float32)
        grad_down = loss._add_product(None, half_NC.t(), after_NF, torch.float32)
        return grad_NF @ up, grad_up, grad_down, grad_NC if ctx.adds else None


# ---- in a model ----


@dataclass(frozen=True)
class How:
    """What of an MLP's work goes into its products."""

    gelu: bool = False
    residual: bool = False  # cuBLAS adds the float32 stream to the last one, which is then not rounded before

    def add_mlp(self, block: Block, x_BTC: Tensor, dtype: torch.dtype, dropout_keys_B: Tensor | None) -> Tensor:
        """As `Block.add_mlp` without biases and dropout."""
        assert dropout_keys_B is None
        mlp, branch_BTC = block.mlp, block.post_attention_layernorm(x_BTC).to(dtype)
        stream_NC, branch_NC = x_BTC.flatten(0, -2), branch_BTC.flatten(0, -2)
        if self.gelu:
            added_to = stream_NC if self.residual else None
            out = _GeluMlp.apply(branch_NC, mlp.up_proj.weight, mlp.down_proj.weight, added_to)  # type: ignore[no-untyped-call]
        else:
            inside_NF = mlp.up_proj(branch_NC)
            inside_NF = F.gelu(inside_NF) if mlp.gate_proj is None else F.silu(mlp.gate_proj(branch_NC)) * inside_NF
            out = _AddProduct.apply(stream_NC, inside_NF, mlp.down_proj.weight)  # type: ignore[no-untyped-call]
        out = out if self.residual else stream_NC + out
        return out.view(x_BTC.shape)


def use_mlp(model: GPT, how: How) -> None:
    """Makes the model's blocks put this work into their MLPs' products. Before they are compiled."""
    config = model.config
    assert config.gelu == "exact", "tanh GELU is not written"
    assert not config.bias, "biases are not written"
    assert config.arch == "gpt2" or not how.gelu, "SwiGLU in products is not written"
    for block in model.layers:
        block.add_mlp = partial(how.add_mlp, block)


def use_loss_kernel() -> None:
    """Makes compiled models of this process take the loss of `loss_chunk`."""
    loss._compiled = lambda: loss_chunk  # type: ignore[assignment]


# ---- a library's kernels for Hopper, https://github.com/Dao-AILab/quack: called as its 0.6.5 reads, not run yet ----


def use_quack_loss() -> None:
    """As `use_loss_kernel`, by QuACK."""
    from quack.cross_entropy import cross_entropy_fwd  # type: ignore[import-not-found]

    def of_chunk(logits_RV: Tensor, targets_R: Tensor, need_gradients: bool) -> tuple[Tensor, Tensor | None]:
        if not need_gradients:
            return cross_entropy_fwd(logits_RV, targets_R).sum(), None
        losses_R, gradient_RV = cross_entropy_fwd(logits_RV, targets_R, return_dx=True, inplace_backward=True)
        return losses_R.sum(), gradient_RV

    loss._compiled = lambda: of_chunk


def use_quack_mlp(model: GPT) -> None:
    """Makes QuACK's products compute SwiGLU, and backward its slope. It has no exact GELU."""
    from quack.mlp import mlp_func  # type: ignore[import-not-found]

    assert model.config.arch == "llama"

    def forward(mlp: MLP, x_BTC: Tensor) -> Tensor:
        both = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(x_BTC.dtype)
        out: Tensor = mlp_func(x_BTC, both, mlp.down_proj.weight.to(x_BTC.dtype), "swiglu", concat_layout=True)
        return out

    for block in model.layers:
        block.mlp.forward = partial(forward, block.mlp)
