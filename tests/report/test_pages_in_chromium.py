"""Pages in a real Chromium: charts, hover, sort, filter, copy and switches work by pointer and by keyboard,
hostile text does nothing, nothing is requested, and axe finds no barrier."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from watched_training import hardware_block

from truemfu.records import CaseResult, Status
from truemfu.report.compare.compare import ComparedFigure, Comparison, Pair, Unmatched
from truemfu.report.compare.page import write_comparison_page
from truemfu.report.run.load import load_run
from truemfu.report.run.page import write_run_page
from truemfu.report.run.side_by_side import write_runs_page
from truemfu.report.sweep.load import load_sweep
from truemfu.report.sweep.page import write_sweep_page
from truemfu.report.sweep.summary import summarize

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

WIDTHS = (1280, 390)
HOSTILE = (
    "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">",
    "\"'><svg onload=document.title='ran'>",
    "\x1b[31mred\x1b]0;t\x07",
    "\u202egnp.exe",
    "=cmd|'/c calc'!A1",
    "m" * 1_000_000,
    "{{ 7 * 7 }}{% raw %}",
    "`</code>` **bold** [link](javascript:x) |",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        started = Browser(tmp_path_factory.mktemp("profile"))
    except (OSError, AssertionError) as error:
        pytest.skip(f"Chromium does not start here: {error}")
    yield started
    started.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker: a package of npm, from TRUEMFU_AXE (its axe.js) or fetched for the test."""
    if given := os.environ.get("TRUEMFU_AXE"):
        return Path(given).read_text("utf-8")
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("axe is not checked: there is no npm here, and TRUEMFU_AXE is not set")
    fetched = subprocess.run(
        ["npm", "pack", "--silent", "axe-core@4"], cwd=folder, capture_output=True, timeout=120, check=False
    )
    packages = list(folder.glob("axe-core-*.tgz"))
    if fetched.returncode or not packages:
        pytest.skip("axe is not checked: npm could not fetch axe-core")
    with tarfile.open(packages[0]) as package:
        member = package.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@pytest.fixture
def sweep_page(matrix: list[CaseResult], write_sweep: Callable[..., Path], tmp_path: Path) -> Path:
    return write_sweep_page(tmp_path / "sweep.html", summarize(load_sweep(write_sweep(matrix))))


@pytest.fixture
def run_page(run_folder: Path, change_run: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    change_run(lambda run: run["summary"].update(hardware=hardware_block()))
    path = run_folder / "training_log.json"
    rows = json.loads(path.read_text())
    rows[9] |= {"perf/checkpoint_time": 1.5}
    rows[14] |= {"perf/step_time": 9.0, "perf/data_wait": 8.9}
    path.write_text(json.dumps(rows))
    return write_run_page(tmp_path / "run.html", load_run(run_folder))


@pytest.fixture
def runs_page(run_folder: Path, tmp_path: Path) -> Path:
    other = Path(shutil.copytree(run_folder, tmp_path / "other"))
    return write_runs_page(tmp_path / "runs.html", [load_run(run_folder), load_run(other)])


def pair(name: str, ratio: float, low: float, high: float, verdict: str, *, is_beyond: bool = False) -> Pair:
    seconds = ComparedFigure(name="step_time_median_s", a=0.1, b=0.1 * ratio, ratio=ratio, low=low, high=high)
    return Pair(
        name=name, runs_a=1, runs_b=1, steps_a=100, steps_b=100, independent_steps_a=90.0,
        independent_steps_b=80.0, verdict=verdict, is_beyond_limit=is_beyond,
        smallest_shown=0.05, is_unsure=False, figures=[seconds],
    )  # fmt: skip


@pytest.fixture
def compare_page(tmp_path: Path) -> Path:
    """Two sweeps: an experiment that is slower beyond the limit, one that is faster, and hostile names."""
    unlike = [
        pair("slow", 1.2, 1.1, 1.3, "slower", is_beyond=True),
        pair("fast", 0.5, 0.4, 0.6, "faster"),
        *(pair(name, 1.0, 0.9, 1.12, "no difference shown") for name in HOSTILE),
    ]
    missing = Unmatched(name="gone", a=HOSTILE[0], b="not in this sweep", is_failure=False)
    found = Comparison(
        a=HOSTILE[0], b=HOSTILE[1], kind="sweep", confidence=0.95, max_regression=0.05, run_to_run=0.01,
        pairs=unlike, unmatched=[missing], notes=list(HOSTILE), is_within_limit=False,
    )  # fmt: skip
    return write_comparison_page(tmp_path / "comparison.html", found)


@pytest.fixture(params=["sweep_page", "run_page", "runs_page"])
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def texts(browser: Browser, selector: str) -> list[str]:
    shown = f"[...document.querySelectorAll({selector!r})].filter((each) => each.checkVisibility())"
    found: list[str] = browser.run(f"{shown}.map((each) => each.textContent)")
    return found


def test_charts_are_drawn_nothing_sticks_out_and_nothing_is_requested(browser: Browser, page: Path) -> None:
    for width in WIDTHS:
        browser.open(page, width)
        lengths = browser.run(
            "[...document.querySelectorAll('.stroke')].map((each) => each.getTotalLength())"
        )
        assert len(lengths) >= 3
        assert all(length > 0 for length in lengths)
        assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert browser.problems == []
        assert browser.requests == [page.as_uri()]


def test_on_a_phone_what_two_runs_were_is_read_without_scrolling(browser: Browser, runs_page: Path) -> None:
    browser.open(runs_page, 390)
    edges = browser.run(
        "[...document.querySelectorAll('#facts td:last-child, #figures td:last-child, #worst td:last-child')]"
        ".map((cell) => cell.getBoundingClientRect().right)"
    )
    assert edges
    assert max(edges) <= 390
    assert texts(browser, ".across") == ["step"] * len(texts(browser, ".chart figcaption b"))


def test_a_comparison_draws_each_ratio_between_the_ends_of_its_interval(
    browser: Browser, compare_page: Path
) -> None:
    box = "getBoundingClientRect()"
    for width in WIDTHS:
        browser.open(compare_page, width)
        drawn = browser.run(
            "[...document.querySelectorAll('.ratios .step:not(.axis)')].map((row) => {"
            "const [equal, limit, reach, point] = ['.line', '.limit', '.reach', '.point'].map("
            f"(part) => row.querySelector(part).{box}); return [reach.left, point.left, reach.right,"
            " equal.left, limit.left, row.className]; })"
        )
        assert len(drawn) == 2 + len(HOSTILE)
        assert all(low < at < high and equal < limit for low, at, high, equal, limit, _ in drawn)
        (slow_low, _, _, equal, limit, slow), (_, _, fast_high, _, _, fast) = drawn[:2]
        assert fast_high < equal < limit < slow_low
        assert (slow, fast) == ("step beyond", "step faster")
        assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert browser.run("document.title") == "Comparison"
        assert browser.run("document.querySelectorAll('img, svg[onload], script').length") == 1
        assert browser.problems == []
        assert browser.requests == [compare_page.as_uri()]
    browser.run("document.querySelectorAll('#table1 th button')[2].click()")
    assert texts(browser, "#table1 tbody td:first-child")[0] == "fast"
    rows = list(csv.reader(io.StringIO(copied(browser, "table1", "csv"))))
    assert len(rows) == 3 + len(HOSTILE)
    assert not any(cell.lstrip().startswith(("=", "+", "@")) for row in rows for cell in row)


@pytest.mark.parametrize("page", ["sweep_page", "run_page", "runs_page", "compare_page"], indirect=True)
def test_axe_finds_no_barrier(browser: Browser, page: Path, axe: str) -> None:
    for width, is_dark in ((1280, False), (390, True)):
        browser.open(page, width, is_dark=is_dark)
        browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        browser.run(f"{axe}; undefined")
        found = browser.run(
            "axe.run().then((found) => found.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))"
        )
        assert found == []


def test_a_tip_follows_the_pointer_and_the_arrow_keys(browser: Browser, run_page: Path) -> None:
    browser.open(run_page)
    browser.move_to(".area", x=0.0)
    first = texts(browser, "#tip div")
    assert first[0] == "step1"
    assert first[1].startswith("loss")
    browser.move_to(".area", x=1.0)
    assert texts(browser, "#tip div")[0] == "step20"
    browser.move_to("h1")
    assert texts(browser, "#tip") == []
    browser.run("document.querySelector('.area').focus()")
    browser.press("End")
    browser.press("ArrowLeft")
    assert texts(browser, "#tip div")[0] == "step19"
    browser.press("Escape")
    assert texts(browser, "#tip") == []


def test_a_cell_of_the_heat_map_tells_about_its_experiment(browser: Browser, sweep_page: Path) -> None:
    browser.open(sweep_page)
    browser.move_to("td[data-row='0']")
    tip = texts(browser, "#tip div")
    assert tip[0] == "experimentStandardTrainer_bs4_seq512"
    assert tip[1] == "statusok"


def test_a_table_is_sorted_by_value_and_unknown_is_last(browser: Browser, sweep_page: Path) -> None:
    browser.open(sweep_page)
    names = "#experiments td:first-child"
    before = texts(browser, names)
    for direction in ("ascending", "descending"):
        browser.run("document.querySelectorAll('#experiments th button')[2].click()")
        assert browser.run("document.querySelectorAll('#experiments th')[2].ariaSort") == direction
        values = browser.run(
            "[...document.querySelectorAll('#experiments td:nth-child(3)')].map((e) => Number(e.dataset.v))"
        )
        known = [value for value in values if value is not None]  # NaN is null in JSON
        assert known == sorted(known, reverse=direction == "descending")
        assert texts(browser, names)[-1] == "DPSGDTrainer_bs8_seq512"  # out of memory
    assert sorted(texts(browser, names)) == sorted(before)


def test_a_filter_leaves_the_rows_with_all_words(browser: Browser, run_page: Path) -> None:
    browser.open(run_page)
    browser.run(
        "const box = document.querySelector('[data-tools=waterfall] input'); box.value = 'IDLE gpu';"
        "box.dispatchEvent(new Event('input'))"
    )
    assert texts(browser, "#waterfall td:first-child") == ["GPU idle"]
    assert texts(browser, "[data-tools=waterfall] output")[0].startswith("1 of ")


def copied(browser: Browser, table: str, form: str) -> str:
    browser.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.run(f"document.querySelector('[data-tools={table}] [data-copy={form}]').click()")
    found: str = browser.run(
        "new Promise((done) => setTimeout(done, 300)).then(() => navigator.clipboard.readText())"
    )
    return found


def test_a_table_is_copied_as_csv_and_markdown(browser: Browser, sweep_page: Path) -> None:
    browser.open(sweep_page)
    rows = list(csv.DictReader(io.StringIO(copied(browser, "experiments", "csv"))))
    assert len(rows) == 8
    assert rows[0]["experiment"] == "StandardTrainer_bs4_seq512"
    assert float(rows[0]["step (s)"]) == 0.036
    lines = copied(browser, "experiments", "markdown").splitlines()
    assert lines[1] == "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2].startswith("| StandardTrainer\\_bs4\\_seq512 | ok | 36.00 ms | 0.2 % |")


def test_switches_choose_the_view_and_the_series(browser: Browser, sweep_page: Path) -> None:
    browser.open(sweep_page)
    assert texts(browser, ".heat h3") == ["MFU"]
    browser.run("document.querySelectorAll('input[data-view]')[2].click()")
    assert texts(browser, ".heat h3") == ["Step time"]
    browser.run("document.querySelector('input[data-series=\"0\"]').click()")
    assert not any("StandardTrainer" in name for name in texts(browser, "#experiments td:first-child"))
    assert browser.run("getComputedStyle(document.querySelector('g[data-of=\"0\"]')).display") == "none"
    assert not any("StandardTrainer" in name for name in texts(browser, ".heat th"))


def test_hostile_text_is_only_text(
    browser: Browser, make_result: Callable[..., CaseResult], write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    ok = make_result()
    failed = [
        make_result(
            batch_size=8 + at, end=Status.ERROR, message=text, log_tail=[text], notes=[text], fits=text
        )
        for at, text in enumerate(HOSTILE)
    ]
    page = write_sweep_page(tmp_path / "page.html", summarize(load_sweep(write_sweep([ok, *failed]))))
    assert page.stat().st_size < 300_000
    browser.open(page)
    assert browser.run("document.title") == "Profiling sweep"
    assert browser.run("document.querySelectorAll('img, svg[onload], script').length") == 1
    assert browser.requests == [page.as_uri()]
    assert browser.problems == []
    rows = list(csv.reader(io.StringIO(copied(browser, "failures", "csv"))))
    assert len(rows) == 1 + len(HOSTILE)
    assert not any(cell.lstrip().startswith(("=", "+", "@")) for row in rows for cell in row)


def test_a_cell_that_begins_like_a_formula_is_copied_as_text(
    browser: Browser, run_folder: Path, change_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    change_run(
        lambda run: run.update(device="=cmd|'/c calc'!A1", git_commit="@SUM(1)", mode="-2+3", python="+1")
    )
    other = Path(shutil.copytree(run_folder, tmp_path / "other"))
    browser.open(write_runs_page(tmp_path / "runs.html", [load_run(run_folder), load_run(other)]))
    cells = [cell for row in csv.reader(io.StringIO(copied(browser, "facts", "csv"))) for cell in row]
    assert {"'=cmd|'/c calc'!A1", "'@SUM(1)", "'-2+3"} <= set(cells)
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Browser, sweep_page: Path) -> None:
    attack = "<script>document.title = 'ran'</script><img src='x' onerror=\"document.title = 'ran'\">"
    text = sweep_page.read_text("utf-8")
    sweep_page.write_text(text.replace("</body>", f"{attack}</body>"), encoding="utf-8")
    browser.open(sweep_page)
    assert browser.run("document.title") == "Profiling sweep"
    assert any("Content Security Policy" in problem for problem in browser.problems)
