"""The page is one file that needs nothing else, and says what it was given."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from markup import SCRIPT, bare

from truemfu.report.html import LONGEST_TEXT, Section, write_page
from truemfu.text import printable


def page(tmp_path: Path, *sections: Section) -> str:
    path = write_page(tmp_path / "new" / "page.html", title="A <title>", lead="Lead.", sections=sections)
    return path.read_text(encoding="utf-8")


def body(tmp_path: Path, *sections: Section) -> str:
    return bare(page(tmp_path, *sections))


def test_text_is_escaped_and_every_cell_is_there(tmp_path: Path) -> None:
    rows = [["a < b", "1"], ["c", "2"]]
    text = body(tmp_path, Section(heading="Heading", sentences=["One."], columns=["x", "y"], rows=rows))
    assert "<title>A &lt;title&gt;</title>" in text
    for piece in ("<h2>Heading</h2>", "<p>One.</p>", "<th>y</th>", "<td>a &lt; b</td>", "<td>2</td>"):
        assert piece in text


def test_bars_are_as_long_as_their_share(tmp_path: Path) -> None:
    text = page(tmp_path, Section(heading="h", columns=["x"], rows=[["1"], ["2"]], bars=[0.25, 0.5]))
    assert "--share: 25.0%" in text
    assert "--share: 50.0%" in text


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = page(tmp_path, Section(heading="h"))
    assert not any(sign in text for sign in ("http:", "https:", "src=", "<link", "@import", "url("))
    assert text.count("<script") == 1
    assert "<table" not in bare(text)


def test_a_log_keeps_its_lines_and_its_indentation(tmp_path: Path) -> None:
    text = page(tmp_path, Section(heading="h", log=["Traceback:", '  File "<string>"']))
    assert "Traceback:\n  File &#34;&lt;string&gt;&#34;\n</pre>" in text


def test_a_browser_may_apply_styles_and_run_the_pages_own_script_only(tmp_path: Path) -> None:
    text = page(tmp_path, Section(heading="h"))
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
    text = body(
        tmp_path,
        Section(heading=long, sentences=[long], columns=[long], rows=[[long]], log=["first", long, "last"]),
    )
    assert len(text) < 7 * 5 * LONGEST_TEXT + 12_000
    assert text.count("(50,000 characters)") == 6
    assert "\nlast\n</pre>" in text


def test_control_characters_are_shown(tmp_path: Path) -> None:
    hostile = "a\x1b]0;t\x07\x9b\u202eb"
    text = page(tmp_path, Section(heading=hostile, sentences=[hostile], rows=[[hostile]], log=[hostile]))
    assert text.count("a\\u001b]0;t\\u0007\\u009b\\u202eb") == 5
    assert printable(text) == text
