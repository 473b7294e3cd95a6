"""The atlas as a page: it stands alone, sorts, filters, leads to its evidence, and can be read on a phone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from atlas_samples import MODERN, entry, sample_atlas
from browsing import Tab, needs_chromium

from loopscope.designs import DESIGNS
from loopscope.show.atlas import headlines, marks_of, render
from loopscope.show.drawing import LINE, Mark, lines, scatter, spread, standalone_scatter
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
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html) and "url(" not in html
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


# --- drawings --------------------------------------------------------------------------------------------------------


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]


def names(svg: str) -> dict[str, tuple[float, float]]:
    """Where the name of every mark stands."""
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">([^<]+)</text></(?:a|g)>', svg)
    return {name: (float(x), float(y)) for x, y, name in found}


def test_names_never_hide_one_another_however_many_marks_share_a_place():
    marks = [Mark(f"design {n}", 1e6, 7.0, "bad", f"d{n}") for n in range(40)]
    drawn = scatter(marks, x_title="x", y_title="y", furthest=1e6)
    rows = sorted(y for _, y in names(drawn).values())
    assert len(rows) == 40 and min(b - a for a, b in pairwise(rows)) >= LINE - 0.2
    assert rows[0] > 0 and rows[-1] < float(re.findall(r'viewBox="0 0 \d+ ([\d.]+)"', drawn)[0])
    assert len(set(circles(drawn))) == 1, "the marks themselves are never moved"


def test_names_are_moved_no_further_than_they_must():
    assert spread([10.0, 50.0, 90.0], 14, 0, 100) == [10.0, 50.0, 90.0]
    assert spread([50.0, 50.0, 50.0], 10, 0, 100) == [40.0, 50.0, 60.0]
    assert spread([2.0, 2.0, 60.0], 10, 0, 100) == [0.0, 10.0, 60.0], "inside, and the rest is left alone"
    assert spread([99.0, 100.0], 10, 0, 100) == [90.0, 100.0] and spread([], 10, 0, 100) == []


def test_further_right_is_freer_and_further_up_grows_more():
    marks = [Mark("b", 1e3, 9.0, "bad", "b"), Mark("a", 2.0, 1.0, "good", "a")]
    drawn = scatter(marks, x_title="x", y_title="y", furthest=1e6)
    (ax, ay), (bx, by) = circles(drawn)
    assert bx > ax and by < ay
    assert list(names(drawn)) == ["a", "b"]


def test_a_runaway_lies_on_the_edge_with_its_growth_and_leaves_the_rest_their_room():
    marks = [
        Mark("calm", 2.0, 1.0, "good", "a"),
        Mark("wild", 1e6, 3e9, "bad", "b"),
        Mark("edge", 1e6, 99.0, "bad", "c"),
    ]
    drawn = scatter(marks, x_title="x", y_title="y", furthest=1e6)
    assert set(names(drawn)) == {"calm", "wild (3.00e+09)", "edge"}
    lost = scatter([Mark("lost", 1.1, math.inf, "good", "l")], x_title="x", y_title="y", furthest=1e6)
    assert set(names(lost)) == {"lost (not finite)"} and "nan" not in lost and "inf" not in lost
    (_, calm), (_, wild), (_, edge) = circles(drawn)
    assert wild <= edge < calm - 150


def test_the_figure_is_a_file_of_its_own_with_every_name_and_no_link():
    marks = marks_of(sample_atlas(), MODERN)
    drawn = standalone_scatter(marks, x_title="x & y", y_title="y", furthest=1e6, title="<t>")
    root = ElementTree.fromstring(drawn)
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert marks and all(mark.name in texts for mark in marks) and {"x & y", "<t>"} <= set(texts)
    assert "href" not in drawn


def test_what_cannot_be_drawn_is_left_out():
    assert lines({"a": [None, None]}, "t") == "" and "polyline" in lines({"a": [1.0, None, 3.0]}, "t")
    assert marks_of(replace(sample_atlas(), entries=[entry(NAMES[0], MODERN, trained=None)]), MODERN) == []


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
    assert tab.page.locator(".drawing .mark:visible").count() == 1, "the scatter follows"
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
    tab.page.locator(f'.mark[data-mark="{NAMES[1]}-modern"]').focus()
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
    sizes = tab.page.eval_on_selector_all(".drawing text", heights)
    assert min(sizes) >= 9, "labels of the scatter can be read"
    colours = (tab.page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("color", "backgroundColor"))
    ink, paper = (sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) for colour in colours)
    assert (ink > paper) == (scheme == "dark") and tab.complaints == []


@needs_chromium
def test_without_a_script_every_row_is_there(open_tab, page_file):
    tab = open_tab(page_file, java_script_enabled=False)
    assert tab.page.locator(".matrix tbody tr").count() == 2 * len(NAMES) + 2
    assert tab.page.locator(".drawing:visible").count() == 3, "a scatter for every setting"
    assert tab.page.locator("noscript").count() == 1
