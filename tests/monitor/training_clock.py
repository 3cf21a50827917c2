"""The time of the training thread, which passes where a test says so, however fast the machine is."""

from __future__ import annotations

import pytest

import truemfu.monitor.monitor as monitor_module
from truemfu.monitor import live_run, step_recorder
from truemfu.monitor.step_flops import model_states, watch


class TrainingClock:
    """A microsecond passes with each look at it, and more only in `sleep`."""

    def __init__(self) -> None:
        self._now_s = 100.0

    def __call__(self) -> float:
        self.sleep(1e-6)
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is the clock of the monitors that are made from now on."""
        for module in (monitor_module, live_run, step_recorder, watch, model_states):
            monkeypatch.setattr(module, "_now_s", self)
