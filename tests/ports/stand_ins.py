"""What the original scripts import and a test has not: torchvision with its downloads, kernels for GPUs, a tokenizer.

scikit-learn's digits stand for MNIST, attention of torch for FlashAttention, random tokens for a prepared text. The
values are the same on every rank and at every start.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate, scaled_dot_product_attention

Image = torch.Tensor
TRAIN_IMAGES, TEST_IMAGES = 90, 40
SKLEARN = importlib.util.find_spec("sklearn")  # importing it takes 3 s of a core
DIGITS = Path(SKLEARN.origin or "").parent / "datasets/data/digits.csv.gz" if SKLEARN else None


def module(name: str, **contents: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made


def install() -> None:
    """Makes `import torchvision`, `import kernels` and `import prepare` find what is here."""
    transforms = {"Compose": Compose, "Normalize": Normalize, "Resize": Resize}
    transforms |= dict.fromkeys(("ToTensor", "CenterCrop"), lambda *_: lambda image: image)
    modules = {"datasets": {"MNIST": Digits}, "transforms": transforms, "utils": {"save_image": lambda *_, **__: None}}
    for name, contents in modules.items():
        module(f"torchvision.{name}", **contents)
    module("torchvision", **{name: sys.modules[f"torchvision.{name}"] for name in modules})
    module(
        "kernels", get_kernel=lambda _: SimpleNamespace(flash_attn_interface=SimpleNamespace(flash_attn_func=attend))
    )
    module(
        "prepare",
        MAX_SEQ_LEN=TIME,
        TIME_BUDGET=4,
        Tokenizer=Tokenizer,
        make_dataloader=make_dataloader,
        evaluate_bpb=evaluate_bpb,
    )
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None


# ---- torchvision ----


class Digits:
    """Images of scikit-learn's digits, 28 x 28 as MNIST's."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None):
        table = np.loadtxt(DIGITS, delimiter=",")  # of an image's pixels, and its label
        images, labels = table[:, :-1], table[:, -1].astype(int)
        part = slice(0, TRAIN_IMAGES) if train else slice(TRAIN_IMAGES, TRAIN_IMAGES + TEST_IMAGES)
        self.images = torch.tensor(images[part], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels, self.transform = labels[part].tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return self.transform(interpolate(self.images[index][None], 28)[0]), self.labels[index]


class Compose:
    def __init__(self, transforms: list[Callable[[Image], Image]]):
        self.transforms = transforms

    def __call__(self, image: Image) -> Image:
        for transform in self.transforms:
            image = transform(image)
        return image


class Normalize:
    def __init__(self, mean: tuple[float], std: tuple[float]):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image: Image) -> Image:
        return (image - self.mean) / self.std


class Resize:
    def __init__(self, size: int):
        self.size = size

    def __call__(self, image: Image) -> Image:
        return interpolate(image[None], self.size)[0]


# ---- kernels and prepare.py of autoresearch ----

TIME, VOCABULARY = 16, 64


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: object) -> torch.Tensor:
    """Attention with heads in the third dimension; windows as long as the sequence."""
    heads_second = (each.transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(*heads_second, is_causal=causal).transpose(1, 2)


class Tokenizer:
    @classmethod
    def from_directory(cls) -> "Tokenizer":
        return cls()

    def get_vocab_size(self) -> int:
        return VOCABULARY


def make_dataloader(_: Tokenizer, size: int, time: int, split: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yields the same two tensors again and again, filled anew, as the original does."""
    chance = torch.Generator().manual_seed(len(split))
    x, y = torch.empty(2, size, time, dtype=torch.long)
    while True:
        start = torch.randint(VOCABULARY, (size, 1), generator=chance)
        rows = (start + 3 * torch.arange(time + 1)) % VOCABULARY
        x.copy_(rows[:, :-1])
        y.copy_(rows[:, 1:])
        yield x, y, 1


@torch.no_grad()
def evaluate_bpb(model: torch.nn.Module, tokenizer: Tokenizer, size: int) -> float:
    x, y, _ = next(make_dataloader(tokenizer, size, TIME, "val"))
    return float(model(x, y)) / math.log(2)
