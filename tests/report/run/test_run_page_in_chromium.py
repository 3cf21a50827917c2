"""The page as a real browser lays it out: nothing sticks out at any width, bars are where they belong, a dark
screen has a dark page, and nothing is fetched."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watched_training import hardware_block

from truemfu.report.run.load import load_run
from truemfu.report.run.page import write_run_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

PHONE, DESK = 390, 1200
POLICY = "default-src 'none'"

# The page measures itself and tells the frame around it, which alone may be narrower than a window.
MEASURE = """<script>
onload = () => {
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.height]; };
  const texts = [...document.querySelectorAll('p, li, dt, dd, th, td, span, b, small')];
  parent.postMessage(JSON.stringify({
    width: document.documentElement.clientWidth,
    needed: document.documentElement.scrollWidth,
    tables: [...document.querySelectorAll('.wide:has(.said)')].map((e) => [e.clientWidth, e.scrollWidth]),
    smallest: Math.min(...texts.map((e) => parseFloat(getComputedStyle(e).fontSize))),
    bars: [...document.querySelector('.fall').querySelectorAll('.track i')].map(box),
    tracks: [...document.querySelector('.fall').querySelectorAll('.track')].map(box),
    plots: [...document.querySelectorAll('.plot svg')].map(box),
    strokes: [...document.querySelectorAll('.stroke')].map((e) => e.getTotalLength()),
    colours: getComputedStyle(document.body).backgroundColor,
    fetched: performance.getEntriesByType('resource').length,
  }), '*');
};
</script>"""
FRAME = """<!doctype html><body style="margin: 0"><iframe src="{page}" width="{width}" height="900"></iframe>
<pre></pre>
<script>onmessage = (told) => {{ document.querySelector('pre').textContent = told.data; }};</script>"""

Layout = dict[str, Any]


def chromium(tmp_path: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def layout(page: Path, tmp_path: Path, width: int, *arguments: str) -> Layout:
    """What the page measured of itself in a frame of this width."""
    measured = page.with_name("measured.html")
    # The page's policy allows no script: the one that measures is let in, the rest of the policy stays.
    text = page.read_text(encoding="utf-8").replace(POLICY, f"{POLICY}; script-src 'unsafe-inline'")
    assert f"{POLICY}; script-src" in text
    measured.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(page=measured.name, width=width))
    dom = chromium(tmp_path, "--dump-dom", "--virtual-time-budget=5000", *arguments, frame.as_uri())
    found = re.search(r"<pre>(.+?)</pre>", dom)
    assert found, dom[-2000:]
    told: Layout = json.loads(html.unescape(found[1]))
    return told


@pytest.fixture(scope="module", autouse=True)
def _starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some containers have a Chromium that does not start."""
    try:
        printed = chromium(tmp_path_factory.mktemp("profile"), "--dump-dom", "data:text/html,<p>starts</p>")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"Chromium does not start here: {type(error).__name__}")
    if "<p>starts</p>" not in printed:
        pytest.skip("Chromium does not start here: it printed no page")


@pytest.fixture
def page(run_folder: Path, change_run: Callable[..., dict[str, Any]]) -> Path:
    """A page with everything on it: counters, damage, warnings with words that cannot be broken."""
    long = "a/very/long/path/" * 12
    change_run(lambda run: run["summary"].update(hardware=hardware_block(), warnings=[long], lost=[long]))
    log = run_folder / "training_log.json"
    log.write_bytes(log.read_bytes()[:-200])
    return write_run_page(run_folder / "page.html", load_run(run_folder))


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_sticks_out_and_all_can_be_read(page: Path, tmp_path: Path, width: int) -> None:
    found = layout(page, tmp_path, width)
    assert found["width"] == pytest.approx(width, abs=20)
    assert found["needed"] <= found["width"]
    assert [needed <= shown for shown, needed in found["tables"]] == [True]
    assert found["smallest"] >= 11
    assert found["fetched"] == 0


def test_bars_are_stairs_from_the_peak_to_what_is_left(page: Path, tmp_path: Path) -> None:
    found = layout(page, tmp_path, DESK)
    (left, right, _), bars = found["tracks"][0], found["bars"]
    assert len(bars) == len(hardware_block()["waterfall"]["parts"]) + 1
    assert bars[0][:2] == pytest.approx([left, right], abs=1)
    level = right
    for begin, end, height in bars[1:]:
        assert height > 10
        assert level in (pytest.approx(begin, abs=1.5), pytest.approx(end, abs=1.5))  # a gain goes up
        level = begin if end == pytest.approx(level, abs=1.5) else end
    assert bars[-1][0] == pytest.approx(left, abs=1)
    assert (bars[-1][1] - left) / (right - left) == pytest.approx(0.38 * 0.9, abs=0.005)


def test_charts_are_drawn_as_wide_as_there_is_room(page: Path, tmp_path: Path) -> None:
    for width, least in ((PHONE, 250), (DESK, 900)):
        found = layout(page, tmp_path, width)
        assert len(found["plots"]) == 4
        assert all(right - left > least and height > 100 for left, right, height in found["plots"])
        assert all(length > 0 for length in found["strokes"])


def test_a_dark_screen_has_a_dark_page(page: Path, tmp_path: Path) -> None:
    dark = layout(page, tmp_path, DESK, "--blink-settings=preferredColorScheme=0")
    light = layout(page, tmp_path, DESK, "--blink-settings=preferredColorScheme=1")
    assert (dark["colours"], light["colours"]) == ("rgb(20, 24, 29)", "rgb(255, 255, 255)")


def test_it_prints_on_a_few_sheets(page: Path, tmp_path: Path) -> None:
    paper = tmp_path / "page.pdf"
    chromium(tmp_path, f"--print-to-pdf={paper}", page.as_uri())
    sheets = re.search(rb"/Type /Pages\n?.*?/Count (\d+)", paper.read_bytes(), re.DOTALL)
    assert sheets
    assert 2 <= int(sheets[1]) <= 7


def test_the_policy_of_the_page_stops_scripts_and_requests(page: Path, tmp_path: Path) -> None:
    attack = (
        "<p id='told'>quiet</p><img src='data:image/png;base64,x' onerror=\"told.textContent='ran'\">"
        "<script>document.getElementById('told').textContent = 'ran'</script>"
    )
    text = page.read_text(encoding="utf-8").replace("</body>", f"{attack}</body>")
    assert "id='told'" in text
    hostile = page.with_name("hostile.html")
    hostile.write_text(text)
    dom = chromium(tmp_path, "--dump-dom", "--virtual-time-budget=2000", hostile.as_uri())
    assert re.search(r'<p id="told">(.*?)</p>', dom)[1] == "quiet"  # type: ignore[index]
    hostile.write_text(text.replace(POLICY, "default-src *; script-src 'unsafe-inline'"))
    dom = chromium(tmp_path, "--dump-dom", "--virtual-time-budget=2000", hostile.as_uri())
    assert re.search(r'<p id="told">(.*?)</p>', dom)[1] == "ran"  # type: ignore[index]
