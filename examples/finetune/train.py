"""A Hugging Face language model learns to answer: only the tokens of answers count.

python train.py                                       a small model and sums such as 12+34=46, made on the spot
python train.py --model gpt2 --data answers.jsonl     a model by folder or name; lines of {"prompt": ..., "answer": ...}
torchrun --standalone --nproc-per-node 2 train.py --out runs/sums

Answers differ in length, so micro-batches hold unlike numbers of tokens that count, and backward is told how many.
Strategy zero keeps each rank its share of AdamW's state. Stopped by Ctrl-C or SIGTERM it saves and leaves with exit
status 75; killed, it has what it saved last; the same command resumes in either case, on any number of ranks. At the
end the model is in OUT/model, where transformers finds it.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import paceline

IGNORED = -100  # the label that transformers leaves out of the loss
END = 0  # of an answer, where the tokens are bytes


class Bytes:
    """The tokenizer of the small model: a token is a byte."""

    eos_token_id = END

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def load(name: str | None) -> tuple[Any, Any]:
    """Returns a model and its tokenizer: those of this folder or name, or a small model with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    shape = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, eos_token_id=END)
    shape.resid_pdrop = shape.embd_pdrop = shape.attn_pdrop = (
        0.0  # so that the curve is the same on any number of ranks
    )
    return GPT2LMHeadModel(shape), Bytes()


def sums(num: int) -> list[dict[str, str]]:
    """Returns questions and answers."""
    chance = random.Random(0)
    pairs = [(chance.randrange(10 ** chance.randint(1, 4)), chance.randrange(100)) for _ in range(num)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def encode(example: dict[str, str], tokenizer: Any, longest: int) -> dict[str, list[int]]:
    """Returns the tokens of prompt, answer and end, and as labels those of answer and end; what is too long loses
    the beginning of its prompt."""
    prompt = tokenizer.encode(example["prompt"])
    answer = [*tokenizer.encode(example["answer"], add_special_tokens=False), tokenizer.eos_token_id]
    return {"input_ids": (prompt + answer)[-longest:], "labels": ([IGNORED] * len(prompt) + answer)[-longest:]}


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Returns a micro-batch, filled up to the longest: input_ids, labels and attention_mask of shape (batch, time)."""
    most = max(len(example["input_ids"]) for example in examples)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([example[name] + [value] * (most - len(example[name])) for example in examples])

    is_there = torch.tensor([[i < len(example["input_ids"]) for i in range(most)] for example in examples])
    return {
        "input_ids": filled("input_ids", END),
        "labels": filled("labels", IGNORED),
        "attention_mask": is_there.long(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, or name on the Hugging Face hub")
    parser.add_argument("--data", type=Path, help="JSON lines")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24, help="examples, of all ranks together")
    parser.add_argument("--micro-batch-size", type=int, default=5, help="examples that a rank computes at once")
    parser.add_argument("--lr", type=float, default=2e-3, help="5e-5 suits a model that has learnt before")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    options = parser.parse_args()

    world = paceline.join()
    torch.manual_seed(0)
    model, tokenizer = load(options.model)
    model.to(world.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    replica = paceline.Replica(model, optimizer, world, strategy="zero")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)

    examples = [json.loads(line) for line in options.data.open()] if options.data else sums(2000)
    encoded = [encode(example, tokenizer, model.config.max_position_embeddings) for example in examples]
    run = paceline.Run(options.out, config=vars(options), unit="tokens", net=replica, schedule=schedule)
    sizes = {"batch_size": options.batch_size, "micro_batch_size": options.micro_batch_size, "collate_fn": collate}
    for step in run.steps(encoded, max_steps=options.steps, **sizes):
        for micro_batch in step:
            num_counted = int((micro_batch["labels"][:, 1:] != IGNORED).sum())  # the first token is never predicted
            step.backward(model(**micro_batch).loss, weight=num_counted)
        result = step.finish(max_norm=1.0)
        schedule.step()
        world.say(f"step {step.number} loss {result.loss:.6f} of {result.weight:.0f} tokens")
        run.save_every(options.save_every)

    weights = replica.state_dict()
    if world.is_main:
        model.save_pretrained(options.out / "model", state_dict=weights)
        if options.model:
            tokenizer.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
