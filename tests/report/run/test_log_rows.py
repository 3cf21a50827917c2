"""A log in columns has the same rows, whatever its size and wherever its blocks end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from truemfu.report.run import log_rows
from truemfu.report.run.log_rows import LogRow, LogRows, read_log

ROWS = [
    {"global_step": step, "training/loss": 1 / (1 + step), "perf/method": "closed form"}
    | ({"perf/checkpoint_time": 2.0, "perf/forwards_between_steps": 3} if step % 7 == 0 else {})
    | ({"training/loss": None, "non_finite": {"training/loss": "nan"}} if step == 11 else {})
    for step in range(1, 60)
]


@pytest.mark.parametrize("block_bytes", [100, 1000, 10**6])
@pytest.mark.parametrize("between", [",\n", ", "])
def test_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, between: str
) -> None:
    monkeypatch.setattr(log_rows, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "log.json"
    path.write_text("[\n" + between.join(map(json.dumps, ROWS)) + "\n]\n")
    log = read_log(path)
    assert (log.is_whole, log.unread, log.repeated) == (True, 0, 0)
    assert [row.global_step for row in log.rows] == list(range(1, 60))
    assert log.rows[6] == LogRow(
        global_step=7, loss=1 / 8, method="closed form", checkpoint_s=2.0, forwards_between_steps=3
    )
    assert log.rows[-1] == log.rows[58]
    assert math.isnan(log.rows.column("loss")[10])
    assert log.rows[10].non_finite == {"training/loss": "nan"}
    assert not log.rows.has("mfu")
    assert all(map(math.isnan, log.rows.column("mfu")))


def test_damage_costs_the_rows_it_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rows, "_BLOCK_BYTES", 500)
    lines = [json.dumps(row).encode() for row in ROWS]
    lines[20] = lines[20][:30] + b"\xff\xfe\0"
    lines[40] = lines[40].replace(b'"global_step": 41', b'"global_step": %d' % 10**30)
    path = tmp_path / "log.json"
    path.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")
    log = read_log(path)
    assert {row.global_step for row in log.rows} == set(range(1, 60)) - {21, 41}
    assert (log.is_whole, log.is_cut_off, log.unread) == (False, False, 2)


def test_rows_are_by_step_and_the_last_of_a_step_counts() -> None:
    rows = LogRows([LogRow(global_step=2, loss=1.0), LogRow(global_step=1), LogRow(global_step=2, mfu=0.5)])
    assert list(rows) == [LogRow(global_step=1), LogRow(global_step=2, mfu=0.5)]
