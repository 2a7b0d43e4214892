"""The page in a real browser, on a phone and on a desktop: drawn soon, nothing asked for, nothing complained of."""

from collections.abc import Iterator
from pathlib import Path

import long_run
import program
import pytest
from browser import CHROMIUM, Browser, Page
from test_report_page import EVIL, evil_run

from paceline.cli.main import main

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

NUM_STEPS = 20_000
# Of all plots of that run: 13,712 points, with which a page took 1.3 s of a processor's time.
MAX_POINTS = 20_000
POINTS = """[...document.querySelectorAll('.plot')].flatMap(p => p.data ?? [])
    .reduce((sum, trace) => sum + (trace.z?.flat() ?? trace.y ?? trace.x ?? []).length, 0)"""
ALL_DRAWN = "(document.documentElement.dataset.drawn || document.documentElement.dataset.failed)"
PLOTS = "[...document.querySelectorAll('.plot:not([hidden] *)')]"
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg') &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders: one of 20,000 steps, one that wants to be markup, and a real one on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    long_run.write(folder / "long", NUM_STEPS)
    evil_run(folder)
    program.run(
        "train", *program.TINY, "--train.steps", "12", "--nproc", "2", "--out", str(folder / "real"), cwd=folder
    ).require()
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        browser.open("about:blank", width=100, height=100).wait_for("true")  # it has started
        yield browser


def report(folder: Path, *runs: Path) -> Path:
    page = folder / "page.html"
    assert main(["report", *map(str, runs), "--out", str(page)]) == 0
    return page


def drawn(browser: Browser, page: Path, width: int, **how: bool) -> Page:
    """The page with all its plots; fails where anything was wrong on the way."""
    shown = browser.open(page.as_uri(), width=width, height=850, **how)
    assert float(shown.wait_for(ALL_DRAWN))  # a number of milliseconds; else why it failed
    assert shown.evaluate(f"{PLOTS}.every(p => p.querySelector('.main-svg') && p.clientWidth === p._fullLayout.width)")
    assert shown.complaints() == []
    assert shown.requests() == [page.as_uri()]
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    assert shown.evaluate(TOO_WIDE) == []
    return shown


def test_a_run_of_20_000_steps_is_drawn_by_few_points(browser: Browser, runs: Path, tmp_path: Path) -> None:
    page = report(tmp_path, runs / "long")
    assert page.stat().st_size < 6e6
    for width, how in ((1280, {}), (390, {"is_phone": True}), (1280, {"is_dark": True})):
        shown = drawn(browser, page, width, **how)
        assert 5_000 < shown.evaluate(POINTS) < MAX_POINTS
        shown.evaluate(
            "document.getElementById('loss').on('plotly_afterplot', () => { window.isRedrawn = true; }) && 0"
        )
        picture = tmp_path / f"{width}.png"
        shown.screenshot(picture)
        assert picture.stat().st_size > 100_000
        assert not shown.evaluate("window.isRedrawn"), "the picture may show plots of another width"


def test_plots_fit_on_paper(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """Finds plots that keep the window's width, of which a sheet of A4 (690 pixels) shows two thirds."""
    shown = drawn(browser, report(tmp_path, runs / "long"), 1280)
    shown.call("Emulation.setEmulatedMedia", media="print")
    shown.evaluate("document.body.style.width = '690px'")  # paper lets no page draw anew, as another window would
    sizes = f"{PLOTS}.map(p => [p, ...p.querySelectorAll('.main-svg')].map(e => e.getBoundingClientRect()))"
    for plot, *drawings in shown.evaluate(f"{sizes}.map(all => all.map(r => [r.left, r.right, r.bottom, r.height]))"):
        for left, right, bottom, height in drawings:
            assert (left, right) == pytest.approx((plot[0], plot[1]), abs=1)
            assert plot[1] <= 690
            assert bottom <= plot[2] + 1
            assert height > 50
    assert shown.evaluate(
        "document.querySelector('.scroll.tall').scrollHeight === document.querySelector('.scroll.tall').clientHeight"
    )


def test_what_is_chosen_is_drawn(browser: Browser, runs: Path, tmp_path: Path) -> None:
    shown = drawn(browser, report(tmp_path, runs / "long"), 1280)

    def chosen(name: str, value: str, then: str) -> None:
        shown.evaluate(f'document.querySelector(\'input[name="{name}"][value="{value}"]\').click()')
        shown.wait_for(then)

    last = "Math.round(Math.max(...document.getElementById('{}').data[2].x))"
    assert shown.evaluate(last.format("loss")) == pytest.approx(NUM_STEPS, abs=27)
    loss = "document.getElementById('loss')"
    chosen("x", "tokens", f"{loss}.layout.xaxis.title.text === 'tokens' && {last.format('loss')} > 6e8")
    chosen("x", "time", f"{loss}.layout.xaxis.title.text.startsWith('training time') && {last.format('loss')} < 100")
    heat = "document.getElementById('run0-heat').data[0]"
    shown.wait_for(f"{heat}.x.at(-1) < 100")
    before = shown.evaluate(f"Math.max(...{heat}.z.flat())")
    chosen("view-run0-heat", "slowest", f"Math.max(...{heat}.z.flat()) > {before}")
    chosen("view-loss", "close", f"{loss}.layout.yaxis.range?.[1] < 5")
    chosen("view-loss", "all", f"{loss}._fullLayout.yaxis.range[1] > {long_run.SPIKE}")
    shown.evaluate("document.querySelector('.legend button').click()")  # training's
    shown.wait_for(f"{loss}.data.filter(t => t.visible === 'legendonly').length === 3")  # with both edges of its band
    shown.call("Emulation.setDeviceMetricsOverride", width=390, height=850, deviceScaleFactor=1, mobile=False)
    assert shown.evaluate("document.documentElement.scrollWidth") == 390  # while the plots still are as wide as before
    shown.wait_for(f"{PLOTS}.every(p => p.clientWidth === p._fullLayout.width)")
    assert shown.complaints() == []


def test_nothing_that_a_run_folder_says_runs(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """Neither by the page's own escaping nor, where that failed, past its policy."""
    page = report(tmp_path, runs / "run<b>&amp;")
    shown = drawn(browser, page, 390, is_phone=True)
    assert shown.evaluate("document.querySelectorAll('img, b').length") == 0
    assert EVIL in shown.evaluate("document.body.textContent")
    broken = tmp_path / "broken.html"
    broken.write_bytes(page.read_bytes().replace(b"</main>", b"<script>document.title = 'ran'</script></main>"))
    forced = browser.open(broken.as_uri(), width=1280, height=850)
    forced.wait_for(ALL_DRAWN)
    assert forced.evaluate("document.title") != "ran"
    assert any("Content Security Policy" in said for said in forced.complaints())


def test_a_real_run_and_several_together(browser: Browser, runs: Path, tmp_path: Path) -> None:
    shown = drawn(browser, report(tmp_path, runs / "real"), 390, is_phone=True)
    said = shown.evaluate("document.body.innerText")
    assert "finished" in said
    headings = shown.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    curves = ["Loss", "Throughput", "Learning rate and gradient norm"]
    parts = ["Where a step goes", "Rank by rank", "Communication", "What happened", "Config"]
    headings = [heading for heading in headings if heading != "Shares of unequal ranks"]  # speeds may differ
    assert headings == [*curves, *parts]
    names = shown.evaluate("document.getElementById('run0-ranks').data.map(t => t.name)")
    assert names == ["data", "forward", "backward", "exposed communication", "optimizer", "other"]
    both = drawn(browser, report(tmp_path, runs / "real", runs / "long"), 390, is_phone=True)
    assert both.evaluate("[...document.querySelectorAll('article.run')].map(a => a.hidden)") == [False, True]
    both.evaluate("document.querySelector('input[name=run][value=\"1\"]').click()")
    both.wait_for("document.getElementById('run1-events')._fullLayout && !document.getElementById('run1-heat').hidden")
    assert both.evaluate("document.documentElement.scrollWidth") == 390
    assert both.complaints() == []
