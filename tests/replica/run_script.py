"""A script on paceline.Run: a classifier of three classes, 12 steps.  python run_script.py FOLDER [MISTAKE]"""

import contextlib
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main(folder: str, fault: str = "") -> None:
    torch.manual_seed(0)
    joined = paceline.join(paceline.ParallelConfig(device="cpu", threads=1, timeout_s=5 if fault == "hang" else 20))
    with contextlib.nullcontext(joined) if fault.endswith("outside") else joined as world:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        inputs = torch.randn(60, 8)
        data = TensorDataset(inputs, inputs[:, :3].argmax(1))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        replica = paceline.Replica(net, optimizer, world)
        config = {"lr": 1e-2, "net": {"width": 16}, "layers": ["linear", "relu"], "seed": None}
        run = paceline.Run(folder, config=config, flops_per_sample=6.0 * 200, net=replica, schedule=schedule)
        for step in run.steps(DataLoader(data, batch_size=15), epochs=3):
            num_right = num_rows = 0
            for x, y in step:
                scores = net(x)
                step.backward(cross_entropy(scores, y))
                num_right += int((scores.argmax(1) == y).sum())
                num_rows += len(x)
            if fault == "slow" and world.rank == 1:
                time.sleep(0.2)
            step.finish(max_norm=1.0)
            schedule.step()
            run.log(accuracy=num_right / num_rows if num_rows else None)
            if step.number == 6 and fault and os.environ.get("PACELINE_ATTEMPT", "0") == "0":
                strike(fault, world.rank, run)
            run.save_every(4)
        run.evaluated(
            loss=replica.evaluate(data, lambda x, y: cross_entropy(net(x), y), batch_size=60), extra=torch.tensor(2.0)
        )


def strike(fault: str, rank: int, run: paceline.Run) -> None:
    if fault == "kill":
        run.checkpoints.finish()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang" and rank == 1:
        time.sleep(60)
    if fault == "stop" and rank == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "raise" and rank == 0:
        raise ValueError("a mistake of the script")
    if fault.startswith("exit"):
        sys.exit(3)
    if fault.startswith("leave"):
        raise SystemExit(3)
    if fault == "name":
        run.log(loss=1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
