"""A real trackio database, read back with trackio's own storage.

trackio decides where its database is when it is imported, so each test is a program of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trackio")

HEAD = """
import json, sys, threading
from math import inf, nan
from pathlib import Path
from truemfu.trackers.trackio import TrackioTracker
folder = Path(sys.argv[1]) / "out"
"""
TAIL = """
from trackio.sqlite_storage import SQLiteStorage
found = {
    f"{project}/{run}": SQLiteStorage.get_logs(project, run)
    for project in SQLiteStorage.get_projects() for run in SQLiteStorage.get_runs(project)
}
print("FOUND" + json.dumps([found, SQLiteStorage.get_run_config("truemfu", "out")], default=str))
"""


def found(folder: Path, program: str) -> tuple[dict[str, list[dict[str, Any]]], Any]:
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "db"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program + TAIL, str(folder)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    logs, config = json.loads(line.removeprefix("FOUND"))
    return logs, config


def test_rows_are_in_the_database_at_their_steps(tmp_path: Path) -> None:
    program = """
tracker = TrackioTracker(folder)
tracker.start({"method": "count"})
for step in (7, 8, 50):
    tracker.log(step, {"training/loss": step / 2, "perf/mfu": None, "perf/warmup": step == 7})
tracker.log(51, {"training/loss": nan, "training/grad_norm": inf})
tracker.flush()
tracker.finish({"mfu": 0.25})
"""
    logs, config = found(tmp_path, program)
    assert list(logs) == ["truemfu/out"]
    rows = logs["truemfu/out"]
    assert [(row["step"], row["training/loss"], row["perf/warmup"]) for row in rows[:3]] == [
        (7, 3.5, True), (8, 4.0, False), (50, 25.0, False),
    ]  # fmt: skip
    assert not any("perf/mfu" in row for row in rows)
    assert rows[3]["step"] == 51
    assert str(rows[3]["training/loss"]).lower() == "nan"
    assert str(rows[3]["training/grad_norm"]).lower() in ("inf", "infinity")
    assert config["truemfu"] == {"method": "count"}


def test_the_programs_run_is_used_and_left_open(tmp_path: Path) -> None:
    program = """
import trackio
theirs = trackio.init(project="theirs", name="big", embed=False)
tracker = TrackioTracker(folder)
thread = threading.Thread(target=lambda: (
    tracker.start({}), tracker.log(3, {"training/loss": 0.5}), tracker.finish({})
))
thread.start()
thread.join()
trackio.log({"mine": 1}, step=4)
trackio.finish()
"""
    logs, _ = found(tmp_path, program)
    assert list(logs) == ["theirs/big"]
    assert [(row["step"], row.get("training/loss"), row.get("mine")) for row in logs["theirs/big"]] == [
        (3, 0.5, None), (4, None, 1),
    ]  # fmt: skip


def test_a_run_can_be_given(tmp_path: Path) -> None:
    program = """
import trackio
run = []
thread = threading.Thread(target=lambda: run.append(trackio.init(project="theirs", name="big", embed=False)))
thread.start()
thread.join()
tracker = TrackioTracker(folder, run=run[0])
tracker.start({})
tracker.log(3, {"training/loss": 0.5})
tracker.finish({})
run[0].finish()
"""
    logs, _ = found(tmp_path, program)
    assert [(row["step"], row["training/loss"]) for row in logs["theirs/big"]] == [(3, 0.5)]


def test_datasets_may_be_called_anything(tmp_path: Path) -> None:
    program = """
tracker = TrackioTracker(folder)
tracker.start({})
names = ["/data/c4.jsonl", "", "c4*", chr(0xDCFF), chr(0xDCFE), "x" * 300]
tracker.log(1, {f"dataset/{name}/loss": float(at) for at, name in enumerate(names)})
tracker.finish({})
"""
    ((row,),) = found(tmp_path, program)[0].values()
    assert sorted(value for key, value in row.items() if key.startswith("dataset")) == [0, 1, 2, 3, 4, 5]
    assert row["dataset/?/loss"] == 3.0
