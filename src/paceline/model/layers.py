"""The parts of a decoder block.

The residual stream and all norms are float32. Matrix products run in the dtype of their input, which each block gets
from `GPT.compute_dtype`; in float32 nothing is cast.

B batch, T sequence (S keys if they differ from the queries), C width, H heads, K kv heads, D head width,
G = H / K queries that share a kv head, F width inside the MLP.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model import cpu, float8
from paceline.model.config import ModelConfig
from paceline.model.dropout import dropout


class Linear(nn.Linear):
    """A linear layer whose float32 weight is cast to the dtype of its input."""

    is_float8 = False  # its products are of float8 numbers (float8.py); x is bfloat16

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x.dtype."""
        if self.is_float8:
            out = float8.linear(x, self.weight.to(x.dtype))
            return out if self.bias is None else out + self.bias.to(x.dtype)
        multiply = cpu.linear if cpu.has_faster_mm(x) else F.linear
        return multiply(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def reset_parameters(self) -> None:
        """Does nothing: `GPT.initialise` fills parameters, and torch's method would import its compiler (a second)."""


class Head(Linear):
    """The output layer, whose product is the loss's. A call returns the weight [V, C]; a hook can wait for it there."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight


class Embedding(nn.Embedding):
    """An embedding that only `GPT.initialise` fills."""

    def reset_parameters(self) -> None:
        """Does nothing, see `Linear`."""


class EmbeddingMix(nn.Module):
    """x_t + sum over k of weight_k * x_(t-k), k = 1 ... K: a causal depthwise convolution, as Primer's (arXiv
    2109.08668, section 4) but of embeddings. A model then sees n-grams from the first step on."""

    def __init__(self, num_earlier: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_earlier, width))

    def forward(self, x_BTC: Tensor, documents_BT: Tensor | None, cache: "LayerCache | None") -> Tensor:
        """[B, T, C] -> [B, T, C]. Tokens of other documents are left out. A cache has the embeddings of the K tokens
        before, and keeps the last K of these."""
        K, (B, T, C) = len(self.weight), x_BTC.shape
        before_BKC = x_BTC.new_zeros(B, K, C) if cache is None or cache.embeddings is None else cache.embeddings
        all_BSC = torch.cat((before_BKC, x_BTC), 1)
        if cache is not None:
            cache.embeddings = all_BSC[:, -K:]
        out_BTC = x_BTC
        for k, weight_C in enumerate(self.weight, 1):
            earlier_BTC = all_BSC[:, K - k : K - k + T]
            if documents_BT is not None:
                documents_BT = documents_BT.to(x_BTC.device, non_blocking=x_BTC.is_cuda)
                is_same_BT = F.pad(documents_BT, (k, 0), value=-1)[:, :T] == documents_BT
                earlier_BTC = earlier_BTC * is_same_BT[..., None]
            out_BTC = torch.addcmul(out_BTC, earlier_BTC, weight_C)
        return out_BTC


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv 1910.07467, eq. 4), in the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return cpu.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias (arXiv 1607.06450, eq. 4), in the dtype of x."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Returns the family's norm over the residual stream."""
    if config.arch == "llama":
        return RMSNorm(config.n_embd, config.norm_eps)
    return LayerNorm(config.n_embd, config.norm_eps, config.bias)


@dataclass
class LayerCache:
    """One layer's keys and values of the tokens so far, in buffers of full length. For generation only."""

    k_BKSD: Tensor
    v_BKSD: Tensor
    length: int = 0
    embeddings: Tensor | None = None  # [B, K, C], the last K of all tokens; the first layer's, for EmbeddingMix

    def extend(self, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends T tokens and returns all keys and values so far, [B, K, S, D] each."""
        end = self.length + k_BKTD.shape[2]
        self.k_BKSD[:, :, self.length : end] = k_BKTD
        self.v_BKSD[:, :, self.length : end] = v_BKTD
        self.length = end
        return self.k_BKSD[:, :, :end], self.v_BKSD[:, :, :end]


def rotary_tables(first: int, num_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Returns [2, T, 1, D]: cosines, then sines with the first half negated, for `rotate`; float32.

    Angles are position * theta^(-2i/D), i < D/2 (RoFormer, arXiv 2104.09864, eq. 15). As in Hugging Face's Llama,
    element i turns with element i + D/2.
    """
    half = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    position_T = torch.arange(first, first + num_positions, device=device, dtype=torch.float32)
    angle_TD = torch.outer(position_T, theta**-half)
    cos_TD, sin_TD = angle_TD.cos(), angle_TD.sin()
    return torch.stack((torch.cat((cos_TD, cos_TD), -1), torch.cat((-sin_TD, sin_TD), -1)))[:, :, None]


def rotate(x_BTHD: Tensor, tables_2THD: Tensor) -> Tensor:
    """Rotates each pair (i, i + D/2) of each head by its position's angle; [B, T, H, D], in the tables' dtype. The
    tables have 1 head for all, or at least H."""
    cos_THD, sin_THD = tables_2THD[:, :, : x_BTHD.shape[2]]
    return torch.addcmul(x_BTHD * cos_THD, x_BTHD.roll(x_BTHD.shape[-1] // 2, -1), sin_THD)


def document_mask(documents_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [B, T, T], added to scores: 0 for keys that are not later and have the same number in documents_BT
    (integers), else -inf. It has the products' dtype: SDPA would convert a boolean mask once a layer."""
    num_tokens = documents_BT.shape[1]
    seen_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    seen_BTT &= torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=documents_BT.device).tril()
    return torch.zeros(seen_BTT.shape, dtype=dtype, device=documents_BT.device).masked_fill_(~seen_BTT, -math.inf)


def attends_by_document(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a flash kernel for sequences of different lengths, which skips what a mask would hide."""
    return (
        device.type == "cuda"
        and hasattr(torch.ops.aten, "_flash_attention_forward")  # private, may go
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 192  # more only on some GPUs
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def document_bounds(documents_BT: Tensor) -> Tensor:
    """Returns where each document begins in the B * T tokens, and their number: int32, [documents + 1]. documents_BT is
    on the CPU, since the host would wait for a GPU to say the length; a document's tokens are neighbours."""
    begins_BT = torch.ones(documents_BT.shape, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    end = torch.tensor([documents_BT.numel()], dtype=torch.int32)
    return torch.cat((begins_BT.flatten().nonzero().flatten().int(), end))


def attend_by_document(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, bounds: Tensor) -> Tensor:
    """Returns causal attention inside documents, [B, T, H, D], by a flash kernel for the documents one by one."""
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTKD, v_BTKD))
    longest = q_BTHD.shape[1]  # or less: known without a look at the bounds
    # torch.nn.attention.varlen has other arguments in each version of torch; it calls this.
    attention = torch.ops.aten._flash_attention_forward
    y = cast(Tensor, attention(q, k, v, bounds, bounds, longest, longest, 0.0, True, False)[0])
    return y.view(q_BTHD.shape)


def attend(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_BTT: Tensor | None = None) -> Tensor:
    """Returns causal attention, [B, H, T, D]; the T queries are the last T of the S positions.

    Query heads h*G ... h*G+G-1 share kv head h (arXiv 2305.13245). No dropout inside: SDPA's would depend on the rank's
    generator, not on the sequence. mask_BTT: from `document_mask`, for T = S; None: a query sees all keys that are not
    later.
    """
    num_queries, num_keys = q_BHTD.shape[2], k_BKSD.shape[2]
    if num_queries == num_keys and cpu.attends_faster(q_BHTD):
        return cpu.attend(q_BHTD, k_BKSD, v_BKSD, mask_BTT)
    group = q_BHTD.shape[1] // k_BKSD.shape[1]
    if mask_BTT is not None:
        if group > 1:  # CUDA's kernels with a mask take no grouped queries
            k_BKSD, v_BKSD = k_BKSD.repeat_interleave(group, 1), v_BKSD.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, attn_mask=mask_BTT.unsqueeze(1))
    if 1 < num_queries < num_keys:  # a later part of a prompt, after a cached part
        mask_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHTD.device).tril(num_keys - num_queries)
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, attn_mask=mask_TS, enable_gqa=True)
    return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, is_causal=num_queries > 1, enable_gqa=group > 1)


class Attention(nn.Module):
    """Causal self-attention with grouped queries, and rotary positions where the family has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.k_proj = Linear(config.n_embd, kv_width, bias=config.bias)
        self.v_proj = Linear(config.n_embd, kv_width, bias=config.bias)
        self.o_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x_BTC: Tensor, rotary_2THD: Tensor | None, cache: LayerCache | None, documents: Tensor | None
    ) -> Tensor:
        """[B, T, C] -> [B, T, C], both in the compute dtype. documents: a mask [B, T, T], or bounds."""
        B, T, C = x_BTC.shape
        q_BTHD = self.q_proj(x_BTC).view(B, T, -1, self.head_dim)
        k_BTKD = self.k_proj(x_BTC).view(B, T, -1, self.head_dim)
        v_BTKD = self.v_proj(x_BTC).view(B, T, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        if rotary_2THD is not None:
            q_BTHD, k_BTKD = rotate(q_BTHD, rotary_2THD), rotate(k_BTKD, rotary_2THD)
        if documents is not None and documents.dim() == 1:
            out: Tensor = self.o_proj(attend_by_document(q_BTHD, k_BTKD, v_BTKD, documents).reshape(B, T, C))
            return out
        k_BKSD, v_BKSD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        if cache is not None:
            k_BKSD, v_BKSD = cache.extend(k_BKSD, v_BKSD)
        y_BHTD = attend(q_BTHD.transpose(1, 2), k_BKSD, v_BKSD, documents)
        out = self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, C))
        return out


class MLP(nn.Module):
    """gpt2: down(GELU(up(x))); llama: down(silu(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.gate_proj = Linear(config.n_embd, config.hidden, bias=False) if config.arch == "llama" else None
        self.up_proj = Linear(config.n_embd, config.hidden, bias=config.bias)
        self.down_proj = Linear(config.hidden, config.n_embd, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C] through [B, T, F]."""
        if self.gate_proj is None:
            out: Tensor = self.down_proj(F.gelu(self.up_proj(x_BTC), approximate=self.approximate))
            return out
        out = self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out


class Block(nn.Module):
    """One decoder block: x + attention(norm(x)), then x + mlp(norm(x)) ("pre-norm", arXiv 2002.04745, fig. 1b)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        # For dropout; site 0 is the embedding sum. A tensor: for each new number torch.compile would make a new graph.
        self.first_site = torch.tensor(1 + 2 * index, device="cpu")
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTC: Tensor,
        dtype: torch.dtype,
        rotary_2THD: Tensor | None,
        dropout_keys_B: Tensor | None = None,
        cache: LayerCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """[B, T, C] float32 -> [B, T, C] float32; matrix products in `dtype`. dropout_keys_B None: no dropout.
        documents: as `Attention` takes it."""
        x_BTC = self.add_attention(x_BTC, dtype, rotary_2THD, dropout_keys_B, documents, cache)
        return self.add_mlp(x_BTC, dtype, dropout_keys_B)

    def add_attention(
        self,
        x_BTC: Tensor,
        dtype: torch.dtype,
        rotary_2THD: Tensor | None,
        dropout_keys_B: Tensor | None,
        documents: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """The first half of `forward`."""
        branch_BTC = self.self_attn(self.input_layernorm(x_BTC).to(dtype), rotary_2THD, cache, documents)
        return self._added(x_BTC, branch_BTC, dropout_keys_B, 0)

    def add_mlp(self, x_BTC: Tensor, dtype: torch.dtype, dropout_keys_B: Tensor | None) -> Tensor:
        """The second half of `forward`."""
        branch_BTC = self.mlp(self.post_attention_layernorm(x_BTC).to(dtype))
        return self._added(x_BTC, branch_BTC, dropout_keys_B, 1)

    def _added(self, x_BTC: Tensor, branch_BTC: Tensor, dropout_keys_B: Tensor | None, site: int) -> Tensor:
        if dropout_keys_B is not None:
            branch_BTC = dropout(branch_BTC, self.dropout, dropout_keys_B, self.first_site + site)
        return x_BTC + branch_BTC
