"""Runs and sweeps with known step times, as a monitor and a sweep leave them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SAMPLES, TOKENS, FLOPS, PEAK = 8, 4096, 2e12, 989.4e12
RECORD: dict[str, Any] = {
    "truemfu_version": "0.1.0",
    "versions": {"torch": "2.11.0"},
    "python": "3.12.3",
    "device": "NVIDIA H200",
    "world_size": 1,
    "convention": {"attention": "full"},
    "model": {"name": "Net", "parameters": 1000, "trainable_parameters": 900, "dtypes": ["bfloat16"]},
    "batch_shapes": [{"input_ids": [8, 512]}],
    "summary": {"peak_source": "datasheet: NVIDIA H200"},
}


def noisy(steps: int, seconds: float = 0.1, *, spread: float = 0.02, seed: int = 0) -> list[float]:
    """Independent step times around a median."""
    draw = random.Random(seed)
    return [seconds * math.exp(draw.gauss(0.0, spread)) for _ in range(steps)]


def correlated(draw: random.Random, steps: int, *, correlation: float, spread: float) -> list[float]:
    """Step times around 1 s, each like the one before (AR(1))."""
    level, push = draw.gauss(0.0, spread), spread * math.sqrt(1 - correlation**2)
    times = []
    for _ in range(steps):
        level = correlation * level + draw.gauss(0.0, push)
        times.append(math.exp(level))
    return times


def row(step: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A row of a log."""
    return {
        "global_step": step,
        "training/loss": 1.0,
        "perf/step_time": seconds,
        "perf/tokens_per_second": TOKENS / seconds,
        "perf/samples_per_second": SAMPLES / seconds,
        "perf/mfu": FLOPS / seconds / PEAK,
        "perf/tflops_per_gpu": FLOPS / seconds / 1e12,
        **more,
    }


def write_log(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in rows)
    path = folder / "training_log.json"
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path


def write_run(
    folder: Path, times: Sequence[float], change: Callable[[dict[str, Any]], object] | None = None
) -> Path:
    """A run of three warm-up steps and these; `change` alters its record."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = json.loads(json.dumps(RECORD))
    if change is not None:
        change(record)
    (folder / "training_run.json").write_text(json.dumps(record), encoding="utf-8")
    warmup = [row(step, 9.0, **{"perf/warmup": True}) for step in (1, 2, 3)]
    steady = [row(step, seconds) for step, seconds in enumerate(times, start=4)]
    if steady:
        steady[-1]["perf/memory_peak_bytes"] = 4 << 30
    write_log(folder, [*warmup, *steady])
    return folder
