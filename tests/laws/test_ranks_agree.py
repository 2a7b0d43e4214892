"""The law: ranks that would train different models train none, and the message names ranks and both values."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from program import TINY, TORCHRUN, Ended, Program, losses, one_message, start_ranks, steps

import paceline


def by_hand(out: Path, flags_by_rank: list[tuple[str, ...]], env_by_rank: list[dict[str, str]]) -> list[Ended]:
    return start_ranks([("train", *TINY, "--out", str(out), *flags) for flags in flags_by_rank], env_by_rank)


@pytest.mark.long
def test_configs_that_differ_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = one_message(by_hand(out, [("--train.seed", "1"), ("--train.seed", "2")], [{}, {}]))
    assert re.search(r"train\.seed: 1 on rank 0; 2 on rank 1", said)
    assert not out.exists()


@pytest.mark.long
def test_each_host_says_why_its_ranks_end(tmp_path: Path) -> None:
    """Two hosts of one rank each, as their environments have it: who sits at the second sees it there, too."""
    flags = [("--train.seed", "1"), ("--train.seed", "2")]
    first, second = by_hand(tmp_path / "run", flags, [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0"}])
    text = (
        "error: ranks differ, and would train different models: train.seed: 1 on rank 0; 2 on rank 1. Make them equal"
    )
    assert first.require(2).err == f"{text}\n"
    assert second.require(2).err == f"rank 1: {text}\n"


@pytest.mark.parametrize(("launcher", "says"), [({"TORCHELASTIC_RUN_ID": "job"}, "rank 1: error: "), ({}, "")])
def test_a_local_rank_waits_for_local_rank_0_to_say_the_error(
    tmp_path: Path, launcher: dict[str, str], says: str
) -> None:
    """Under torchrun it says the error itself if it lives on; without torchrun nobody ends local rank 0 before it."""
    script = tmp_path / "rank.py"
    script.write_text("import sys\nfrom paceline.__main__ import main\nsys.exit(main())\n")
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    arguments = ("train", "--preset", "tiny", "--data.path", "no/such/folder", "--out", str(tmp_path / "run"))
    with Program(*arguments, command=(sys.executable, str(script)), env=world | launcher) as program:
        said = program.wait().require(2).err
    assert said.startswith(says)
    assert ("no/such/folder" in said) == bool(says)


@pytest.mark.long
def test_a_local_rank_that_alone_sees_an_error_says_it(tmp_path: Path) -> None:
    """Under torchrun, which ends the others then; where local rank 0 has the same error, that one says it."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, time\n"
        "from paceline.__main__ import main\n"
        "if os.environ['RANK'] in sys.argv[1]:\n"
        "    time.sleep(int(os.environ['RANK']))\n"
        "    sys.argv[1:] = ['train', '--preset', 'tiny', '--data.path', 'no/such/folder', '--out', sys.argv[2]]\n"
        "    sys.exit(main())\n"
        "time.sleep(60)\n"
    )
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script))
    with Program("1", str(tmp_path / "run"), command=torchrun) as alone:
        said = alone.wait().err
    assert re.search(r"^rank 1: error: .*no/such/folder", said, re.MULTILINE), said
    with Program("01", str(tmp_path / "run"), command=torchrun) as both:
        said = both.wait().err
    assert re.search(r"^error: .*no/such/folder", said, re.MULTILINE), said
    assert "rank 1: error" not in said


@pytest.mark.long
def test_data_that_differs_is_refused(tmp_path: Path) -> None:
    """The same names and lengths, one letter of one file another: only what is in it can tell."""
    for name, letter in (("one", "a"), ("two", "b")):
        (tmp_path / name / "text").mkdir(parents=True)
        for number in range(8):
            (tmp_path / name / "text" / f"{number}.txt").write_text(f"{number}: {letter} as in an alphabet. " * 400)
    flags = [("--data.path", str(tmp_path / name / "text")) for name in ("one", "two")]
    said = one_message(by_hand(tmp_path / "run", flags, [{}, {}]))
    assert re.search(r'data: "[0-9a-f]{16}" on rank 0; "[0-9a-f]{16}" on rank 1', said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_versions_that_differ_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(paceline.__file__).parent, other / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "paceline" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{paceline.__version__}"', '"99.0"'))
    said = one_message(by_hand(tmp_path / "run", [(), (), ()], [{}, {}, {"PYTHONPATH": str(other)}]))
    assert re.search(rf"rank 2 \(.*\) has paceline 99\.0, and rank 0 \(.*\) paceline {paceline.__version__}", said)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_torchrun_on_one_host_is_the_same_run(runs, tmp_path: Path) -> None:
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
    with Program("-m", "paceline", "train", *runs.flags, "--out", str(tmp_path / "run"), command=torchrun) as program:
        ended = program.wait().require(0)
        program.wait_until_gone()
    assert losses(tmp_path / "run") == losses(runs.get(2))  # one thread a rank in both: not a bit differs
    assert {row["world_size"] for row in steps(tmp_path / "run")} == {2}
    assert ended.out.count("step 40: validation loss") == 1, "rank 0 alone speaks"
