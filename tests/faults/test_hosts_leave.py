"""The short form of the campaign with hosts: each is lost once and comes back; and what torchrun can do there."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import namespaces
import pytest
from hosts_campaign import FLAGS, SLEEPS, Hit, make, undisturbed
from program import COLD, TINY, TORCHRUN, Program, losses, rows, run, steps
from ssh_hosts import SshHosts, ssh_hosts

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return undisturbed(tmp_path_factory.mktemp("straight"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[SshHosts]:
    try:
        with ssh_hosts(tmp_path) as found:
            yield found
    except namespaces.Unavailable as why:
        pytest.skip(str(why))


@pytest.mark.long
@pytest.mark.parametrize(("way", "victim"), [("power", 0), ("cable", 1)])
def test_a_host_that_is_lost_and_comes_back_changes_nothing(
    pair: SshHosts, straight: list[float], way: str, victim: int
) -> None:
    """Mutation: a host that comes back is not taken in; or the host that is left has no copy of the checkpoint."""
    hit = Hit(0, way, victim, at_step=25, after_s=0.2, away_s=1.0)
    make(hit, pair, straight)
    assert not hit.problems, hit
    assert hit.on_s, "the other host went on alone"
    assert hit.back_s, "and took it in again"


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("way", SLEEPS)
def test_a_pause_of_10_s_harms_nothing(pair: SshHosts, straight: list[float], way: str) -> None:
    """Mutation: a host that is silent for 3 s is lost."""
    hit = Hit(0, way, 1, at_step=25, after_s=0.2, away_s=10.0)
    make(hit, pair, straight)
    assert not hit.problems, hit


@pytest.mark.long
def test_a_run_whose_launcher_is_lost_ends_saved_and_goes_on_from_there(pair: SshHosts, straight: list[float]) -> None:
    """Each host has its own disk; a signal stops the second launch. Mutation: ranks are killed with the launcher."""
    hosts = ("--ssh", pair.ssh, "--python", pair.warm_python, "--hosts", "a:1,b:1", "--chdir", str(pair.disk))
    launch = ("launch", *hosts, "--", "train", *FLAGS)
    folders = [pair.disk_of(number) / "run" for number in (0, 1)]
    for end in ("kill", "terminate", ""):
        with Program(*launch, "--out", "run", "--resume", "auto", host=pair.hosts[0]) as program:
            known = len(steps(folders[0])) if folders[0].exists() else 0
            if end:
                program.wait_for(lambda known=known: folders[0].exists() and len(steps(folders[0])) > known + 3)
                getattr(program.process, end)()
            status = program.wait().status
            program.wait_until_gone()
        assert status == {"kill": -9, "terminate": 75, "": 0}[end]
        assert rows(folders[0] / "events.jsonl")[-1]["event"] == "end", "it was saved"
        if end != "kill":
            names = [(folder / "checkpoints" / "latest").read_text() for folder in folders]
            assert names[0] == names[1]
            assert losses(folders[0]) == losses(folders[1])
    assert max(abs(a - b) for a, b in zip(losses(folders[0]), straight, strict=True)) <= 1e-4


@pytest.mark.long
@pytest.mark.nightly
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
