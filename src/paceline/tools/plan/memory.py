"""The memory of a rank by kind, at the peak of a step."""

from paceline.model import cost
from paceline.train.resolve import Settings, fixed_bytes, sequence_bytes
from paceline.world.config import SHARDS_WEIGHTS
from paceline.world.facts import RankFacts

# What training loads beside the interpreter and torch; the driver's context.
PROGRAM_BYTES = {"cpu": 0.17e9, "cuda": 1.5e9}
# Of an element: the replica's part, the message, and what the last message left out.
_CODED_BYTES = {"int8": 4 + 8.125 / 8, "int4": 4 + 4.125 / 8 + 4}


def memory_bytes(settings: Settings, rank: RankFacts, num_ranks: int, num_shards: int) -> dict[str, float]:
    """Returns bytes by kind, of a rank with full micro-batches. num_shards: ranks that divide the optimizer's state."""
    config, model = settings.config, settings.config.model
    counts = cost.num_parameters(model)
    strategy, total = config.parallel.strategy, float(counts.total)
    part = 1 / num_shards
    whole = part if strategy in SHARDS_WEIGHTS else 1.0
    head = model.vocab_size * model.n_embd
    block = (counts.matmul - head) / model.n_layer
    moments = 8 * total - (4 * model.n_layer * block if config.optim.name == "muon" else 0)
    buffers = float(2 * 4 * block if strategy in SHARDS_WEIGHTS else 0)  # weights of two blocks, gathered
    if strategy in SHARDS_WEIGHTS and config.optim.name == "muon" and num_ranks > 1:
        buffers += 8 * model.n_layer * block * part  # the owners' weights and gradients
    if strategy == "zero" and num_ranks > 1 and settings.dtype.itemsize == 2 and config.parallel.wire != "int8":
        buffers += 4 * total * part + min(2 * total, 40 << 20)  # exact masters beside rounded weights; messages
    if strategy == "local" and num_ranks > 1:
        buffers += 8 * total
    buffers += _CODED_BYTES.get(config.parallel.wire, 0.0) * total * (num_ranks > 1)
    together = min(config.train.layered_micro_batches, settings.plan.passes)
    sequences = max(map(len, settings.plan.micro_batches(0)), default=0)
    loss = cost.loss_bytes(model, settings.dtype.itemsize) if rank.device == "cuda" else 0
    return {
        "weights": 4 * total * whole,
        "gradients": 4 * total * whole,
        "optimizer": moments * part,
        "activations": together * (sequences * sequence_bytes(config, rank) + fixed_bytes(config)) + loss,
        "buffers": buffers,
        # A save copies what this rank writes, and training goes on. A GPU's copy is in the host's memory.
        "snapshot": (4 * total + moments) * min(part, whole) if rank.device == "cpu" else 0.0,
        "program": PROGRAM_BYTES[rank.device],
    }
