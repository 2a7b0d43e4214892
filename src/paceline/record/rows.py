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
    # By rank. data, forward, backward, exposed_comm, optim and what is left of step_ms (other) are where its step went.
    rank_step_ms: list[float]  # its own time until it came to the step's last exchange
    rank_compute_ms: list[float]  # data, forward and backward
    rank_data_ms: list[float]
    rank_forward_ms: list[float]
    rank_backward_ms: list[float]
    rank_exposed_comm_ms: list[float]  # the wait in that exchange is in it
    rank_optim_ms: list[float]

    def parts(self) -> dict[str, list[float]]:
        """Returns where the step went, by part and rank, in milliseconds; a rank's parts add up to its step."""
        parts = {
            "data": self.rank_data_ms,
            "forward": self.rank_forward_ms,
            "backward": self.rank_backward_ms,
            "exposed communication": self.rank_exposed_comm_ms,
            "optimizer": self.rank_optim_ms,
        }
        # A rank that began the step before rank 0 did was in it for longer.
        whole = [max(self.step_ms, own_ms) for own_ms in self.rank_step_ms]
        spent = [sum(values) for values in zip(*parts.values(), strict=True)]
        return parts | {"other": [step_ms - known for step_ms, known in zip(whole, spent, strict=True)]}


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
