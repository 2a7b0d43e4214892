"""Text from a model, one token at a time. (B batch = 1, T sequence, V vocabulary.)"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.base.errors import UserError
from paceline.model.gpt import GPT

# Not cuDNN's, which torch prefers on an H100: it makes a plan for each length of the cache, so for every token.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields up to max_new_tokens token ids that continue the prompt; ends after `stop`.

    temperature 0 takes the likeliest token. `generator`: on the CPU; None: a new one with seed 0. No global generator
    is used, so weights and seed determine the text. Keys and values are cached. When all n_positions are used,
    generation restarts with the latest half of them as the prompt. A longer prompt is cut to its last n_positions
    tokens. Raises UserError for an empty prompt, a negative temperature, or logits that are not finite.
    """
    if not prompt:
        raise UserError("the prompt is empty: give at least one token to continue")
    if temperature < 0:
        raise UserError(f"temperature is {temperature}: use 0 for the likeliest token, or a positive number")
    if top_k is not None and top_k < 1:
        raise UserError(f"top-k is {top_k}: use a positive number, or leave it out to draw from all tokens")
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    device = model.embed_tokens.weight.device
    context = list(prompt)[-model.config.n_positions :]
    cache = model.make_cache(batch=1)
    unread = context
    for _ in range(max_new_tokens):
        with sdpa_kernel(_ATTENTION):
            logits_V = model.logits(torch.tensor([unread], device=device), cache)[0, -1].cpu()
        if not logits_V.isfinite().all():
            raise UserError("the model's logits are not finite: training diverged; take an earlier checkpoint (--step)")
        token = _draw(logits_V, temperature, top_k, generator)
        yield token
        if token == stop:
            return
        unread = [token]
        context.append(token)
        if len(context) > model.config.n_positions:
            unread = context = context[-max(1, model.config.n_positions // 2) :]
            cache = model.make_cache(batch=1)


def _draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / temperature
    if top_k is not None and top_k < logits_V.shape[0]:
        smallest_kept = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest_kept, float("-inf"))
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))
