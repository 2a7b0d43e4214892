"""Text to ids on one core: paceline's Encoder against tiktoken and tokenizers used directly, on the same text.

The text is the standard library's own sources, or --text; the vocabularies are one of 4096 tokens under paceline's own
pattern and one of GPT-2's size under GPT-2's, both trained on it, or --tokenizer. All get the same pieces of 256 KiB.
The rate is of process CPU time, so that a machine with other work is fair to all; the sides run in turn.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core each
os.environ["RAYON_NUM_THREADS"] = "1"

import tokenizers
from side import show
from tokenizers import pre_tokenizers, trainers

from paceline.data.encode import Encoder
from paceline.data.sources import embedded
from paceline.data.tokenizer import END_OF_TEXT, Tokenizer, train

PIECE = 1 << 18
GPT2_VOCAB = 50257


def gpt2_like(text: str) -> Tokenizer:
    """A tokenizer of GPT-2's size that cuts as GPT-2's does, trained on text."""
    model = tokenizers.Tokenizer.from_str(train([text[:PIECE]], 257))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=GPT2_VOCAB, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([text], trainer)
    return Tokenizer(model.to_str())


def rate(encode: Callable[[str], Iterable[int]], pieces: list[str]) -> float:
    """Returns MB of text a second of CPU."""
    began = time.process_time()
    for piece in pieces:
        encode(piece)
    return sum(len(piece.encode()) for piece in pieces) / 1e6 / (time.process_time() - began)


def compare(name: str, tokenizer: Tokenizer, pieces: list[str], rounds: int) -> None:
    began = time.process_time()
    encoder = Encoder(tokenizer)
    seconds = time.process_time() - began
    print(f"\n{name}: {tokenizer.vocab_size} tokens, {encoder.library}, found out in {seconds:.2f} s")
    slow = tokenizers.Tokenizer.from_str(tokenizer.json)
    slow.encode_special_tokens = True
    sides: dict[str, Callable[[str], Iterable[int]]] = {
        "paceline": encoder.encode,
        "tokenizers": lambda piece: slow.encode_batch_fast([piece], add_special_tokens=False)[0].ids,
    }
    if encoder.library == "tiktoken":
        sides["tiktoken"] = encoder._fast.encode_ordinary  # the same pattern and vocabulary
    for piece in pieces:
        expected = list(sides["tokenizers"](piece))
        if any(list(side(piece)) != expected for side in sides.values()):
            raise SystemExit(f"ids differ in {piece[:60]!r}")
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, encode in sides.items():
            rates[side].append(rate(encode, pieces))
    for side, found in rates.items():
        show(side, found, "MB/s of CPU time")
    for side in rates.keys() - {"paceline"}:
        ratios = [ours / theirs for ours, theirs in zip(rates["paceline"], rates[side], strict=True)]
        show(f"paceline: times {side}", ratios, "x")
    print("ids are equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, instead of the two that are trained here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=8, help="how much of the text is encoded a round")
    options = parser.parse_args()
    if options.text:
        text = options.text.read_text(errors="replace")
    else:
        text = "".join(Path(file.path).read_text(errors="replace") for file in embedded().files)
    pieces = [text[start : start + PIECE] for start in range(0, min(len(text), options.mb * 1_000_000), PIECE)]
    if options.tokenizer:
        compare(options.tokenizer.name, Tokenizer.load(options.tokenizer), pieces, options.rounds)
        return
    compare("paceline's pattern", Tokenizer(train([text], 4096)), pieces, options.rounds)
    compare("GPT-2's pattern", gpt2_like(text), pieces, options.rounds)


if __name__ == "__main__":
    main()
