"""What training says of its network is true: held against bytes and rate of the link, and against steps without it."""

import re
import statistics
import sys
from pathlib import Path

import pytest
from program import rows, run, steps

pytestmark = pytest.mark.alone

BITS_PER_S = 100e6
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448  # of Ethernet with TCP timestamps, as a rate counts them
MODEL = ("--preset", "tiny", "--model.n-embd", "256", "--model.n-layer", "3", "--model.n-head", "4")
ONLY_STEPS = ("--train.eval-every", "-1", "--train.sample-tokens", "0", "--parallel.strategy", "ddp")
WARM_UP = 3
TOLERANCE = 0.2  # 5% on a quiet machine (docs/LOG.md); this one may have other work


def in_lab(*arguments: str) -> None:
    ended = run("lab", *arguments)
    if ended.status == 2 and re.search("root|kernel|namespace|ip ", ended.err):
        pytest.skip(ended.err.strip())
    ended.require(0)


def median(run_folder: Path, name: str) -> float:
    return statistics.median(row[name] for row in steps(run_folder)[WARM_UP:])


@pytest.mark.long
def test_communication_takes_what_bytes_and_rate_say_and_exposed_is_what_steps_are_longer_by(tmp_path: Path) -> None:
    together = tmp_path / "together"
    train = ("train", *MODEL, *ONLY_STEPS, "--train.steps", "12", "--train.global-batch-size", "16")
    in_lab("--hosts", "2", "--rate", "100mbit", "--", *train, "--train.device-batch-size", "8", "--out", str(together))
    wire_bytes = median(together, "comm_bytes") * FRAME_BYTES / PAYLOAD_BYTES
    computed_ms = wire_bytes * 8 / BITS_PER_S * 1e3
    assert median(together, "comm_ms") == pytest.approx(computed_ms, rel=TOLERANCE)

    # The same work on both hosts at once, each a world of its own: what a step takes without synchronisation.
    alone = ("train", *MODEL, *ONLY_STEPS, "--train.steps", "12", "--train.global-batch-size", "8")
    script = (
        "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT; "
        f'exec {sys.executable} -m paceline "$@" --out {tmp_path}/alone-$(hostname)'
    )
    in_lab("--hosts", "2", "--rate", "100mbit", "--", "exec", "sh", "-c", script, "sh", *alone)
    without_ms = max(median(tmp_path / f"alone-{host}", "step_ms") for host in "ab")
    longer_ms = median(together, "step_ms") - without_ms
    assert median(together, "exposed_comm_ms") == pytest.approx(longer_ms, rel=TOLERANCE)


@pytest.mark.long
def test_a_host_with_a_third_of_a_processor_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train = ("train", *MODEL, *ONLY_STEPS, "--train.steps", "25", "--train.global-batch-size", "16")
    in_lab("--hosts", "2", "--cpu", "1.0,0.35", "--", *train, "--train.device-batch-size", "8", "--out", str(out))
    found = [row for row in rows(out / "events.jsonl") if row["event"] == "straggler"]
    assert [(row["rank"], row["host"]) for row in found] == [(1, "b")]
    assert found[0]["step"] <= 20  # 8 on a quiet machine
    assert found[0]["phase"] in ("forward", "backward")
    assert 1.5 < found[0]["ms"] / found[0]["median_ms"] < 6  # 1 / 0.35 = 2.9
