"""bench/gpu/check without what it runs: which rows of its table are refused, and checks at the same time."""

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    """The script, whose name is no module's."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(FOLDER / "check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))
    for name in {"several", "table", "checks", "machine"} - before:
        del sys.modules[name]


def machine(check: ModuleType, folder: Path, num_gpus: int = 0, num_ranks: int = 2) -> Any:
    return check.Machine("cuda" if num_gpus else "cpu", num_ranks, num_gpus, folder)


def test_a_row_of_the_table_is_refused_only_for_float8_without_units(check: ModuleType) -> None:
    """Finds: a row that is refused and is taken for one that trains, or the other way round."""
    table = check.table
    rows = list(table.rows_of(2, False, is_rehearsal=False))
    assert len(rows) == len(set(rows)) == len(table.STRATEGIES) * len(table.DTYPES)
    refused = [row for row in rows if table.refusal(row, has_float8=False)]
    assert {row.dtype for row in refused} == {"float8"}
    assert len(refused) == len(table.STRATEGIES)
    assert not any(table.refusal(row, has_float8=True) for row in rows)
    assert set(table.rows_of(2, False, is_rehearsal=True)) < set(rows)


def test_checks_that_measure_have_nothing_beside_them(check: ModuleType, tmp_path: Path) -> None:
    """Finds: a speed that is measured beside other checks."""
    running, beside, lock = set(), [], threading.Lock()

    def made(name: str, machine: Any) -> str:
        with lock:
            running.add(name)
            beside.append((name, set(running)))
        time.sleep(0.02)
        with lock:
            running.remove(name)
        return name

    checks = [
        check.Check(name, lambda machine, name=name: made(name, machine), is_alone=name == "speed")
        for name in ("speed", "a", "b", "c", "d")
    ]
    rows = list(check.outcomes(checks, machine(check, tmp_path), jobs=4))
    assert {row["check"] for row in rows} == {"speed", "a", "b", "c", "d"}
    assert all(row["passed"] for row in rows), rows
    assert [names for name, names in beside if name == "speed"] == [{"speed"}]
    assert all("speed" not in names for name, names in beside if name != "speed")
    assert max(len(names) for _, names in beside) > 1


def test_ctrl_c_ends_what_checks_in_threads_run_and_begins_no_other(check: ModuleType, tmp_path: Path) -> None:
    """Finds: after Ctrl-C all other checks are still made."""
    begun: list[int] = []

    def made(number: int, machine: Any) -> str:
        begun.append(number)
        if number:
            machine.execute(tmp_path, ["sleep", "5"])
        return "done"

    checks = [check.Check(str(number), partial(made, number)) for number in range(8)]
    results = check.outcomes(checks, machine(check, tmp_path), jobs=2)
    assert next(results)["figure"] == "done"
    results.close()  # as an exception in the caller's loop does
    assert len(begun) <= 4, begun


def test_the_speed_of_ranks_that_share_a_gpu_is_skipped_and_said(check: ModuleType, tmp_path: Path) -> None:
    """Finds: a figure of ranks that wait for each other's turn."""
    several = check.Check("speed of all", lambda machine: "1 tokens/s", gpus=2, is_alone=True)
    one = check.Check("speed of one", lambda machine: "1 tokens/s", is_alone=True)
    rows = list(check.outcomes([several, one], machine(check, tmp_path, num_gpus=1), jobs=1))
    assert [row["passed"] for row in rows] == [None, True]
    assert "share a GPU" in rows[0]["figure"]
    [row] = check.outcomes([several], machine(check, tmp_path, num_gpus=2), jobs=1)
    assert row["passed"] is True


def test_the_same_run_is_made_once_except_one_that_may_be_continued(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: checks in threads make a run twice, or continue each other's."""
    folders: list[Path] = []

    def paceline(of: Any, folder: Path, *words: str, **how: Any) -> Path:
        folders.append(folder)
        time.sleep(0.02)
        return folder

    monkeypatch.setattr(check.Machine, "paceline", paceline)
    here = machine(check, tmp_path)
    with ThreadPoolExecutor(4) as executor:
        runs = list(executor.map(lambda _: here.train("--preset", "tiny"), range(4)))
    assert set(runs) == set(folders)
    assert len(folders) == 1
    stopped = [here.train("--preset", "tiny", ends_with=75) for _ in range(2)]
    assert len({*runs, *stopped}) == 3


def test_a_run_that_failed_is_made_again_for_the_next_check(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: a run that one check had no time for fails all others that need it."""
    answers = iter([check.Failed("no end after 90 s"), "a run"])

    def paceline(of: Any, folder: Path, *words: str, **how: Any) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(check.Machine, "paceline", paceline)
    here = machine(check, tmp_path)
    with pytest.raises(check.Failed):
        here.train("--preset", "tiny")
    assert here.train("--preset", "tiny") == "a run"


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "visible", "shown"),
    [
        (4, 4, "", ["0,1", "2,3"]),
        (8, 4, "", ["0,1", "2,3"]),
        (2, 2, "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        (5, 5, "", ["0,1", "2,3"]),
        (2, 4, "", []),  # the ranks share them
        (0, 4, "", []),
    ],
)
def test_two_launchers_have_different_gpus(
    num_gpus: int,
    num_ranks: int,
    visible: str,
    shown: list[str],
    check: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finds: local ranks count from 0 under both, so both take GPU 0, which is refused."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    commands: list[str] = []

    def execute(of: Any, folder: Path, command: list[str], **how: Any) -> Any:
        commands.append(command[-1])
        return check.several.Run(folder, 1.0, "")

    monkeypatch.setattr(check.Machine, "execute", execute)
    here = machine(check, tmp_path, num_gpus, num_ranks)
    monkeypatch.setattr(check.Machine, "train", lambda *_, **__: check.several.Run(tmp_path, 1.0, ""))
    monkeypatch.setattr(check.several, "worst", lambda one, other: 0.0)
    check.several.on_two_hosts(here, "zero")
    second, first = commands[0].split(" & ")[:2]
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", f"{first} {second}") == shown


@pytest.mark.parametrize("words", ["--ranks 9", "--jobs 0", "--only nosuch"])
def test_an_option_with_which_nothing_would_be_checked_is_refused(
    words: str, check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finds: a word that is in no name, and all 0 of 0 checks pass."""
    monkeypatch.setattr(sys, "argv", ["check", "--rehearse", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        check.main()
    assert words.replace(" ", " is ") in capsys.readouterr().err


GPT = """
from types import SimpleNamespace as GPTConfig
import torch
class GPT(torch.nn.Linear):
    def __init__(self, config):
        super().__init__(1, 1)
    def init_weights(self):
        torch.nn.init.ones_(self.weight)
    def forward(self, tokens, targets):
        return self.weight.sum()
"""


@pytest.mark.long
def test_nanochat_finds_its_own_packages_beside_it(tmp_path: Path) -> None:
    """Finds: its package kernels is taken to be bench/gpu/kernels.py, so it goes without FlashAttention 3."""
    for name, text in {
        "kernels/__init__.py": "get_kernel = None",
        "nanochat/__init__.py": "",
        "nanochat/flash_attention.py": "from kernels import get_kernel\nUSE_FA3 = True",
        "nanochat/gpt.py": GPT,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(FOLDER / "peers.py"), "--inside-nanochat", "--rehearse"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("FlashAttention 3\n"), done.stderr
