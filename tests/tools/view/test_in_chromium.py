"""The page in a real browser: a report and live, at several sizes, on paper, by keyboard, and while training fails."""

import base64
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import long_run
import program
import pytest
from browser import CHROMIUM, Browser, Page
from simulated_run import Simulated
from test_report import EVIL, evil_run

from paceline.cli.main import main
from paceline.record.folder import COMPLETE
from paceline.tools.view.follow import Views
from paceline.tools.view.server import PageServer

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

DRAWN = "document.documentElement.dataset.drawn"
TEXT = "document.body.innerText"
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .uplot') && e.offsetWidth)
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(e => e.outerHTML.slice(0, 80))"""
# Of each curve that is shown: its name, and where the canvas ends and how wide what is painted on it is, in CSS pixels.
CURVES = """charts.filter(c => c.place.offsetWidth).map(c => {
    const canvas = c.place.querySelector('canvas'), box = canvas.getBoundingClientRect();
    const {data, width} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let [first, last] = [width, 0];
    for (let i = 3; i < data.length; i += 4) if (data[i]) {
        const x = ((i - 3) / 4) % width;
        if (x < first) first = x;
        if (x > last) last = x;
    }
    return {id: c.id, right: box.right, height: box.height, painted: (last - first) * box.width / width};
})"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        browser.open("about:blank", width=100, height=100).wait_for("true")  # it has started
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    long_run.write(folder / "long")
    long_run.write(folder / "short", 300, dtype="float32")
    evil_run(folder)
    return folder


def report(folder: Path, *runs: Path) -> Path:
    page = folder / "page.html"
    assert main(["report", *map(str, runs), "--out", str(page)]) == 0
    return page


def fits(page: Page, width: int, least: float = 0.8) -> list[dict[str, Any]]:
    """Fails where the page complains, is wider than its window, or a curve is not drawn from edge to edge."""
    assert page.complaints() == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(TOO_WIDE) == []
    curves: list[dict[str, Any]] = page.evaluate(CURVES)
    column = page.evaluate("document.querySelector('main').clientWidth")
    for curve in curves:
        share = 0.6 if curve["id"] == "loss" and width > 900 else least  # facts stand beside it
        assert curve["painted"] > share * (column - 64), curve
        assert curve["height"] > 100
    return curves


def press(page: Page, *keys: str) -> None:
    for key in keys:
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def choose(page: Page, name: str, value: str = "") -> None:
    page.evaluate(f"document.querySelector('input[name={name}]{f'[value={value}]' if value else ''}').click()")


@pytest.mark.parametrize("names", [["long"], ["long", "short"]])
def test_a_report_at_three_sizes_dark_and_on_paper(
    browser: Browser, runs: Path, tmp_path: Path, names: list[str]
) -> None:
    page = report(tmp_path, *(runs / name for name in names))
    ids = ["loss", "rate", "lr", "norm", "parts", "traffic"]
    for width, how in ((1280, {}), (768, {"is_dark": True}), (400, {"is_phone": True})):
        shown = browser.open(page.as_uri(), width=width, height=850, **how)
        shown.wait_for(DRAWN)
        assert shown.requests() == [page.as_uri()]
        assert [curve["id"] for curve in fits(shown, width)] == ids
        picture = tmp_path / f"{width}.png"
        drawn = shown.evaluate(DRAWN)
        shown.screenshot(picture)
        assert picture.stat().st_size > 60_000
        assert shown.evaluate(DRAWN) == drawn, "the picture may show plots of another width"
        top = shown.evaluate("document.getElementById('loss').getBoundingClientRect().top + scrollY")
        assert top < 500, "the curve begins on the first screen"
        below = ["facts"] if len(names) == 1 and width < 900 else ["runs"] if len(names) > 1 else []
        for after in below:
            assert shown.evaluate(f"document.getElementById('{after}').getBoundingClientRect().top + scrollY") > top
    shown = browser.open(page.as_uri(), width=1280, height=850, is_dark=True)
    shown.wait_for(DRAWN)
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown.call("Emulation.setEmulatedMedia", media="print")
    for curve in shown.evaluate(CURVES):
        assert curve["right"] <= 700, curve
        assert curve["painted"] > 550, curve
    assert shown.evaluate("colourOf('page')") == "#ffffff"
    lengths = "[...document.querySelectorAll('.scroll.tall')].map(e => e.scrollHeight - e.clientHeight)"
    assert shown.evaluate(lengths) == [0]
    pdf = base64.b64decode(shown.call("Page.printToPDF", printBackground=True)["data"])
    assert 2 <= pdf.count(b"/Type /Page\n") <= 9
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    shown.call("Emulation.setEmulatedMedia", media="screen")
    fits(shown, 1280)


def test_what_is_chosen_is_drawn(browser: Browser, runs: Path, tmp_path: Path) -> None:
    shown = browser.open(report(tmp_path, runs / "long").as_uri(), width=1280, height=850)
    shown.wait_for(DRAWN)
    x, y = (f"charts[0].plot.scales.{axis}" for axis in "xy")
    assert shown.evaluate(f"{x}.max") == long_run.NUM_STEPS
    assert shown.evaluate(f"{y}.max") > long_run.SPIKE
    choose(shown, "close")
    shown.wait_for(f"{y}.max < 6")
    choose(shown, "close")
    choose(shown, "log")
    shown.wait_for(f"{y}.distr === 3 && {y}.min > 0")
    choose(shown, "smooth")
    shown.wait_for("charts[0].shown[0].drawn.some((value, at) => value !== charts[0].shown[0].values[at])")
    choose(shown, "x", "tokens")
    shown.wait_for(f"{x}.max === {long_run.NUM_STEPS * long_run.TOKENS}")
    choose(shown, "x", "seconds")
    shown.wait_for(f"{x}.max < 600 && charts[2].plot.scales.x.max < 600")
    choose(shown, "x", "step")
    shown.evaluate("document.getElementById('loss').focus()")
    press(shown, "+")
    shown.wait_for(f"{x}.max - {x}.min < {long_run.NUM_STEPS} && charts[1].plot.scales.x.max === {x}.max")
    press(shown, "Escape")
    shown.wait_for(f"{x}.max === {long_run.NUM_STEPS}")
    press(shown, "Home", "ArrowRight")
    assert shown.evaluate("charts[0].legend.lastChild.textContent") == "step 16"  # a point is 8 steps
    shown.evaluate("charts[0].legend.querySelector('button').click()")
    shown.wait_for("charts[0].shown.map(line => line.name).join() === 'validation'")
    heat = "document.querySelector('#heat .scale').textContent"
    before = shown.evaluate(heat)
    choose(shown, "heat", "most")
    shown.wait_for(f"{heat} !== {before!r}")
    shown.call("Emulation.setDeviceMetricsOverride", width=400, height=850, deviceScaleFactor=1, mobile=False)
    shown.wait_for("charts.every(c => !c.plot || !c.place.offsetWidth || c.plot.width === c.place.clientWidth)")
    fits(shown, 400)


def test_nothing_that_a_run_folder_says_runs(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """Neither as markup nor, where that failed, past the page's policy."""
    page = report(tmp_path, runs / "run<b>&amp;")
    shown = browser.open(page.as_uri(), width=400, height=850, is_phone=True)
    shown.wait_for(DRAWN)
    assert shown.complaints() == []
    assert shown.evaluate("document.querySelectorAll('img, b').length") == 0
    assert EVIL in shown.evaluate("document.body.textContent")
    broken = tmp_path / "broken.html"
    broken.write_bytes(page.read_bytes().replace(b"</main>", b"<script>document.title = 'ran'</script></main>"))
    forced = browser.open(broken.as_uri(), width=1280, height=850)
    forced.wait_for(DRAWN)
    assert forced.evaluate("document.title") != "ran"
    assert any("Content Security Policy" in said for said in forced.complaints())


# ---- live ----


def serve(path: Path) -> PageServer:
    server = PageServer(Views(path), "127.0.0.1", 0)
    threading.Thread(target=server.serve, daemon=True).start()
    return server


def test_64_ranks_live_at_three_sizes(browser: Browser, tmp_path: Path) -> None:
    made = Simulated(tmp_path / "run", 64, slow_rank=37)
    made.steps(30)
    made.event("straggler", step=20, rank=37, host="node4", since_step=13, phase="forward", ms=121.0, median_ms=61.0)
    made.event("checkpoint failed", step=25, error=EVIL)
    made.append("metrics.jsonl", {"step": 30, "val_loss": 4.25, "val_bpb": None, "tokens": 30_000})
    server = serve(made.folder)
    origin = server.url.partition("?")[0]
    files = ("", "page.css", "uPlot.js", "charts.js", "page.js", "events")
    for width, how in ((1280, {}), (768, {"is_dark": True}), (400, {"is_phone": True})):
        page = browser.open(server.url, width=width, height=850, **how)
        page.wait_for(
            "document.querySelectorAll('.bars li').length === 5"
        )  # not 64, which a phone shows as five screens
        fits(page, width)
        assert set(page.requests()) == {server.url, *(origin + name for name in files)}
        assert page.evaluate("location.href") == origin  # without the token
        page.screenshot(tmp_path / f"{width}.png")
    said = page.evaluate(TEXT)
    assert "Rank 37 (host node4) has been slow since step 13: forward took it 121 ms, the median rank 61 ms" in said
    assert "4.250" in said
    assert EVIL in said
    assert "and 59 more ranks, which work 1" in said
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    parts = "[...document.querySelectorAll('.bars li')][0].querySelectorAll('.bar span')"
    widths = page.evaluate(f"[...{parts}].map(e => e.getBoundingClientRect().width)")
    assert widths[1] == pytest.approx(widths[2], rel=0.06)  # forward: 2 x 60 ms, backward 118 ms
    large = page.evaluate("[...document.querySelectorAll('#facts .large dt')].map(e => e.textContent)")
    assert large == ["Loss", "Time left", "Throughput"]
    page.evaluate("document.getElementById('loss').focus()")
    press(page, "Home", "ArrowRight")
    where = "charts[0].legend.lastChild.textContent"
    assert page.evaluate(where) == "step 2"
    made.steps(1)  # it is live
    page.wait_for(f"{TEXT}.includes('step 31 of 500')")
    made.event("end", step=31, reason=COMPLETE)
    page.wait_for(f"{TEXT}.includes('finished')")
    assert page.complaints() == []
    server.shutdown()


def test_many_runs_side_by_side(browser: Browser, tmp_path: Path) -> None:
    for index in range(3):
        Simulated(tmp_path / "runs" / f"run{index}", 2 + index).steps(10 * (index + 1))
    server = serve(tmp_path / "runs")
    page = browser.open(server.url, width=400, height=850, is_phone=True)
    page.wait_for("charts[0].shown?.length === 3")
    steps = page.evaluate("[...document.querySelectorAll('#runs tbody td:nth-child(3)')].map(e => e.textContent)")
    assert steps == ["10 of 500", "20 of 500", "30 of 500"]
    assert page.evaluate("document.querySelectorAll('.bars li').length") == 2
    page.evaluate("document.querySelector('#runs input').focus()")
    press(page, "ArrowDown", "ArrowDown")
    page.wait_for("document.getElementById('chosen').textContent === 'run2'")
    assert page.evaluate("document.querySelectorAll('.bars li').length") == 4
    choose(page, "x", "seconds")
    (tmp_path / "runs/run2/config.toml").write_text("[train]\nsteps = 500\n")
    script = Simulated(tmp_path / "made", num_steps=400)
    (script.folder / "config.toml").write_text('[run]\nunit = "samples"\n[train]\nsteps = 400\n')
    script.steps(40)
    script.folder.rename(tmp_path / "runs" / "run3")
    page.wait_for("charts[0].shown.length === 4")
    rows = page.evaluate("[...document.querySelectorAll('#runs > .scroll tr')].map(e => e.textContent)")
    assert [name in rows[0] for name in ("tokens", "samples")] == [True, True]
    assert ["samples a second" in row for row in rows[1:]] == [False, False, False, True]
    assert page.evaluate("document.querySelector('#runs input:checked').value") == "2"
    marked = "[...document.querySelectorAll('#differences mark')].map(e => e.textContent)"
    assert page.evaluate(marked) == ["samples", "400"]  # by which the last run differs from the first
    fits(page, 400)
    server.shutdown()


def test_a_number_that_a_script_begins_to_log_gets_a_curve_in_each_run(browser: Browser, tmp_path: Path) -> None:
    """Mutation: charts are those of the first message."""
    made = [Simulated(tmp_path / "runs" / name) for name in ("one", "two")]
    for each in made:
        each.append("metrics.jsonl", each.row(1) | {"unit": "samples"})
    server = PageServer(Views(tmp_path / "runs"), "127.0.0.1", 0)
    threading.Thread(target=server.serve, daemon=True).start()
    page = browser.open(server.url, width=1280, height=850)
    page.wait_for(f"{DRAWN} && runs.length === 2")
    assert page.evaluate("document.getElementById('logged').hidden")
    for each in made:
        for step in (2, 3):
            each.append("metrics.jsonl", each.row(step) | {"unit": "samples", "accuracy": step / 4})
    page.wait_for("charts.at(-1).every?.length === 2 && charts.at(-1).place.id.startsWith('logged')")
    assert "What the script logs" in page.evaluate(TEXT)
    fits(page, 1280, least=0.2)
    server.shutdown()


def test_a_slow_rank_of_many_is_named_before_ranks_jsonl_has_a_row(browser: Browser, tmp_path: Path) -> None:
    """Mutation: the section of ranks is hidden as long as no row lists them."""
    made = Simulated(tmp_path / "run", 16)
    for step in (1, 2, 3):
        row = {name: value for name, value in made.row(step).items() if not name.startswith("rank_")}
        made.append("metrics.jsonl", row)
    made.event("straggler", step=3, rank=7, host="node0", since_step=1, phase="forward", ms=121.0, median_ms=61.0)
    server = serve(made.folder)
    page = browser.open(server.url, width=1280, height=850)
    page.wait_for(f"{TEXT}.includes('Rank 7 (host node0) has been slow since step 1')")
    assert "Means of the newest rows" not in page.evaluate(TEXT)
    assert page.complaints() == []
    server.shutdown()


def test_a_curve_has_dots_only_as_long_as_it_has_no_lines(browser: Browser, tmp_path: Path) -> None:
    """Mutation: the dots of the first message stay."""
    made = Simulated(tmp_path / "run")
    made.steps(1)
    server = serve(made.folder)
    page = browser.open(server.url, width=1280, height=850)
    dots = "charts[0].plot?.series[1].points.show(charts[0].plot, 1)"
    page.wait_for(f"{DRAWN} && {dots} === true")
    made.steps(4)
    page.wait_for(f"{TEXT}.includes('step 5 of 500') && {dots} === false")
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
        page.wait_for(f"{TEXT}.includes('finished') && {TEXT}.includes('1 restart')")
        kinds = page.evaluate("runs[0].events.map(([, kind]) => kind)")
        assert [kind for kind in kinds if kind != "checkpoint"][::-1] in (
            ["start", "failed", "resume", "end"],
            ["start", "failed", "failed", "resume", "end"],  # rank 0 has recorded its loss, too
        )
        assert page.evaluate("runs[0].curves.steps.step") == list(range(1, 41))
        losses = page.evaluate("runs[0].curves.steps.loss.mean")
        assert losses == pytest.approx(program.losses(tmp_path / "run"), rel=1e-4)
        assert page.evaluate("runs[0].resumed") == [10]
        assert page.evaluate("self.isFirst")  # nobody loaded it again
        fits(page, 1280)
        watching.process.send_signal(signal.SIGINT)
        assert watching.wait().status == 0
        page.wait_for(f"{TEXT}.includes('No connection to `paceline watch`')")
        assert page.evaluate("document.querySelectorAll('.bars li').length") == 2  # what was known stays
