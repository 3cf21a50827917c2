"""Records real step times for compare_statistics.py: the same training, over and over.

Each run is a process of its own with a TrainingMonitor, as users make them. Kept are the step times of its
rows after warm-up, in microseconds, when the run began, and the machine's load at its end. Whatever else the
machine does is in the noise. On a CPU a small transformer layer on one thread, of some milliseconds a step;
on a GPU eight layers of 2,048 in bf16, or six convolutions with 256 channels, which keep it busy.

    python benchmarks/compare_noise.py --runs 40 --steps 2000 --machine "shared with other work" \\
        --output benchmarks/results/compare_noise.json
    python benchmarks/compare_noise.py --runs 12 --steps 1500 --machine "nothing else running" \\
        --output benchmarks/results/compare_noise_alone.json
    python benchmarks/compare_noise.py --device cuda --runs 13 --steps 430 \\
        --output benchmarks/results/compare_noise_h200.json
    python benchmarks/compare_noise.py --device cuda --model convolutions --runs 13 --steps 430 \\
        --output benchmarks/results/compare_noise_h200_convolutions.json
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def built(model: str, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model and its batch."""
    import torch
    from torch import nn

    if model == "convolutions":
        layers = [
            part
            for _ in range(6)
            for part in (nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU())
        ]
        images = torch.randn(64, 256, 56, 56, device=device, dtype=torch.bfloat16)
        return nn.Sequential(*layers).to(device, torch.bfloat16), images
    width, heads, depth, shape, dtype = 64, 4, 1, (8, 32), torch.float32
    if device == "cuda":
        width, heads, depth, shape, dtype = 2048, 16, 8, (8, 512), torch.bfloat16
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    batch = torch.randn(*shape, width, device=device, dtype=dtype)
    return nn.Sequential(encoder, nn.Linear(width, width)).to(device, dtype), batch


def train(folder: Path, steps: int, device: str, model_name: str) -> None:
    """One monitored run."""
    import torch

    from truemfu import TrainingMonitor

    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    model, batch = built(model_name, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = TrainingMonitor(str(folder), model=model)
    for step in range(1, steps + 1):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, 0, loss.detach(), 0.0, 1e-3)
    monitor.close()


def recorded(steps: int, device: str, model: str) -> dict[str, object]:
    """One run in its own process: when it began, and its step times in microseconds."""
    from truemfu.report.run.load import load_run

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        call = [sys.executable, __file__, "--train", folder, "--steps", str(steps)]
        call += ["--device", device, "--model", model]
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
    parser.add_argument("--model", choices=("transformer", "convolutions"), default="transformer")
    parser.add_argument("--machine", help="what to write about the machine beside its processor")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.train, asked.steps, asked.device, asked.model)
        return
    import torch

    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    if asked.device == "cuda":
        machine = torch.cuda.get_device_name(0)
    if asked.machine is not None:
        machine += f", {asked.machine}"
    runs = []
    for number in range(asked.runs):
        runs.append(recorded(asked.steps, asked.device, asked.model))
        load = os.getloadavg()[0]
        runs[-1]["load"] = round(load, 2)
        print(f"run {number + 1} of {asked.runs}, load {load:.2f}", flush=True)
        asked.output.write_text(
            json.dumps(
                {
                    "recorded": f"{datetime.date.today()}",
                    "by": "benchmarks/compare_noise.py",
                    "machine": machine,
                    "model": asked.model,
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
