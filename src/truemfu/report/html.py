"""One self-contained page: headings, sentences and tables, readable in light and dark, no outside asset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, sentences under it, and a table whose first column is text and whose others are numbers.

    `bars`, where given, are fractions between 0 and 1, drawn behind the last cell of each row. `log` is shown
    line by line as it is.
    """

    heading: str
    sentences: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    bars: Sequence[float] | None = None
    log: Sequence[str] = ()


def write_page(path: Path, *, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write the page to `path` (its folder is made) and return where it lies."""
    environment = Environment(loader=PackageLoader("truemfu.report", "."), autoescape=True, trim_blocks=True)
    page = environment.get_template("page.html.jinja").render(title=title, lead=lead, sections=sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path.resolve()
