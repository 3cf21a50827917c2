"""The page is one file that needs nothing else, and says what it was given."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from markup import SCRIPT, bare

from truemfu.report.drawing.html import LONGEST_TEXT, write_template
from truemfu.report.drawing.tables import Column, Table, plain
from truemfu.text import printable


def page(tmp_path: Path, sentence: str = "", table: Table | None = None, **values: Any) -> str:
    """One of our pages, a comparison, with these values."""
    given = {"title": "A <title>", "lead": "Lead.", "verdict": [], "chart": None, "remarks": [], **values}
    tables = [] if table is None else [replace(table, sentence=sentence)]
    path = write_template(tmp_path / "new" / "page.html", "compare_page.html.jinja", tables=tables, **given)
    return path.read_text(encoding="utf-8")


def table_of(title: str, columns: list[str], *rows: list[str]) -> Table:
    return Table(
        title=title,
        columns=[Column(label=label) for label in columns],
        rows=[[plain(cell) for cell in row] for row in rows],
    )


def test_text_is_escaped_and_every_cell_is_there(tmp_path: Path) -> None:
    table = table_of("Heading", ["x", "y"], ["a < b", "1"], ["c", "2"])
    text = bare(page(tmp_path, "One.", table))
    assert "<title>A &lt;title&gt;</title>" in text
    for piece in ("<h2>Heading</h2>", "<p>One.</p>", "<th>y</th>", "<td>a &lt; b</td>", "<td>2</td>"):
        assert piece in text


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert not any(sign in text for sign in ("http:", "https:", "src=", "<link", "@import", "url("))
    assert text.count("<script") == 1
    assert "<table" not in bare(text)


def test_a_browser_may_apply_styles_and_run_the_pages_own_script_only(tmp_path: Path) -> None:
    text = page(tmp_path)
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert policy
    assert policy.start() < text.index("<style>")
    script = SCRIPT.search(text)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy[1] == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


def test_long_texts_are_cut_and_their_length_is_said(tmp_path: Path) -> None:
    long = "<" * 50_000
    text = page(tmp_path, long, table_of("t", [long], [long]), verdict=[long], remarks=[long])
    assert len(text) < 7 * 8 * LONGEST_TEXT + 40_000
    # a column has its name twice: on its button, and for the copied table
    assert text.count("(50,000 characters)") == 6


def test_control_characters_are_shown(tmp_path: Path) -> None:
    hostile = "a\x1b]0;t\x07\x9b\u202eb"
    text = page(tmp_path, hostile, table_of("t", ["c"], [hostile]), verdict=[hostile], remarks=[hostile])
    assert text.count("a\\u001b]0;t\\u0007\\u009b\\u202eb") == 4
    assert printable(text) == text
