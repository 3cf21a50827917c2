"""A job that torchrun restarts, and that comes back with more ranks: one record in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from truemfu.monitor.ranks.rank_file import read_files
from truemfu.report.run.load import load_run

TIME_LIMIT_S = 200
STEPS = 10
SCRIPT = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from truemfu import TrainingMonitor

    folder, first, failing = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first += attempt * 10
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    for step in range(first, first + 10):
        model(torch.ones(2 + rank, 16)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        time.sleep(0.15)
    monitor.save_logs()
    dist.barrier()
    if failing == "fails" and attempt == 0:
        if rank == 1:
            sys.exit(3)
        time.sleep(60)
    monitor.close()
    dist.destroy_process_group()
"""


def launch(folder: Path, ranks: int, *arguments: str) -> None:
    script = folder.parent / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    ran = subprocess.run(
        [sys.executable, *command, str(script), str(folder), *arguments],
        # With a store that attempts share, gloo meets the addresses of the failed one.
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of which one fails, their restart, and three ranks later on."""
    found = tmp_path_factory.mktemp("elastic") / "run"
    launch(found, 2, "1", "fails")
    launch(found, 3, str(2 * STEPS + 1), "ends")
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text())
    return rows


def test_the_log_goes_on_with_the_figures_of_each_world_size(folder: Path) -> None:
    rows = rows_of(folder)
    assert [row["global_step"] for row in rows] == list(range(1, 3 * STEPS + 1))
    samples = [round(row["perf/samples_per_second"] * row["perf/step_time"]) for row in rows]
    assert samples == [2 + 3] * 2 * STEPS + [2 + 3 + 4] * STEPS


def test_each_place_has_one_file_with_the_rows_of_all_attempts(folder: Path) -> None:
    files = list(read_files(folder))
    assert [fault for _, faults in files for fault in faults] == []
    rows = [row for own, _ in files for row in own]
    assert len(list((folder / "ranks").iterdir())) == 3
    attempts = {(row.device.rpartition(":")[2], row.restart, row.world_size) for row in rows}
    first, again = {(place, 0, 2) for place in "01"}, {(place, 1, 2) for place in "01"}
    assert attempts == first | again | {(place, 0, 3) for place in "012"}
    assert sum(row.is_last for row in rows) == 1 + 2 + 3  # the rank that waited was ended by a signal


def test_the_report_sums_up_the_attempts(folder: Path) -> None:
    run = load_run(folder)
    assert [line.attempts for line in run.ranks.lines] == [3, 3, 1]
    job = run.job
    assert job is not None
    assert [start.ended for start in job.starts][1:] == ["finished", "finished"]  # the first: by torchrun
    assert [(start.first_step, start.last_step) for start in job.starts] == [(1, 10), (11, 20), (21, 30)]
    assert [start.where.split(" ×")[0] for start in job.starts] == ["2", "2", "3"]
    parts = dict(job.parts)
    assert parts["steps that counted"] > 0.15 * 3 * (STEPS - 1)  # the first one has no sleep before it
    assert "steps done again or lost" not in parts
    assert parts["between starts"] > 0
    assert job.with_gaps is not None
    assert sum(parts.values()) == pytest.approx(job.with_gaps.seconds)
    assert job.held.job_mfu == pytest.approx(job.step_mfu * job.held.goodput)
