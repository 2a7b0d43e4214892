"""`paceline train --out RUN -- SCRIPT`: ranks of a script start, stop and start again as those of the trainer."""

import json
from pathlib import Path

import pytest
from program import Ended, Program, losses, rows, run, steps
from ssh_hosts import SshHosts

from paceline.checkpoint.steps import list_steps

SCRIPT = Path(__file__).parents[1] / "replica" / "run_script.py"


def train(folder: Path, *fault: str, flags: tuple[str, ...] = ()) -> Ended:
    return run("train", "--out", str(folder), *flags, "--", str(SCRIPT), str(folder), *fault)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(folder).require(0)
    return losses(folder)


@pytest.mark.long
def test_ranks_of_a_script_that_were_killed_start_again(straight: list[float], tmp_path: Path) -> None:
    """Mutation: a script that has come to its end is called dead, since only its exit status says so."""
    folder = tmp_path / "run"
    ended = train(folder, "kill", flags=("--nproc", "2", "--max-restarts", "1"))
    assert "rank 0 was killed by SIGKILL" in ended.require(0).err
    assert "after step 4; restart 1 of 1" in ended.err
    assert losses(folder) == pytest.approx(straight, abs=1e-6)
    begun = [(event["event"], event.get("step")) for event in rows(folder / "events.jsonl") if "world_size" in event]
    assert begun == [("start", None), ("resume", 4)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("stop", 75, "stopped at step 7 (SIGTERM on rank 1)"),
        ("raise", 1, "ValueError: a mistake of the script"),
        ("leave outside", 3, "run folder "),
        ("name", 2, "run.log was given loss, which a row has already"),
    ],
)
def test_the_last_word_of_ranks_of_a_script_is_its_launchers_exit_status(
    tmp_path: Path, fault: str, status: int, says: str
) -> None:
    """Mutations: a rank that fails in the world reports nothing, and its launcher says so once more; SystemExit after
    the world is taken for the end of the script."""
    folder = tmp_path / "run"
    ended = train(folder, fault, flags=("--nproc", "2")).require(status)
    assert says in ended.out + ended.err
    assert ended.err.count(says) <= 2
    assert "did not report why" not in ended.err
    reports = [json.loads(path.read_text()) for path in sorted((folder / "ranks").glob("*.end"))]
    assert status in [report["code"] for report in reports if report["consequence"] is None]
    last = rows(folder / "events.jsonl")[-1]
    assert (last["event"], last.get("reason")) != ("end", "horizon reached")
    trace = [line for line in ended.err.splitlines() if "runpy" in line or "paceline/cli" in line]
    assert not trace, "a traceback is the script's"


@pytest.mark.long
def test_a_launcher_that_looks_at_another_folder_is_refused(tmp_path: Path) -> None:
    """Mutation: checkpoints are looked for where the script saves none."""
    command = ("train", "--nproc", "2", "--out", str(tmp_path / "a"), "--", str(SCRIPT), str(tmp_path / "b"))
    assert f"and --out is {tmp_path / 'a'}: give `train` the same folder" in run(*command).require(2).err
    assert not (tmp_path / "a").exists()


@pytest.mark.lab
@pytest.mark.long
@pytest.mark.parametrize(("fault", "status"), [("stop", 75), ("kill", 0)])
def test_two_hosts_train_by_a_script(
    pair: SshHosts, straight: list[float], tmp_path: Path, fault: str, status: int
) -> None:
    """Each host has a disk of its own: the one without rank 0 gets copies of checkpoints. Mutation: --nproc goes to the
    script."""
    folder = pair.disk / tmp_path.name
    flags = ("--out", str(folder), "--max-restarts", "1")
    script = ("train", *flags, "--", str(SCRIPT), str(folder), fault)
    options = ("--ssh", pair.ssh, "--python", pair.warm_python, "--hosts", "a:1,b:1", "--chdir", str(pair.disk))
    with Program("launch", *options, "--", *script, host=pair.hosts[0]) as program:
        ended = program.wait().require(status)
        program.wait_until_gone()
    first, second = (pair.disk_of(number) / tmp_path.name for number in range(2))
    made = straight[:7] if fault == "stop" else straight
    assert losses(first) == pytest.approx(made, abs=1e-6)
    assert {row["world_size"] for row in steps(first)} == {2}
    assert list_steps(first / "checkpoints")[-1] == list_steps(second / "checkpoints")[-1] == len(made)
    assert (fault == "kill") == ("restart 1 of 1" in ended.err)
