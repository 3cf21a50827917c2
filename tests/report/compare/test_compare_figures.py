"""The figures of docs/compare.md are those that benchmarks/compare_statistics.py printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRINTED = (ROOT / "benchmarks" / "results" / "compare_statistics.txt").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| ((?:recorded|another recording|the same|synthetic).*) \| ([\d,]+) \| ([\d.]+) % \| ([\d.]+) % \|$",
    PAGE,
    re.M,
)


PRINTED_AS = [
    ("H200, transformer", "1 run each"),
    ("H200, transformer", "1 run each"),
    ("H200, convolutions", "1 run each"),
    ("CPU alone, recorded", "4 in turn"),
    ("CPU alone, recorded", "4 in turn"),
    ("CPU alone, recorded", "4, then 4"),
    ("CPU alone, recorded", "1 run each"),
    ("CPU, recorded, calm", "1 run each"),
    ("CPU, recorded, busy", "1 run each"),
    ("H200, resampled, spread < 5 %", "1 run each"),
    ("H200, resampled, ≥ 5 %", "1 run each"),
    ("synthetic, AR(1), 3 %", "1 run each"),
    ("synthetic, AR(1), runs ±0.7 %", "1 run each"),
    ("synthetic, spikes", "1 run each"),
    ("synthetic, drift, 1 % a run", "1 run each"),
]
"""Noise and design of the page's rows, as the script names them."""


@pytest.mark.parametrize(
    ("row", "printed_as"), list(zip(ROWS, PRINTED_AS, strict=True)), ids=lambda of: " ".join(of)
)
def test_every_row_was_printed(row: tuple[str, str, str, str], printed_as: tuple[str, str]) -> None:
    _, steps, false_alarms, found = row
    noise, design = map(re.escape, printed_as)
    figures = rf"{steps} +[\d,]+ +{re.escape(false_alarms)}% +{re.escape(found)}% "
    assert re.search(rf"^{noise}(?: \(\d+(?: runs)?\))? +{design} +{figures}", PRINTED, re.M)


def test_rows_marked_ok_keep_both_promises() -> None:
    marked = re.findall(r"([\d.]+)% +([\d.]+)%  ok$", PRINTED, re.M)
    assert len(marked) >= 13
    assert all(float(false_alarms) <= 5 and float(found) >= 95 for false_alarms, found in marked)
    assert "MISSED" not in PRINTED
