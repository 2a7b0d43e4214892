"""The toy in a script of Hugging Face Accelerate, which opens the process group; paceline adopts it.

accelerate launch --cpu --num_processes 2 --mixed_precision no with_accelerate.py        # pip install accelerate
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

accelerator = Accelerator()
world = paceline.join()  # instead of accelerator.prepare(...): one of the two divides the batches

torch.manual_seed(0)
inputs = torch.randn(6400, 4)
targets = (inputs[:, :2] * inputs[:, 2:]).sum(dim=1, keepdim=True) + 0.01 * torch.randn(6400, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64)

model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1)).to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
replica = paceline.Replica(model, optimizer, world)

for step, batch in enumerate(paceline.share(loader, world), start=1):
    result = replica.train(batch, lambda x, y: nn.functional.mse_loss(model(x), y))
    accelerator.print(f"step {step} loss {result.loss:.7f}")
world.leave()
accelerator.end_training()
