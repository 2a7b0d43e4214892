"""An example for each name of the Python reference: docs/generate.py shows each below its name, a test runs all."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import paceline

# ---- join ----
world = paceline.join()  # torchrun's ranks, or one process

# ---- World ----
world.say(f"{world.world_size} ranks on {world.device}")  # printed by rank 0
slowest = world.max(12.5)  # every rank calls it, and gets the same number
with world.main_first():  # rank 0, then the others
    Path("cache").mkdir(exist_ok=True)

# ---- Replica ----
torch.manual_seed(0)
model = nn.Linear(4, 1).to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
replica = paceline.Replica(model, optimizer, world)  # strategy="zero" shards AdamW's state

# ---- Step ----
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
for step in replica.steps(data, batch_size=16, micro_batch_size=4):
    for x, y in step:  # this rank's micro-batches
        step.backward(nn.functional.mse_loss(model(x), y))
    result = step.finish(max_norm=1.0)

# ---- StepResult ----
world.say(f"loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")  # of the global batch

# ---- Checkpoints ----
checkpoints = paceline.Checkpoints("runs/net", net=replica)
if checkpoints.restore() is None:  # the step, or None where nothing was saved yet
    checkpoints.save()
checkpoints.finish()  # it is on the disk

# ---- Run ----
run = paceline.Run("runs/whole", config={"lr": 1e-2}, net=replica)  # new, or the one that is there, restored
for step in run.steps(data, batch_size=16, micro_batch_size=4):
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
    step.finish()
    run.log(largest=float(model.weight.abs().max()))  # joins the row of this step
    run.save_every(100)
run.evaluated(loss=replica.evaluate(data, lambda x, y: nn.functional.mse_loss(model(x), y), batch_size=64))

# ---- load_weights ----
weights = paceline.load_weights("runs/net", "net")  # needs no world and no model
assert weights["weight"].shape == (1, 4)

# ---- share ----
loader = torch.utils.data.DataLoader(data, batch_size=16)  # of all ranks together
batches = paceline.share(loader, world)
for batch in batches:
    result = replica.train(batch, lambda x, y: nn.functional.mse_loss(model(x), y))

# ---- Share ----
x, y = batches.peek()  # a micro-batch of this rank; uses nothing up
num_rows = sum(len(x) for x, y in batches.flat())  # this rank's micro-batches, to read them without training

# ---- Batch ----
halves = torch.randn(4, 4).split(2)  # micro-batches that this rank has made by itself
result = replica.train(paceline.Batch(halves), lambda x: model(x).square().mean())

# ---- EXIT_RESUMABLE ----
if replica.stop_reason:  # a signal, with steps(..., stop_on_signals=True)
    checkpoints.save()
    sys.exit(paceline.EXIT_RESUMABLE)  # 75: saved, start me again

# ---- BatchPlan ----
plan = paceline.BatchPlan(12, 5, 2)  # 12 sequences, micro-batches of at most 5, 2 ranks
assert [list(part) for part in plan.micro_batches(1)] == [[10, 11]]

# ---- ParallelConfig ----
settings = paceline.ParallelConfig(device="cpu", threads=4)  # paceline.join(settings)

# ---- Config ----
config = paceline.Config().replace("train", steps=100)  # what config.toml of a run folder holds

# ---- GPT ----
sizes = paceline.ModelConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=257, n_positions=64)
gpt = paceline.GPT(sizes, seed=1)
tokens = torch.zeros(2, 16, dtype=torch.long)
loss_sum = gpt(tokens, tokens)  # nats, summed over the tokens

# ---- ModelConfig ----
llama = paceline.ModelConfig(arch="llama", n_layer=2, n_head=4, n_embd=64, qk_norm=True)

# ---- Dataset ----
Path("tokens").mkdir(exist_ok=True)
for name in ("train.bin", "val.bin"):  # as nanoGPT writes them; or a folder of `paceline data prepare`
    (np.arange(1000, dtype=np.uint16) % 50).tofile(Path("tokens") / name)
windows = paceline.Dataset.open("tokens", vocab_size=50).train.windows(32)
tokens, targets = windows[0]  # 32 each

# ---- UserError ----
try:
    paceline.load_weights("runs/nothing")
except paceline.UserError as error:  # exit status 2: you must change something
    world.say(f"error: {error}")

# ---- RunError ----
try:
    checkpoints.save()  # compares the replicas first
except paceline.RunError as error:  # exit status 1: the run failed
    world.say(f"error: {error}")
