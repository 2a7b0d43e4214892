"""`verify` says yes where the laws hold, and names the law where they are made not to."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from program import Ended, Program, run
from ranks import run_ranks

from paceline.base.errors import RunError
from paceline.config import Config, load_preset, to_toml
from paceline.record.console import Console
from paceline.tools.bench import laws, verify
from paceline.tools.bench.laws import Evidence, Seat, Verdict
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment, detect

LAWS = ["the world", "replicas are equal", "the same curve", "shares do not matter", "resume is exact"]


def verdicts(ended: Ended) -> dict[str, str]:
    """Law -> pass, FAIL or open, as the table has them."""
    return dict(re.findall(rf"^ ({'|'.join(LAWS)}) +(pass|FAIL|open) ", ended.out, flags=re.MULTILINE))


def kept_folder(ended: Ended) -> Path:
    return Path(re.sub(r"\s", "", ended.out.partition("are kept in ")[2]))


def verified(tmp_path: Path, *flags: str, status: int = 0, env: dict[str, str] | None = None) -> Ended:
    ended = run("verify", *flags, env={"TMPDIR": str(tmp_path), **(env or {})}, cwd=tmp_path).require(status)
    assert not list(tmp_path.glob("runs")), "run folders are in the place for temporary files"
    return ended


@pytest.mark.long
def test_a_flipped_bit_fails_the_row_on_replicas_and_keeps_what_shows_it(tmp_path: Path) -> None:
    ended = verified(tmp_path, "--nproc", "2", status=1, env={"PACELINE_FAULTS": "rank=1 step=5 kind=flip"})
    assert list(verdicts(ended).items()) == list(zip(LAWS, ["pass", "FAIL", "open", "open", "open"], strict=True))
    said = re.sub(r"\s+", " ", ended.out)
    assert "replicas are not equal at" in said  # the table breaks the line here
    assert "step 5: " in said
    assert "run `paceline verify --nproc 2` on each host alone" in said
    assert "1 of 5 checks failed (2 ranks" in said
    folder = kept_folder(ended)
    assert (folder / "straight/metrics.jsonl").exists()
    assert "replicas are not equal" in (folder / "straight-rank-00000.out").read_text()


@pytest.mark.long
@pytest.mark.nightly
def test_a_rank_that_computes_something_else_fails_the_row_on_the_curve(tmp_path: Path) -> None:
    """No update in step 5, agreed by all ranks: replicas stay equal, a resume repeats it, and one process knows no such
    thing."""
    ended = verified(tmp_path, "--nproc", "2", status=1, env={"PACELINE_FAULTS": "rank=1 step=5 kind=nan"})
    assert list(verdicts(ended).items()) == list(zip(LAWS, ["pass", "pass", "FAIL", "pass", "pass"], strict=True))
    said = re.sub(r"\s+", " ", ended.out)
    assert "step 5 was skipped in one of the two" in said
    assert "straight/metrics.jsonl" in said


@pytest.mark.long
def test_two_ranks_pass(tmp_path: Path) -> None:
    ended = verified(tmp_path, "--nproc", "2")
    assert list(verdicts(ended).items()) == [(law, "pass") for law in LAWS]
    assert not list(tmp_path.glob("paceline-verify-*"))


@pytest.mark.lab
@pytest.mark.long
@pytest.mark.nightly
def test_torchrun_on_two_hosts_passes_and_leaves_nothing(tmp_path: Path) -> None:
    """torchrun's own rendezvous between hosts of a lab, each of which has its agent, and one of which has its store."""
    endpoint = "--rdzv-backend c10d --rdzv-id job --rdzv-endpoint 10.0.0.1:29400"
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 {endpoint}"
    script = f"{torchrun} -m paceline verify --parallel.interface eth0"
    with Program("lab", "--hosts", "2", "--", "exec", "sh", "-c", script, env={"TMPDIR": str(tmp_path)}) as program:
        ended = program.wait()
    if ended.status == 2:
        pytest.skip(f"no lab here: {ended.err}")
    ended.require(0)
    assert list(verdicts(ended).items()) == [(law, "pass") for law in LAWS]
    said = re.sub(r"\s+", " ", ended.out)
    assert "1 on a" in said
    assert "10.0.0.1" in said
    assert "10.0.0.2" in said
    assert not list(tmp_path.glob("paceline-verify-*"))


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"strategy": "local", "sync_every": 8}, "strategy local is another algorithm"),
        ({"strategy": "zero", "wire": "int8"}, "wire int8 rounds what ranks send"),
    ],
)
def test_a_curve_that_its_config_bends_is_not_judged(parallel: dict[str, Any], why: str, tmp_path: Path) -> None:
    record(tmp_path, "straight", 2.5, **parallel)
    record(tmp_path, "alone", 2.5)
    assert laws.check_curve(left(tmp_path))[0]  # it is near enough
    record(tmp_path, "alone", 2.25)
    seen = "at most 2.5e-01 apart, at step 1; loss 2.5000 to 2.5000"
    assert laws.check_curve(left(tmp_path)) == (None, f"not judged: {why}; {seen}")


def test_losses_that_are_not_finite_are_compared_and_shown(tmp_path: Path) -> None:
    """Finds: a loss that became NaN in one of the two runs taken for equal to the other's."""
    record(tmp_path, "straight", None)
    record(tmp_path, "alone", None)
    assert laws.check_curve(left(tmp_path)) == (True, "at most 0.0e+00 apart, at step 1; loss NaN to NaN")
    record(tmp_path, "alone", 2.5)
    assert laws.check_curve(left(tmp_path)) == (False, "at most inf apart, at step 1; loss NaN to NaN")


def record(folder: Path, name: str, loss: float | None, **parallel: Any) -> None:
    """Writes what a run of one step leaves."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.toml").write_text(to_toml(Config().replace("parallel", **parallel)))
    (folder / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "skipped": False}) + "\n")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `verify --keep` kept, of one process: the straight run and the one that was stopped."""
    place = tmp_path_factory.mktemp("verify")
    ended = verified(place, "--keep")
    assert list(verdicts(ended).items()) == list(zip(LAWS, ["pass", "open", "open", "open", "pass"], strict=True))
    assert "3 could not be judged" in ended.out
    assert ended.out.count("needs two ranks") == 3
    return kept_folder(ended)


@pytest.fixture
def copied(records: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(records, tmp_path / "records"))


def left(folder: Path, ranks: int = 2, **failures: str) -> Evidence:
    """What runs on so many ranks left in this folder; all went well but those that are named."""
    return Evidence(folder, [seat()] * ranks, {name: "" for name in verify._RUNS} | failures)


@pytest.mark.parametrize(
    "variables",
    [
        {"PET_MASTER_ADDR": "10.0.0.1", "PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
         "TORCHELASTIC_USE_AGENT_STORE": "True"},
    ],
    ids=["a pod", "torchrun"],
)  # fmt: skip
def test_each_run_has_a_store_of_its_own(variables: dict[str, str]) -> None:
    """Mutation: a port that counts only where RANK is a variable, so that a pod's runs met at verify's own store."""
    env = detect(variables)
    assert env.master_port == 29400
    wanted = replace(env, master_port=4711, agent_holds_store=False, job="")
    assert detect({**variables, **verify._with_port(env, 4711)}) == wanted


def broken_off(_: ParallelConfig, env: Environment, place: Path) -> list[str]:
    """What is left of a `verify --keep` in which a rank was lost."""
    lost = patch.object(verify, "_make_runs", side_effect=RunError("a rank was lost"))
    with lost, patch("tempfile.tempdir", str(place)), pytest.raises(RunError, match="a rank was lost"):
        verify.verify(verify.config_of(load_preset("tiny", Config())), env, Console(env.rank), keep=True)
    return [path.name.rpartition("-")[0] for path in place.iterdir()]


def test_folders_that_are_to_be_kept_are_kept_also_of_runs_that_broke_off(tmp_path: Path) -> None:
    assert run_ranks(broken_off, 1, tmp_path, opened=False) == [["paceline-verify"]]


def seat(**changes: str) -> Seat:
    values = {"host": "a", "device": "cpu", "backend": "gloo", "network": "eth0 10.0.0.1", "versions": "torch 2.13"}
    return Seat(**{**values, **changes})


def change(path: Path, **of_row: object) -> None:
    """Changes fields in the last row of a JSON-lines file."""
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), **of_row})
    path.write_text("\n".join(lines) + "\n")


def test_a_run_that_failed_fails_its_laws_in_its_own_words_and_leaves_the_others_open(tmp_path: Path) -> None:
    failed = Evidence(tmp_path, [seat()] * 2, {"straight": "rank 1: out of memory (exit status 1)"})
    checks = (laws.check_replicas, laws.check_curve, laws.check_resume)
    open_verdict = (None, "not judged: the straight run failed")
    assert [check(failed) for check in checks] == [(False, failed.failures["straight"]), open_verdict, open_verdict]
    of_one = Evidence(tmp_path, [seat()], failed.failures)
    assert [law.check(of_one)[0] for law in laws.LAWS] == [True, False, None, None, None]
    assert laws.check_curve(left(tmp_path, alone="no memory")) == (False, "the run of one process failed: no memory")
    for name in ("stopped", "resumed"):
        assert laws.check_resume(left(tmp_path, **{name: "no memory"})) == (False, "no memory")


def test_a_resume_that_ends_elsewhere_fails_with_both_values(copied: Path) -> None:
    passed, seen = laws.check_resume(left(copied))
    assert passed
    digest = re.search(r"weights (\w+)", seen)
    assert digest
    change(copied / "stopped/events.jsonl", digest="0123456789abcdef")
    assert laws.check_resume(left(copied)) == (
        False,
        f"weights 0123456789abcdef, and {digest[1]} of the straight run",
    )


def test_a_resume_with_another_optimizer_state_or_another_curve_fails(copied: Path) -> None:
    change(copied / "stopped/events.jsonl", state_digests=["0"])
    assert laws.check_resume(left(copied)) == (False, "the weights are the same; the state of rank 0 differs")
    shutil.copy(copied / "straight/events.jsonl", copied / "stopped/events.jsonl")
    assert laws.check_resume(left(copied))[0]
    change(copied / "stopped/metrics.jsonl", loss=1.0)
    assert laws.check_resume(left(copied))[0] is False


def test_a_curve_further_away_than_rounding_fails_with_the_step(copied: Path) -> None:
    alone = Path(shutil.copytree(copied / "straight", copied / "alone"))
    assert laws.check_curve(left(copied))[0]
    loss = json.loads((alone / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    change(alone / "metrics.jsonl", loss=loss + 5e-5)
    assert laws.check_curve(left(copied))[0]
    change(alone / "metrics.jsonl", loss=loss + 2e-4)
    passed, seen = laws.check_curve(left(copied))
    assert passed is False
    assert seen.startswith("at most 2.0e-04 apart, at step 20")
    change(alone / "metrics.jsonl", loss=None)  # as NaN is recorded
    assert laws.check_curve(left(copied))[0] is False
    shutil.copytree(copied / "straight", copied / "shares")
    assert laws.check_shares(left(copied))[0]
    change(copied / "shares/metrics.jsonl", loss=loss + 2e-4)
    assert laws.check_shares(left(copied))[0] is False


def test_states_that_differ_at_the_end_are_no_equal_replicas(copied: Path) -> None:
    change(copied / "straight/events.jsonl", state_digests=["aa", "bb"])
    differ = "digests of the state at the end: aa (rank 0), bb (rank 1)"
    assert laws.check_replicas(left(copied)) == (False, differ)
    change(copied / "straight/events.jsonl", state_digests=["aa", "aa"])
    assert laws.check_replicas(left(copied))[0]


def test_the_world_is_the_one_that_trained_on_equal_devices(copied: Path) -> None:
    events, metrics = copied / "straight/events.jsonl", copied / "straight/metrics.jsonl"
    start = next(line for line in map(json.loads, events.read_text().splitlines()) if line["event"] == "start")
    rows = [{**json.loads(line), "rank_compute_ms": [1.0, 2.0]} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def judged(other: Seat, **facts: object) -> Verdict:
        events.write_text(json.dumps({**start, "world_size": 2, "hosts": ["a", "b"], **facts}) + "\n")
        return laws.check_world(Evidence(copied, [seat(), other], {"straight": ""}))

    b = seat(host="b", network="eth0 10.0.0.2")
    passed, seen = judged(b)
    assert passed
    assert seen.startswith("2 ranks (1 on a, 1 on b): cpu; gloo; eth0 10.0.0.1, eth0 10.0.0.2;")
    assert judged(b, hosts=["a", "a"]) == (False, "the run's ranks were on a (rank 0 1)")
    assert judged(b, world_size=1) == (False, "the run had 1 rank")
    gpu = seat(host="b", device="NVIDIA H200", backend="nccl", network="eth0 10.0.0.2")
    both = "device cpu (rank 0), NVIDIA H200 (rank 1); backend gloo (rank 0), nccl (rank 1)"
    assert judged(gpu) == (False, both)
    local = seat(host="b", network="lo 127.0.0.1")
    assert judged(local) == (False, "transfers over eth0 10.0.0.1 (rank 0), lo 127.0.0.1 (rank 1)")


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        (("--nproc", "two"), {}, "--nproc is 'two'"),
        (("--nrpoc", "2"), {}, "did you mean '--nproc'?"),
        (("--nproc", "2", "--parallel.expect-ranks", "3"), {}, "parallel.expect-ranks is 3, and this world has 2"),
        (("--preset", "tny"), {}, "did you mean 'tiny'?"),
        (
            ("--nproc", "2"),
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "--nproc 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[str, ...], env: dict[str, str], message: str, tmp_path: Path) -> None:
    ended = run("verify", *flags, env=env, cwd=tmp_path).require(2)
    assert message in ended.err
    assert "RANK" not in os.environ
