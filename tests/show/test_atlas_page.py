"""The atlas as a page: it stands alone, sorts, filters, leads to its evidence, and can be read on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from atlas_samples import MODERN, entry, sample_atlas
from browsing import Tab, needs_chromium

from loopscope.designs import DESIGNS
from loopscope.show.atlas import BEYOND, free_and_growing, headlines, render
from loopscope.show.drawing import svg
from loopscope.studies.atlas_properties import PROPERTIES

NAMES = list(DESIGNS)


@pytest.fixture(scope="module")
def html() -> str:
    return render(sample_atlas())


@pytest.fixture(scope="module")
def page_file(html, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("atlas") / "atlas.html"
    path.write_text(html, "utf-8")
    return path


# --- as text ---------------------------------------------------------------------------------------------------------


def test_every_cell_leads_to_evidence_that_is_there(html):
    ids = set(re.findall(r' id="([^"]+)"', html))
    links = set(re.findall(r'href="#([^"]+)"', html))
    assert links <= ids and len(links) > 10 * len(DESIGNS)


def test_it_is_one_file_that_asks_for_nothing(html):
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html) and not re.findall(r"url\((?!#)", html)
    assert "default-src &#39;none&#39;" in html and html.count("<script") == 1


def test_every_design_has_its_summary_and_source(html):
    for design in DESIGNS.values():
        assert design.source in html and f'id="design-{design.name}"' in html
    assert "A plain pre-norm loop, every loop supervised" in html


def test_what_a_file_says_is_text_on_the_page():
    bad = "<script>alert(1)</script>"
    record = sample_atlas()
    hurt = [replace(each, error=bad, row=bad) for each in record.entries]
    html = render(replace(record, entries=hurt, commands=[[bad]], system=bad))
    assert bad not in html and "&lt;script&gt;alert(1)" in html and html.count("<script") == 1
    assert "because &lt;b&gt;it" in html


def test_the_headlines_count_what_is_blind_not_learnt_and_failed():
    paper, modern, hops = headlines(sample_atlas())
    assert modern.startswith(f"Modern recipe, text: {len(NAMES) - 4} of {len(NAMES) - 2} trained designs carry")
    assert f"Failed: {DESIGNS[NAMES[3]].title}, {DESIGNS[NAMES[5]].title}." in modern
    assert f"Not learnt: {DESIGNS[NAMES[1]].title}." in hops and "Failed" not in paper


def test_an_atlas_of_nothing_yet_is_still_a_page():
    assert "not run" in render(replace(sample_atlas(), entries=[]))


# --- how free, and how fast it grows ---------------------------------------------------------------------------------


def test_the_freest_stand_on_top_and_of_those_the_ones_that_grow_most():
    free, growth = free_and_growing(sample_atlas(), MODERN)
    places = [(f.xs[0], g.xs[0]) for f, g in zip(free.series, growth.series, strict=True)]
    assert places and places == sorted(places)
    assert [series.ys for series in free.series] == [series.ys for series in growth.series]
    assert len(free.y.ticks) == len(places), "each with its name"


def test_a_runaway_lies_at_the_end_is_told_as_it_is_and_leaves_the_rest_their_room():
    ran = entry(NAMES[0], MODERN)
    assert ran.trained is not None
    trained = replace(ran.trained, norms=[3.0 * 10 ** min(k, 12) for k in range(len(ran.trained.norms))])
    _, growth = free_and_growing(replace(sample_atlas(), entries=[replace(ran, trained=trained)]), MODERN)
    assert {series.xs[0] for series in growth.series} == {BEYOND}
    assert "growth 1.00e+09" in growth.series[0].label and "growth 1.00e+09" in svg(growth)


def test_what_was_not_measured_has_no_mark():
    record = replace(sample_atlas(), entries=[entry(NAMES[0], MODERN, trained=None)])
    assert not any(chart.is_drawn for chart in free_and_growing(record, MODERN))


# --- in a browser ----------------------------------------------------------------------------------------------------

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")


@pytest.fixture
def tab(open_tab, page_file) -> Iterator[Tab]:
    return open_tab(page_file)


def shown(tab: Tab) -> list[str]:
    """Designs in the matrix, from above."""
    return tab.page.eval_on_selector_all(
        ".matrix tbody tr", "rows => rows.filter(r => r.offsetParent).map(r => r.querySelector('th a').textContent)"
    )


@needs_chromium
def test_settings_filter_and_sorting_change_what_is_shown(tab, page_file):
    titles = [design.title for design in DESIGNS.values()]
    assert shown(tab) == titles and tab.page.get_by_role("radio", name="modern recipe").is_checked()
    tab.page.get_by_role("radio", name="pointer chasing").check()
    assert shown(tab) == titles[:2]
    tab.page.get_by_role("radio", name="modern recipe").check()
    tab.page.locator("#filter").fill("broken from 5")
    assert shown(tab) == [titles[2]]
    assert tab.page.locator("#status").text_content() == f"1 of {len(titles)} designs shown"
    assert tab.page.locator("[data-chart] a:visible").count() == 2, "the chart follows"
    tab.page.locator("#filter").fill("")
    tab.page.get_by_role("button", name="score").click()
    assert shown(tab)[0] == titles[2] and set(shown(tab)[-1:]) <= {titles[5]}, "the least CE first, what has none last"
    assert tab.page.locator('[data-column="score"]').get_attribute("aria-sort") == "ascending"
    tab.page.get_by_role("button", name="score").click()
    assert shown(tab)[-1] == titles[5] and shown(tab).index(titles[2]) == len(titles) - 2
    tab.page.locator("#sort").select_option("")
    tab.page.locator("#turn").click()
    assert shown(tab) == titles
    assert tab.complaints == [] and tab.requests == [page_file.as_uri()]


@needs_chromium
def test_a_cell_opens_its_evidence_also_the_second_time_and_by_keys(tab):
    evidence = tab.page.locator(f"#{NAMES[0]}-modern-cache")
    assert not evidence.is_visible()
    link = tab.page.locator(f'tr[data-anchor="{NAMES[0]}-modern"] [data-key="cache"] a')
    link.click()
    evidence.wait_for(state="visible")
    assert tab.page.evaluate("scrollY") > 0
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    link.focus()
    tab.page.keyboard.press("Enter")
    evidence.wait_for(state="visible")
    tab.page.locator(f'[data-chart] a[data-group="{NAMES[1]}-modern"]').first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.locator(f"#{NAMES[1]}-modern-motion").wait_for(state="visible")
    assert tab.complaints == []


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_cell_with_its_question_and_never_scrolls_sideways(open_tab, page_file, scheme):
    tab = open_tab(page_file, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    assert len(shown(tab)) == len(NAMES), "one setting at a time, here too"
    label = "getComputedStyle(document.querySelector('.matrix td'), '::before').content"
    assert PROPERTIES[0].title in tab.page.evaluate(label)
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 400
    heights = "all => all.filter(t => t.checkVisibility()).map(t => t.getBoundingClientRect().height)"
    sizes = tab.page.eval_on_selector_all("[data-chart] text", heights)
    assert min(sizes) >= 9, "labels of the chart can be read"
    colours = (tab.page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("color", "backgroundColor"))
    ink, paper = (sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) for colour in colours)
    assert (ink > paper) == (scheme == "dark") and tab.complaints == []


@needs_chromium
def test_without_a_script_every_row_is_there(open_tab, page_file):
    tab = open_tab(page_file, java_script_enabled=False)
    assert tab.page.locator(".matrix tbody tr").count() == 2 * len(NAMES) + 2
    assert tab.page.locator("[data-chart]:visible").count() == 3, "a chart for every setting"
    assert tab.page.locator("noscript").count() == 1
