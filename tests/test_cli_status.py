"""`truemfu status`: how a run stands or ended, and the list of runs."""

from __future__ import annotations

import json
import re
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
    assert "3 rows were replaced by a later row of the same step" in run("status", "twice").out


def write_run(folder: Path, methods: dict[str, int], **summary: object) -> None:
    """The files of a run whose steps have their FLOPs by these methods; without a peak."""
    folder.mkdir(parents=True)
    of_steps = [method for method, steps in methods.items() for _ in range(steps)]
    rows = [
        {"global_step": at, "perf/step_time": 0.1, "perf/tflops_per_gpu": 2.0, "perf/method": method}
        for at, method in enumerate(of_steps)
    ]
    (folder / "training_log.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    (folder / "training_run.json").write_text(json.dumps({"summary": {"steps": len(rows), **summary}}))


def test_all_methods_are_named_and_an_estimated_rate_is_marked(run: Run, tmp_path: Path) -> None:
    methods = {"estimate": 30, "count of observed steps": 60}
    write_run(tmp_path / "run", methods)
    out = run("status", "run").out
    assert re.search(r"FLOPs by +estimate \(30 steps\), count of observed steps \(60 steps\)\n", out)
    assert "of one device; the model's work, estimated from its structure in 30 of 90 steps" in out
    found = json.loads(run("status", "run", "--json").out)
    assert (found["method"], found["methods"]) == ("count of observed steps", methods)
    assert "2 TFLOP/s (partly estimated)" in run("status").out


def test_a_folder_that_holds_runs_is_listed(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "truemfu-runs" / "a", {"estimate": 2})
    out = run("status", "truemfu-runs").out
    assert "truemfu-runs/a" in out
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no run in empty or two levels below" in run("status", "empty").err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_long_error_leaves_the_list_one_table(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    error = "RuntimeError: " + "shapes do not match; " * 12
    write_run(tmp_path / "crashed", {"estimate": 2}, ended_by=error)
    write_run(tmp_path / "fine", {"estimate": 2})
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", run("status").out).splitlines()
    assert len(lines) == 4
    assert re.search(r"MFU or FLOP/s +state", lines[0])
    crashed = next(line.rstrip() for line in lines if "crashed" in line)
    if is_terminal:
        assert len(crashed) <= 100
        assert crashed.endswith("…")
    else:
        assert error.strip() in crashed


def test_a_folder_without_runs_says_what_to_do(run: Run) -> None:
    result = run("status")
    assert result.code == 2
    assert "truemfu run train.py" in result.err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7_500, "2 h"), (200_000, "2 days")]
)
def test_an_age_is_short(seconds: float, text: str) -> None:
    assert age(seconds) == text
