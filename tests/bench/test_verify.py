"""`verify` says yes where the laws hold, and names the law where they are made not to."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from program import Ended, Program, run

from paceline.bench import verify
from paceline.bench.verify import Row

LAWS = ["the world", "replicas are equal", "the same curve", "resume is exact"]


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
    assert list(verdicts(ended).items()) == list(zip(LAWS, ["pass", "FAIL", "open", "open"], strict=True))
    said = re.sub(r"\s+", " ", ended.out)
    assert "replicas are not equal at step 5" in said
    assert "run `paceline verify --nproc 2` on each host alone" in said
    assert "1 of 4 checks failed (2 ranks" in said
    folder = kept_folder(ended)
    assert (folder / "straight/metrics.jsonl").exists()
    assert "replicas are not equal" in (folder / "straight-rank-00000.out").read_text()


@pytest.mark.long
def test_a_rank_that_computes_something_else_fails_the_row_on_the_curve(tmp_path: Path) -> None:
    """No update in step 5, agreed by all ranks: replicas stay equal, a resume repeats it, and one process knows no such
    thing."""
    ended = verified(tmp_path, "--nproc", "2", status=1, env={"PACELINE_FAULTS": "rank=1 step=5 kind=nan"})
    assert list(verdicts(ended).items()) == list(zip(LAWS, ["pass", "pass", "FAIL", "pass"], strict=True))
    said = re.sub(r"\s+", " ", ended.out)
    assert "step 5 was skipped in one of the two" in said
    assert "straight/metrics.jsonl" in said


@pytest.mark.long
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


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `verify --keep` kept, of one process: the straight run and the one that was stopped."""
    place = tmp_path_factory.mktemp("verify")
    ended = verified(place, "--keep")
    assert list(verdicts(ended).items()) == list(zip(LAWS, ["pass", "open", "open", "pass"], strict=True))
    assert "2 could not be judged in a world of one" in ended.out
    assert ended.out.count("needs two ranks") == 2
    return kept_folder(ended)


@pytest.fixture
def copied(records: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(records, tmp_path / "records"))


DONE = verify.Ended(True)


def change(path: Path, **of_row: object) -> None:
    """Changes fields in the last row of a JSON-lines file."""
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), **of_row})
    path.write_text("\n".join(lines) + "\n")


def resume(folder: Path) -> Row:
    return verify.judge_resume(folder / "straight", folder / "stopped", DONE)


def test_a_resume_that_ends_elsewhere_fails_with_both_values(copied: Path) -> None:
    good = resume(copied)
    assert good.passed
    digest = re.search(r"weights (\w+)", good.seen)
    assert digest
    change(copied / "stopped/events.jsonl", digest="0123456789abcdef")
    row = resume(copied)
    assert row.passed is False
    assert row.seen == f"weights 0123456789abcdef, and {digest[1]} of the straight run"
    assert "bit for bit" in row.expected


def test_a_resume_with_another_optimizer_state_or_another_curve_fails(copied: Path) -> None:
    change(copied / "stopped/events.jsonl", state_digests=["0"])
    assert resume(copied).seen == "the weights are the same; the state of rank 0 differs"
    shutil.copy(copied / "straight/events.jsonl", copied / "stopped/events.jsonl")
    assert resume(copied).passed
    change(copied / "stopped/metrics.jsonl", loss=1.0)
    assert resume(copied).passed is False


def test_a_curve_further_away_than_rounding_fails_with_the_step(copied: Path) -> None:
    straight, alone = copied / "straight", Path(shutil.copytree(copied / "straight", copied / "alone"))
    same = verify.judge_curve(alone, straight, DONE, 2)
    assert same.passed
    loss = json.loads((alone / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    change(alone / "metrics.jsonl", loss=loss + 5e-5)
    assert verify.judge_curve(alone, straight, DONE, 2).passed
    change(alone / "metrics.jsonl", loss=loss + 2e-4)
    row = verify.judge_curve(alone, straight, DONE, 2)
    assert row.passed is False
    assert row.seen.startswith("at most 2.0e-04 apart, at step 20")
    change(alone / "metrics.jsonl", loss=None)  # as NaN stands there
    assert verify.judge_curve(alone, straight, DONE, 2).passed is False


def test_states_that_differ_at_the_end_are_no_equal_replicas(copied: Path) -> None:
    straight = copied / "straight"
    change(straight / "events.jsonl", state_digests=["aa", "bb"])
    row = verify.judge_replicas(straight, DONE, 2)
    assert row.passed is False
    assert row.seen == "digests of the state at the end: aa (rank 0), bb (rank 1)"
    change(straight / "events.jsonl", state_digests=["aa", "aa"])
    assert verify.judge_replicas(straight, DONE, 2).passed


def seat(**changes: str) -> verify.Seat:
    values = {"host": "a", "device": "cpu", "backend": "gloo", "network": "eth0 10.0.0.1", "versions": "torch 2.13"}
    return verify.Seat(**{**values, **changes})


def test_the_world_is_the_one_that_trained_on_equal_devices(copied: Path) -> None:
    straight = copied / "straight"
    lines = [json.loads(line) for line in (straight / "events.jsonl").read_text().splitlines()]
    start = next(line for line in lines if line["event"] == "start")
    other = seat(host="b", network="eth0 10.0.0.2")
    for row in (straight / "metrics.jsonl",):
        rows = [json.loads(line) for line in row.read_text().splitlines()]
        row.write_text("".join(json.dumps({**r, "rank_compute_ms": [1.0, 2.0]}) + "\n" for r in rows))

    def judged(seats: list[verify.Seat], **facts: object) -> Row:
        (straight / "events.jsonl").write_text(
            json.dumps({**start, "world_size": 2, "hosts": ["a", "b"], **facts}) + "\n"
        )
        return verify.judge_world(seats, straight, DONE)

    assert judged([seat(), other]).passed
    assert judged([seat(), other]).expected.startswith("2 ranks (1 on a, 1 on b)")
    assert judged([seat(), other], hosts=["a", "a"]).seen == "the run's ranks were on a (rank 0 1)"
    assert judged([seat(), other], world_size=1).seen == "the run had 1 rank"
    gpu = seat(host="b", device="NVIDIA H200", backend="nccl", network="eth0 10.0.0.2")
    assert (
        judged([seat(), gpu]).seen == "device cpu (rank 0), NVIDIA H200 (rank 1); backend gloo (rank 0), nccl (rank 1)"
    )
    local = seat(host="b", network="lo 127.0.0.1")
    assert judged([seat(), local]).seen == "transfers over eth0 10.0.0.1 (rank 0), lo 127.0.0.1 (rank 1)"
    assert judged([seat(), other], hosts=["a", "b"]).passed


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
