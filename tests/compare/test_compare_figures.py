"""The figures of docs/compare.md are those that benchmarks/compare_statistics.py printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRINTED = (ROOT / "benchmarks" / "results" / "compare_statistics.txt").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| ((?:recorded|another recording|the same|synthetic).*) \| ([\d,]+) \| ([\d.]+) % \| ([\d.]+) % \|$",
    PAGE,
    re.M,
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_was_printed(row: tuple[str, str, str, str]) -> None:
    _, steps, false_alarms, found = row
    assert re.search(rf" {steps} +[\d,]+ +{re.escape(false_alarms)}% +{re.escape(found)}%", PRINTED)


def test_the_table_has_rows() -> None:
    assert len(ROWS) == 14


def test_rows_marked_ok_keep_both_promises() -> None:
    marked = re.findall(r"([\d.]+)% +([\d.]+)%  ok$", PRINTED, re.M)
    assert len(marked) >= 13
    assert all(float(false_alarms) <= 5 and float(found) >= 95 for false_alarms, found in marked)
    assert "MISSED" not in PRINTED
