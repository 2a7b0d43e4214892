"""A training loop that shares nothing with train/, sync/ and optim/, for runs to be compared with."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from paceline.config import Config
from paceline.data.config import Quiet
from paceline.data.loader import FixedBatches, Loader, MicroBatch
from paceline.data.plan import BatchPlan
from paceline.model.gpt import GPT, build
from paceline.optim.config import OptimConfig
from paceline.train.data import open_data


class PlainCurve(NamedTuple):
    """What the loop came to."""

    losses: list[float]
    val_loss: float


def plain_curve(config: Config, without_update: int = 0) -> PlainCurve:
    """Returns the losses of a run of this config with optimizer adamw, without dropout.

    All sequences of a step at once, torch's AdamW and clipping, torch's cross-entropy of all logits, and the schedule
    as its documentation says it. without_update: the number of a step that makes none.
    """
    data, batch = open_data(config, Quiet()), config.train.global_batch_size
    loader = Loader(data.training, BatchPlan(batch, batch, 1), 0, config.train.seed)
    config = config.replace("model", vocab_size=data.blend.first.vocab_size, n_positions=config.data.seq_len)
    model = build(config.model, config.train.seed, "cpu").train()
    decay, ratio = config.optim.weight_decay, config.optim.embedding_lr_ratio
    parameters = dict(model.named_parameters())
    embeddings = [p for name, p in parameters.items() if p.ndim > 1 and name.startswith("embed_")]
    matrices = [p for name, p in parameters.items() if p.ndim > 1 and not name.startswith("embed_")]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": embeddings, "weight_decay": decay, "ratio": ratio},
            {"params": matrices, "weight_decay": decay, "ratio": 1.0},
            {"params": vectors, "weight_decay": 0.0, "ratio": 1.0},
        ],
        betas=(config.optim.beta1, config.optim.beta2),
        eps=config.optim.eps,
    )
    losses = []
    for step in range(config.train.steps):
        (micro_batch,) = loader.micro_batches(step)
        loss = _loss(model, micro_batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = group["ratio"] * _learning_rate(config.optim, step, step / config.train.steps)
        if step + 1 != without_update:
            optimizer.step()
        losses.append(loss.item())
    held_out = FixedBatches(data.validation, config.train.eval_sequences)
    return PlainCurve(losses, _loss(model, held_out.micro_batch(range(len(held_out)))).item())


def _loss(model: GPT, batch: MicroBatch) -> torch.Tensor:
    return F.cross_entropy(model.logits(batch.tokens).flatten(0, 1), batch.targets.flatten())


def _learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    if config.schedule == "cosine":
        factor = (1 + math.cos(math.pi * progress)) / 2
    else:
        factor = min(1.0, (1 - progress) / config.decay_frac)
    warm_up = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return config.lr * warm_up * (config.min_lr_frac + (1 - config.min_lr_frac) * factor)
