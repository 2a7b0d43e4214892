"""A net of two layers learns a function of four numbers: before.py on one device, after.py on any number of ranks.

python before.py                        torchrun --standalone --nproc-per-node 2 after.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
world = paceline.join()
device = world.device

inputs = torch.randn(6400, 4)
targets = (inputs[:, :2] * inputs[:, 2:]).sum(dim=1, keepdim=True) + 0.01 * torch.randn(6400, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64)

model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
replica = paceline.Replica(model, optimizer, world)

for step, batch in enumerate(paceline.share(loader, world), start=1):
    result = replica.train(batch, lambda x, y: nn.functional.mse_loss(model(x), y))
    world.say(f"step {step} loss {result.loss:.7f}")
