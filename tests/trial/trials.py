"""Real trials: a script under `truemfu try`, and what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_SCRIPTS = Path(__file__).parents[1] / "run_scripts"
TIME_LIMIT_S = 600


@dataclass
class Tried:
    """A trial that ended, and the folder of its command."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def trial(self) -> dict[str, Any]:
        return json.loads((self.folder / "trial" / "trial.json").read_text())

    def case(self, name: str) -> dict[str, Any]:
        return next(case for case in self.trial["cases"] if case["name"] == name)

    def runs(self, name: str) -> list[dict[str, Any]]:
        return [run for run in self.trial["runs"] if run["name"] == name]

    def printed(self, number: int) -> str:
        """What one process printed."""
        (folder,) = (self.folder / "trial" / "processes").glob(f"{number:02}-*")
        return (folder / "output.txt").read_text()


def command(
    folder: Path, *options: str, call: list[str], steps: tuple[str, ...] = ("--steps", "20")
) -> list[str]:
    own = [sys.executable, "-m", "truemfu", "try", "-o", str(folder / "trial")]
    return [*own, *steps, "--warm-up", "3", *options, "--", *call]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **more}


def tried(
    folder: Path,
    *options: str,
    call: list[str],
    more: Mapping[str, str] | None = None,
    steps: tuple[str, ...] = ("--steps", "20"),
) -> Tried:
    """The trial of a command in this folder."""
    done = subprocess.run(
        command(folder, *options, call=call, steps=steps),
        cwd=folder,
        env=environment(**(more or {})),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    return Tried(done.returncode, done.stdout, done.stderr, folder)


def written(folder: Path, text: str, name: str = "train.py") -> list[str]:
    """The command that runs this script."""
    (folder / name).write_text(text)
    return [sys.executable, name]


def longer(name: str, *constants: tuple[str, str]) -> str:
    """A script of the tests of `truemfu run` with other constants: more steps than a trial needs."""
    text = (RUN_SCRIPTS / f"{name}.py").read_text()
    for old, new in constants:
        assert old in text
        text = text.replace(old, new, 1)
    return text


LOOP = """
import atexit, os, sys, time
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
TRY = os.environ.get("TRUEMFU_TRY")


class Data(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        {item}
        return torch.full((8,), index / 800)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        {forward}
        return torch.relu(self.inner(x))


model = nn.Sequential(Block(), Block())
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for epoch in range(1000):
    for batch in DataLoader(Data(), batch_size=4, shuffle=True):
        x = batch
        for block in model:
            x = {call}
        loss = x.sub(1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        {after}
"""


def script(**parts: str) -> str:
    default = {"item": "pass", "forward": "pass", "before": "", "call": "block(x)", "after": "pass"}
    text = LOOP
    for name, part in {**default, **parts}.items():
        text = text.replace("{" + name + "}", part)
    return text


def trial_of(folder: Path, *options: str, **parts: str) -> Tried:
    return tried(folder, *options, call=written(folder, script(**parts)))
