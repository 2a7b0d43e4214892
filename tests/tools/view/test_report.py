"""The report as a file: complete, true to the records, and safe whatever stands in them."""

import importlib
import json
import os
import re
import stat
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import long_run
import numpy as np
import program
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.record.folder import create
from paceline.tools.view.report import make_page

NUM_PARAMETERS = 124_439_808  # of GPT-2's smallest, as its authors' checkpoint has them


class Parsed(HTMLParser):
    """The tags of a page, and their attributes."""

    def __init__(self, page: bytes):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def runs_in(page: bytes) -> list[dict[str, Any]]:
    """What the page has of each run."""
    found = re.search(rb'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return list(json.loads(found[1])["runs"].values())


def said_in(run: dict[str, Any]) -> str:
    """All texts of a run."""
    facts = [" ".join(fact) for fact in run["facts"]]
    events = [" ".join(event[:4]) for event in reversed(run["events"])]
    tables = [" ".join(row) for _, rows, _ in run["tables"].values() for row in rows]
    return "\n".join(
        [run["said"], run["warning"], *run["notices"], *run["findings"].values(), *facts, *events, *tables]
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_run.write(tmp_path_factory.mktemp("runs") / "long")


@pytest.fixture(scope="module")
def page(run: Path) -> bytes:
    return make_page([run], lambda path: NUM_PARAMETERS)


def test_it_is_one_small_file_that_names_no_address(page: bytes) -> None:
    assert len(page) < 180_000
    own = page.replace(b"https://github.com/leeoniya/uPlot", b"")  # in uPlot's head, with its version
    assert b"http" not in own.replace(b"http-equiv", b"")
    assert {name for name, _ in Parsed(page).attributes}.isdisjoint({"src", "srcset", "action", "onclick"})
    assert b"default-src 'none'" in page
    assert Parsed(page).tags.count("script") == 4


def test_no_spike_and_no_straggler_is_lost(page: bytes) -> None:
    (run,) = runs_in(page)
    losses, heat = run["curves"]["steps"]["loss"], run["heat"]
    assert max(value for value in losses["high"] if value is not None) == long_run.SPIKE
    assert len(losses["mean"]) <= 400
    columns, steps = np.array(heat["mean"]), np.array(heat["steps"])
    assert 100 <= len(columns) <= 300
    inside = (steps > long_run.SLOW_FROM + 10) & (steps < long_run.SLOW_TO - 5)
    outside = (steps < long_run.SLOW_FROM - 5) | (steps > long_run.SLOW_TO + 10)
    assert (columns[inside, long_run.SLOW_RANK] > 0.5).all()
    assert (columns[outside].mean(axis=0) < 0.05).all()
    assert (np.array(heat["most"]) >= columns - 1e-3).all()
    assert heat["frames"] == [[long_run.SLOW_RANK, long_run.SLOW_FROM, long_run.SLOW_TO + 7]]


def test_every_event_has_its_mark_and_a_restart_its_line(page: bytes) -> None:
    (run,) = runs_in(page)
    assert len(run["events"]) == len(long_run.events())
    assert all(at is not None for *_, at in run["events"])
    assert run["resumed"] == [long_run.SAVED_AT]


def test_it_says_what_happened(page: bytes) -> None:
    said = said_in(runs_in(page)[0])
    for told in (
        "finished",
        "65.5M in 2,000 steps",
        "Restarts 1 13 steps repeated",
        "Stragglers cost 42s",
        "Ranks 4 on a, b",
        "Rank 2 (host b) was slow in steps 901 to 1,247: forward took it 182 ms, the median rank 61 ms; it cost 42s.",
        "28 events, 1 restart, 13 repeated steps.",
        "A rank sends 711.4 MiB a step",
        "come to 712.1 MiB by the ring's formula",  # 2 * 3/4 * 4 bytes * 124,439,808
        "1 step without a finite loss",
        "hang 1,513 rank 3, host b",
        "straggler over 1,247 rank 2, host b, cost 41.5 s",
    ):
        assert told in said, told


def test_learning_rate_and_gradient_norm_are_drawn_and_told(page: bytes, run: Path) -> None:
    rows = [row for row in program.rows(run / "metrics.jsonl") if "loss" in row]
    rates = [row["lr"] for row in rows]
    norms = {row["step"]: row["grad_norm"] for row in rows if row["grad_norm"] is not None}
    largest_at = max(norms, key=lambda step: norms[step])
    (view,) = runs_in(page)
    curves = view["curves"]["steps"]
    assert max(curves["lr"]["mean"]) == pytest.approx(max(rates), rel=5e-2)
    assert max(curves["grad_norm"]["high"]) == pytest.approx(max(norms.values()), rel=1e-4), "no spike is lost"
    clipped = sum(norm > 1.0 for norm in norms.values()) / len(norms)  # the preset's grad-clip is 1
    peak_at = rows[rates.index(max(rates))]["step"]
    for told in (
        f"The learning rate peaks at {max(rates):.3g} in step {peak_at:,}",
        f"largest in step {largest_at:,} with {norms[largest_at]:.3g}; {clipped:.0%} of the steps are clipped to 1",
    ):
        assert told in view["findings"]["update"], told


def test_the_parts_of_a_step_add_up_to_it(page: bytes, run: Path) -> None:
    rows = [row for row in program.rows(run / "metrics.jsonl") if "loss" in row]
    (view,) = runs_in(page)
    latest_ms = sum(row["step_ms"] for row in rows[-100:]) / 100
    for rank in view["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(latest_ms, rel=1e-3)
        assert [*rank["parts"]][-1] == "other"
    parts = view["curves"]["parts"]
    whole = np.sum([parts[part]["mean"] for part in view["ranks"][0]["parts"]], axis=0)
    assert whole.mean() == pytest.approx(sum(row["step_ms"] for row in rows) / len(rows), rel=1e-3)
    steady = [row["step_ms"] for row in rows if row["step"] not in (1, long_run.SAVED_AT + 1)]
    assert view["tables"]["parts"][1][-1] == ["step", f"{sum(steady) / len(steady):.4g}", "100.0"]


def unequal_run(folder: Path, sequences: list[list[int]], tokens_per_s: tuple[float, float]) -> dict[str, Any]:
    """What the page has of a run in which two ranks of these speeds had these sequences of 100 tokens in each step."""
    folder.mkdir()
    (folder / "config.toml").touch()
    rows = []
    for step, shares in enumerate(sequences, start=1):
        own = [1e5 * count / speed for count, speed in zip(shares, tokens_per_s, strict=True)]
        row = {"step": step, "loss": 2.0, "tokens": 1200 * step, "step_ms": max(own), "world_size": 2}
        row |= {"tokens_per_s": 1.2e6 / max(own), "rank_sequences": shares, "rank_optim_ms": [0.0, 0.0]}
        rows.append(row | {"rank_compute_ms": own, "rank_exposed_comm_ms": [max(own) - ms for ms in own]})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = [step for step in range(2, len(sequences) + 1) if sequences[step - 1] != sequences[step - 2]]
    events = [{"event": "start", "hosts": ["fast", "slow"]}]
    events += [{"event": "shares", "step": step, "sequences": sequences[step - 1]} for step in changes]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return runs_in(make_page([folder]))[0]


def test_shares_of_unequal_ranks_are_told_and_drawn(tmp_path: Path) -> None:
    """A rank of twice the other's speed has half of the sequences in step 1, which is left out, and then two thirds."""
    view = unequal_run(tmp_path / "run", [[6, 6]] * 2 + [[8, 4]] * 4, (2000.0, 1000.0))
    said = view["findings"]["shares"]
    assert "By rank, the last step had 8, 4 sequences (changed 1 time, the last at step 3)." in said
    # Four steps of 400 ms, and the second, of 600 ms: 6000 tokens in 2.2 s, where 3000 a second were possible.
    assert f"reached {6000 / 2.2 / 3000:.0%} of the sum of its ranks' own speeds" in said
    assert "A step took 440 ms on average; with equal shares it would have taken 600 ms." in said
    rows = view["tables"]["shares"][1]
    assert rows == [["0 · fast", "7.6", "2k", "13.6%"], ["1 · slow", "4.4", "1k", "0.0%"]]
    curves = view["curves"]["shares"]
    assert [curves["rank 0"]["mean"], curves["rank 1"]["mean"]] == [[6, 6, 8, 8, 8, 8], [6, 6, 4, 4, 4, 4]]


def test_equal_shares_of_unequal_ranks_name_the_remedy_and_ranks_alike_have_no_section(tmp_path: Path) -> None:
    view = unequal_run(tmp_path / "equal", [[6, 6]] * 4, (2000.0, 1000.0))
    assert "`--parallel.shares auto` divides a step by speed" in view["findings"]["shares"]
    assert "shares" not in view["curves"]
    assert "shares" not in unequal_run(tmp_path / "alike", [[6, 6]] * 4, (1050.0, 1000.0))["findings"]


EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)"><!--'


def evil_run(folder: Path) -> Path:
    """A run whose every text wants to be markup."""
    path = folder / "run<b>&amp;"
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f"[data]\npath = {json.dumps(EVIL)}\n{json.dumps(EVIL)} = 1\n")
    parts = {f"rank_{part}_ms": [1.0, 2.0] for part in ("compute", "step", "data")}
    rows = [{"step": step, "loss": 1.0, "tokens": step, "step_ms": 5.0, EVIL: 3, **parts} for step in range(1, 9)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = {"time": "2026-11-20T08:00:00+0000", "event": "start", "world_size": 2, "hosts": [EVIL, EVIL]}
    slow = {"event": "straggler", "step": 3, "rank": 1, "host": EVIL, "phase": EVIL, "ms": 2, "since_step": 2}
    failed = start | {"event": EVIL, "error": EVIL, EVIL: [EVIL]}
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, slow, failed)))
    return path


def test_nothing_from_a_run_folder_becomes_markup(tmp_path: Path) -> None:
    page = make_page([evil_run(tmp_path)])
    parsed = Parsed(page)
    assert parsed.tags.count("script") == 4
    assert parsed.tags.count("b") == 0
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert EVIL in said_in(runs_in(page)[0])  # shown as what it is


def test_bytes_and_halves_of_characters_that_are_not_utf_8_are_shown_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"run\xff")
    path.mkdir()
    (path / "config.toml").touch()
    (path / "events.jsonl").write_text(json.dumps({"event": "failed", "error": "\ud83d"}) + "\n")
    page = make_page([path])
    assert rb"run\udcff" in page
    assert rb"\ud83d" in page


def test_several_runs_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "long"  # called alike
    other.mkdir(parents=True)
    (other / "config.toml").write_text((run / "config.toml").read_text().replace('"bfloat16"', '"float32"'))
    views = runs_in(make_page([run, other]))
    assert [view["name"] for view in views] == [f"{run.parent.name}/long", "other/long"]
    ours, theirs = (view["config"] for view in views)
    assert {field for field in ours if ours[field] != theirs[field]} == {"train.dtype"}


def test_runs_with_little_in_them_have_a_page_all_the_same(tmp_path: Path) -> None:
    """Without a step; of older rows; too long to add up; with no finite value; without time; a row being written."""
    bare = {"step": 1, "loss": 2.0, "tokens": 10, "step_ms": 5.0}
    older = bare | {"tokens_per_s": 9.0, "world_size": 2, "rank_step_ms": [5, 5], "rank_compute_ms": [1, 4]}
    older |= {"data_ms": 1, "forward_ms": 1, "backward_ms": 1, "exposed_comm_ms": 1, "optim_ms": 1}
    older |= {"comm_ms": 2, "comm_bytes": 4_000_000}
    kinds = {
        "none": ([], "No step is recorded yet."),
        "bare": ([bare], "Loss went from 2.00 to 2.00"),
        "older": ([older, older | {"step": 2}], "Rank 1 was slow in steps 2 to 2."),
        "endless": ([older | {"step": step, "step_ms": 1.7e308} for step in (1, 2, 3)], "Loss went from 2.00 to 2.00"),
        "unknown": ([dict.fromkeys(older, None) | {"step": 1}], "No step has a finite loss"),
        "still": ([dict.fromkeys(older, 0) | {"step": 1}], "Loss went from 0.00 to 0.00"),
    }
    for name, (rows, told) in kinds.items():
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text("[model]\n")
        (path / "events.jsonl").write_text('{"event": "straggler", "rank": 1, "step": 2}\n')
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
        (view,) = runs_in(make_page([path]))
        assert told in said_in(view), name
        assert not re.search(r"\b(nan|inf)\b", said_in(view)), name
    (older_view,) = runs_in(make_page([tmp_path / "older"]))
    assert [rank["parts"]["compute"] for rank in older_view["ranks"]] == [4, 1]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_STEPS = st.fixed_dictionaries({"step": st.integers(0, 40)})


def _rows_of(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    likely = st.floats(0, 1e9) | st.lists(st.floats(0, 1e9), max_size=4) | _VALUES
    return st.builds(lambda row, more: more | row, _STEPS, st.dictionaries(st.sampled_from(names), likely))


_ROW_NAMES = [*long_run.step_row(1, long_run.random.Random(0)), "val_loss", "val_bpb", "elapsed_s"]
_EVENT_NAMES = ["time", "world_size", "hosts", "rank", "phase", "ms", "median_ms", "since_step", "cost_s", "reason"]
_KINDS = st.sampled_from(
    ["shares", "start", "resume", "straggler", "straggler over", "end", "failed", "checkpoint", "new kind"]
)


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(_rows_of(_ROW_NAMES), max_size=8),
    st.lists(st.builds(lambda row, kind: row | {"event": kind}, _rows_of(_EVENT_NAMES), _KINDS), max_size=6),
)
def test_whatever_the_records_hold_there_is_a_page(tmp_path: Path, rows: list[Any], events: list[Any]) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = make_page([tmp_path], lambda path: 1000)
    assert Parsed(page).tags.count("script") == 4
    assert len(runs_in(page)) == 1


def test_the_command_refuses_what_is_no_run(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for arguments, told in (
        ([], "name the run folders"),
        (["nowhere"], "does not exist"),
        ([str(tmp_path)], "not a run folder"),
        ([str(run), "--out", str(tmp_path)], "is a folder"),
        ([str(run), "--out", "pipe"], "is no file"),  # nor is /dev/null
        ([str(run), "--out", "no/such/page.html"], "a folder that does not exist"),
        ([str(run), "--opne"], "did you mean '--open'?"),
    ):
        assert main(["report", *arguments]) == 2
        assert told in (said := capfd.readouterr().err), said


def test_a_run_that_only_its_user_may_read_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """Mutation: `watch` waits for it without an end."""
    importlib.import_module("paceline.cli.watch")  # the other user may not be able to read Python's files
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        run = create(Path(shared) / "run")
        run.config.touch()
        run.path.chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may read everything
        try:
            for verb in (["watch", "--once"], ["watch"], ["report"]):
                assert main([*verb, str(run.path)]) == 2
                assert "Permission denied; " in (said := capfd.readouterr().err), said
        finally:
            os.seteuid(user)
            run.path.chmod(0o700)


def test_the_command_writes_the_page_and_shows_it(tmp_path: Path) -> None:
    """The browser here is a program that notes what it is told to show."""
    path = evil_run(tmp_path)
    browser = tmp_path / "browser"
    browser.write_text(f'#!{sys.executable}\nimport sys\nopen("{tmp_path}/shown", "w").write(sys.argv[1])\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    program.run("report", str(path), "--open", cwd=tmp_path, env={"BROWSER": str(browser)}).require()
    page = path / "report.html"
    assert (tmp_path / "shown").read_text() == page.as_uri()
    assert page.read_bytes().startswith(b"<!doctype html>")
    elsewhere = tmp_path / "elsewhere.html"
    assert main(["report", str(path), "--out", str(elsewhere)]) == 0
    assert elsewhere.stat().st_size == pytest.approx(page.stat().st_size, abs=200)
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "linked.html")
    assert main(["report", str(path), "--out", str(link)]) == 0
    assert link.is_symlink()
    assert link.stat().st_size == pytest.approx(page.stat().st_size, abs=200)
