"""Records real step times for compare_statistics.py: the same training, over and over.

Each run is a process of its own with a TrainingMonitor, as users make them. Kept are the step times of its
rows after warm-up, in microseconds, when the run began, and the machine's load at its end. Whatever else the
machine does is in the noise. On a CPU a small transformer layer on one thread, of some milliseconds a step;
on a GPU eight layers of 2,048 in bf16, which keep it busy.

    python benchmarks/compare_noise.py --runs 40 --steps 2000 --output benchmarks/results/compare_noise.json
    python benchmarks/compare_noise.py --device cuda --runs 13 --steps 430 \\
        --output benchmarks/results/compare_noise_h200.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def train(folder: Path, steps: int, device: str) -> None:
    """One monitored run."""
    import torch

    from truemfu import TrainingMonitor

    torch.manual_seed(0)
    width, heads, layers, shape, dtype = 64, 4, 1, (8, 32), torch.float32
    if device == "cuda":
        width, heads, layers, shape, dtype = 2048, 16, 8, (8, 512), torch.bfloat16
    else:
        torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.nn.Linear(width, width)
    ).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(*shape, width, device=device, dtype=dtype)
    monitor = TrainingMonitor(str(folder), model=model)
    for step in range(1, steps + 1):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, 0, loss.detach(), 0.0, 1e-3)
    monitor.close()


def recorded(steps: int, device: str) -> dict[str, object]:
    """One run in its own process: when it began, and its step times in microseconds."""
    from truemfu.report.run_load import load_run

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        call = [sys.executable, __file__, "--train", folder, "--steps", str(steps), "--device", device]
        subprocess.run(call, check=True, capture_output=True)
        rows = load_run(folder).rows
    times = [row.step_time_s for row in rows if not row.is_warmup and row.step_time_s is not None]
    return {"began_s": round(began), "step_times_us": [round(1e6 * seconds) for seconds in times]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.train, asked.steps, asked.device)
        return
    import torch

    machine = f"{platform.machine()}, {os.cpu_count()} cores, shared with other work"
    if asked.device == "cuda":
        machine = torch.cuda.get_device_name(0)
    runs = []
    for number in range(asked.runs):
        runs.append(recorded(asked.steps, asked.device))
        load = os.getloadavg()[0]
        runs[-1]["load"] = round(load, 2)
        print(f"run {number + 1} of {asked.runs}, load {load:.2f}", flush=True)
        asked.output.write_text(
            json.dumps(
                {
                    "recorded": f"{datetime.date.today()}",
                    "by": "benchmarks/compare_noise.py",
                    "machine": machine,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "runs": runs,
                },
                separators=(",", ":"),
            ).replace('{"began_s"', '\n{"began_s"')
            + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
