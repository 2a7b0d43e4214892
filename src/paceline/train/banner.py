"""What a run says about itself: at the start everything that is in force, at the end what came out."""

import shlex
import statistics
from collections import defaultdict

from paceline.base import units
from paceline.config import Config
from paceline.model import cost
from paceline.record.console import Console, facts, table
from paceline.record.rows import StepRow
from paceline.train.feed import Feed
from paceline.train.resolve import Settings
from paceline.train.stragglers import Stragglers
from paceline.world.device import Peak
from paceline.world.runtime import World

_MOST_COLUMNS = 4  # ranks that are shown one by one: a line of 80 characters holds them


def start(console: Console, world: World, settings: Settings, feed: Feed, peak: Peak, folder: str) -> None:
    """Says the world, the model, the data, the whole batch product, and each automatic choice with its flag."""
    config, plan = settings.config, settings.plan
    parameters = cost.num_parameters(config.model)
    counts = sorted({plan.num_micro_batches(rank) for rank in range(world.world_size)})
    micro_steps = _plural(counts[0], "micro-step") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} micro-steps"
    optim = config.optim
    rule = "Muon for matrices, AdamW for the rest" if optim.name == "muon" else "AdamW"
    horizon = (
        f"{settings.num_steps} steps = {units.count(settings.num_steps * _tokens_per_step(settings))} tokens"
        if settings.num_steps is not None
        else f"{units.duration(config.train.time_budget)} of training; the learning rate follows the clock"
    )
    model, peak_text = config.model, f"nothing known ({peak.source})"
    if peak.flops_per_s:
        peak_text = f"{units.count(peak.flops_per_s)}FLOP/s a rank ({peak.source})"
    checks = f"every {config.parallel.check_every} steps" if config.parallel.check_every else "never"
    rows = {
        "world": f"{_plural(world.world_size, 'rank')} on {world.device.type}, {world.backend_text}, "
        f"{_plural(world.threads, 'thread')} a rank",
        "model": f"{model.arch}, {model.n_layer} layers x {model.n_embd}, {units.count(parameters.total)} parameters "
        f"({units.count(parameters.non_embedding)} outside embeddings), "
        f"{units.count(cost.flops_per_token(model, config.data.seq_len))}FLOP a token",
        "data": _data_text(feed, config),
        "batch": f"{_plural(world.world_size, 'rank')} x {micro_steps} of up to {plan.device_batch_size} "
        f"sequences = {plan.global_batch_size} sequences = {units.count(_tokens_per_step(settings))} tokens a step",
        "optimizer": f"{rule}, lr {settings.lr:.3g} ({optim.schedule}, {optim.warmup_steps} warm-up steps), "
        f"weight decay {settings.weight_decay:.3g}, gradient clipped at {optim.grad_clip:g}",
        "gradients": f"{config.parallel.strategy}, summed over ranks on the last micro-step; replicas compared "
        f"{checks}",
        "horizon": horizon,
        "MFU is of": peak_text,
        "run folder": folder,
    }
    chosen = [("chosen", f"{choice.what}: {choice.why}  [{choice.flag}]") for choice in settings.choices]
    console.say(facts([*rows.items(), *chosen]))
    console.say()


class Totals:
    """Sums over the steps of this process, for the table at the end. The first step is warm-up and left out."""

    def __init__(self) -> None:
        self.has_warmed_up = False
        self.num_steps = 0
        self.num_tokens = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._parts: dict[str, list[float]] = {}

    def add(self, row: StepRow) -> None:
        """Counts a step in."""
        self.num_steps += 1
        for name, value in vars(row).items():
            if isinstance(value, int | float):
                self._sums[name] += value
        for part, by_rank in row.parts().items():
            so_far = self._parts.get(part, [0.0] * len(by_rank))
            self._parts[part] = [before + ms for before, ms in zip(so_far, by_rank, strict=True)]
        self.num_tokens += round(row.tokens_per_s * row.step_ms / 1e3)

    def mean_parts(self) -> dict[str, list[float]]:
        """Returns where a step went, by part and rank, in milliseconds, mean over the steps."""
        return {part: [ms / max(1, self.num_steps) for ms in by_rank] for part, by_rank in self._parts.items()}

    def sum(self, name: str) -> float:
        """Returns the sum of a numeric field of StepRow over the steps."""
        return self._sums[name]

    def mean(self, name: str) -> float:
        """Returns the mean of a numeric field of StepRow over the steps."""
        return self._sums[name] / max(1, self.num_steps)


def where_time_went(console: Console, totals: Totals, world: World) -> None:
    """Says the table of one step's parts, averaged over the steps after the first."""
    if not totals.num_steps:
        return
    step_ms, parts = totals.mean("step_ms"), totals.mean_parts()
    columns, rows = _by_rank(parts, step_ms)
    console.say(table("Where a step's time went, ms", columns, rows))
    line = f"{units.count(round(totals.num_tokens / totals.sum('step_ms') * 1e3))} tokens/s"
    if totals.sum("mfu"):
        line += f", MFU {100 * totals.mean('mfu'):.1f}%"
    if world.world_size > 1:
        comm_ms = totals.mean("comm_ms")
        hidden_ms = max(0.0, comm_ms - totals.mean("exposed_comm_ms"))
        line += (
            f"; all-reduce: {units.size(totals.mean('comm_bytes'))} of gradients a step, {comm_ms:.1f} ms under way, "
            f"{hidden_ms:.1f} ms of it behind backward"
        )
    console.say(line + "\n")


def _by_rank(parts: dict[str, list[float]], step_ms: float) -> tuple[list[str], list[list[str]]]:
    """A column for each of a few ranks, and how much of the step the mean rank spent on it; of many ranks the least,
    the median and the most."""
    num_ranks = len(parts["data"])
    if num_ranks <= _MOST_COLUMNS:
        names, shown = [f"rank {rank}" for rank in range(num_ranks)], parts
    else:
        names = ["least", "median", "most"]
        shown = {part: [min(by), statistics.median(by), max(by)] for part, by in parts.items()}
    rows = [
        [part, *(f"{ms:.1f}" for ms in shown[part]), f"{100 * statistics.fmean(by_rank) / step_ms:.1f}"]
        for part, by_rank in parts.items()
    ]
    whole = [f"{step_ms:.1f}"] * len(names)
    return ["part", *names, "% of step"], [*rows, ["step", *whole, "100.0"]]


def who_was_slow(console: Console, stragglers: Stragglers, totals: Totals, hosts: list[str]) -> None:
    """Says which ranks others waited for, in what, and what it cost; nothing where none was found slow."""
    for rank, num_steps, phase, cost_s in stragglers.summary():
        console.say(
            f"rank {rank} ({hosts[rank]}) was slow in {num_steps} of {stragglers.num_steps} steps, most of it in "
            f"{phase}: {cost_s:.1f} s more than the median rank",
            style="yellow",
        )
    if stragglers.cost_ms:
        share = stragglers.cost_ms / totals.sum("step_ms")
        console.say(f"waiting for slow ranks: {stragglers.cost_ms / 1e3:.1f} s, {share:.0%} of the time in steps\n")


def _tokens_per_step(settings: Settings) -> int:
    return settings.plan.global_batch_size * settings.config.data.seq_len


def _data_text(feed: Feed, config: Config) -> str:
    trained, validated = map(units.count, feed.blend.num_tokens)
    text = (
        f"{feed.blend.name}: {trained} tokens to train on, {validated} to validate, vocabulary {feed.blend.vocab_size}"
    )
    if feed.cropped_frac is not None:
        text += f"; documents packed by best fit, {feed.cropped_frac:.1%} of tokens cropped"
    return text + ("; attention stays inside documents" if config.data.mask_documents else "")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def next_commands(console: Console, config: Config, folder: str, finished: bool) -> None:
    """Says what to try now."""
    folder = shlex.quote(folder)
    console.say("\nTry next:")
    if not finished:
        console.say(f"  paceline resume {folder}")
    console.say(f'  paceline sample {folder} --prompt "def main("')
    console.say(f"  paceline report {folder}   # one page of plots")
    if finished and config.train.time_budget:
        console.say(f"  paceline resume {folder} --train.time-budget {2 * config.train.time_budget:g}   # go on")
    elif finished and config.train.steps:
        console.say(f"  paceline resume {folder} --train.steps {2 * config.train.steps}   # go on")
