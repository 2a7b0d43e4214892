"""What a step costs to compare with the other ranks': `python bench/agreement.py`. CPU time of this process.

The numbers of all parameter groups are compared in each step, the weights in each hundredth. Target: together less than
0.5% of a step of 20 ms.
"""

import time

import torch
from torch import nn

import paceline
from paceline.replica import agreement
from paceline.replica.result import Exchanged

NUM_CALLS, STEP_MS = 1000, 20.0


def main() -> None:
    world = paceline.join(paceline.ParallelConfig(device="cpu", threads=1))
    layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(512, 128), *layers, nn.BatchNorm1d(64), nn.Linear(128, 512))
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed[:1], "lr": 0.1}, {"params": decayed[1:]}, {"params": others, "weight_decay": 0.0}]
    replica = paceline.Replica(model, torch.optim.AdamW(groups, lr=1e-3), world)
    replica.num_steps = 1
    row = Exchanged(*([0.0] * len(Exchanged._fields)))

    def numbers() -> None:
        agreement.digest_of_numbers(replica, 1.0)
        agreement.require_equal_numbers([row, row], replica, 1.0)
        replica.mark_left()

    def weights() -> None:
        replica.num_steps += 1
        mine = agreement.digests_before(replica)
        agreement.require_equal_weights([row._replace(weights=float(agreement.overall(mine)))] * 2, replica, mine)

    size = sum(parameter.numel() for parameter in model.parameters())
    world.say(f"{size / 1e6:.1f}M parameters in {len(list(model.parameters()))} tensors, 3 groups, {NUM_CALLS} steps")
    total_ms = 0.0
    for name, call in (("numbers, each step", numbers), ("weights, after the first and each 100th", weights)):
        began = time.process_time()
        for _ in range(NUM_CALLS):
            call()
        each_ms = (time.process_time() - began) * 1e3 / NUM_CALLS
        total_ms += each_ms
        world.say(f"{name:40} {each_ms * 1e3:6.1f} us a step  {each_ms / STEP_MS:7.3%} of {STEP_MS:g} ms")
    world.say(f"{'together':40} {total_ms * 1e3:6.1f} us a step  {total_ms / STEP_MS:7.3%}")


if __name__ == "__main__":
    main()
