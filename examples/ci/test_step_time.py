"""A gate on step time as a test: training must not become slower than a recorded run on the same machine.

The first call records `baseline_run` beside this file, or where STEP_TIME_BASELINE points; remove it to
record a new one. A baseline of another device, model or batch cannot be compared, which fails too.
One run each finds a slow-down of 5 % on a GPU with steady steps. On a CPU equal runs differ by percents: use
several runs of each, in turn, as performance.yml does.

    pytest examples/ci/test_step_time.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from truemfu import TrainingMonitor

BASELINE = Path(os.environ.get("STEP_TIME_BASELINE", Path(__file__).parent / "baseline_run"))
STEPS = 200
LIMIT_PERCENT = 5


def train(folder: Path) -> None:
    """Your training, for some hundred steps."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with TrainingMonitor(folder, model=model) as monitor:
        for step in range(1, STEPS + 1):
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, 0.0, loss, 0.0, 1e-3)


def test_a_step_takes_no_longer_than_before(tmp_path: Path) -> None:
    train(tmp_path / "run")
    if not BASELINE.exists():
        shutil.copytree(tmp_path / "run", BASELINE)
        pytest.skip(f"recorded {BASELINE}")
    command = [sys.executable, "-m", "truemfu", "compare", str(BASELINE), str(tmp_path / "run")]
    command += ["--max-regression", str(LIMIT_PERCENT)]
    compared = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stdout + compared.stderr
