"""How often the modules are looked through for changes: as often as that costs little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from training_clock import TrainingClock

from truemfu.monitor.step_flops import model_states
from truemfu.monitor.step_flops.model_states import ModelStates
from truemfu.monitor.step_flops.plan import ObservationPlan

STEPS = 20_000


def checks_of(seconds: float, monkeypatch: pytest.MonkeyPatch, steps: int = STEPS) -> ModelStates:
    """The states after so many steps, where a look through the modules takes so long."""
    clock = TrainingClock()
    clock.install(monkeypatch)
    look = model_states.fingerprint

    def slow(models: Any) -> Any:
        clock.sleep(seconds)
        return look(models)

    monkeypatch.setattr(model_states, "fingerprint", slow)
    hooks: Any = SimpleNamespace(models=SimpleNamespace(roots=[nn.Linear(2, 2)]))
    states = ModelStates(hooks, ObservationPlan(0, 0.0))
    for step in range(steps):
        if step >= states.check_at:
            states.check(step)
    return states


@pytest.mark.parametrize("seconds", [20e-6, 300e-6, 4e-3, 0.05])
def test_checks_cost_ten_microseconds_a_step_whatever_the_size_of_the_model(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = checks_of(seconds, monkeypatch)
    assert states.check_s <= STEPS * 10e-6 + 3 * seconds
    assert states.check_s >= 0.5 * STEPS * 10e-6


def test_a_second_check_follows_soon_however_slow_the_first_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    states = checks_of(0.05, monkeypatch, steps=11)
    assert states.check_s == pytest.approx(2 * 0.05, rel=0.01)
