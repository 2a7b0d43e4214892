"""What a model costs, in closed form: parameters, FLOPs, bytes of activations. Needs no torch."""

from dataclasses import dataclass
from functools import cache

from paceline.model.config import ModelConfig

# The loss takes so many logits at once: on a CPU 8 MiB of float32, which stay in the cache; on a GPU, which larger
# products keep busy, more. It takes at least so many rows.
LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_ELEMENTS_CPU = 1 << 27, 1 << 21
LOSS_CHUNK_ROWS = 512  # with fewer, adding up the chunks' V x C weight gradients takes a tenth of the time


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters, counted in three ways."""

    total: int  # every trained number once; a tied matrix counts once
    non_embedding: int  # without the embeddings, model.embed-mix included (a tied head is the embedding)
    matmul: int  # those that each token is multiplied with: the linear layers and the head, tied or not


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of elements of each parameter, by part of the model, in the order of `GPT.named_parameters()`."""

    embed: tuple[int, ...]
    block: tuple[int, ...]
    head: tuple[int, ...]  # with the last norm


@cache
def parameter_sizes(config: ModelConfig) -> Sizes:
    """Returns the sizes for a config with resolved n_positions and vocab_size."""
    width, kv_width, hidden = config.n_embd, config.num_kv_heads * config.head_dim, config.hidden
    llama, embedding = config.arch == "llama", config.vocab_size * config.n_embd
    norm = (width, width) if config.bias else (width,)

    def linear(num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        return (num_outputs * num_inputs, *((num_outputs,) if config.bias else ()))

    attention = (*linear(width, width), *linear(kv_width, width), *linear(kv_width, width), *linear(width, width))
    qk_norms = (config.head_dim, config.head_dim) if config.qk_norm else ()
    mlp = (*((hidden * width,) if llama else ()), *linear(hidden, width), *linear(width, hidden))
    positions = () if llama else (config.n_positions * width,)
    return Sizes(
        embed=(embedding, *positions, *((config.embed_mix * width,) if config.embed_mix else ())),
        block=(*norm, *attention, *qk_norms, *norm, *mlp),
        head=norm if config.tied else (*norm, embedding),
    )


@cache
def num_parameters(config: ModelConfig) -> Parameters:
    """Returns the counts for a config with resolved n_positions and vocab_size."""
    width, kv_width, sizes = config.n_embd, config.num_kv_heads * config.head_dim, parameter_sizes(config)
    non_embedding = config.n_layer * sum(sizes.block) + sum(sizes.head)
    products = 2 * width * width + 2 * width * kv_width + (3 if config.arch == "llama" else 2) * width * config.hidden
    return Parameters(
        total=sum(sizes.embed) + non_embedding,
        non_embedding=non_embedding,
        matmul=config.n_layer * products + config.vocab_size * width,  # the head's product has the embedding's size
    )


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Returns the FLOPs of forward and backward for one token of a sequence: 6 N + 12 L H Q T (PaLM, arXiv 2204.02311,
    appendix B), N parameters in matrix products, L layers, H heads of width Q, T seq_len. As there, attention counts as
    if it were not causal, and recomputation does not count."""
    return 6 * num_parameters(config).matmul + 12 * config.n_layer * config.n_embd * seq_len


def loss_bytes(config: ModelConfig, compute_bytes: int) -> int:
    """Returns roughly the most bytes that the loss on a GPU needs at once, whatever the micro-batch: a chunk's logits
    as computed, in float32, and their gradient; the head's weight and gradient in both formats."""
    logits = max(LOSS_CHUNK_ROWS * config.vocab_size, LOSS_CHUNK_ELEMENTS)
    return (logits + config.vocab_size * config.n_embd) * (4 + 2 * compute_bytes)


def loss_bytes_cpu(config: ModelConfig, num_tokens: int, compute_bytes: int) -> int:
    """Returns the bytes of a chunk's logits on a CPU: in float32, and as computed with their gradient if that is
    another format."""
    rows = min(num_tokens, max(LOSS_CHUNK_ROWS, LOSS_CHUNK_ELEMENTS_CPU // config.vocab_size))
    return rows * config.vocab_size * (4 + (2 * compute_bytes if compute_bytes < 4 else 0))


def activation_bytes(
    config: ModelConfig, seq_len: int, *, compute_bytes: int, checkpoint: bool = False, keeps_scores: bool = False
) -> int:
    """Returns roughly how many bytes one token keeps for backward; for choosing a micro-batch.

    compute_bytes: of an element of the compute dtype (4 or 2). checkpoint: blocks keep their float32 input, and one
    block at a time keeps all. keeps_scores: attention keeps its T x T probabilities (as with bfloat16 on a CPU).
    """
    width, kv_width, hidden = config.n_embd, config.num_kv_heads * config.head_dim, config.hidden
    stream = 4 * width
    # Norm's output, q, k, v, the heads' output as one row, and as heads where the kernel keeps it and not the scores.
    attention = (3 if keeps_scores else 4) * width + 2 * kv_width
    attention += width + kv_width if config.qk_norm else 0  # q and k before their norms
    mlp = width + (4 if config.arch == "llama" else 2) * hidden
    scores = config.n_head * seq_len if keeps_scores else 0
    masks = 2 * width if config.dropout else 0  # one byte an element
    block = 2 * stream + compute_bytes * (attention + mlp + scores) + masks
    ends = stream + 2 * compute_bytes * width  # the last norm's input, hidden states and their gradient
    return ends + (config.n_layer * stream + block if checkpoint else config.n_layer * block)
