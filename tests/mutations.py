"""Plants 50 mistakes in the core, one at a time, and runs the tests that should catch each.

    python tests/mutations.py               # all
    python tests/mutations.py zero order    # those with one of these words in the name or the file

For each, `src` is copied, the mistake is made in the copy, and the tests run with PYTHONPATH at it; ranks of tests are
forked from the same process, so they import the copy, too. Before that the tests run once on the code as it is. Exit
status 1: these fail, a text to replace does not occur exactly once, or more than two mistakes are not caught.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAY_SURVIVE = 2
_TESTS_FAILED = 1  # pytest's exit status; a higher one: it could not run them
_TIMEOUT_S = 120  # of one test: a mistake may make ranks wait for each other


class Mutation(NamedTuple):
    """One mistake: in `file` of src/paceline, `old`, which occurs there once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # below tests/


PLAN = ("data/test_batch_plan.py",)
BALANCE = ("replica/test_balancer.py",)
ORDER = ("data/test_order.py",)
LOADER = ("data/test_loader.py",)
STRATEGIES = ("sync/test_strategies.py",)
REPLICAS = ("sync/test_replicas.py",)
GROUP = ("world/test_group.py",)
TWO_RANKS = ("replica/test_replica.py::test_two_ranks_and_what_has_its_own_ways",)
SHARE = ("replica/test_share.py",)
OPTIMIZER = ("optim/test_optimizer.py",)
CLIP_AND_SCHEDULE = ("optim/test_clip_and_schedule.py",)
DAMAGE = ("checkpoint/test_whole_or_absent.py",)
PARTS = ("checkpoint/test_parts.py",)
FUZZ = ("replica/test_fuzz.py",)
RESOLVE = ("train/test_resolve.py",)
GOLDEN_CURVES = ("golden/test_golden_curves.py",)

MUTATIONS = (
    # ---- which sequences, in which order ----
    Mutation(
        "one rank too many has an extra micro-batch",
        "data/plan.py",
        "first + count + (rank < extra))",
        "first + count + (rank <= extra))",
        PLAN,
    ),
    Mutation(
        "the order ignores the epoch",
        "data/order.py",
        'seed_key("order", seed, number)',
        'seed_key("order", seed, 0)',
        ORDER,
    ),
    Mutation(
        "all data sets of a mixture have one order",
        "data/order.py",
        'return seed if number == 0 else seed_key("order", seed, "source", number)',
        "return seed",
        LOADER,
    ),
    Mutation(
        "targets are the tokens themselves",
        "data/loader.py",
        "torch.from_numpy(block[:, 1:].astype(np.int64))",
        "torch.from_numpy(block[:, :-1].astype(np.int64))",
        LOADER,
    ),
    Mutation(
        "each step reads the first step's sequences",
        "data/loader.py",
        "begin = within * len(in_step) - in_step.start",
        "begin = -in_step.start",
        LOADER,
    ),
    Mutation(
        "changed shares read what was located for others",
        "data/loader.py",
        "(located.number, located.in_step) != (number, in_step)",
        "located.number != number",
        LOADER,
    ),
    Mutation(
        "shares follow noise",
        "replica/balance.py",
        "or gain < _SIGMAS * error",
        "",
        BALANCE,
    ),
    Mutation(
        "a change that does not pay stays",
        "replica/balance.py",
        "step_ms <= all_slower",
        "True or step_ms <= all_slower",
        BALANCE,
    ),
    # ---- gradients over ranks ----
    Mutation(
        "no all-reduce",
        "sync/naive.py",
        "self._group.all_reduce(parameter.grad)",
        "self._group.barrier()",
        STRATEGIES,
    ),
    Mutation(
        "a missed wait for the sum",
        "sync/buckets.py",
        "            bucket.transfer.wait()\n",
        "",
        STRATEGIES,
    ),
    Mutation(
        "a gradient of the step before",
        "sync/buckets.py",
        "view.zero_()",
        "pass",
        STRATEGIES,
    ),
    Mutation(
        "a skipped all-gather of the weights",
        "sync/zero.py",
        "self.gathering = group.start_all_gather(self.message, self.borders)",
        "self.gathering = None",
        STRATEGIES,
    ),
    Mutation(
        "a slice ends an element early",
        "sync/zero.py",
        "min(self.span[1], offset + parameter.numel())",
        "min(self.span[1] - 1, offset + parameter.numel())",
        STRATEGIES,
    ),
    Mutation(
        "gradients of fsdp are halved",
        "sync/fsdp.py",
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(2.0)",
        TWO_RANKS,
    ),
    Mutation(
        "repaired by the rank that differs",
        "sync/replicas.py",
        "group.broadcast(tensors[difference.name], difference.model_rank)",
        "group.broadcast(tensors[difference.name], difference.minority[0])",
        REPLICAS,
    ),
    Mutation(
        "a broadcast from rank 0 instead of the source",
        "world/group.py",
        "dist.broadcast(tensor, source, ",
        "dist.broadcast(tensor, 0, ",
        GROUP,
    ),
    # ---- a step ----
    Mutation(
        "the wrong divisor: the estimate over the total",
        "replica/step.py",
        "self._replica.sync.weigh(self._weight, self._total) / self._divisor",
        "self._divisor / self._replica.sync.weigh(self._weight, self._total)",
        TWO_RANKS,
    ),
    Mutation(
        "masked tokens count: the weight given is ignored",
        "replica/step.py",
        "if weight is None:\n",
        "if weight is None or current.rows is not None:\n",
        TWO_RANKS,
    ),
    Mutation(
        "an update with a gradient that is not finite",
        "replica/step.py",
        "if is_empty or not math.isfinite(norm):",
        "if is_empty or not norm:",
        TWO_RANKS,
    ),
    Mutation(
        "a vote to stop is not counted",
        "replica/step.py",
        "vote=replica.vote",
        "vote=0.0",
        ("train/test_ends.py::test_stop_after_counts_from_the_start_of_the_process",),
    ),
    Mutation(
        "unused parameters count as used",
        "replica/gradients.py",
        "used = np.array([parameter.grad is not None for",
        "used = np.array([True for",
        TWO_RANKS,
    ),
    Mutation(
        "exposed gradients are multiplied by the divisor",
        "replica/gradients.py",
        "torch._foreach_mul_(flats, 1.0 / divisor)",
        "torch._foreach_mul_(flats, divisor)",
        ("replica/test_reduced_gradients.py",),
    ),
    Mutation(
        "state that there was is cut at the wrong border",
        "replica/updates.py",
        "value.reshape(-1)[part.start : part.stop]",
        "value.reshape(-1)[: part.stop - part.start]",
        ("replica/test_updates.py",),
    ),
    # ---- sources of a script ----
    Mutation(
        "a resumed pass begins anew",
        "replica/sources.py",
        "self._steps(self._pass, self.step, self._drawn)",
        "self._steps(self._pass, 0, self._drawn)",
        SHARE,
    ),
    Mutation(
        "drop_last drops a complete batch",
        "replica/datasets.py",
        "(batch_size - 1 if drop_last else 0)",
        "(batch_size if drop_last else 0)",
        SHARE,
    ),
    Mutation(
        "all ranks take the first micro-batches that a function drew",
        "replica/sources.py",
        "numbers = {rows.start for rows in mine}",
        "numbers = set(range(len(mine)))",
        ("replica/test_steps_of_shares.py",),
    ),
    # ---- an update, a loss ----
    Mutation(
        "bias correction stays that of the first update",
        "optim/adamw.py",
        'group["step"] += count',
        'group["step"] = 1',
        OPTIMIZER,
    ),
    Mutation(
        "momentum in the place of one minus momentum",
        "optim/muon.py",
        'gradients.unbind(), 1 - group["momentum"]',
        'gradients.unbind(), group["momentum"]',
        OPTIMIZER,
    ),
    Mutation(
        "a clip factor upside down",
        "optim/clip.py",
        "torch.where(norm > max_norm, max_norm / norm, 1.0)",
        "torch.where(norm > max_norm, norm / max_norm, 1.0)",
        CLIP_AND_SCHEDULE,
    ),
    Mutation(
        "a stale learning rate",
        "train/loop.py",
        'group["lr"] = lr',
        'group["lr"] = group["lr"] or lr',
        ("train/test_switches.py",),
    ),
    Mutation(
        "a chunk's weight gradient is not scaled",
        "model/loss.py",
        "grad_weight_VC * scale_1",
        "grad_weight_VC",
        ("model/test_loss.py",),
    ),
    Mutation(
        "dropout ignores the run's seed",
        "train/data.py",
        'seeds.key(seed, "dropout")',
        'seeds.key("dropout")',
        ("train/test_dropout_keys.py",),
    ),
    # ---- checkpoints ----
    Mutation(
        "a checksum is not compared",
        "checkpoint/manifest.py",
        'if sha256_of(folder / name, progress) != manifest["files"][name]["sha256"]:',
        "if not sha256_of(folder / name, progress):",
        DAMAGE,
    ),
    Mutation(
        "gaps between slices are no fault",
        "checkpoint/manifest.py",
        "if item.start != reached:",
        "if item.start < reached:",
        PARTS,
    ),
    Mutation(
        "a checkpoint is renamed before its files are synced",
        "checkpoint/shards.py",
        "            os.fsync(descriptor)\n",
        "",
        DAMAGE,
    ),
    Mutation(
        "a wrong border of what is read",
        "checkpoint/load.py",
        "found[item][part.start - item.start : part.stop - item.start]",
        "found[item][part.start - entry.item.start : part.stop - entry.item.start]",
        PARTS,
    ),
    Mutation(
        "tensors may change before they are copied",
        "checkpoint/save.py",
        "        self._thread.start()\n",
        "        self._thread.start()\n        self._copied.set()\n",
        ("checkpoint/test_saving_goes_on_behind.py",),
    ),
    Mutation(
        "one checkpoint fewer stays",
        "checkpoint/retention.py",
        "[: -config.keep]",
        "[: 1 - config.keep]",
        DAMAGE,
    ),
    Mutation(
        "an optimizer's moments are lost on resume",
        "replica/contents.py",
        "found.pop(item).to(part.parameter.device).view(shape)",
        "torch.zeros_like(found.pop(item)).to(part.parameter.device).view(shape)",
        ("replica/test_kept_together.py::test_one_process_goes_on_to_the_bit",),
    ),
    Mutation(
        "replicas that differ are saved",
        "replica/checkpoints.py",
        "list(map(str, compared(mine, self._group))) if is_same",
        "list(map(str, compared(mine, self._group)[:0])) if is_same",
        ("replica/test_checkpoints.py::test_where_ranks_differ_nothing_is_saved_and_it_is_said",),
    ),
    # ---- what a run decides ----
    Mutation(
        "the memory of the rank that has most decides",
        "train/resolve.py",
        "free = min(each.free_bytes for each in facts)",
        "free = max(each.free_bytes for each in facts)",
        RESOLVE,
    ),
    Mutation(
        "a horizon in tokens ends a step early",
        "train/resolve.py",
        "max(1, math.ceil(tokens / tokens_per_step))",
        "max(1, int(tokens / tokens_per_step))",
        RESOLVE,
    ),
    Mutation(
        "saves come a step late",
        "train/saves.py",
        "_progress.step % every == 0",
        "_progress.step % every == 1",
        ("train/test_switches.py::test_checkpoints_come_when_asked_and_the_newest_stay",),
    ),
    # ---- what 3c0a85c computed ----
    Mutation(
        "Adam's first beta is its second",
        "optim/adamw.py",
        'beta1=group["betas"][0]',
        'beta1=group["betas"][1]',
        GOLDEN_CURVES,
    ),
    Mutation(
        "the second epoch has the order of the first, as recorded",
        "data/order.py",
        'seed_key("order", seed, number)',
        'seed_key("order", seed, 0)',
        ("golden/test_golden_orders.py",),
    ),
    Mutation(
        "the divisor of the loss counts one token too many",
        "replica/step.py",
        "loss * (factor * replica.scaler.scale / self._divisor)",
        "loss * (factor * replica.scaler.scale / (self._divisor + 1))",
        GOLDEN_CURVES,
    ),
    # ---- what random scripts on a Replica find ----
    Mutation(
        "gradients of channels_last weights are contiguous",
        "sync/buckets.py",
        "self.flat.as_strided(p.shape, torch.empty_like(p).stride(), self.flat.storage_offset() + offset)",
        "self.flat[offset : offset + p.numel()].view_as(p)",
        FUZZ,
    ),
    Mutation(
        "a step ends before its weights have arrived",
        "replica/model.py",
        "        self.waits_at_once = True\n",
        "        self.waits_at_once = False\n",
        FUZZ,
    ),
    Mutation(
        "a save returns before it has copied",
        "replica/checkpoints.py",
        "        self.saver.wait_copied()  # after this",
        "        # after this",
        FUZZ,
    ),
    Mutation(
        "a restored position is not taken",
        "replica/positions.py",
        "made.load_state_dict(self._waiting.pop(0))",
        "self._waiting.pop(0)",
        FUZZ,
    ),
)


def main(words: Sequence[str]) -> int:
    """Runs the mutations with one of these words; all where there is none. Returns the exit status."""
    chosen = [each for each in MUTATIONS if not words or any(word in f"{each.name} {each.file}" for word in words)]
    if not chosen:
        print(f"no mutation has one of these words: {' '.join(words)}")
        return 1
    wrong = [each for each in chosen if (ROOT / "src/paceline" / each.file).read_text().count(each.old) != 1]
    for each in wrong:
        print(f"{each.file} does not have exactly once: {each.old!r} ({each.name})")
    if wrong:
        return 1
    with tempfile.TemporaryDirectory(prefix="paceline-mutations-") as folder:
        os.environ.setdefault("PACELINE_TEST_CACHE", f"{folder}/cache")
        status, failed = _run_tests(_copy(Path(folder, "as-it-is")), {test for each in chosen for test in each.tests})
        if status:
            print(f"the tests fail on the code as it is: {failed}")
            return 1
        num_survivors = 0
        for number, each in enumerate(chosen, start=1):
            source = _copy(Path(folder, str(number)))
            file = source / "paceline" / each.file
            file.write_text(file.read_text().replace(each.old, each.new))
            status, failed = _run_tests(source, each.tests)
            num_survivors += status != _TESTS_FAILED
            result = f"caught by {failed}" if status == _TESTS_FAILED else f"SURVIVED (pytest's exit status {status})"
            print(f"{number:2} {each.file:25} {each.name:60} {result}", flush=True)
            shutil.rmtree(source)
    print(f"{len(chosen) - num_survivors} of {len(chosen)} caught")
    return int(num_survivors > MAY_SURVIVE)


def _copy(to: Path) -> Path:
    return shutil.copytree(ROOT / "src", to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))


def _run_tests(source: Path, tests: Sequence[str] | set[str]) -> tuple[int, str]:
    """Runs the tests with `source` in the place of src, up to the first failure. Returns pytest's exit status and the
    test that failed."""
    flags = ("-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "--tb=no", f"--timeout={_TIMEOUT_S}")
    ended = subprocess.run(
        (sys.executable, "-m", "pytest", *flags, *(f"tests/{test}" for test in sorted(tests))),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", ended.stdout, re.MULTILINE)
    return ended.returncode, failed[1] if failed else ended.stdout[-2000:] + ended.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
