"""`truemfu audit` on a real training process, from its marks to the verdict: ncu and CUDA are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hardware.fake_ncu import install_fake_ncu

ROWS, WIDTH, CLASSES = 4, 16, 8
FLOPS = 2 * 2 * ROWS * WIDTH * CLASSES  # forward and the weights' gradient

TRAIN = f"""
import sys, torch
from torch import nn
from truemfu import TrainingMonitor
from truemfu.monitor.hybrid.audit_step import AuditStep, Marks

steps, folder, has_cuda = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "cuda"
calls = []
marks = Marks(lambda: not calls.append("start"), lambda: calls.append("stop"))
given = AuditStep.from_environment.__func__
if has_cuda:
    AuditStep.from_environment = classmethod(lambda *arguments: given(*arguments, marks=marks))
model = nn.Linear({WIDTH}, {CLASSES}, bias=False)
with TrainingMonitor(folder, {{"monitoring": {{"peak_tflops": 1}}}}, model=model) as monitor:
    for step in range(steps):
        loss = model(torch.randn({ROWS}, {WIDTH})).sum()
        loss.backward()
        monitor.log_step(step, 0.0, loss, None, 0.1)
print("marks", calls)
"""
TABLE = f""""ID","Process ID","Kernel Name","CC","sm__ops_path_tensor_src_bf16_dst_fp32.sum"
"0","1","some_gemm","9.0","{FLOPS // 2}"
"1","1","some_gemm","9.0","{FLOPS // 2}"
"""


def audited(folder: Path, steps: int, device: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr."""
    script, prints = folder / "train.py", folder / "prints.csv"
    script.write_text(TRAIN)
    prints.write_text(TABLE)
    install_fake_ncu(folder)
    command = [sys.executable, str(script), str(steps), str(folder / "out"), device]
    done = subprocess.run(
        [sys.executable, "-m", "truemfu", "audit", "--json", *options, "--", *command],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAKE_NCU_PRINTS": str(prints)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_short_run_is_counted_before_it_ends(tmp_path: Path) -> None:
    code, read, said = audited(tmp_path, 4, "cuda")
    assert code == 0, said
    assert (read["count"]["step"], read["count"]["hardware_flops"]) == (3, FLOPS)
    assert read["crosscheck"]["ratio"] == 1
    assert read["unmatched_flops"] == 0


def test_a_long_run_is_ended(tmp_path: Path) -> None:
    code, read, said = audited(tmp_path, 10**9, "cuda")
    assert code == 0, said
    assert "the marked step is counted: ending the run" in said
    assert read["crosscheck"]["ratio"] == 1


def test_one_step_is_marked_once(tmp_path: Path) -> None:
    code, _, said = audited(tmp_path, 12, "cuda", "--keep-running")
    assert code == 0, said
    assert "marks ['start', 'stop']" in said


def test_a_run_on_a_cpu_is_ended_at_once(tmp_path: Path) -> None:
    _, read, said = audited(tmp_path, 10**9, "cpu")
    assert read["verdict"] == "not compared: the model is on cpu: Nsight Compute only profiles CUDA kernels"
    assert "marks" not in said
