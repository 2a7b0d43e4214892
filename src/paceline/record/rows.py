"""The typed rows of metrics.jsonl. Names carry units; the schema is a contract that tools and people read."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step. Times are this rank's (rank 0's in the file) unless they are lists by rank."""

    step: int  # 1 after the first update
    loss: float  # nats per token, mean over the whole global batch
    lr: float
    grad_norm: float  # before clipping, of the gradient summed over ranks
    skipped: bool  # the gradient was not finite: no update happened, on any rank
    tokens: int  # seen so far by the whole world
    step_ms: float  # from the end of the step before to the end of this one
    tokens_per_s: float
    mfu: float | None  # model FLOP/s over the summed peaks of all ranks
    compute_ms: float  # what this rank did before it first waited for others: data, forward, backward
    data_ms: float
    forward_ms: float
    backward_ms: float
    comm_ms: float  # time in which at least one collective was under way
    exposed_comm_ms: float  # the part of it that no compute hid
    optim_ms: float  # clipping and update
    other_ms: float
    comm_bytes: int  # sent by this rank
    world_size: int
    rank_step_ms: list[float]  # each rank's own time until it came to the step's last exchange
    rank_compute_ms: list[float]


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One evaluation over the fixed validation sequences, shared by all ranks."""

    step: int
    val_loss: float  # nats per token
    val_bpb: float | None  # bits per UTF-8 byte; null where the data set does not say how many bytes a token has
    tokens: int  # trained on so far
    val_tokens: int
    eval_ms: float
    elapsed_s: float  # training time so far
