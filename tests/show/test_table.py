"""One table, five renderings: what LaTeX, Markdown and HTML would take for their own is escaped in each."""

import csv
import io
import os
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from loopscope.show.numbers import mean_deviation, plain, signed
from loopscope.show.table import Column, Table, columns, escape_latex

GOLDEN = Path(__file__).parent / "golden"
NASTY = Table(
    "50 % of a_b",
    [
        *(Column("a|b", align="right"), Column("<b>PPL</b>", ".2f"), *columns(plain, "‖h‖"), "evidence"),
        *(Column("ΔCE", partial(signed, decimals=4)), Column("over seeds", mean_deviation)),
    ],
    [
        ["\\input{x} $&# ~^ <>", 12.3456, 39207.4, "‖h‖ ± 1 × 2\nnew", -0.00123, [1.0, 3.0]],
        ['say "hi", you', None, "never", "=1+1 [bold]text[/bold] :smile:", None, []],
    ],
    note="Mean ± <i>deviation</i> & more.",
    name="nasty",
)


def rendered(table: Table) -> dict[str, str]:
    """A table in every rendering."""
    console = Console(width=100, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table.terminal(lines=True))
    return {
        "txt": captured.get(),
        "md": table.markdown(),
        "csv": table.csv(),
        "tex": table.latex(),
        "html": str(table.html("cards")),
    }


@pytest.mark.parametrize("ending", ["txt", "md", "csv", "tex", "html"])
def test_a_table_is_rendered_as_it_was(ending):
    """Made anew with LOOPSCOPE_GOLDEN=1 in the environment."""
    path, text = GOLDEN / f"table.{ending}", rendered(NASTY)[ending]
    if os.environ.get("LOOPSCOPE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text("utf-8")


def test_csv_keeps_every_cell(tmp_path):
    assert list(csv.reader(io.StringIO(NASTY.csv()))) == [NASTY.header, *NASTY.cells]


def test_every_rendering_holds_the_same_cells():
    table = Table("t", ["x", *columns(".3f", "y")], [["one", 1.0], ["two", None]], absent="not measured")
    for text in rendered(table).values():
        assert "1.000" in text and "not measured" in text


def test_columns_can_be_left_out():
    table = NASTY.without("a|b", "ΔCE", "‖h‖", "over seeds")
    assert table.header == ["<b>PPL</b>", "evidence"] and table.cells[1] == ["–", "=1+1 [bold]text[/bold] :smile:"]
    assert table.note == NASTY.note


def test_columns_in_which_nothing_was_measured_can_be_left_out():
    assert Table("t", ["x", "y", "z"], [["a", None, None], ["b", 1, None]]).measured().header == ["x", "y"]
    assert Table("t", ["x", "y"], []).measured().header == ["x", "y"], "of no rows nothing is known"


def test_a_row_of_another_length_is_our_own_mistake():
    with pytest.raises(ValueError):
        _ = Table("t", ["x", "y"], [["one"]]).cells


def test_latex_takes_nothing_for_a_command():
    assert escape_latex("plain text, 12") == "plain text, 12"
    assert escape_latex("50 % of a_b \\x") == r"50 \% of a\_b \textbackslash{}x"


def test_files_are_markdown_csv_and_latex(tmp_path):
    NASTY.write(tmp_path / "tables")
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {"nasty.md", "nasty.csv", "nasty.tex"}
