"""The page in a real browser: it loads alone, shows its charts, reacts to keys and toggles, fits a phone and paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Tab, needs_chromium
from made_up import write_reproduction, write_run

from loopscope.rows.conditions import CONDITIONS
from loopscope.show.page import write_report

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = needs_chromium


@pytest.fixture(scope="session")
def page_file(reproduction_page, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(reproduction_page, "utf-8")
    return path


@pytest.fixture(scope="module")
def tab(browser, page_file) -> Iterator[Tab]:
    """One tab for the tests that follow one another on the same page, as a reader would; each also works alone."""
    opened = Tab(browser, page_file, color_scheme="light")
    yield opened
    opened.context.close()


def test_keys_mouse_and_toggles_work(tab):
    press, focus = tab.page.keyboard.press, lambda what: tab.page.evaluate(f"document.activeElement.{what}")
    press("Tab")
    assert focus("className") == "skip"
    assert tab.page.locator(".skip").bounding_box()["x"] >= 0, "the skip link is seen once it has the focus"
    press("Enter")
    assert focus("id") == "main"
    press("Tab")
    assert focus("dataset.toggle") == "0"
    press("Space")
    assert not tab.page.get_by_role("checkbox", name=re.compile("per-loop . RMSNorm")).is_checked()
    assert tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    for _ in range(5):
        press("Tab")
    assert focus("id") == "show-all"
    press("Enter")
    assert tab.page.locator("#toggle-status").text_content() == "5 of 5 conditions shown"
    press("Tab")
    press("Tab")
    assert focus("tagName") == "SUMMARY"
    press("Enter")
    assert tab.page.locator("figure", has=tab.page.locator('[data-chart="plane"]')).locator("table").is_visible()

    before = {name: tab.lines(name) for name in ("plane", "norm-training")}
    box = tab.page.get_by_role("checkbox", name="terminal + raw")
    box.uncheck()
    assert tab.page.locator("#toggle-status").text_content() == "4 of 5 conditions shown"
    assert {name: tab.lines(name) for name in before} == {name: count - 2 for name, count in before.items()}
    assert tab.page.locator("figure", has=tab.page.locator('[data-chart="plane"]')).locator(".legend .off").count() == 1
    box.check()
    assert {name: tab.lines(name) for name in before} == before
    assert tab.complaints == []


def test_it_asks_for_nothing_and_every_line_of_every_chart_is_there_at_once(tab, page_file):
    names = tab.charts()
    assert len(names) == 11 and tab.complaints == [] and tab.requests == [page_file.as_uri()]
    assert all(tab.lines(name) >= 9 for name in names if name != "gates")
    check_labels(tab, names)


def test_one_plain_screenshot_without_a_script_has_the_charts(open_tab, page_file):
    tab = open_tab(page_file, java_script_enabled=False)
    assert tab.lines("plane") == 9 and tab.page.locator("noscript").count() == 0


LABELS = """name => {
  const chart = document.querySelector(`[data-chart="${name}"]`);
  const box = e => { const r = e.getBoundingClientRect();
                     return {left: r.left, right: r.right, top: r.top, bottom: r.bottom, text: e.textContent}; };
  return {texts: [...chart.querySelectorAll('text')].filter(e => e.textContent).map(box), frame: box(chart)};
}"""


def check_labels(tab: Tab, names: list[str]) -> None:
    """Both axes of every chart have ticks and titles, and no label is cut off or lies on another."""
    for name in names:
        boxes = tab.page.evaluate(LABELS, name)
        frame, texts = boxes["frame"], boxes["texts"]
        assert len(texts) >= 6, f"{name} has an axis without ticks"
        for box in texts:
            assert frame["left"] - 1 <= box["left"] and box["right"] <= frame["right"] + 1, (name, box)
            assert box["bottom"] - box["top"] >= 9 and box["right"] - box["left"] >= 4, (name, box)
        for one, other in itertools.combinations(texts, 2):
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            along = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
            assert across <= 3 or along <= 3, (name, one, other)


def test_dark_is_dark_paper_is_light_and_charts_follow_while_the_page_is_open(tab, tmp_path):
    light = tab.page.screenshot()
    assert weakest_contrast(tab) > 3
    tab.page.emulate_media(color_scheme="dark")
    assert tab.page.screenshot() != light and weakest_contrast(tab) > 3
    assert brightness(tab, "backgroundColor") < 60 < 200 < brightness(tab, "color")
    ink = "getComputedStyle(document.querySelector('[data-chart] text')).fill"
    assert sum(channels(tab.page.evaluate(ink))) / 3 > 200, "so has the ink of the charts"

    tab.page.emulate_media(media="print", color_scheme="dark")
    assert brightness(tab, "color") < 60 and sum(channels(tab.page.evaluate(ink))) / 3 < 60, "dark ink"
    assert not tab.page.locator(".controls").is_visible() and not tab.page.locator("nav").is_visible()
    tab.page.emulate_media(media="screen", color_scheme="dark")
    tab.page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") >= 5
    assert tab.complaints == []


def channels(colour: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def brightness(tab: Tab, name: str) -> float:
    return sum(channels(tab.page.evaluate("n => getComputedStyle(document.body)[n]", name))) / 3


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [c / 255 for c in channels(colour)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def weakest_contrast(tab: Tab) -> float:
    """Of any colour of a condition against the page."""
    probe = """name => { const e = document.createElement('i'); e.style.color = `var(${name})`; document.body.append(e);
                         const c = getComputedStyle(e).color; e.remove(); return c; }"""
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return min(contrast(tab.page.evaluate(probe, f"--c{n}"), paper) for n in range(8))


def test_a_phone_shows_the_whole_grid_with_two_recipes_and_never_scrolls_sideways(open_tab, tmp_path):
    write_reproduction(tmp_path / "grid", dict.fromkeys(CONDITIONS, 1), modern=tuple(CONDITIONS)[:4])
    write_report([tmp_path / "grid"], tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html", viewport={"width": 400, "height": 800})
    charts = tab.charts()
    assert len(charts) == 11 and tab.complaints == [] and tab.lines("plane") == 13
    assert tab.page.get_by_role("checkbox").count() == 13
    check_labels(tab, charts)
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 400
    rights = tab.page.evaluate(
        "[...document.querySelectorAll('[data-chart]')].map(s => s.getBoundingClientRect().right)"
    )
    assert max(rights) <= 400


def test_a_single_run_named_like_a_script_that_is_still_going_is_a_whole_page_and_text(open_tab, tmp_path):
    name = "<script>alert(1)<"
    run = write_run(tmp_path / name, "terminal+raw", done=60, files=())
    write_report([run], tmp_path / "page.html", title="</title><img src=x onerror=alert(2)>")
    tab = open_tab(tmp_path / "page.html")
    charts = tab.charts()
    assert len(charts) == 6 and tab.complaints == [] and len(tab.requests) == 1
    check_labels(tab, charts)
    assert tab.page.title() == "loopscope: </title><img src=x onerror=alert(2)>"
    assert name in tab.page.locator('[data-chart="plane"] [data-group] title').first.text_content()
    assert name in tab.page.locator("details.run summary").first.text_content()
    assert tab.page.locator(".controls").count() == 0, "one condition needs no toggles"
    assert tab.page.locator("details.run").get_attribute("open") is not None
    empty = "[...document.querySelectorAll('main section')].filter(s => s.textContent.trim().length < 40).length"
    assert tab.page.evaluate(empty) == 0

    tab.page.evaluate("""() => { const script = document.createElement('script');
                                 script.textContent = 'document.title = "x"'; document.body.append(script); }""")
    tab.page.wait_for_timeout(100)
    assert tab.page.title() != "x" and any("Content Security Policy" in text for text in tab.complaints)
