"""model.size auto: the shape, the batch and the weight decay for what the ranks compute in the run's time."""

import math
from dataclasses import replace

from paceline.base import units
from paceline.config import Config
from paceline.model import cost
from paceline.model.config import ModelConfig

_HEAD_WIDTH = 64
# Set by a few runs (docs/LOG.md, 2026-11-23):
_LAYERS, _LAYERS_FLOPS = 2.2, 1.5e13  # so many layers for these FLOPs
_BATCH_OF_TOKENS = 2.0  # tokens in a step over the square root of all tokens
# Text that is read again is learnt by heart, by large models sooner; decay holds that up. 0.1 is best for one pass. For
# eight passes over 61,000 tokens it is about 4 for 2 x 128, 5.5 for 3 x 192 and 7.5 for 4 x 256, as the cube root of
# 7, 23 and 54 parameters a token (docs/log/ablations.md; also arXiv 2509.14786, section 3).
_DECAY_OF_A_PASS = 2.7  # added for each pass after the first, over the decay of one pass, at one parameter a token
_MOST_PASSES = 12  # measured up to here
_NEARLY_ALL = 0.8  # of the passes
_MORE_LAYERS = 2  # for text that is too short for the time (docs/log/ablations.md); measured up to here


def sized(
    config: Config, vocab_size: int, flops_per_s: float, num_ranks: int, data_tokens: int = 0
) -> tuple[Config, str, str]:
    """Returns the config with the shape, batch and decay that end with the lowest loss, what they are, and why. FLOP/s
    0, not known, or no time budget: as given. data_tokens: of the training data; train.max_epochs of them are trained
    at most.

    Width is 64 a layer, so parameters grow as layers^3, and the best number as the root of the FLOPs (Chinchilla,
    arXiv 2203.15556): layers as the sixth root. Tokens in a step grow as the root of all tokens. Where max_epochs end
    the training early, the model is as large as these FLOPs train, and up to two layers larger where the time allows.
    """
    model, train = replace(config.model, size="given"), config.train
    seconds, most = train.time_budget, train.max_epochs * data_tokens or math.inf
    if not flops_per_s * seconds:
        missing = "measured speed" if seconds else "train.time-budget"
        shape = f"{model.n_layer} layers x {model.n_embd}"
        return replace(config, model=model), shape, f"as given: no {missing}"

    def shaped(layers: int) -> ModelConfig:
        return replace(model, n_layer=layers, n_head=layers, n_kv_head=0, n_embd=_HEAD_WIDTH * layers, n_hidden=0)

    def tokens_in(seconds: float, layers: int) -> float:
        shape = replace(shaped(layers), vocab_size=model.vocab_size or vocab_size)
        return flops_per_s * seconds / cost.flops_per_token(shape, config.data.seq_len)

    wanted = tokens_in(seconds, _layers(flops_per_s * seconds))  # if the data had enough
    while tokens_in(seconds, _layers(flops_per_s * seconds)) > most:
        seconds *= 0.98
    layers = _layers(flops_per_s * seconds)
    if wanted > most:  # time is left: a larger model learns more from the same passes
        larger = range(layers, layers + _MORE_LAYERS + 1)
        layers = max(each for each in larger if tokens_in(train.time_budget, each) >= _NEARLY_ALL * most)
    tokens = min(most, tokens_in(train.time_budget, layers))
    seconds = tokens * train.time_budget / tokens_in(train.time_budget, layers)
    model = shaped(layers)
    least = math.ceil(max(1, train.device_batch_size) / num_ranks)  # a micro-batch is a part of the batch
    each = max(least, round(_BATCH_OF_TOKENS * math.sqrt(tokens) / config.data.seq_len / num_ranks))
    batch = num_ranks * each  # else some ranks would wait for others
    shape = f"{layers} layers x {model.n_embd}, {batch} sequences a step"
    why = f"about {units.count(tokens)} tokens at {units.count(flops_per_s)}FLOP/s in {seconds:.3g} s"
    if wanted > most:
        why += (
            f", limited by train.max-epochs {train.max_epochs:g}: for {train.time_budget:g} s "
            f"{wanted / most:.1f} times as much text would be enough"
        )
    train = replace(train, global_batch_size=batch, global_batch_tokens=0)
    passes = tokens / data_tokens if data_tokens else 1.0
    num_parameters = cost.num_parameters(replace(model, vocab_size=model.vocab_size or vocab_size)).non_embedding
    decay = decay_for(config.optim.weight_decay, passes, num_parameters / max(1, data_tokens))
    if decay != config.optim.weight_decay:
        shape += f", weight decay {config.optim.weight_decay:g} -> {decay:.2g}"
        why += f", {passes:.1f} passes over the data"
    return replace(config, model=model, train=train, optim=replace(config.optim, weight_decay=decay)), shape, why


def _layers(flops: float) -> int:
    """Returns how many layers so many FLOPs of training are best spent on."""
    return max(2, round(_LAYERS * math.pow(flops / _LAYERS_FLOPS, 1 / 6)))


def decay_for(of_one_pass: float, passes: float, parameters_of_a_token: float) -> float:
    """Returns the weight decay for so many passes over the data. parameters_of_a_token: those outside embeddings over
    the tokens of a pass."""
    more = _DECAY_OF_A_PASS * math.cbrt(parameters_of_a_token) * max(0.0, min(passes, _MOST_PASSES) - 1.0)
    return of_one_pass * (1.0 + more)
