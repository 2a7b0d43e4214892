"""The toy as a function of Ray Train, whose workers open the process group; paceline adopts it.

python with_ray_train.py        # pip install "ray[train]"
"""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train() -> None:
    import paceline

    torch.manual_seed(0)
    inputs = torch.randn(6400, 4)
    targets = (inputs[:, :2] * inputs[:, 2:]).sum(dim=1, keepdim=True) + 0.01 * torch.randn(6400, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=64)
    with paceline.join() as world:  # left at the end of the function: the worker continues
        model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1)).to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        replica = paceline.Replica(model, optimizer, world)
        for step, batch in enumerate(paceline.share(loader, world), start=1):
            result = replica.train(batch, lambda x, y: nn.functional.mse_loss(model(x), y))
            world.say(f"step {step} loss {result.loss:.7f}")


if __name__ == "__main__":
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
