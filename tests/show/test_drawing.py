"""Charts as drawings: everything is drawn, in place, told by words, and the same again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopscope.show.chart import Axis, Chart, Level, Series, Style
from loopscope.show.drawing import save, svg, swatch

SVG = "{http://www.w3.org/2000/svg}"
AXES = [Axis("y"), Axis("y", "log"), Axis("y", "signed-log", linear_below=0.1), Axis("y", "log", floor=1e-12)]


def chart(ys: Iterable[float | None] = (1.0, 2.0, 4.0), y: Axis = AXES[0], **changes: Any) -> Chart:
    ys = list(ys)
    one = Series(label="a <b>", xs=list(range(1, len(ys) + 1)), ys=ys, style=Style(colour="c1"), group="7")
    given = {"name": "made-up", "title": "Made up", "x": Axis("loop", whole=True), "y": y, "series": [one], **changes}
    return Chart(**given)


def elements(drawn: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawn).iter(f"{SVG}{tag}"))


def ticks(drawn: str) -> list[str]:
    return [text.text or "" for text in elements(drawn, "text")]


def test_whoever_points_at_a_mark_is_told_its_values_and_text_is_text():
    told = [title.text for title in elements(svg(chart()), "title")]
    assert "a <b>\nloop: 2\ny: 2" in told and told.count("a <b>") == 2, "the line and its marks as a whole"


def test_a_series_is_switched_by_its_group_and_leads_to_its_evidence():
    groups = [each.get("data-group") for each in elements(svg(chart()), "g") if each.get("data-group")]
    assert groups == ["7", "7"]
    linked = Series(label="x", xs=[1], ys=[2.0], style=Style(colour="c0"), mode="marks", group="d", link="d-modern")
    (link,) = elements(svg(chart(series=[linked])), "a")
    assert link.get("href") == "#d-modern" and link.get("data-group") == "d"


def test_colours_are_the_pages_and_no_name_stands_twice():
    drawn = svg(chart())
    assert "var(--c1)" in drawn and "var(--ink)" in drawn and not re.search("#0b0b", drawn)
    ids = re.findall(r'\bid="([^"]+)"', drawn + svg(chart(name="another")))
    assert len(set(ids)) == len(ids), "one page has both"
    assert "<metadata" not in drawn and "<style" not in drawn and "matplotlib" not in drawn


def test_a_line_goes_on_beyond_the_frame_and_its_marks_do_not():
    drawn = svg(chart([1.0, 1e9, 2.0], Axis("y", "log", top=10.0)))
    told = [title.text for title in elements(drawn, "title")]
    assert len(told) == 2 + 2 and not any("1.00e+09" in str(each) for each in told)


@pytest.mark.parametrize(
    ("axis", "ys", "shown"),
    [
        (Axis("y", "log"), (1.0, 1e5), {"1", "100", "10,000"}),
        (Axis("y", "log"), (3.0, 40.0), {"3", "10", "30"}),
        (Axis("y", "log"), (363.0, 381.0), {"364", "380"}),
        (Axis("y", "signed-log", linear_below=0.1), (-3.0, 20.0), {"−1", "0", "10"}),
        (Axis("y", shows=(-5.0, 5.0)), (0.0, 0.1), {"−4", "4"}),
        (Axis("y", ticks={1.0: "least", 4.0: "most"}), (1.0, 4.0), {"least", "most"}),
    ],
)
def test_ticks_are_numbers_for_people_on_every_scale(axis, ys, shown):
    assert shown <= set(ticks(svg(chart(ys, axis))))


def test_what_a_log_axis_cannot_show_is_left_out_or_lies_on_the_floor():
    assert Axis("y", "log").place(0.0) is None and Axis("y", "log").place(-1.0) is None
    assert Axis("y", "log", floor=1e-12).place(0.0) == 1e-12
    assert [Axis("y").place(value) for value in (float("nan"), float("inf"), 1e300)] == [None] * 3
    assert not chart([0.0, None], Axis("y", "log")).is_drawn


def test_levels_have_their_meaning_beside_them():
    assert {"chance", "trained depth"} <= set(
        ticks(svg(chart(levels=[Level(1.0, "chance"), Level(2.0, "trained depth", of="x")])))
    )


def test_names_on_an_axis_each_have_their_line():
    names = {float(n): f"design {n}" for n in range(40)}
    places = [Series(label=name, xs=[1], ys=[n], style=Style(colour="c0"), mode="marks") for n, name in names.items()]
    drawn = svg(chart(y=Axis("", ticks=names), series=places))
    rows = sorted(float(text.get("y", "")) for text in elements(drawn, "text") if str(text.text).startswith("design"))
    assert len(rows) == 40 and min(b - a for a, b in itertools.pairwise(rows)) > 12, "as high as a line"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
@given(ys=st.lists(st.none() | st.floats(allow_subnormal=False), min_size=1, max_size=6), axis=st.sampled_from(AXES))
def test_no_numbers_stop_a_drawing_and_the_same_give_the_same(ys, axis):
    assert svg(chart(ys, axis)) == svg(chart(ys, axis))


def test_a_figure_is_a_drawing_and_a_page_the_same_again_with_one_legend(tmp_path: Path):
    charts = [chart(title="One"), chart(title="Another")]
    save(charts, tmp_path / "figure", title="Both")
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"figure.svg", "figure.pdf"}
    save(charts, tmp_path / "figure", title="Both")
    assert first == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save([chart([None])], tmp_path / "figure")
    assert not list(tmp_path.iterdir()), "nothing to draw any more"


def test_a_swatch_is_the_line_and_the_mark():
    drawn = swatch(Style(colour="c2", marker="s", dash="--", is_open=True))
    assert "var(--c2)" in drawn and "stroke-dasharray" in drawn and elements(drawn, "use")
