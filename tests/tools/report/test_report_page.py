"""The page as a file: complete, true to the records, and safe whatever stands in them."""

import json
import math
import os
import re
import stat
import sys
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
from paceline.tools.report.page import make_page

NUM_PARAMETERS = 124_439_808  # of GPT-2's smallest, as its authors' checkpoint has them


class Parsed(HTMLParser):
    """Tags by name, attributes, and the text outside scripts."""

    def __init__(self, page: bytes):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self._in_script = False
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if not self._in_script:
            self.text.append(data)


def text_of(page: bytes) -> str:
    return " ".join(" ".join(Parsed(page).text).split())


def figures_of(page: bytes) -> dict[str, dict[str, Any]]:
    found = re.search(rb'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    return {figure["id"]: figure for figure in json.loads(found[1])["list"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_run.write(tmp_path_factory.mktemp("runs") / "long")


@pytest.fixture(scope="module")
def page(run: Path) -> bytes:
    return make_page([run], {run: NUM_PARAMETERS})


def test_it_is_one_small_file_that_names_no_address(page: bytes) -> None:
    assert len(page) < 6e6
    own = re.sub(rb'<script type="text/plain" id="plotly">.*?</script>', b"", page, flags=re.DOTALL)
    assert b"http" not in own.replace(b"http-equiv", b"")
    assert {name for name, _ in Parsed(page).attributes}.isdisjoint({"src", "srcset", "action", "onclick"})
    assert b"default-src 'none'" in page


def test_no_spike_and_no_straggler_is_lost(page: bytes) -> None:
    figures = figures_of(page)
    assert max(y for trace in figures["loss"]["traces"] for y in trace["y"] if y is not None) == long_run.SPIKE
    assert all(len(trace["y"]) <= 1500 for trace in figures["loss"]["traces"])
    heat = figures["run0-heat"]["traces"][0]
    columns, steps = np.array(heat["meta"]["zs"]["mean"]), np.array(heat["meta"]["xs"]["step"])
    assert columns.shape == (long_run.NUM_RANKS, 400)
    inside = (steps > long_run.SLOW_FROM + 5) & (steps < long_run.SLOW_TO - 5)
    assert (columns[long_run.SLOW_RANK, inside] > 0.5).all()
    assert (columns[:, ~inside].mean(axis=1) < 0.05).all()
    assert (np.array(heat["meta"]["zs"]["slowest"]) >= columns - 1e-3).all()


def test_every_event_has_its_mark(page: bytes) -> None:
    marks = [trace for trace in figures_of(page)["run0-events"]["traces"] if trace["mode"] == "markers"]
    assert sum(len(trace["x"]) for trace in marks) == len(long_run.events())
    restart = next(trace for trace in figures_of(page)["loss"]["traces"] if trace["name"] == "restart")
    assert set(restart["meta"]["xs"]["step"]) == {long_run.SAVED_AT, None}


def test_it_says_what_happened(page: bytes) -> None:
    said = text_of(page)
    for told in (
        "finished",
        "65.5M in 2,000 steps",  # tokens
        "1 13 steps repeated",  # restarts
        "42s named: rank 2",
        "4 on a, b",
        "Rank 2 (host b) was slow in steps 901 to 1,247: forward took it 182 ms, the median rank 61 ms",
        "A rank sends 711.4 MiB a step",
        "come to 712.1 MiB by the ring's formula",  # 2 * 3/4 * 4 bytes * 124,439,808
        "1 step without a finite loss",
        "hang 1,513 rank 3, host b",
        "straggler over 1,247 rank 2, host b, cost 41.5 s",
    ):
        assert told in said, told


def test_of_several_runs_the_curves_stand_before_the_tables(run: Path) -> None:
    """Finds the key figures and the configs' differences above the loss, which then begins below a screen."""
    said = text_of(make_page([run, run], {}))
    places = [
        said.index(f"{heading} ") for heading in ("Loss", "Throughput", "The runs in figures", "Where a step goes")
    ]
    assert places == sorted(places)
    assert said.index("Their configs are equal.") > places[2]


def test_learning_rate_and_gradient_norm_are_drawn_and_told(page: bytes, run: Path) -> None:
    rows = [row for row in program.rows(run / "metrics.jsonl") if "loss" in row]
    rates = [row["lr"] for row in rows]
    norms = {row["step"]: row["grad_norm"] for row in rows if row["grad_norm"] is not None}
    largest_at = max(norms, key=lambda step: norms[step])
    figures = figures_of(page)
    assert max(figures["lr"]["traces"][-1]["y"]) == pytest.approx(max(rates), rel=2e-2)
    drawn = [y for trace in figures["grad-norm"]["traces"] for y in trace["y"]]
    assert max(drawn) == pytest.approx(max(norms.values()), rel=1e-4), "no spike is lost"
    axis = figures["grad-norm"]["layout"]["yaxis"]
    assert 10 ** axis["range"][0] < min(norms.values())
    assert max(norms.values()) < 10 ** axis["range"][1]
    assert any(axis["range"][0] < math.log10(mark) < axis["range"][1] for mark in axis["tickvals"])
    clipped = sum(norm > 1.0 for norm in norms.values()) / len(norms)  # the preset's grad-clip is 1
    peak_at = rows[rates.index(max(rates))]["step"]
    for told in (
        f"The learning rate peaks at {max(rates):.3g} in step {peak_at:,}",
        f"largest in step {largest_at:,} with {norms[largest_at]:.3g}; {clipped:.0%} of the steps are clipped to 1",
    ):
        assert told in text_of(page), told


@pytest.mark.parametrize(
    ("at", "told"),
    [
        ([], None),
        ([7], "once (step 7)"),
        (range(10, 90, 10), "8 times (steps 10, 20, 30, 40, 50, 60 and 2 more)"),
    ],
)
def test_repaired_replicas_are_the_headline(tmp_path: Path, at: list[int], told: str | None) -> None:
    (tmp_path / "config.toml").touch()
    row = {"loss": 2.5, "tokens": 1, "step_ms": 9}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps({'step': k, **row})}\n" for k in range(1, 90)))
    events = [{"event": "start"}]
    for step in at:
        events += [{"event": "replicas differ", "step": step}, {"event": "repaired", "step": step}]
    events.append({"event": "end", "reason": "horizon reached"})
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    page = make_page([tmp_path], {})
    head = text_of(page).partition("Draw over")[0]
    if told is None:
        assert b'<p class="status good">finished</p>' in page
        assert "Replicas differed" not in text_of(page)
        return
    assert f"Replicas differed and were repaired {told}: a rank had other values" in head
    assert b'<p class="status open">finished, with repaired replicas</p>' in page
    assert b'<p class="headline">Replicas' in page.partition(b'<dl class="facts">')[0]
    assert "Replicas differed" in text_of(make_page([tmp_path, tmp_path], {})).partition("Key figures")[0]


def test_the_parts_of_a_step_add_up_to_it(page: bytes, run: Path) -> None:
    rows = [row for row in program.rows(run / "metrics.jsonl") if "loss" in row]
    steady = [row["step_ms"] for row in rows if row["step"] not in (1, long_run.SAVED_AT + 1)]
    mean_ms = sum(steady) / len(steady)
    bars = figures_of(page)["run0-ranks"]["traces"]
    assert [trace["name"] for trace in bars][-1] == "other"
    for rank in range(long_run.NUM_RANKS):
        assert sum(trace["x"][rank] for trace in bars) == pytest.approx(mean_ms, rel=1e-3)
    along = figures_of(page)["run0-parts"]["traces"]
    whole = np.sum([trace["y"] for trace in along], axis=0)
    assert whole.mean() == pytest.approx(sum(row["step_ms"] for row in rows) / len(rows), rel=1e-3)


def unequal_run(folder: Path, sequences: list[list[int]], tokens_per_s: tuple[float, float]) -> bytes:
    """The page of a run in which two ranks of these speeds had these sequences of 100 tokens in each step."""
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
    return make_page([folder], {})


def test_shares_of_unequal_ranks_are_told_and_drawn(tmp_path: Path) -> None:
    """A rank of twice the other's speed has half of the sequences in step 1, which is left out, and then two thirds."""
    page = unequal_run(tmp_path / "run", [[6, 6]] * 2 + [[8, 4]] * 4, (2000.0, 1000.0))
    said = text_of(page)
    assert "By rank, the last step had 8, 4 sequences (changed 1 time, the last at step 3)." in said
    # Four steps of 400 ms, and the second, of 600 ms: 6000 tokens in 2.2 s, where 3000 a second were possible.
    assert f"reached {6000 / 2.2 / 3000:.0%} of the sum of its ranks' own speeds" in said
    assert "A step took 440 ms on average; with equal shares it would have taken 600 ms." in said
    assert "0 · fast 7.6 2,000 13.6 1 · slow 4.4 1,000 0.0" in said
    lines = figures_of(page)["run0-shares"]["traces"]
    assert [trace["y"] for trace in lines] == [[6, 6, 8, 8, 8, 8], [6, 6, 4, 4, 4, 4]]


def test_equal_shares_of_unequal_ranks_name_the_remedy_and_ranks_alike_have_no_section(tmp_path: Path) -> None:
    page = unequal_run(tmp_path / "equal", [[6, 6]] * 4, (2000.0, 1000.0))
    assert "`--parallel.shares auto` divides a step by speed" in text_of(page)
    assert "run0-shares" not in figures_of(page)
    assert "Shares of unequal ranks" not in text_of(unequal_run(tmp_path / "alike", [[6, 6]] * 4, (1050.0, 1000.0)))


def test_a_rank_that_left_has_the_parts_of_the_steps_that_it_was_in(tmp_path: Path) -> None:
    """Two ranks with steps of 100 ms; then the first alone, with steps of 300 ms."""
    (tmp_path / "config.toml").touch()
    rows = []
    for step in range(1, 9):
        forward = [30.0, 30.0] if step <= 4 else [230.0]
        others = {"data": 10.0, "backward": 40.0, "exposed_comm": 10.0, "optim": 10.0}
        by_rank = {f"rank_{part}_ms": [ms] * len(forward) for part, ms in others.items()}
        row = {"step": step, "loss": 2.0, "tokens": step, "step_ms": sum(others.values()) + forward[0]}
        rows.append({**row, **by_rank, "rank_forward_ms": forward, "world_size": len(forward)})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    bars = {trace["name"]: trace["x"] for trace in figures_of(make_page([tmp_path], {}))["run0-ranks"]["traces"]}
    assert [bars["forward"][1], bars["other"][1]] == [30, 0]
    assert sum(ms[0] for ms in bars.values()) == pytest.approx((3 * 100 + 4 * 300) / 7, rel=1e-3)


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
    page = make_page([evil_run(tmp_path)], {})
    parsed = Parsed(page)
    assert parsed.tags.count("script") == 3
    assert parsed.tags.count("b") == 0
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert EVIL in "".join(parsed.text)  # shown as what it is
    figures = json.dumps(figures_of(page))
    assert "<script" not in figures  # plotly would read tags in labels
    assert "&lt;/script&gt;" in figures


def test_bytes_and_halves_of_characters_that_are_not_utf_8_are_shown_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"run\xff")
    path.mkdir()
    (path / "config.toml").touch()
    (path / "events.jsonl").write_text(json.dumps({"event": "failed", "error": "\ud83d"}) + "\n")
    said = text_of(make_page([path], {}))
    assert r"run\udcff" in said
    assert r"\ud83d" in said


def test_several_runs_are_overlaid_and_told_apart(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "long"  # called alike
    other.mkdir(parents=True)
    (other / "config.toml").write_text((run / "config.toml").read_text().replace('"bfloat16"', '"float32"'))
    rows = "".join(f'{{"step": {step}, "loss": 2.5, "tokens": {step}, "step_ms": 9}}\n' for step in range(1, 50))
    (other / "metrics.jsonl").write_text(rows)
    page = make_page([run, other], {})
    said = text_of(page)
    assert "2 runs compared" in said
    ours, theirs = f"{run.parent.name}/long", "other/long"
    assert f"{ours} {theirs}" in said
    assert "train.dtype bfloat16 float32" in said
    assert "train.steps" not in said.split("Draw over")[0]  # equal in both
    lines = [trace for trace in figures_of(page)["loss"]["traces"] if trace.get("showlegend") is not False]
    assert [trace["name"] for trace in lines] == [ours, theirs, f"{ours}, validation"], "validation is on top of all"
    assert len({trace["line"]["color"] for trace in lines}) == 2


def test_equal_curves_of_several_runs_all_show(tmp_path: Path) -> None:
    """Each is thinner than the one that it lies upon, and broken; marks of validation are rings around each other."""
    figures = figures_of(make_page([long_run.write(tmp_path / "short", 200)] * 4, {}))
    for name in ("loss", "throughput", "lr", "grad-norm"):
        named = [trace for trace in figures[name]["traces"] if trace.get("showlegend") is not False]
        lines = [trace["line"] for trace in named if trace["mode"] == "lines"]
        widths = [line["width"] for line in lines]
        assert widths == sorted(set(widths), reverse=True)
        assert lines[0]["dash"] == "solid"
        assert len({line["dash"] for line in lines}) == 4
    marks = [trace["marker"] for trace in figures["loss"]["traces"] if "markers" in trace["mode"]]
    assert [mark["size"] for mark in marks] == [15, 11, 7, 6]
    assert all(mark["line"]["width"] > 0 for mark in marks)


def test_runs_with_little_in_them_have_a_page_all_the_same(tmp_path: Path) -> None:
    """Without a step; of older rows; too long to add up; with no finite value; without time; a row being written."""
    bare = {"step": 1, "loss": 2.0, "tokens": 10, "step_ms": 5.0}
    older = bare | {"tokens_per_s": 9.0, "world_size": 2, "rank_step_ms": [5, 5], "rank_compute_ms": [1, 4]}
    older |= {"data_ms": 1, "forward_ms": 1, "backward_ms": 1, "exposed_comm_ms": 1, "optim_ms": 1}
    older |= {"comm_ms": 2, "comm_bytes": 4_000_000}
    kinds = {
        "none": ([], "no step is recorded yet"),
        "bare": ([bare], "Loss went from 2.00 to 2.00"),
        "older": ([older, older | {"step": 2}], "Rank 1 was slow in steps 2 to 2. Were each step's slowest rank"),
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
        page = make_page([path], {})
        assert told in text_of(page), name
        assert not re.search(r"\b(nan|inf)\b", text_of(page)), name
    assert "run0-links" in figures_of(make_page([tmp_path / "older"], {}))
    one = figures_of(make_page([tmp_path / "bare"], {}))["loss"]["traces"]
    assert [trace["mode"] for trace in one] == ["markers"], "a line of one point would not show"


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


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.lists(_rows_of(_ROW_NAMES), max_size=8),
    st.lists(st.builds(lambda row, kind: row | {"event": kind}, _rows_of(_EVENT_NAMES), _KINDS), max_size=6),
)
def test_whatever_the_records_hold_there_is_a_page(tmp_path: Path, rows: list[Any], events: list[Any]) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = make_page([tmp_path], {tmp_path: 1000})
    assert Parsed(page).tags.count("script") == 3
    figures_of(page)


def test_the_command_refuses_what_is_no_run(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, told in (
        ([], "name the run folders"),
        (["nowhere"], "does not exist"),
        ([str(tmp_path)], "not a run folder"),
        ([str(run), "--out", str(tmp_path)], "is a folder"),
        ([str(run), "--out", "no/such/page.html"], "a folder that does not exist"),
        ([str(run), "--opne"], "did you mean '--open'?"),
    ):
        assert main(["report", *arguments]) == 2
        assert told in (said := capfd.readouterr().err), said


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
