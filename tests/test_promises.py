"""Every test that docs/promises.md names is there, and its table is the one the suite printed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_promise_names_a_test_that_is_there() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    promises = [row for row in rows if row != "| promise | test |"]
    assert len(promises) == len(NAMED) > 20
    for file, name in NAMED:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_the_table_is_the_one_that_the_suite_printed() -> None:
    printed = (ROOT / "benchmarks" / "results" / "faults.txt").read_text(encoding="utf-8")
    quoted = [line.removeprefix("    ") for line in PAGE.splitlines() if line.startswith("    ")]
    assert "\n".join(quoted).split() == printed.split()
    tried, survived, _ = re.findall(r"[\d,]+", printed.splitlines()[-1])
    assert tried == survived
    assert int(tried.replace(",", "")) >= 1000
