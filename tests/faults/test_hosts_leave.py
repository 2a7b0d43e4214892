"""The short form of the campaign with hosts: each is lost once and comes back; and what torchrun can do there."""

import itertools
from contextlib import ExitStack
from pathlib import Path

import namespaces
import pytest
from hosts_campaign import Hit, make, undisturbed
from program import COLD, TINY, TORCHRUN, Program, losses, rows, run, steps

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return undisturbed(tmp_path_factory.mktemp("straight"))


@pytest.mark.long
@pytest.mark.parametrize(("victim", "way"), [(1, "power"), (0, "cable")])
def test_a_host_that_is_lost_and_comes_back_changes_nothing(
    two_hosts: list[namespaces.Host], straight: list[float], tmp_path: Path, victim: int, way: str
) -> None:
    hit = Hit(0, way, victim, at_step=25, after_s=0.2, away_s=1.0)
    make(hit, two_hosts, tmp_path, straight)
    assert not hit.problems, hit
    assert hit.on_s, "the other host went on alone"
    assert hit.back_s, "and took it in again"


@pytest.mark.long
def test_a_signal_to_one_host_stops_the_run_and_both_can_resume_it(
    two_hosts: list[namespaces.Host], tmp_path: Path
) -> None:
    addresses = ",".join(host.address for host in two_hosts)
    folders = [tmp_path / host.name / "run" for host in two_hosts]
    for verb, more in (("train", ("--train.steps", "2000")), ("resume", ("--train.steps", "2000"))):
        with ExitStack() as stack:
            programs = []
            for host, folder in zip(two_hosts, folders, strict=True):
                place = (*TINY, "--out", str(folder)) if verb == "train" else (str(folder),)
                program = Program(verb, *place, *more, "--hosts", addresses, host=host)
                programs.append(stack.enter_context(program))
            known = len(rows(folders[0] / "metrics.jsonl")) if verb == "resume" else 0
            programs[0].wait_for(lambda known=known: len(steps(folders[0])) > known + 3)
            programs[1].process.terminate()
            for program in programs:
                program.wait().require(75)
        names = [(folder / "checkpoints" / "latest").read_text() for folder in folders]
        assert names[0] == names[1]
        assert losses(folders[0]) == losses(folders[1])
        assert [row["event"] for row in rows(folders[1] / "events.jsonl")][-1] == "end"
    assert steps(folders[0])[-1]["world_size"] == 2


@pytest.mark.long
def test_a_rank_that_dies_is_a_failure_and_all_hosts_hear_of_it(tmp_path: Path) -> None:
    """Two launchers on loopback. The first restart is allowed, the second failure ends the run."""
    env = {"PACELINE_FAULTS": "rank=1 step=8 phase=forward kind=kill attempt=any"}
    with ExitStack() as stack:
        programs = []
        for node in ("0", "1"):
            place = ("--hosts", "127.0.0.1:29471,127.0.0.1:29472", "--node-rank", node, "--out", str(tmp_path / node))
            flags = (*TINY, "--checkpoint.every", "5", "--max-restarts", "1", *place)
            programs.append(stack.enter_context(Program("train", *flags, env=env)))
        ends = [program.wait().require(1) for program in programs]
    for ended in ends:
        assert "rank 1 was killed by SIGKILL" in ended.err
        assert "the run failed after 1 restart" in ended.err
        assert "Traceback" not in ended.err
    assert (tmp_path / "1" / "checkpoints" / "latest").read_text() == "step-00000005\n"


@pytest.mark.long
def test_torchrun_with_a_range_of_nodes_goes_on_without_the_second(
    two_hosts: list[namespaces.Host], tmp_path: Path
) -> None:
    """The first host has the rendezvous and must live; the run folder is shared."""
    at = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{two_hosts[0].address}:29400")
    patience = (
        "--max-restarts",
        "3",
        "--rdzv-conf",
        "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3",
    )
    torchrun = (*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "1", *at, *patience)
    flags = (
        *TINY,
        "--train.device-batch-size",
        "6",
        "--train.steps",
        "60",
        "--checkpoint.every",
        "5",
        "--out",
        str(tmp_path / "run"),
    )
    run("train", *flags[:-1], str(tmp_path / "straight")).require(0)
    slow = {"PACELINE_FAULTS": "rank=0 step=1 phase=data kind=sleep seconds=0.1 times=100 attempt=any"}
    with ExitStack() as stack:
        programs = []
        for host in two_hosts:
            command = (*torchrun, "-m", "paceline", "train", *flags, "--parallel.interface", host.interface)
            env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **COLD, **slow}
            programs.append(stack.enter_context(Program(command=command, env=env, host=host)))
        programs[0].wait_for(lambda: len(steps(tmp_path / "run")) > 12)
        programs[1].kill_all()
        programs[0].wait_for(lambda: steps(tmp_path / "run")[-1]["world_size"] == 1)
        programs.append(stack.enter_context(Program(command=command, env=env, host=host)))
        programs[0].wait().require(0)
    sizes = [row["world_size"] for row in steps(tmp_path / "run")]
    assert [size for size, _ in itertools.groupby(sizes)] == [2, 1, 2]
    for ours, theirs in zip(losses(tmp_path / "run"), losses(tmp_path / "straight"), strict=True):
        assert abs(ours - theirs) <= 1e-4
