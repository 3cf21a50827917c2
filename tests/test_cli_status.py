"""`truemfu status`: how a run stands or ended, and the list of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import Run, caller

from truemfu.text import age

SCRIPT = """
import sys, torch
from torch import nn
from truemfu import TrainingMonitor
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = TrainingMonitor(sys.argv[1], model=model)
for step in range(1, 4):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.log_step(step, 0, loss, 1.0, 0.1)
{end}
"""


def train(folder: Path, end: str = "") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(end=end)
    return subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


@pytest.mark.long
def test_runs_here_are_listed_with_how_they_ended(run: Run, tmp_path: Path) -> None:
    assert train(tmp_path / "plain").returncode == 0
    assert train(tmp_path / "runs" / "crashed", "raise ValueError('no more data')").returncode == 1
    assert train(tmp_path / "runs" / "with", "with monitor: 1 / 0").returncode == 1
    train(tmp_path / "killed", "monitor.save_logs(); import os; os._exit(1)")
    states = {one["folder"]: one for one in json.loads(run("status", "--json").out)}
    assert {name: state["has_ended"] for name, state in states.items()} == {
        "plain": True,
        "runs/crashed": True,
        "runs/with": True,
        "killed": False,
    }
    assert states["plain"]["state"] == "ended"
    assert states["runs/crashed"]["state"] == "ended by ValueError: no more data, after step 3"
    assert states["runs/with"]["ended_by"] == "ZeroDivisionError: division by zero"
    assert states["killed"]["state"].startswith("running, or killed: last write ")
    lines = run("status").out.splitlines()
    assert len(lines) == 2 + len(states)
    assert "ended by ValueError: no more data, after step 3" in run("status", "runs/crashed").out


@pytest.mark.long
def test_a_folder_used_twice_says_so(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        train(tmp_path / "twice")
    assert "3 steps were logged twice" in run("status", "twice").out


def test_a_folder_without_runs_says_what_to_do(run: Run) -> None:
    result = run("status")
    assert result.code == 2
    assert "truemfu run train.py" in result.err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7_500, "2 h"), (200_000, "2 days")]
)
def test_an_age_is_short(seconds: float, text: str) -> None:
    assert age(seconds) == text
