"""The examples of a gate work: the workflow's commands run, and the pytest example passes and fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "ci"
TRAIN = """
import torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """With `truemfu` as a command, from this checkout."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    command = programs / "truemfu"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m truemfu "$@"\n')
    command.chmod(0o755)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PATH": path, "PYTHONPATH": source} | more


def scale_log(folder: Path, factor: float) -> None:
    """The same run with steps that take `factor` times as long."""
    path = folder / "training_log.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    for row in rows:
        for name in row:
            if name == "perf/step_time":
                row[name] *= factor
            elif "per_second" in name or "mfu" in name or "tflops" in name:
                row[name] /= factor
    path.write_text(json.dumps(rows))


def test_the_commands_of_the_workflow(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((EXAMPLES / "performance.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["step-time"]
    assert workflow[True] == "pull_request"  # YAML 1.1 reads the key `on` as true
    assert set(job["env"]) == {"TRAIN", "RUNS", "LIMIT"}
    steps = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    assert list(steps) == ["Install", "Measure", "Compare"]
    for version in ("base", "head"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "train.py").write_text(TRAIN)
    own = environment(
        tmp_path,
        TRAIN="python train.py",
        RUNS="1",
        LIMIT=str(job["env"]["LIMIT"]),
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
    )

    def run(name: str) -> int:
        call = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[name]]
        return subprocess.run(call, cwd=tmp_path, env=own, check=False, timeout=250).returncode

    assert run("Measure") == 0
    for factor, expected in ((0.01, 0), (10_000.0, 1)):  # far faster, then 100 times slower than measured
        scale_log(tmp_path / "runs" / "head" / "1", factor)
        (tmp_path / "summary.md").unlink(missing_ok=True)
        assert run("Compare") == expected
        assert (tmp_path / "summary.md").read_text().startswith("# Comparison")
        assert (tmp_path / "comparison.html").is_file()


def test_the_pytest_example(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    call += [str(EXAMPLES / "test_step_time.py"), f"--rootdir={tmp_path}", "-rs"]
    own = environment(tmp_path, STEP_TIME_BASELINE=str(baseline))

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(call, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)

    first = run()
    assert first.returncode == 0, first.stdout
    assert "recorded" in first.stdout
    scale_log(baseline, 100.0)
    passed = run()
    assert passed.returncode == 0, passed.stdout
    assert "1 passed" in passed.stdout
    scale_log(baseline, 1e-4)
    failed = run()
    assert failed.returncode == 1
    assert "B is slower" in failed.stdout
