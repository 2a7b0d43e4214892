"""The live page in a real browser: at three sizes, by keyboard, and while training fails and restarts."""

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import program
import pytest
from browser import CHROMIUM, Browser, Page
from simulated_run import Simulated

from paceline.record.folder import COMPLETE
from paceline.tools.watch.run import Runs
from paceline.tools.watch.server import PageServer

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

EVIL = "<img src=x onerror=\"document.title='ran'\">"
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg') &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
TEXT = "document.body.innerText"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        browser.open("about:blank", width=100, height=100).wait_for("true")  # it has started
        yield browser


def serve(path: Path) -> PageServer:
    server = PageServer(Runs(path), "127.0.0.1", 0)
    threading.Thread(target=server.serve, daemon=True).start()
    return server


def is_well(page: Page, server: PageServer, width: int) -> None:
    """Fails where the page complains, asks another host for anything, or is wider than its window."""
    assert page.complaints() == []
    origin = server.url.partition("?")[0]
    assert set(page.requests()) == {server.url, *(origin + name for name in ("", "page.css", "page.js", "events"))}
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate("location.href") == origin  # without the token


def press(page: Page, *keys: str) -> None:
    for key in keys:
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def test_64_ranks_at_three_sizes_live_and_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run", 64, slow_rank=37)
    made.steps(30)
    made.event("straggler", step=20, rank=37, host="node4", since_step=13, phase="forward", ms=121.0, median_ms=61.0)
    made.event("checkpoint failed", step=25, error=EVIL)
    made.append("metrics.jsonl", {"step": 30, "val_loss": 4.25, "val_bpb": None, "tokens": 30_000})
    server = serve(made.folder)
    for width, how in ((1280, {}), (820, {"is_dark": True}), (390, {"is_phone": True})):
        page = browser.open(server.url, width=width, height=850, **how)
        page.wait_for("document.querySelectorAll('.bars li').length === 8")
        is_well(page, server, width)
        page.screenshot(tmp_path / f"{width}.png")
        drawn = page.evaluate("document.querySelector('#loss path').getBoundingClientRect().width")
        assert drawn > 0.7 * width  # a curve that is drawn 20 pixels wide makes a picture, too
    said = page.evaluate(TEXT)
    assert "Rank 37 (host node4) has been slow since step 13: forward took it 121 ms, the median rank 61 ms" in said
    assert "4.250" in said
    assert EVIL in said
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    bars = "[...document.querySelectorAll('.bars li')]"
    works = page.evaluate(f"{bars}.map(e => parseFloat(e.lastChild.textContent.replace('works ', '')))")
    assert works == sorted(works, reverse=True)
    assert "and 56 more ranks, which work 1" in said  # not 64 bars, which a phone shows as five screens
    assert page.evaluate(f"{bars}[0].textContent").startswith("37 · node4 slow")
    parts = f"[...{bars}[0].querySelectorAll('.bar span')]"
    widths = page.evaluate(f"{parts}.map(e => e.getBoundingClientRect().width)")
    assert widths[1] == pytest.approx(widths[2], rel=0.06)  # forward: 2 x 60 ms, backward 118 ms
    made.steps(1)  # it is live
    page.wait_for(f"{TEXT}.includes('step 31 of 500')")
    press(page, *["Tab"] * 3)  # past both choices
    assert page.evaluate("document.activeElement.id") == "loss"
    press(page, "Home", "ArrowRight")
    readout = "document.querySelector('.readout').textContent"
    assert re.fullmatch(r"step 2: loss 5\.[\d]+( · validation [\d.]+)?", page.evaluate(readout))
    made.event("end", step=31, reason=COMPLETE)
    page.wait_for(f"{TEXT}.includes('finished')")
    assert page.evaluate(readout).startswith("step 2: ")  # the cursor stays
    is_well(page, server, 390)
    server.shutdown()


def test_many_runs_side_by_side(browser: Browser, tmp_path: Path) -> None:
    for index in range(3):
        Simulated(tmp_path / "runs" / f"run{index}", 2 + index).steps(10 * (index + 1))
    server = serve(tmp_path / "runs")
    page = browser.open(server.url, width=390, height=850, is_phone=True)
    page.wait_for("document.querySelectorAll('#loss path').length === 3")
    steps = page.evaluate("[...document.querySelectorAll('#runs tbody td:nth-child(3)')].map(e => e.textContent)")
    assert steps == ["10 of 500", "20 of 500", "30 of 500"]
    assert page.evaluate("document.querySelectorAll('.bars li').length") == 2
    page.evaluate("document.querySelector('#runs input').focus()")
    press(page, "ArrowDown", "ArrowDown")
    page.wait_for("document.querySelector('#state h2').textContent === 'run2'")
    assert page.evaluate("document.querySelectorAll('.bars li').length") == 4
    page.evaluate("document.querySelector('input[value=seconds]').click()")
    Simulated(tmp_path / "runs" / "run3").steps(40)
    page.wait_for("document.querySelectorAll('#loss path').length === 4")
    assert page.evaluate("document.querySelector('#runs input:checked').value") == "2"
    is_well(page, server, 390)
    server.shutdown()


def test_it_lives_on_when_a_rank_is_killed_and_training_begins_again(browser: Browser, tmp_path: Path) -> None:
    with program.Program("watch", "run", "--page", "--port", "0", cwd=tmp_path) as watching:
        watching.wait_for(lambda: "Ctrl-C" in watching._said())
        address = re.search(r"http://\S+", watching._said())
        assert address
        page = browser.open(address[0], width=1280, height=850)
        page.wait_for(f"{TEXT}.includes('There is no run at this path yet')")
        page.evaluate("self.isFirst = true")
        options = ["--nproc", "2", "--max-restarts", "1", "--checkpoint.every", "10", "--out", "run"]
        faults = {"PACELINE_FAULTS": "rank=1 step=14 kind=kill"}
        program.run("train", *program.TINY, *options, cwd=tmp_path, env=faults).require()
        page.wait_for(f"{TEXT}.includes('finished') && {TEXT}.includes('attempt 2')")
        kinds = page.evaluate("runs[0].events.map(([, kind]) => kind)")
        assert [kind for kind in kinds if kind != "checkpoint"][::-1] in (
            ["start", "failed", "resume", "end"],
            ["start", "failed", "failed", "resume", "end"],  # rank 0 has recorded its loss, too
        )
        assert page.evaluate("runs[0].curves.loss.step") == list(range(1, 41))
        assert page.evaluate("runs[0].curves.loss.mean") == pytest.approx(program.losses(tmp_path / "run"), rel=1e-4)
        assert page.evaluate("runs[0].resumed") == [10]
        assert page.evaluate("document.querySelectorAll('#loss .mark').length") == 1
        assert page.evaluate("self.isFirst")  # nobody loaded it again
        assert page.complaints() == []
        watching.process.send_signal(signal.SIGINT)
        assert watching.wait().status == 0
        page.wait_for(f"{TEXT}.includes('No connection to `paceline watch`')")
        assert page.evaluate("document.querySelectorAll('.bars li').length") == 2  # what was known stays
