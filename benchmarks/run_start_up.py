"""What `truemfu run` adds to the start of a command.

Why: a wrapper that makes every command start slowly is left out. Prints: wall times of an empty program, of
`import torch` and of five training steps, alone and under `truemfu run`, as medians with their ratio and
difference. The two ways alternate, and which of them goes first alternates too, so a machine that becomes
slower meanwhile does so for both. The time under `truemfu run` is that of the whole command: the start of
truemfu itself, the training, and for the steps the count of the model and the closing summary. Ends with one
line of JSON.

    python benchmarks/run_start_up.py [--repeats 9] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import truemfu
from source_id import source_id

FIVE_STEPS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(torch.ones(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PROGRAMS = {"an empty program": "pass", "import torch": "import torch", "five training steps": FIVE_STEPS}


def wall_time_s(command: list[str], folder: Path) -> float:
    """Seconds from the start of a command to its end."""
    began = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if ended.returncode != 0:
        raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr}")
    return took


def measure(repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    """Medians of each program, by its name."""
    times: dict[str, dict[str, list[float]]] = {name: {"alone": [], "watched": []} for name in PROGRAMS}
    for repeat in range(-1, repeats):  # the first round fills the caches of the disk
        for name, code in PROGRAMS.items():
            command = [sys.executable, "-c", code]
            output = folder / f"{list(PROGRAMS).index(name)}_{repeat}"
            ways = {
                "alone": command,
                "watched": [sys.executable, "-m", "truemfu", "run", "--output", str(output), "--", *command],
            }
            for way in sorted(ways, reverse=repeat % 2 == 0):
                took = wall_time_s(ways[way], folder)
                if repeat >= 0:
                    times[name][way].append(took)
    return {
        name: {
            "alone_ms": 1e3 * statistics.median(found["alone"]),
            "watched_ms": 1e3 * statistics.median(found["watched"]),
        }
        for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen.repeats, Path(folder))
    about = {
        "date": datetime.date.today().isoformat(),
        "truemfu": f"{truemfu.__version__} ({source_id()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "repeats": chosen.repeats,
    }
    lines = [
        ", ".join(f"{name} {value}" for name, value in about.items()),
        "",
        f"{'median wall time':<22}{'alone':>11}{'watched':>11}{'ratio':>8}{'difference':>13}",
    ]
    for name, medians in found.items():
        alone, watched = medians["alone_ms"], medians["watched_ms"]
        lines.append(
            f"{name:<22}{alone:>8.0f} ms{watched:>8.0f} ms{watched / alone:>8.2f}{watched - alone:>10.0f} ms"
        )
    lines.append("")
    lines.append(json.dumps({**about, "medians": found}))
    text = "\n".join(lines)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
