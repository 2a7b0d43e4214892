"""Evaluates the model: its loss on fixed sequences, the same at any world size, and a sample of text."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from paceline.base.errors import UserError
from paceline.base.sums import exact_sum
from paceline.data.plan import in_proportion
from paceline.model.generate import generate
from paceline.model.gpt import with_weights
from paceline.record.rows import EvalRow
from paceline.train.meet import Setup
from paceline.world.device import product_dtype

_SAY_EVERY_S = 10.0  # before the first line of progress; doubled after each
_VOTE_EVERY = 4  # forward passes, about a second on a busy device
_SAMPLE_TEMPERATURE = 0.7


@torch.no_grad()
def evaluate(setup: Setup) -> EvalRow | None:
    """Returns the loss over the fixed validation sequences; None if a rank's stop flag was set meanwhile. Collective.

    Ranks take sequences in proportion to their shares of a step. If forward passes communicate (fsdp), ranks with fewer
    make dummy passes. Uses no generator and keeps no state, so training continues as without an evaluation. Special
    tokens (end of text) count zero bytes.
    """
    began_s, replica, group, progress = time.perf_counter(), setup.replica, setup.group, setup.progress
    token_bytes = setup.data.blend.first.token_bytes
    nats, num_tokens, num_bytes = 0.0, 0, 0
    replica.model.eval()
    for number, which in enumerate(_micro_batches(setup)):
        if number % _VOTE_EVERY == _VOTE_EVERY - 1 and replica.agree_to_stop():
            replica.model.train()
            return None
        if not which and not replica.sync.shards_weights:
            continue
        part = setup.validation.micro_batch(which or range(1))
        loss = float(replica.model(part.tokens, part.targets, documents=part.documents))
        if not which:
            continue
        nats += loss
        num_tokens += part.targets.numel()
        if token_bytes is not None:
            num_bytes += int(token_bytes[part.targets.cpu().numpy()].sum(dtype="int64"))
    replica.model.train()
    rows = group.share([nats, float(num_tokens), float(num_bytes)])  # float64 counts exactly below 2^53
    nats, all_tokens, all_bytes = (exact_sum(column) for column in zip(*rows, strict=True))
    return EvalRow(
        step=progress.step,
        val_loss=nats / all_tokens,
        val_bpb=nats / math.log(2) / all_bytes if all_bytes else None,
        tokens=progress.tokens,
        val_tokens=int(all_tokens),
        eval_ms=(time.perf_counter() - began_s) * 1e3,
        elapsed_s=progress.elapsed_s,
    )


def _micro_batches(setup: Setup) -> Iterator[range]:
    """Yields this rank's sequences by micro-batch, equally many on all ranks; prints progress."""
    plan, num_sequences = setup.loader.plan_at(setup.progress.step), len(setup.validation)
    shares = in_proportion(num_sequences, plan.shares or [1] * plan.world_size)
    plan = replace(plan, global_batch_size=num_sequences, shares=shares)
    micro_batches = plan.micro_batches(setup.world.rank)
    began_s, silent_s = time.monotonic(), _SAY_EVERY_S
    for number in range(plan.passes):
        setup.at("evaluate")
        if (took_s := time.monotonic() - began_s) > silent_s:
            done = f"{num_sequences * number // plan.passes} of {num_sequences} sequences after {took_s:.0f} s"
            setup.console.say(f"evaluating step {setup.progress.step}: {done}")
            silent_s *= 2
        yield micro_batches[number] if number < len(micro_batches) else range(0)


def say_sample(setup: Setup, weights: Mapping[str, torch.Tensor]) -> None:
    """Prints text from the trained model, on rank 0; the others wait at the end. Collective if weights are sharded. The
    run is complete, so a prompt or a memory that allows no sample fails nothing."""
    if setup.data.blend.first.tokenizer_json is None:
        return
    on_host = {}
    for name, tensor in weights.items():  # which gathers a sharded one
        if setup.world.is_main:
            on_host[name] = tensor.cpu()
    if not setup.world.is_main:
        return
    try:
        _say_sample(setup, on_host)
    except (UserError, RuntimeError) as error:  # as torch.OutOfMemoryError; on a CPU its message begins with a place
        reason = str(error).rpartition("err == 0. ")[2].partition(". ")[0]
        setup.console.say(f"no sample: {reason}", style="yellow")


def _say_sample(setup: Setup, weights: Mapping[str, torch.Tensor]) -> None:
    config, tokenizer = setup.config, setup.data.blend.first.tokenizer()
    prompt = config.train.sample_prompt
    start = tokenizer.prompt(prompt)
    if not start:
        return  # a character vocabulary has no token to begin with
    # A fresh model, because compiled blocks would be compiled again for each length.
    model = with_weights(config.model, {name: tensor.to(setup.world.device) for name, tensor in weights.items()})
    model.compute_dtype = product_dtype(setup.config.train.dtype)
    generator = torch.Generator().manual_seed(config.train.seed % (1 << 63))  # it takes 64 bits
    tokens = generate(
        model.eval(), start, config.train.sample_tokens, temperature=_SAMPLE_TEMPERATURE, top_k=50, generator=generator
    )
    ids = []
    for token in tokens:
        setup.at("end")  # progress for the watchdog: a slow sample is no hang
        ids.append(token)
    setup.console.say(f"A sample (temperature {_SAMPLE_TEMPERATURE}):")
    setup.console.say(prompt + tokenizer.decode(ids))
