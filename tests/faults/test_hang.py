"""A rank that stops answering in the midst of training ends the whole command in time, and is named with its stack."""

import re
import time
from pathlib import Path

import pytest
from program import TINY, Program, rows, steps

TIMEOUT_S = 3.0
ASLEEP = "rank=1 step=6 phase=data kind=sleep seconds="
IN_DATA = r"data of step 6\n +paceline/base/faults\.py:\d+ _do\n"
LATEST_S = 50.0  # from the timeout to the end of all ranks: 2 on a quiet machine


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "strategy", "says"),
    [
        # The sleep is there to be its last word: that is up to a beat old, and in 0.3 s this run makes many steps.
        (f"{ASLEEP}1; rank=1 step=6 phase=forward kind=stop", "zero", rf"is stopped by a signal, .*{IN_DATA}"),
        (f"{ASLEEP}60", "ddp", rf"has made no progress .*{IN_DATA}"),
        # torch's own collectives, in which the others wait, tell nobody that they do
        (f"{ASLEEP}60", "fsdp", IN_DATA),
    ],
    ids=["stopped", "asleep in its data", "asleep, with fsdp"],
)
def test_a_rank_that_hangs_ends_the_run_in_time(tmp_path: Path, fault: str, strategy: str, says: str) -> None:
    folder = tmp_path / "run"
    with Program(
        *("train", *TINY, "--nproc", "3", "--parallel.strategy", strategy, "--out", str(folder)),
        *("--parallel.step-timeout-s", str(TIMEOUT_S)),
        env={"PACELINE_FAULTS": fault},
    ) as program:
        program.wait_for(lambda: len(steps(folder)) == 5)
        began = time.monotonic()
        program.wait_for(lambda: not program.ranks())
        took_s = time.monotonic() - began
        ended = program.wait().require(1)  # the launcher takes a second for its own end where cores are shared
        program.wait_until_gone()
    assert re.search(r"^error: rank 1 \(.*, pid \d+\) .*" + says, ended.err, re.MULTILINE), ended.err
    assert ended.err.count("error: rank 1 (") == 1, "said once"
    (hang,) = [row for row in rows(folder / "events.jsonl") if row["event"] == "hang"]
    assert hang["ranks"] == [1]
    first_step_s = steps(folder)[0]["step_ms"] / 1000  # ten of the slowest rank's are waited for, where that is longer
    assert took_s < max(TIMEOUT_S, 12 * first_step_s) + LATEST_S
