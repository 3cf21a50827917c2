"""The example trains with the sampler and the accountant of Opacus."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


def test_the_example_learns_and_states_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "private_training.py"
    accuracy, epsilon = runpy.run_path(str(example))["main"]()
    assert accuracy > 0.8
    assert epsilon == pytest.approx(5.15, abs=0.01)  # Opacus, for this noise, rate and number of steps
    assert f"ε = {epsilon:.2f} at δ = 1e-05\nerror of the private gradient" in capsys.readouterr().out
