"""What is logged every so many steps is logged every so many seconds too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import TrainingMonitor
from truemfu.monitor import live_run
from truemfu.monitor import monitor as monitor_module
from truemfu.monitor.rows.frequency import DETAILS_S, StepsOrSeconds
from truemfu.monitor.step_note import StepPosition


class Kept:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: dict[int, Mapping[str, Any]] = {}

    def start(self, run: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.rows[step] = metrics

    def flush(self) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


def detailed_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, step_s: float, steps: int, **settings: Any
) -> list[int]:
    """The steps with an MFU in a tracker, of a run whose steps take so long by the monitor's clock."""
    now = SimpleNamespace(s=1000.0)
    for module in (monitor_module, live_run):
        monkeypatch.setattr(module, "_now_s", lambda: now.s)
    model, kept = nn.Linear(8, 8), Kept()
    config = {"monitoring": {"peak_tflops": 1.0, **settings}}
    monitor = TrainingMonitor(folder, config, model=model, trackers=[kept])
    for step in range(1, steps + 1):
        loss = model(torch.ones(2, 8)).sum()
        now.s += step_s
        loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert list(kept.rows) == list(range(1, steps + 1))
    return [step for step, row in kept.rows.items() if "perf/mfu" in row]


def test_with_steps_of_twenty_seconds_the_first_mfu_comes_with_the_first_step_after_thirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert detailed_steps(tmp_path, monkeypatch, step_s=20.0, steps=7) == [2, 4, 6]


def test_with_fast_steps_it_comes_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = detailed_steps(tmp_path, monkeypatch, step_s=0.1, steps=20, detailed_log_freq=8)
    assert found == [8, 16]


def test_seconds_are_counted_from_the_last_time_it_was_due() -> None:
    due = StepsOrSeconds(10, DETAILS_S, began_s=100.0)
    ends_s = {9: 120.0, 10: 121.0, 11: 140.0, 12: 151.0, 13: 152.0, 20: 170.0, 21: 199.9, 22: 200.0}
    assert [step for step, end_s in ends_s.items() if due.is_due(StepPosition(step, 1), end_s)] == [
        10,
        12,
        20,
        22,
    ]
