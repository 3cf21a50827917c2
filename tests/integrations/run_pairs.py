"""The same command alone and under `truemfu run`, each in its own folder, and what they left compared."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SCRIPTS = Path(__file__).parents[1] / "run_scripts"
TIME_LIMIT_S = 400
PEAK_FLOPS_PER_S = 1e12
RUN_DEPENDENT = {
    # in trainer_state.json of transformers: times of the run
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    # in training_args.bin of transformers 4: a folder named after the time of the run
    "logging_dir",
}
"""Names in files of the scripts whose values differ between two runs of the same script."""


@dataclass
class Ended:
    """A command that ended, its working folder, and the folder that `--output` named."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    output: Path

    def rows(self) -> list[dict[str, Any]]:
        path = self.output / "training_log.json"
        return json.loads(path.read_text()) if path.exists() else []

    def run_file(self) -> dict[str, Any]:
        return json.loads((self.output / "training_run.json").read_text())


def load(name: str) -> ModuleType:
    """A script as a module, for its model and batches."""
    spec = importlib.util.spec_from_file_location(f"run_scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(command: list[str], output: Path) -> list[str]:
    """The command line that watches a command."""
    return [sys.executable, "-m", "truemfu", "run", "--output", str(output), "--", *command]


def environment(**more: str) -> dict[str, str]:
    """That of the tests, with one thread, a peak, and the same order of sets in every process."""
    fixed = {"OMP_NUM_THREADS": "1", "TRUEMFU_PEAK_TFLOPS": "1", "PYTHONHASHSEED": "0"}
    return {**os.environ, **fixed, **more}


def started(command: list[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    """A command in a new folder, in a process group of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(PWD_EXPECTED=str(folder), **more),
        text=True,
        start_new_session=True,
        **pipes,
    )


def ended(command: list[str], folder: Path, output: Path, **more: str) -> Ended:
    """A command run to its end."""
    process = started(command, folder, **more)
    try:
        stdout, stderr = process.communicate("from stdin", timeout=TIME_LIMIT_S)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr, folder, output)


def alone_and_watched(command: list[str], folder: Path, **more: str) -> tuple[Ended, Ended]:
    """A command run alone, then under `truemfu run`."""
    output = folder / "output"
    return (
        ended(command, folder / "alone", folder / "no_output", **more),
        ended(watched(command, output), folder / "watched", output, **more),
    )


def different_files(one: Path, other: Path) -> list[str]:
    """Names of files that only one folder has, or whose content differs."""
    names = {
        str(path.relative_to(root)) for root in (one, other) for path in root.rglob("*") if path.is_file()
    }
    return sorted(
        name
        for name in names
        if not ((one / name).is_file() and (other / name).is_file())
        or not same(_content(one / name), _content(other / name))
    )


def _content(path: Path) -> Any:
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        return torch.load(path, weights_only=False)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return path.read_bytes()


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, tensors and objects included; values of `RUN_DEPENDENT` names are not compared."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            name in RUN_DEPENDENT or same(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes"):
        return one.tobytes() == other.tobytes()
    if type(one).__eq__ is object.__eq__ or is_dataclass(one):
        return same(vars(one), vars(other)) if hasattr(one, "__dict__") else repr(one) == repr(other)
    return bool(one == other)


def amounts(rows: list[dict[str, Any]], rate: str) -> list[int | None]:
    """What each step did, from a rate in its row; None where the row has none."""
    return [round(row[rate] * row["perf/step_time"]) if row.get(rate) is not None else None for row in rows]


def flops(rows: list[dict[str, Any]], name: str = "perf/mfu") -> list[int | None]:
    """FLOPs of each step: MFU × step time × peak."""
    return [
        round(row[name] * row["perf/step_time"] * PEAK_FLOPS_PER_S) if row.get(name) is not None else None
        for row in rows
    ]
