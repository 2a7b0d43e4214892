"""What to lower when a GPU's memory is full."""

from paceline.base.errors import RunError
from paceline.train.resolve import Settings, largest_micro_batch
from paceline.world.facts import RankFacts


def out_of_memory(error: BaseException, settings: Settings, rank: RankFacts) -> RunError:
    """Returns the error of this rank, with the flags that need less memory for the same losses, the cheapest first."""
    config, plan = settings.config, settings.plan
    least = min(plan.device_batch_size // 2, largest_micro_batch(config, rank, plan.world_size)[0])
    flags = [f"--train.device-batch-size {least}"] if least else []
    if not config.train.activation_checkpoint:
        flags.append("--train.activation-checkpoint")
    smaller = {"ddp": "zero", "naive": "zero", "zero": "fsdp"}.get(config.parallel.strategy)
    if plan.world_size > 1 and smaller:
        flags.append(f"--parallel.strategy {smaller}")
    advice = f"needs less, for the same losses: {', '.join(flags)}" if flags else "needs a smaller model, or more ranks"
    told = str(error).split(". ")[:2]  # how much was asked for, and how large the GPU is
    return RunError(f"{'. '.join(told)}. This {advice}")
