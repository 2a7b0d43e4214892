"""A convolutional net learns to read digits, which are drawn when they are asked for: nothing is downloaded.

python train.py
torchrun --standalone --nproc-per-node 2 train.py --workers 2

What is shared is the DataLoader: its batch is that of all ranks, each rank's workers draw this rank's images only, and
each augments by random numbers of its own. The normalisation is by groups of channels, so that an image is normalised
alike whatever else its rank has; batch norms would make the curve depend on the number of ranks. With --no-augment it
does not: the losses are the same on 1 rank and on 2.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline

# Of each digit the pixels of five rows of three.
GLYPHS = ["111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001"]
GLYPHS += ["111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111"]
SIDE = 16  # pixels


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Images of digits (1, 16, 16) with what they show; image i is always the same, but for the augmentation."""

    def __init__(self, first: int, num_images: int, augment: bool = False):
        self.first, self.num_images, self.augment = first, num_images, augment

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chance = torch.Generator().manual_seed(self.first + index)
        digit, height, width, top, left = (
            int(torch.randint(low, high, (), generator=chance))
            for low, high in ((0, 10), (10, 13), (6, 9), (1, 4), (2, 6))
        )
        glyph = torch.tensor([float(pixel) for pixel in GLYPHS[digit]]).view(1, 1, 5, 3)
        image = 0.3 * torch.randn(1, SIDE, SIDE, generator=chance)
        image[:, top : top + height, left : left + width] += F.interpolate(glyph, (height, width), mode="bilinear")[0]
        return self.augmented(image) if self.augment else image, digit

    def augmented(self, image: torch.Tensor) -> torch.Tensor:
        """Returns it moved by up to two pixels, with another contrast; drawn from the worker's own generator."""
        moved = image.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), dims=(1, 2))
        return moved * (0.7 + 0.6 * torch.rand(()))


def layer(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, padding=1), nn.GroupNorm(4, num_out), nn.ReLU())


def measures(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a micro-batch's means: the loss, and the part that the model reads rightly."""
    scores = model(images)
    return {"loss": F.cross_entropy(scores, digits), "accuracy": (scores.argmax(-1) == digits).float().mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000, help="to learn from; a sixth as many are for the test")
    parser.add_argument("--batch-size", type=int, default=50, help="of all ranks together")
    parser.add_argument("--workers", type=int, default=1, help="of each rank; 0: images are drawn between steps")
    parser.add_argument("--out", default="runs/images")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()

    world = paceline.join()
    torch.manual_seed(0)
    model = nn.Sequential(layer(1, 16, 1), layer(16, 32, 2), layer(32, 64, 2), nn.Flatten(), nn.Linear(64 * 16, 10))
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replica = paceline.Replica(model, optimizer, world)

    run = paceline.Run(options.out, config=vars(options), net=replica)
    learnt = Digits(0, options.images, options.augment)
    loader = DataLoader(learnt, options.batch_size, shuffle=True, num_workers=options.workers)
    tests = DataLoader(Digits(options.images, options.images // 6), batch_size=100)
    for epoch in range(1 + replica.num_steps // len(loader), options.epochs + 1):
        for step in run.steps(loader, epochs=epoch):
            for images, digits in step:
                step.backward(F.cross_entropy(model(images), digits))
            result = step.finish()
            if step.number % 10 == 0:
                world.say(f"epoch {epoch} step {step.number} loss {result.loss:.6f}")
        means = replica.evaluate(tests, lambda images, digits: measures(model, images, digits))
        run.evaluated(**means)
        run.save()
        world.say(f"epoch {epoch} accuracy {means['accuracy']:.4f}")


if __name__ == "__main__":
    main()
