"""The ranks of a job in its report, from however many of their files are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from markup import bare

from truemfu.monitor.ranks.rank_file import file_name
from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.report.run.load import load_run
from truemfu.report.run.page import write_run_page
from truemfu.report.run.ranks import rank_lines


def row(rank: int, number: int, at_s: float, gpu: str | None = None, **values: Any) -> RankRow:
    known = {"world_size": 2, "host": "node", "device": gpu or f"GPU-{rank}", "step_time_s": 0.5, "steps": 10}
    return RankRow(rank=rank, number=number, at_s=at_s, **(known | values))


def test_a_device_is_one_line_though_its_rank_changes() -> None:
    rows = [
        row(0, 1, 1.0, "GPU-a"),
        row(1, 1, 1.0, "GPU-b", step_time_s=0.7, data_wait_s=0.2, memory_bytes=2**30),
        row(1, 1, 50.0, "GPU-a", restart=1, step_time_s=0.9, steps=30),
        row(0, 1, 50.0, "GPU-b", restart=1, is_last=True, memory_bytes=2**31),
    ]
    ((_, a),) = rank_lines([rows[0], rows[2]])
    ((rank, b),) = rank_lines([rows[1], rows[3]])
    assert rank == 0
    assert (a.device, a.ranks, a.attempts, a.steps, a.mean_step_s) == (
        "GPU-a",
        "0, 1",
        2,
        40,
        pytest.approx((10 * 0.5 + 30 * 0.9) / 40),
    )
    assert a.last_seen == "1970-01-01 00:00:50 UTC, no last row"
    assert (b.device, b.ranks, b.data_wait_s, b.memory_bytes) == ("GPU-b", "1, 0", pytest.approx(0.1), 2**31)
    assert b.last_seen == "1970-01-01 00:00:50 UTC"


def test_ranks_that_share_a_device_have_lines_of_their_own() -> None:
    rows = [row(rank, number, float(number), "GPU-a") for number in (1, 2) for rank in (0, 1)]
    assert [line.ranks for _, line in rank_lines(rows)] == ["0", "1"]


def test_a_device_whose_rank_changed_is_not_shared() -> None:
    """A job that comes back is restart 0 again."""
    rows = [
        row(0, 1, 1.0, "GPU-a"),
        row(0, 2, 2.0, "GPU-a"),
        row(1, 1, 60.0, "GPU-a"),
        row(0, 1, 90.0, "GPU-a"),
    ]
    ((_, line),) = rank_lines(rows)
    assert (line.ranks, line.attempts) == ("0, 1", 3)


def test_the_page_shows_ranks_and_what_could_not_be_read(run_folder: Path, tmp_path: Path) -> None:
    folder = run_folder / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        lines = [msgspec.json.encode(row(rank, number, 10.0 * number)) for number in (1, 2)]
        (folder / file_name("node", f"GPU-{rank}")).write_bytes(b"\n".join([*lines, b'{"rank":']))
    run = load_run(run_folder)
    assert len(run.ranks.lines) == 2
    page = bare(write_run_page(tmp_path / "page.html", run).read_text())
    assert "<h2>Ranks</h2>" in page
    assert page.count("<td>node</td>") == 2
    assert "Rows of a rank are missing: node-GPU-0.jsonl: 1 lines cannot be read." in page


def test_a_single_process_has_no_such_section(run_folder: Path, tmp_path: Path) -> None:
    assert "<h2>Ranks</h2>" not in bare(
        write_run_page(tmp_path / "page.html", load_run(run_folder)).read_text()
    )


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        ("node-1", "GPU-ab", "node-1-GPU-ab.jsonl"),
        ("node", "node:cpu:3", "node-cpu-3.jsonl"),
        ("../../etc", "x/y\0", "etc-x-y.jsonl"),
        ("", "", "unknown-unknown.jsonl"),
    ],
)
def test_file_names_stay_in_the_folder(host: str, device: str, expected: str) -> None:
    assert file_name(host, device) == expected
