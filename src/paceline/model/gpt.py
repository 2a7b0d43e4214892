"""A decoder-only transformer of two families, chosen by config.

B batch, T sequence, C width, K kv heads, D head width, V vocabulary, N = B * T tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.base import seeds
from paceline.base.errors import UserError
from paceline.model.config import ModelConfig
from paceline.model.dropout import dropout
from paceline.model.layers import (
    Block,
    Embedding,
    EmbeddingMix,
    Head,
    LayerCache,
    Linear,
    attends_by_document,
    document_bounds,
    document_mask,
    make_norm,
    rotary_tables,
)
from paceline.model.loss import loss_sum

_INIT_STD = 0.02  # GPT-2's


class GPT(nn.Module):
    """Tokens in, the sum of the next-token losses out. Parameters have Hugging Face Llama's names, in both families.

    Two plain attributes may be set at any time:
    - `compute_dtype`: of matrix products (float32, bfloat16, float16). Parameters, gradients, the residual stream,
      norms and the loss are always float32. No autocast context is needed, on any device.
    - `checkpoint_blocks`: keep only each block's input for backward, and recompute the block there.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """The initial weights depend only on config and seed; see `initialise`. On torch's meta device there are none.
        Raises UserError for an impossible config."""
        super().__init__()
        config.check()
        for name in ("n_positions", "vocab_size"):
            if getattr(config, name) < 1:
                raise UserError(f"model.{name.replace('_', '-')} is 0, and there is no data to derive it from: give it")
        self.config = config
        self.compute_dtype = torch.float32
        self.checkpoint_blocks = False
        self._is_compiled = False
        self.embed_tokens = Embedding(config.vocab_size, config.n_embd)
        self.embed_positions = Embedding(config.n_positions, config.n_embd) if config.arch == "gpt2" else None
        self.embed_mix = EmbeddingMix(config.embed_mix, config.n_embd) if config.embed_mix else None
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.norm = make_norm(config)
        self.lm_head = None if config.tied else Head(config.n_embd, config.vocab_size, bias=False)
        if not self.embed_tokens.weight.is_meta:
            self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """Sets each parameter by config, seed and its name.

        GPT-2's initialisation: normal with standard deviation 0.02; smaller by sqrt(2 n_layer), the number of writes,
        for projections that write to the residual stream; norms 1; biases 0; embed_mix 0.5. Each parameter is drawn on
        the CPU in float32 from its own generator, so devices, ranks and order change nothing.
        """
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(_initial(name, parameter.shape, self.config.n_layer, seed))

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        dropout_keys_B: Tensor | None = None,
        documents: Tensor | None = None,
        split: Sequence[int] = (),
    ) -> Tensor:
        """Returns the sum over all B*T tokens of -log p(target), in nats; a float32 scalar.

        The caller divides it by the token count of the whole world's step. dropout_keys_B: int64, one key a sequence;
        nothing drops without it, in eval(), or with config.dropout 0.

        `documents`, [B, T] integers, keeps attention inside documents: a token sees earlier ones of equal number, which
        are its neighbours. Rotary positions are relative, so a document's loss is as if it were alone in the row;
        gpt2's learned positions count from the row's start. On the CPU, from where `attends_by_document` needs it
        without a wait; else it becomes a mask of B * T * T numbers of the compute dtype.

        split: sizes of micro-batches whose sum is B. Each half of a block, attention or MLP, computes all of them
        before the next half does, in backward too (layered accumulation, arXiv 2106.02679): its gradients are complete
        when k times the backward of all halves before it is still to come. Compiled or checkpointed blocks stay whole.
        The activations of all are kept. Gradients are those of k separate calls, bit for bit; a tied matrix's within
        rounding.
        """
        sizes = list(split) or [len(tokens_BT)]
        # Backward begins with what forward did last. Reversed here, it takes micro-batches in their order.
        whole_batch = tokens_BT, targets_BT, dropout_keys_B, documents
        tokens, targets, keys, numbers = (_cut(batch, sizes)[::-1] for batch in whole_batch)
        losses = [
            loss_sum(hidden_BTC.flatten(0, 1), self.head_weight, target_BT.flatten(), compiled=self._is_compiled)
            for hidden_BTC, target_BT in zip(self._hidden(tokens, keys, numbers), targets, strict=True)
        ]
        return sum(losses[-2::-1], start=losses[-1])

    def logits(self, tokens_BT: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Returns [B, T, V] float32. With a cache, the tokens follow those in it, and are added to it."""
        [hidden_BTC] = self._hidden([tokens_BT], cache=cache)
        return F.linear(hidden_BTC, self.head_weight.to(hidden_BTC.dtype)).float()

    @property
    def head_weight(self) -> Tensor:
        """The output layer's matrix [V, C]: the token embedding's if they are tied."""
        weight_VC: Tensor = self.embed_tokens.weight if self.lm_head is None else self.lm_head()
        return weight_VC

    def read_as(self) -> dict[str, torch.dtype]:
        """Returns the parameters that every reader casts to the compute dtype first, as linear layers do; none if that
        is the parameters' own."""
        if self.compute_dtype == torch.float32:
            return {}
        layers = [(name, module) for name, module in self.named_modules() if isinstance(module, Linear)]
        weights = [f"{name}.{weight}" for name, layer in layers for weight, _ in layer.named_parameters()]
        return dict.fromkeys(weights, self.compute_dtype)

    def rounded_gradients(self) -> list[str]:
        """Returns those of `read_as` whose gradient from one backward pass has values of the compute dtype: all but the
        head's, which is added up in float32. None if blocks are compiled: the compiler may leave a rounding out."""
        return [] if self._is_compiled else [name for name in self.read_as() if name.startswith("layers.")]

    def make_cache(self, batch: int) -> list[LayerCache]:
        """Returns an empty cache with room for n_positions tokens: one entry a layer."""
        shape = (batch, self.config.num_kv_heads, self.config.n_positions, self.config.head_dim)
        room = torch.empty(2, *shape, dtype=self.compute_dtype, device=self.embed_tokens.weight.device)
        return [LayerCache(*room.clone()) for _ in self.layers]

    def stages(self) -> list[nn.Module]:
        """Returns the modules, in the order of forward, that can wait for weights of their own: the parts of the
        blocks, or whole blocks if these are compiled, the last norm, and the output layer unless it is the token
        embedding."""
        parts = self.layers if self._is_compiled else [part for block in self.layers for part in block.children()]
        return [*parts, self.norm] if self.lm_head is None else [*parts, self.norm, self.lm_head]

    def use_float8(self) -> None:
        """Makes the products of the blocks' linear layers float8. The compute dtype must be bfloat16."""
        for module in self.layers.modules():
            if isinstance(module, Linear):
                module.is_float8 = True

    def compile_blocks(self) -> None:
        """Compiles each block in place: names stay, and late layers' gradients are ready before early ones. On CUDA
        also the loss."""
        self._is_compiled = True
        options = _compiler_options()  # wherever the model is: fsdp's goes to the GPU afterwards
        for block in self.layers:
            block.compile(options=options)

    def _hidden(
        self,
        tokens: Sequence[Tensor],
        dropout_keys: Sequence[Tensor | None] = (None,),
        documents: Sequence[Tensor | None] = (None,),
        cache: list[LayerCache] | None = None,
    ) -> list[Tensor]:
        """Returns the last norm's output [B, T, C] in the compute dtype, for each micro-batch."""
        first = cache[0].length if cache else 0
        num_tokens = tokens[0].shape[1]
        if first + num_tokens > self.config.n_positions:
            raise UserError(
                f"a sequence of {first + num_tokens} tokens is longer than the model's {self.config.n_positions} "
                "positions (model.n-positions): shorten it, or train with more positions"
            )
        if not self.training or self.config.dropout == 0.0:
            dropout_keys = [None] * len(tokens)
        masks = [None if part is None else self._mask(part, tokens[0].device) for part in documents]
        streams = [self._embed(*part, cache) for part in zip(tokens, dropout_keys, documents, strict=True)]
        rotary_2THD = self._rotary(first, num_tokens, streams[0].device)
        dtype, parts = self.compute_dtype, list(zip(dropout_keys, masks, strict=True))
        for index, block in enumerate(cast(list[Block], self.layers)):
            layer_cache = cache[index] if cache else None
            if len(streams) > 1 and not (self.checkpoint_blocks or self._is_compiled):
                # By halves of a block: the gradients of one are sent while the other's are computed.
                streams = [
                    block.add_attention(x_BTC, dtype, rotary_2THD, *part, cache=None)
                    for x_BTC, part in zip(streams, parts, strict=True)
                ]
                streams = [
                    block.add_mlp(x_BTC, dtype, keys_B) for x_BTC, keys_B in zip(streams, dropout_keys, strict=True)
                ]
            else:
                streams = [
                    self._run(block, x_BTC, dtype, rotary_2THD, keys_B, layer_cache, mask)
                    for x_BTC, (keys_B, mask) in zip(streams, parts, strict=True)
                ]
        return [self.norm(x_BTC).to(self.compute_dtype) for x_BTC in streams]

    def _mask(self, documents_BT: Tensor, device: torch.device) -> Tensor:
        """Returns what a block's attention takes to stay inside documents, on the device."""
        if attends_by_document(device, self.compute_dtype, self.config.head_dim):
            return document_bounds(documents_BT.cpu()).to(device, non_blocking=True)
        return document_mask(documents_BT.to(device, non_blocking=device.type == "cuda"), self.compute_dtype)

    def _run(self, block: nn.Module, *arguments: object) -> Tensor:
        """Calls the block; if checkpointed, only its input is kept. Dropout needs no generator state."""
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        return cast(Tensor, block(*arguments))

    def _embed(
        self,
        tokens_BT: Tensor,
        dropout_keys_B: Tensor | None,
        documents_BT: Tensor | None,
        cache: list[LayerCache] | None,
    ) -> Tensor:
        x_BTC: Tensor = self.embed_tokens(tokens_BT)
        if self.embed_mix is not None:
            x_BTC = self.embed_mix(x_BTC, documents_BT, cache[0] if cache else None)
        if self.embed_positions is not None:
            first = cache[0].length if cache else 0
            x_BTC = x_BTC + self.embed_positions.weight[first : first + tokens_BT.shape[1]]
        return x_BTC if dropout_keys_B is None else dropout(x_BTC, self.config.dropout, dropout_keys_B, site=0)

    def _rotary(self, first: int, num_tokens: int, device: torch.device) -> Tensor | None:
        if self.config.arch == "gpt2":
            return None
        tables_2T1D = rotary_tables(first, num_tokens, self.config.head_dim, self.config.rope_theta, device)
        tables_2T1D = tables_2T1D.to(self.compute_dtype)
        # Repeated over heads, a CPU's kernels need no broadcast inside their loops: a quarter less time, equal bits.
        return tables_2T1D.repeat(1, 1, self.config.n_head, 1) if device.type == "cpu" else tables_2T1D


def _compiler_options() -> dict[str, Any]:
    """For GPUs: from torch 2.13 on the compiler splits a norm's backward pass where it reads more than 10 tensors, for
    fear of spilled registers (pytorch/pytorch#179423). A block's first norm reads 15; as one kernel, as 2.11 makes it,
    a step of gpt2-124m is 2% shorter by estimate (docs/LOG.md, 2026-11-30)."""
    from torch._inductor import list_options  # over a second, which the first compiled block takes anyway

    name = "triton.mix_order_reduction_max_reads"
    return {name: 20} if name in list_options() else {}


def _cut(batch: Tensor | None, sizes: list[int]) -> list[Any]:
    """Returns the micro-batches of these sizes; None for each if there is no batch."""
    return [None] * len(sizes) if batch is None else list(torch.split(batch, sizes))


def _without_weights(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Returns the shape of each parameter by name, without memory for it."""
    return {name: parameter.shape for name, parameter in _without_weights(config).named_parameters()}


def with_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> GPT:
    """Returns a model whose parameters are these tensors, which are not copied."""
    model = _without_weights(config)
    model.load_state_dict(weights, assign=True)
    return model


def build(config: ModelConfig, seed: int, device: torch.device | str) -> GPT:
    """Returns a model with its initial weights on a device, where it is made once. Raises UserError for an impossible
    config."""
    model = _without_weights(config)
    # Not to_empty(): empty_like of a meta tensor imports sympy, 0.6 s.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))  # type: ignore[no-untyped-call]
    model.initialise(seed)
    return model


def _initial(name: str, shape: torch.Size, n_layer: int, seed: int) -> Tensor:
    """The first value of one parameter, float32 on the CPU."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm." in name:
        return torch.ones(shape)
    if name == "embed_mix.weight":
        return torch.full(shape, 0.5)
    generator = torch.Generator().manual_seed(seeds.key(seed, "init", name))
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = _INIT_STD / math.sqrt(2 * n_layer) if writes_residual else _INIT_STD
    return torch.normal(0.0, std, shape, generator=generator)
