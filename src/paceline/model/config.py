"""The shape of a model. Needs no torch, so that the command line answers at once."""

import math
from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import UserError, require_at_least, require_choices

FLOAT8_MULTIPLE = 16  # of all sizes in a float8 product
_HIDDEN_MULTIPLE = 64  # llama's MLP width is rounded up to this, which suits matrix kernels


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder. 0 stands for a derived value; each field says from what."""

    arch: Literal["gpt2", "llama"] = "llama"
    """Family: gpt2 (LayerNorm, learned positions, GELU) or llama (RMSNorm, rotary positions, SwiGLU)."""
    size: Literal["given", "auto"] = "given"
    """auto: n-layer, n-head, n-embd and the batch are chosen for what the ranks compute in train.time-budget, by timing
    them, so another start may choose others; weight decay grows with the passes that this makes over the data. One of
    the sizes as a flag means given."""
    n_layer: int = 4
    """Number of decoder blocks."""
    n_head: int = 4
    """Number of attention heads; must divide n-embd."""
    n_kv_head: int = 0
    """Number of key and value heads (grouped queries); must divide n-head. 0: as many as n-head."""
    n_embd: int = 256
    """Width of the residual stream."""
    n_positions: int = 0
    """Longest context in tokens. 0: data.seq-len."""
    vocab_size: int = 0
    """Number of token ids. 0: from the data."""
    n_hidden: int = 0
    """Width inside the MLP. 0: gpt2 4 n-embd; llama 8/3 n-embd rounded up to a multiple of 64."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding sum or of a block's branch in training."""
    bias: bool = False
    """Biases in the linear layers and layer norms of the gpt2 family."""
    gelu: Literal["exact", "tanh"] = "exact"
    """GELU of the gpt2 family. exact is several times faster on a CPU; tanh is what OpenAI's GPT-2 weights need."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys before their product."""
    head: Literal["auto", "tied", "untied"] = "auto"
    """Whether the output layer is the token embedding. auto: gpt2 tied, llama untied."""
    embed_mix: int = 0
    """Earlier tokens whose embeddings are added to each token's, times weights by channel that begin at 0.5 (a causal
    depthwise convolution); 0: none. Short runs on characters gain; such a model cannot be exported."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths (llama)."""
    norm_eps: float = 1e-5
    """Added to the variance in every norm."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads, with 0 resolved."""
        return self.n_kv_head or self.n_head

    @property
    def hidden(self) -> int:
        """Width inside the MLP, with 0 resolved."""
        if self.n_hidden:
            return self.n_hidden
        if self.arch == "gpt2":
            return 4 * self.n_embd
        return math.ceil(8 * self.n_embd / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the token embedding's matrix."""
        return self.arch == "gpt2" if self.head == "auto" else self.head == "tied"

    def check(self) -> None:
        """Raises UserError, naming the field, if no model can have this shape; zeros are allowed."""
        require_choices(self, "model.")
        require_at_least(self, "model.", n_layer=1, n_head=1, n_embd=1)
        require_at_least(self, "model.", n_kv_head=0, n_positions=0, vocab_size=0, n_hidden=0, embed_mix=0)
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"model.dropout is {self.dropout}: it must be at least 0 and below 1 (0 switches it off)")
        for name, value in (("rope-theta", self.rope_theta), ("norm-eps", self.norm_eps)):
            if not 0 < value < math.inf:
                raise UserError(f"model.{name} is {value}: it must be a finite number above 0")
        if self.n_embd % self.n_head:
            raise UserError(
                f"model.n-embd is {self.n_embd}, not a multiple of model.n-head ({self.n_head}): "
                f"try {math.ceil(self.n_embd / self.n_head) * self.n_head}, or another number of heads"
            )
        if self.n_head % self.num_kv_heads:
            divisors = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            raise UserError(
                f"model.n-kv-head is {self.n_kv_head}, which does not divide model.n-head ({self.n_head}): "
                f"use one of {', '.join(map(str, divisors))}, or 0 for as many as heads"
            )
        if self.arch == "llama" and self.head_dim % 2:
            raise UserError(
                f"model.n-head {self.n_head} and model.n-embd {self.n_embd} give heads {self.head_dim} wide, and "
                f"rotary positions need an even width: try --model.n-embd {self.n_head * (self.head_dim + 1)}"
            )
        if self.bias and self.arch == "llama":
            raise UserError(
                "model.bias is true, and the llama family has no biases: leave it out, or use --model.arch gpt2"
            )
