"""The peer of bench/two_ranks.py: the same model and update in torch's DistributedDataParallel, as its tutorial has it.

Started by torchrun. Prints the milliseconds of each step on rank 0.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.config import Config
from paceline.data.config import DataConfig, Quiet
from paceline.data.loader import Loader
from paceline.data.plan import BatchPlan
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.train.data import open_data
from paceline.world.device import choose_dtype


def main() -> None:
    steps, micro_batch, micro_steps = (int(argument) for argument in sys.argv[1:4])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = open_data(Config(data=DataConfig(seq_len=256)), Quiet())
    shape = ModelConfig(
        arch="gpt2", n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=data.blend.first.vocab_size
    )
    model = build(shape, 1337, "cpu")
    model.compute_dtype = choose_dtype("auto", torch.device("cpu"))[0]
    batch = micro_batch * micro_steps * world_size
    loader = Loader(data.training, BatchPlan(batch, micro_batch, world_size), rank, 1337)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(steps):
        started = time.perf_counter()
        micro_batches = loader.micro_batches(step)
        for i, micro in enumerate(micro_batches):
            ddp.require_backward_grad_sync = i == len(micro_batches) - 1
            (ddp(micro.tokens, micro.targets) / (batch * 256 / world_size)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step_ms {(time.perf_counter() - started) * 1e3:.3f}", flush=True)
    dist.barrier()
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
