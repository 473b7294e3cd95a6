"""A table: values in columns, rendered to a terminal, Markdown, CSV, LaTeX and HTML, each time the same text."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from loopscope.files import write_atomically
from loopscope.show.numbers import ABSENT

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Column:
    """What a column is called, and how its values are printed."""

    name: str
    form: str | Callable[[Any], str] = ""
    """A format specification (".2f", ","), or a function. A text among its values stands as it is."""
    align: str = ""
    """left or right, on a terminal; without it numbers, which have a form, stand right and texts left."""

    def text(self, value: object, absent: str) -> str:
        """A value as it is printed."""
        if value is None:
            return absent
        if isinstance(value, str):
            return value
        return self.form(value) if callable(self.form) else format(value, self.form)

    @property
    def is_right(self) -> bool:
        """Whether it stands right."""
        return self.align == "right" or (not self.align and bool(self.form))


def columns(form: str | Callable[[Any], str], *names: str) -> list[Column]:
    """Columns whose values are printed alike."""
    return [Column(name, form) for name in names]


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its name."""

    title: str
    columns: Sequence[Column | str]
    """A name alone is a column of texts."""
    rows: Sequence[Sequence[object]]
    """Values: texts, numbers, None for what was not measured, or whatever the form of the column prints."""
    note: str = ""
    name: str = ""
    """Of its files."""
    absent: str = ABSENT
    """How None is printed."""
    parts: Sequence[int] = ()
    """Rows before which a terminal draws a line."""

    @property
    def header(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self._columns]

    @property
    def cells(self) -> list[list[str]]:
        """Every row as it is printed."""
        made = self._columns
        return [[column.text(value, self.absent) for column, value in zip(made, row, strict=True)] for row in self.rows]

    @property
    def _columns(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    def without(self, *names: str) -> Table:
        """The same without the columns of these names."""
        kept = [place for place, name in enumerate(self.header) if name not in names]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)

    def measured(self) -> Table:
        """The same without the columns in which nothing was measured."""
        by_column = zip(self.header, zip(*self.rows, strict=True), strict=False)
        return self.without(*(name for name, values in by_column if all(value is None for value in values)))

    def terminal(self, *, lines: bool = False) -> RichTable:
        """For a terminal; `lines` between rows where cells are long. Nothing is cut: what is too long is folded."""
        from rich.table import Table as RichTable

        made = RichTable(title=self.title or None, title_justify="left", show_lines=lines)
        made.caption, made.caption_justify = self.note or None, "left"
        for column in self._columns:
            made.add_column(column.name, justify="right" if column.is_right else "left", overflow="fold")
        for place, row in enumerate(self.cells):
            if place in self.parts:
                made.add_section()
            made.add_row(*row)
        return made

    def markdown(self, *, heading: bool = True) -> str:
        """With a heading, unless it has one where it goes, and the note below."""
        lines = [_markdown_row(self.header), "|" + "---|" * len(self.columns), *map(_markdown_row, self.cells)]
        title = f"## {self.title}\n\n" if heading else ""
        return title + "\n".join(lines) + (f"\n\n{self.note}\n" if self.note else "\n")

    def csv(self) -> str:
        """Header and rows."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.cells])
        return text.getvalue()

    def latex(self) -> str:
        """A table environment for booktabs; everything that LaTeX would take for a command is escaped."""
        header, *rows = (" & ".join(map(escape_latex, row)) + r" \\" for row in (self.header, *self.cells))
        body = "\n".join([r"\toprule", header, r"\midrule", *rows, r"\bottomrule"])
        caption = escape_latex(" ".join(filter(None, (f"{self.title}.", self.note))))
        return (
            f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n"
            f"\\begin{{tabular}}{{{'l' * len(self.columns)}}}\n{body}\n\\end{{tabular}}\n\\end{{table}}\n"
        )

    def html(self, kind: str = "numbers") -> Markup:
        """For a page, in a frame that scrolls; `kind` is a class of its style sheet. All texts are escaped."""
        title, header = escape(self.title), [escape(name) for name in self.header]
        heads = "".join(f'<th scope="col">{name}</th>' for name in header)
        rows = [
            f'<tr><th scope="row">{escape(first)}</th>'
            + "".join(f'<td data-label="{n}">{escape(cell)}</td>' for n, cell in zip(header[1:], rest, strict=True))
            for first, *rest in self.cells
        ]
        return Markup(
            f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">\n<table class="{kind}">\n'
            f"<caption>{title}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
            + "\n".join(rows)
            + "\n</tbody>\n</table>\n</div>"
        )

    def write(self, folder: Path) -> None:
        """NAME.md, NAME.csv and NAME.tex."""
        folder.mkdir(parents=True, exist_ok=True)
        for ending, text in (("md", self.markdown()), ("csv", self.csv()), ("tex", self.latex())):
            write_atomically(folder / f"{self.name}.{ending}", text)


def escape_markdown(text: str) -> str:
    """Text in one line of Markdown: what comes from a file opens neither a cell nor a tag of its own."""
    return " ".join(text.splitlines()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(map(escape_markdown, cells)) + " |"


_LATEX: dict[str, str] = {sign: f"\\{sign}" for sign in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\n": " "}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "–": "--", "…": r"\ldots{}", "ã": r"\~{a}"}
_LATEX |= {
    sign: f"${command}$"
    for sign, command in {
        **dict(zip("‖−±×·≥≤√", (r"\|", "-", r"\pm", r"\times", r"\cdot", r"\geq", r"\leq", r"\surd"), strict=True)),
        **dict(zip("Δ∇⟨⟩α⊥", (r"\Delta", r"\nabla", r"\langle", r"\rangle", r"\alpha", r"\perp"), strict=True)),
        **dict(zip("Σλ²", (r"\Sigma", r"\lambda", "^2"), strict=True)),
    }.items()
}


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(sign, sign) for sign in text)
