"""`paceline learn ring`: what it shows is what the processes did, added up again here from the first table alone."""

import os
import pty
import re
import sys
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest
import torch
from program import TORCHRUN, Ended, Fork, Program, _be_the_command, run
from ranks import FORKS, run_ranks

from paceline.cli.main import main
from paceline.world.runtime import World

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from ring import contributors, ring_all_reduce, steps

_CELL = re.compile(r"((?: *-?\d+\.\d)*) +(empty|all|\d+(?:\+(?:\d+|\.\.))*) *([<>])?")


@dataclass(frozen=True)
class Cell:
    """One cell of a table as it was read."""

    values: list[float]
    whose: str
    mark: str


def tables(out: str) -> list[list[list[Cell]]]:
    """The tables of the lesson, in order, by rank and chunk, read off its plain lines."""
    found: list[list[list[Cell]]] = []
    for line in map(str.strip, out.splitlines()):
        if line.startswith("chunk 0"):
            found.append([])
        elif re.match(r"rank \d  ", line) and found:
            cells = _CELL.findall(line[6:])
            found[-1].append([Cell([float(v) for v in values.split()], whose, mark) for values, whose, mark in cells])
    return found


def added(first: list[list[Cell]], chunk: int, whose: str) -> list[float]:
    """The sum of these ranks' first values of a chunk."""
    size, named = len(first), whose.replace("+..+", "+").split("+")
    ranks = list(range(size)) if whose == "all" else [int(rank) for rank in named]
    if ".." in whose:  # around the ring, from the first that is named to the last
        ranks = [(ranks[0] + k) % size for k in range((ranks[1] - ranks[0]) % size + 1)]
    return [sum(column) for column in zip(*(first[rank][chunk].values for rank in ranks), strict=True)]


def assert_lesson(ended: Ended, num_ranks: int, elements: int) -> None:
    """Everything that a piped lesson says, against sums made here."""
    assert "\x1b" not in ended.out
    assert ended.err == "" or "OMP_NUM_THREADS" in ended.err  # torchrun's own advice
    found = tables(ended.out)
    first = found[0]
    assert len(found) == 1 + 2 * (num_ranks - 1)
    assert all(len(row) == num_ranks for table in found for row in table)
    assert all(sum(len(cell.values) for cell in row) == elements for row in first)
    lengths = [len(cell.values) for cell in first[0]]
    assert max(lengths) - min(lengths) <= 1
    for table in found:
        for row in table:
            for chunk, cell in enumerate(row):
                if cell.whose != "empty":
                    assert cell.values == pytest.approx(added(first, chunk, cell.whose), abs=1e-6)
    assert all(cell.whose in ("all", "empty") for row in found[-1] for cell in row)
    sent = [0] * num_ranks
    for table in found[1:]:
        for rank, row in enumerate(table):
            chunk = [cell.mark for cell in row].index(">")
            assert [cell.mark for cell in table[(rank + 1) % num_ranks]].index("<") == chunk
            sent[rank] += 4 * lengths[chunk]
    total = 2 * (num_ranks - 1) * 4 * elements
    assert sum(sent) == total
    assert f"as the group counted them: {', '.join(map(str, sent))}, on average {total / num_ranks:g}." in ended.out
    assert f"x {4 * elements} = {total / num_ranks:g}." in ended.out
    assert "the same bits on all ranks" in ended.out
    difference = re.search(r"differs from it by at most ([\d.e+-]+)\s+in values", ended.out)
    assert difference is not None
    assert float(difference[1]) < 1e-4
    assert len(re.findall(r"iB: +this ring [\d.]+ ms \(.*, gloo [\d.]+ ms|B: +this ring [\d.]+ ms", ended.out)) == 2


def test_three_ranks_and_seven_values_add_up_step_by_step(tmp_path: Path) -> None:
    ended = run("learn", "ring", "--elements", "7", cwd=tmp_path).require()
    assert_lesson(ended, 3, 7)
    assert len(set(re.findall(r"process of its own \((\d+), (\d+), (\d+)\)", ended.out)[0])) == 3
    assert "1 of 4, reduce-scatter: rank 0 sends its chunk 0 to rank 1, which adds it to its own" in ended.out
    assert not list(tmp_path.iterdir())


def test_alone_there_is_nobody_to_send_to(tmp_path: Path) -> None:
    ended = run("learn", "ring", "--ranks", "1", "--elements", "3", cwd=tmp_path).require()
    assert "nobody to send to" in ended.out
    assert [len(cell.values) for cell in tables(ended.out)[0][0]] == [3]
    assert "as the group counted them: 0. 2 (n-1)/n s is 2 x 0/1 x 12 = 0." in ended.out


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "elements"), [(2, 1), (5, 5)])
def test_other_worlds_also_torchruns_show_what_they_did(num_ranks: int, elements: int, tmp_path: Path) -> None:
    arguments = ("learn", "ring", "--elements", str(elements))
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", str(num_ranks), "-m", "paceline")
    with Program(*arguments, command=command, cwd=tmp_path) as program:
        assert_lesson(program.wait().require(), num_ranks, elements)


@pytest.mark.long
def test_on_a_terminal_tables_move_and_plain_ones_do_not(tmp_path: Path) -> None:
    shown = {plain: on_a_terminal(tmp_path, *["--plain"] * plain) for plain in (False, True)}
    assert "\x1b[" not in shown[True]
    assert "\x1b[" in shown[False]
    assert "\x1b[1A" in shown[False]  # up again, to draw over what stood there
    assert_lesson(Ended(0, shown[True].replace("\r", ""), "", 0.0), 2, 4)
    for text in shown.values():
        assert "2 of 2, all-gather" in text


def on_a_terminal(folder: Path, *flags: str) -> str:
    """What the lesson of two ranks writes to a terminal."""
    ours, theirs = pty.openpty()
    words = ("-m", "paceline", "learn", "ring", "--ranks", "2", "--elements", "4", "--delay", "0", *flags)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "130", "LINES": "50"}
    with open(os.devnull, "w") as pids:
        streams = [reduction.DupFd(number) for number in (theirs, theirs, pids.fileno())]
        what = words, environment, str(folder), streams, None
        process = Fork(FORKS.Process(target=_be_the_command, args=what))
    os.close(theirs)
    said = b""
    while part := _read(ours):
        said += part
    os.close(ours)
    assert process.wait(60) == 0, said.decode()
    return said.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: nobody has the other end open any more
        return b""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ranks", "0"), "0 ranks"),
        (("--ranks", "9"), "1 to 8"),
        (("--rank", "2"), "did you mean '--ranks'"),
        (("--ranks", "two"), "--ranks"),
        (("--elements", "0"), "--elements is 0"),
        (("--elements", "1001"), "1000"),
        (("--delay", "-1"), "--delay is -1"),
        (("--delay", "nan"), "--delay is nan"),
        (("--interface", "nosuch0"), "nosuch0"),
    ],
)
def test_a_wrong_flag_is_one_message_and_status_2(
    flags: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out, err = said(capfd, 2, "learn", "ring", *flags)
    assert says in err
    assert out == ""
    assert err.count("error: ") + err.count("╭") == 1


def said(capfd: pytest.CaptureFixture[str], status: int, *arguments: str) -> tuple[str, str]:
    """What the command writes to stdout and stderr in this process, where nothing is started."""
    try:
        found = main(list(arguments))
    except SystemExit as left:  # tyro's
        found = int(left.code or 0)
    assert found == status
    out, err = capfd.readouterr()
    return out, err


def test_there_is_no_other_lesson_and_no_world_within_a_world(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "did you mean 'ring'" in said(capfd, 2, "learn", "rings")[1]
    assert "paceline learn ring" in said(capfd, 2, "learn")[0]
    assert "paceline learn ring" in said(capfd, 0, "learn", "--help")[0]
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert "--ranks 2 inside a world" in said(capfd, 2, "learn", "ring", "--ranks", "2")[1]
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert "9 ranks" in said(capfd, 2, "learn", "ring")[1]


# ---- the algorithm ----


def sum_around_the_ring(world: World, lengths: list[int]) -> list[tuple[bool, int]]:
    """For each length: whether the ring gave the exact sum of integers that every rank can make, and bytes it sent."""
    found = []
    for length in lengths:
        each = [torch.arange(length) * (rank + 1) % 17 - rank for rank in range(world.world_size)]
        flat = each[world.rank].float()
        world.group.take_traffic()
        ring_all_reduce(world.group, flat)
        sent = world.group.take_traffic().num_bytes
        found.append((torch.equal(flat, torch.stack(each).sum(0).float()), int(sent)))
    return found


def test_the_ring_adds_up_any_length_on_four_real_ranks_for_the_bytes_of_the_formula() -> None:
    lengths = [1, 3, 4, 1001, 65536]
    results: list[Any] = run_ranks(sum_around_the_ring, 4, lengths)
    for place, length in enumerate(lengths):
        assert all(result[place][0] for result in results), length
        assert sum(result[place][1] for result in results) == 2 * 3 * 4 * length
    assert {result[4][1] for result in results} == {2 * 3 * 65536}  # 2 (n-1)/n of 4 bytes each: even chunks, even ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_after_half_of_the_steps_each_rank_has_one_complete_sum_and_after_all_every_sum(num_ranks: int) -> None:
    plan = steps(num_ranks)
    assert len(plan) == 2 * (num_ranks - 1)
    half, end = contributors(num_ranks, plan[: num_ranks - 1]), contributors(num_ranks, plan)
    for rank in range(num_ranks):
        complete = [chunk for chunk in range(num_ranks) if sorted(half[rank][chunk]) == list(range(num_ranks))]
        assert complete == [(rank + 1) % num_ranks]
        assert all(sorted(end[rank][chunk]) == list(range(num_ranks)) for chunk in range(num_ranks))
    for step in plan:  # each chunk crosses one link
        assert sorted(step.chunks) == list(range(num_ranks))
