"""The rows of metrics.jsonl, a contract for tools and people. Names have the units."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One step. Times are this rank's (rank 0's in the file) unless they are lists by rank."""

    step: int  # 1 after the first update
    loss: float  # nats per token, mean over the whole global batch
    lr: float
    grad_norm: float  # before clipping, of the gradient summed over ranks
    skipped: bool  # the gradient was not finite: no rank updated
    tokens: int  # seen so far by all ranks
    step_ms: float  # from the end of the step before to the end of this one
    tokens_per_s: float
    mfu: float | None  # model FLOP/s over the summed peaks of all ranks
    compute_ms: float  # this rank's work before it first waited for others: data, forward, backward
    data_ms: float
    forward_ms: float
    backward_ms: float
    comm_ms: float  # time with at least one collective under way
    exposed_comm_ms: float  # the part of comm_ms that compute did not hide
    comm_cpu_ms: float  # CPU time of the threads that carry transfers; takes compute's core where there is no other
    optim_ms: float  # clipping and update
    other_ms: float
    comm_bytes: int  # sent by this rank
    world_size: int
    # By rank. data, forward, backward, exposed_comm, optim and the rest of step_ms (other) add up to a rank's step.
    rank_sequences: list[int]  # computed in this step
    rank_step_ms: list[float]  # its own time: until the all-gather before the update, and the update of the step before
    rank_compute_ms: list[float]  # data, forward and backward
    rank_data_ms: list[float]
    rank_forward_ms: list[float]
    rank_backward_ms: list[float]
    rank_exposed_comm_ms: list[float]  # also for the ranks that came later to the all-gather
    rank_optim_ms: list[float]
    codec_ms: float = 0.0  # CPU time of coding messages (parallel.wire int8, int4); the parts contain it

    def parts(self) -> dict[str, list[float]]:
        """Returns part -> milliseconds by rank; a rank's parts add up to its step."""
        parts = {
            "data": self.rank_data_ms,
            "forward": self.rank_forward_ms,
            "backward": self.rank_backward_ms,
            "exposed communication": self.rank_exposed_comm_ms,
            "optimizer": self.rank_optim_ms,
        }
        sums = [sum(values) for values in zip(*parts.values(), strict=True)]
        # A rank that began the step before rank 0 did took longer for it.
        other = [max(self.step_ms, own_ms) - known for own_ms, known in zip(self.rank_step_ms, sums, strict=True)]
        return parts | {"other": other}


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One evaluation over the fixed validation sequences, shared by all ranks."""

    step: int
    val_loss: float  # nats per token
    val_bpb: float | None  # bits per UTF-8 byte; null if the data set does not know the bytes of its tokens
    tokens: int  # trained on so far
    val_tokens: int
    eval_ms: float
    elapsed_s: float  # training time so far
