"""The page in a real browser: it loads alone, draws, reacts to keys and toggles, and fits a phone and paper."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import write_reproduction, write_run

from loopscope.report.build import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install -y chromium")
WAIT = 20_000
"""Milliseconds before a page that does not get there has failed."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium; nothing is downloaded."""
    os.environ.setdefault("PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD", "1")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Tab:
    """A page that was opened from a file, everything it complained of, and everything it asked for."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog " + dialog.message), dialog.dismiss()))
        self.page.route("**/*", self._note)
        self.page.goto(file.as_uri())

    def _note(self, route: Any) -> None:
        self.requests.append(route.request.url)
        route.continue_()

    def draw_all(self) -> int:
        """Scroll to every chart, as a reader would, and give their number."""
        charts = self.page.locator("[data-chart]")
        for n in range(charts.count()):
            charts.nth(n).scroll_into_view_if_needed()
            self.page.wait_for_function("n => document.querySelectorAll('[data-chart]')[n].dataset.drawn", arg=n)
        return charts.count()

    def lines(self, chart: str) -> int:
        """Lines and marks that are drawn in a chart."""
        return self.page.locator(f'[data-chart="{chart}"] .scatterlayer .trace').count()


@pytest.fixture
def open_tab(browser) -> Iterator[Callable[..., Tab]]:
    tabs = []

    def opened(file: Path, **options: Any) -> Tab:
        tabs.append(Tab(browser, file, **options))
        return tabs[-1]

    yield opened
    for tab in tabs:
        tab.context.close()


@pytest.fixture(scope="module")
def page_file(reproduction, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([reproduction], path)
    return path


def test_it_loads_without_a_complaint_and_asks_for_nothing_but_itself(open_tab, page_file):
    tab = open_tab(page_file)
    assert tab.draw_all() == 11
    assert tab.complaints == [] and tab.requests == [page_file.as_uri()]


def test_every_chart_draws_one_line_for_every_trace_in_its_data(open_tab, page_file):
    tab = open_tab(page_file)
    tab.draw_all()
    data = json.loads(tab.page.locator("#page-data").text_content())
    for name, chart in data["charts"].items():
        assert tab.lines(name) == len(chart["traces"]) > 0, name
        titles = tab.page.locator(f'[data-chart="{name}"] .infolayer .xtitle, [data-chart="{name}"] .infolayer .ytitle')
        assert titles.count() == 2


def test_charts_far_below_are_drawn_only_when_they_come_near(open_tab, page_file):
    tab = open_tab(page_file)
    tab.page.wait_for_selector('[data-chart="plane"][data-drawn]')
    assert tab.page.locator('[data-chart="frontier"][data-drawn]').count() == 0
    tab.page.locator('[data-chart="frontier"]').scroll_into_view_if_needed()
    tab.page.wait_for_selector('[data-chart="frontier"][data-drawn]')


def test_a_condition_that_is_switched_off_leaves_all_charts_and_comes_back(open_tab, page_file):
    tab = open_tab(page_file)
    tab.draw_all()
    before = {name: tab.lines(name) for name in ("plane", "norm-training", "alpha", "frontier")}
    box = tab.page.get_by_role("checkbox", name="terminal + raw")
    box.uncheck()
    assert tab.page.locator("#toggle-status").text_content() == "4 of 5 conditions shown"
    for name, count in before.items():
        tab.page.wait_for_function(LINES_ARE, arg=[name, count - 2])
    assert tab.page.locator('[data-chart="plane"]').locator("..").locator(".legend .off").count() == 1
    box.check()
    for name, count in before.items():
        tab.page.wait_for_function(LINES_ARE, arg=[name, count])


LINES_ARE = '([n, c]) => document.querySelectorAll(`[data-chart="${n}"] .scatterlayer .trace`).length === c'


def test_everything_can_be_done_with_the_keyboard(open_tab, page_file):
    tab = open_tab(page_file)
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    assert tab.page.locator(".skip").bounding_box()["x"] >= 0, "the skip link is seen once it has the focus"
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.dataset.toggle") == "0"
    tab.page.keyboard.press("Space")
    assert not tab.page.get_by_role("checkbox", name=re.compile("per-loop . RMSNorm")).is_checked()
    outline = tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    for _ in range(6):
        tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.id") == "show-none"
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("#toggle-status").text_content() == "0 of 5 conditions shown"
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.tagName") == "SUMMARY"
    tab.page.keyboard.press("Enter")
    assert tab.page.locator('[data-chart="plane"]').locator("..").locator("table").is_visible()


def test_hovering_shows_condition_run_and_values(open_tab, page_file):
    tab = open_tab(page_file)
    tab.draw_all()
    chart = tab.page.locator('[data-chart="plane"]')
    chart.scroll_into_view_if_needed()
    chart.locator(".scatterlayer .trace .point").first.hover(force=True)
    label = tab.page.locator('[data-chart="plane"] .hoverlayer .hovertext')
    label.wait_for()
    text = label.text_content()
    trace = json.loads(tab.page.locator("#page-data").text_content())["charts"]["plane"]["traces"][0]
    assert trace["meta"] in text and trace["customdata"][0][0] in text and trace["customdata"][0][1] in text


def test_dark_is_dark_and_charts_follow_also_while_the_page_is_open(open_tab, page_file):
    tab = open_tab(page_file, color_scheme="light")
    tab.page.wait_for_selector('[data-chart="plane"][data-drawn]')
    light = tab.page.screenshot()
    light_mark = mark_colour(tab)
    tab.page.emulate_media(color_scheme="dark")
    tab.page.wait_for_function("c => getComputedStyle(document.querySelector('.point')).fill !== c", arg=light_mark)
    dark = tab.page.screenshot()
    assert dark != light
    assert brightness(tab, "body", "backgroundColor") < 60 < 200 < brightness(tab, "body", "color")
    assert contrast_of_marks(tab) > 3


def mark_colour(tab: Tab) -> str:
    return tab.page.evaluate("getComputedStyle(document.querySelector('.point')).fill")


def channels(colour: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def brightness(tab: Tab, selector: str, name: str) -> float:
    colour = tab.page.evaluate("([s, n]) => getComputedStyle(document.querySelector(s))[n]", [selector, name])
    return sum(channels(colour)) / 3


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [c / 255 for c in channels(colour)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def contrast_of_marks(tab: Tab) -> float:
    """The weakest contrast of any colour of a condition against the page."""
    probe = """name => { const e = document.createElement('i'); e.style.color = `var(${name})`; document.body.append(e);
                         const c = getComputedStyle(e).color; e.remove(); return c; }"""
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return min(contrast(tab.page.evaluate(probe, f"--c{n}"), paper) for n in range(8))


def test_every_colour_is_seen_on_white_too(open_tab, page_file):
    assert contrast_of_marks(open_tab(page_file, color_scheme="light")) > 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(open_tab, page_file, scheme):
    tab = open_tab(page_file, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    tab.draw_all()
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 400
    for box in tab.page.evaluate(
        "[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().right)"
    ):
        assert box <= 400


def test_no_label_of_an_axis_is_cut_off_or_lies_on_another(open_tab, page_file):
    for width in (400, 1200):
        tab = open_tab(page_file, viewport={"width": width, "height": 900})
        tab.draw_all()
        for name in tab.page.evaluate("[...document.querySelectorAll('[data-chart]')].map(c => c.dataset.chart)"):
            boxes = tab.page.evaluate(LABELS, name)
            assert len(boxes["x"]) >= 2 and len(boxes["y"]) >= 2, f"{name} has no ticks at {width} px"
            frame = boxes["frame"]
            for box in boxes["x"] + boxes["y"]:
                assert frame["left"] - 1 <= box["left"] and box["right"] <= frame["right"] + 1, (name, width, box)
            for side, start, end in (("x", "left", "right"), ("y", "top", "bottom")):
                placed = sorted(boxes[side], key=lambda box: box[start])
                for first, second in itertools.pairwise(placed):
                    assert first[end] <= second[start] + 3, (name, width, side, first, second)


LABELS = """name => {
  const chart = document.querySelector(`[data-chart="${name}"]`);
  const box = e => { const r = e.getBoundingClientRect();
                     return {left: r.left, right: r.right, top: r.top, bottom: r.bottom, text: e.textContent}; };
  const texts = selector => [...chart.querySelectorAll(selector)].filter(e => e.textContent).map(box);
  return {x: texts('.xtick text'), y: texts('.ytick text'), frame: box(chart)};
}"""


def test_paper_gets_every_chart_in_light_colours_at_its_own_width(open_tab, page_file, tmp_path):
    tab = open_tab(page_file, color_scheme="dark")
    tab.page.wait_for_selector('[data-chart="plane"][data-drawn]')
    tab.page.emulate_media(media="print", color_scheme="dark")
    tab.page.wait_for_function("() => [...document.querySelectorAll('[data-chart]')].every(c => c.dataset.drawn)")
    assert brightness(tab, "body", "color") < 60, "dark ink"
    assert not tab.page.locator(".controls").is_visible() and not tab.page.locator("nav").is_visible()
    widths = tab.page.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)")
    assert max(widths) == 660, "A4 less its margins"
    tab.page.emulate_media(media="screen", color_scheme="dark")
    tab.page.wait_for_function("() => document.querySelector('.main-svg').clientWidth > 700")
    tab.page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") >= 5
    assert tab.complaints == []


def test_a_run_named_like_a_script_runs_nothing_and_is_read_as_text(open_tab, tmp_path):
    name = "<img src=x onerror=alert(1)>"
    for condition in ("per-loop+rmsnorm", "per-loop+raw"):
        write_run(tmp_path / "runs" / f"{name} {condition}", condition)
    write_report([tmp_path / "runs"], tmp_path / "page.html", title="</title><script>alert(2)</script>")
    tab = open_tab(tmp_path / "page.html")
    tab.draw_all()
    assert tab.complaints == [] and len(tab.requests) == 1
    assert tab.page.title() == "loopscope: </title><script>alert(2)</script>"
    chart = tab.page.locator('[data-chart="plane"]')
    chart.locator(".scatterlayer .trace .point").first.hover(force=True)
    tab.page.locator('[data-chart="plane"] .hoverlayer .hovertext').wait_for()
    assert name in tab.page.locator('[data-chart="plane"] .hoverlayer').text_content()


def test_an_injected_script_would_be_stopped_by_the_policy(open_tab, page_file, tmp_path):
    evil = page_file.read_text("utf-8").replace("<main", "<script>document.title = 'owned'</script><main", 1)
    (tmp_path / "evil.html").write_text(evil, "utf-8")
    tab = open_tab(tmp_path / "evil.html")
    tab.page.wait_for_selector('[data-chart="plane"][data-drawn]')
    assert tab.page.title() != "owned"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def test_a_single_run_that_is_still_going_is_a_whole_page_too(open_tab, tmp_path):
    write_run(tmp_path / "run", done=60, files=())
    write_report([tmp_path / "run"], tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    assert tab.draw_all() == 6 and tab.complaints == []
    assert tab.page.locator(".controls").count() == 0, "one condition needs no toggles"
    assert tab.page.locator("details.run").get_attribute("open") is not None


def test_the_whole_grid_with_two_recipes_draws(open_tab, tmp_path):
    names = ("terminal+rmsnorm", "terminal+raw", "per-loop+rmsnorm", "per-loop+raw", "per-loop+penalty")
    conditions = {**dict.fromkeys(names, 3), "per-loop+final-only": 1, "terminal+penalty": 1}
    conditions |= {"per-loop+inter-loop-norm": 1, "per-loop+layernorm": 1}
    write_reproduction(tmp_path / "grid", conditions, modern=names[:4])
    write_report([tmp_path / "grid"], tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    assert tab.draw_all() == 11 and tab.complaints == []
    assert tab.page.get_by_role("checkbox").count() == 13 and tab.lines("plane") == 23
