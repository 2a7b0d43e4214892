"""A net of two layers learns a function of four numbers: before.py on one device, after.py on any number of ranks.

python before.py                        torchrun --standalone --nproc-per-node 2 after.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

inputs = torch.randn(6400, 4)
targets = (inputs[:, :2] * inputs[:, 2:]).sum(dim=1, keepdim=True) + 0.01 * torch.randn(6400, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64)

model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step, (x, y) in enumerate(loader, start=1):
    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.7f}")
