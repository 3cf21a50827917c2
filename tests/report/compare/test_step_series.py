"""The series of a log are those of the run's own medians, whatever happened to the file."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tracemalloc
from pathlib import Path

import pytest
import torch
from made_runs import PEAK, SAMPLES, TOKENS, noisy, row, write_log, write_run

from truemfu import TrainingMonitor
from truemfu.report.compare.step_series import StepSeries, series_of
from truemfu.report.run.load import load_run
from truemfu.report.run.log_rows import read_log


def read_series(path: Path) -> StepSeries:
    return series_of(read_log(path).rows)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run with an evaluation in it."""
    folder = tmp_path_factory.mktemp("monitored") / "run"
    model = torch.nn.Linear(8, 8)
    with TrainingMonitor(folder, {"monitoring": {"peak_tflops": 0.05}}, model=model) as monitor:
        for step in range(1, 41):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            monitor.log_step(step, 0.0, loss, 0.0, 0.1)
            if step == 20:
                with monitor.pause("evaluation"):
                    model(torch.ones(64, 8))
    return folder


def test_medians_are_those_of_the_monitor(monitored: Path) -> None:
    series, record = read_series(monitored / "training_log.json"), load_run(monitored).record
    assert record is not None
    assert record.summary is not None
    assert record.summary.warmup_steps
    assert len(series.step_times_s) == 40 - record.summary.warmup_steps
    assert statistics.median(series.step_times_s) == pytest.approx(record.summary.median_step_time_s)
    assert statistics.median(series.mfu) == pytest.approx(record.summary.median_mfu)
    assert statistics.median(series.samples_per_s) == pytest.approx(record.summary.median_samples_per_second)
    assert series.peak_flops_per_s == pytest.approx(0.05e12)


def test_steps_after_warm_up_and_their_sizes(tmp_path: Path) -> None:
    times = noisy(50)
    series = read_series(write_run(tmp_path, times) / "training_log.json")
    assert list(series.step_times_s) == times
    assert series.samples is not None
    assert series.tokens is not None
    assert (series.samples.median, series.tokens.median) == (pytest.approx(SAMPLES), pytest.approx(TOKENS))
    assert (series.peak_memory_bytes, series.peak_flops_per_s) == (4 << 30, pytest.approx(PEAK))
    assert series.steps_per_row == 1


def test_of_a_step_that_was_logged_again_the_last_row_counts(tmp_path: Path) -> None:
    rows = [row(step, 1.0) for step in range(1, 31)] + [row(step, 2.0) for step in range(21, 26)]
    series = read_series(write_log(tmp_path, rows))
    assert list(series.step_times_s) == [1.0] * 20 + [2.0] * 5 + [1.0] * 5


def test_unknown_and_impossible_times_are_left_out(tmp_path: Path) -> None:
    rows = [row(1, 1.0), {"global_step": 2}, row(3, 1.0) | {"perf/step_time": -1.0}]
    rows += [row(4, 1.0) | {"perf/step_time": None}, row(5, 3.0) | {"perf/mfu": None}]
    series = read_series(write_log(tmp_path, rows))
    assert list(series.step_times_s) == [1.0, 3.0]
    assert len(series.mfu) == 1


def test_rows_of_every_tenth_step(tmp_path: Path) -> None:
    series = read_series(write_log(tmp_path, [row(10 * number, 1.0) for number in range(1, 30)]))
    assert series.steps_per_row == 10


@pytest.mark.parametrize("lost_bytes", [1, 3, 60])
def test_a_log_that_was_cut_off_gives_its_whole_rows(tmp_path: Path, lost_bytes: int) -> None:
    path = write_log(tmp_path, [row(step, 1.0) for step in range(1, 31)])
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    log = read_log(path)
    lost = 1 if lost_bytes > 3 else 0
    assert (len(series_of(log.rows).step_times_s), log.unread) == (30 - lost, lost)


@pytest.mark.parametrize(
    ("damage", "unread"),
    [(b"\xff\xfe nonsense", 1), (b'{"global_step": "x"},', 1), (b"{" * 200_000, 1), (b"\0" * 999, 0)],
)
def test_a_damaged_line_costs_no_other(tmp_path: Path, damage: bytes, unread: int) -> None:
    path = write_log(tmp_path, [row(step, 1.0) for step in range(1, 31)])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:10], damage, *lines[10:]]))
    log = read_log(path)
    assert len(series_of(log.rows).step_times_s) == 30
    assert (log.is_damaged, log.unread) == (True, unread)


def test_rows_that_were_overwritten_are_known_to_be_missing(tmp_path: Path) -> None:
    path = write_log(tmp_path, [row(step, 1.0) for step in range(1, 31)])
    lines = path.read_bytes().split(b"\n")
    lines[9] = b"xxxxx" + lines[9][5:]
    lines[19] = b"\0" * len(lines[19])
    path.write_bytes(b"\n".join(lines))
    log = read_log(path)
    assert (len(series_of(log.rows).step_times_s), log.is_damaged) == (28, True)


def test_a_log_that_was_formatted_is_read_too(monitored: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(monitored, tmp_path / "run"))
    path = folder / "training_log.json"
    expected = list(read_series(path).step_times_s)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert list(read_series(path).step_times_s) == expected


def test_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "training_log.json")
    with pytest.raises(OSError, match="FIFO"):
        read_series(tmp_path / "training_log.json")


def test_memory_is_that_of_the_numbers(tmp_path: Path) -> None:
    """A further row of 600 bytes takes less than 200, so a million fit in a few hundred megabytes."""
    padding = {f"training/metric_{number}": 0.123456789 for number in range(16)}

    def peak(steps: int) -> int:
        path = write_log(tmp_path, [row(step, 1.0 + step % 7, **padding) for step in range(1, steps + 1)])
        assert path.stat().st_size > 600 * steps
        tracemalloc.start()
        try:
            assert len(read_series(path).step_times_s) == steps
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(25_000) - peak(10_000) < 200 * 15_000
