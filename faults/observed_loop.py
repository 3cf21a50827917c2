"""What the programs of `observed_programs.py` share: a small model, a training loop, and a record of a run.

A program is an ordinary training script. The same text runs alone, with a `TrainingMonitor`, and under
`truemfu run`; `OBSERVED_MONITOR`, where set, is the folder of the monitor, and `OBSERVED_RECORD` the file for
what must be the same in all three.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STEPS = 4
WIDTH = 8

_noted: list[str] = []
_monitor: Any = None
_watched: list[nn.Module] = []


class Net(nn.Module):
    """Two layers and a place between them for what a program does in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.middle(self.one(x).relu()))  # type: ignore[no-any-return]


def begin() -> None:
    """The same seeds and one thread for every run of a program."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def note(*values: object) -> None:
    """Record a side effect: it must be the same, in the same place of the order, in every run."""
    _noted.append(" ".join(map(str, values)))


def watch(model: nn.Module) -> None:
    """Attach a monitor where this run has one."""
    global _monitor
    _watched.append(model)
    folder = os.environ.get("OBSERVED_MONITOR")
    if folder and _monitor is None:
        from truemfu import TrainingMonitor

        _monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 1.0}}, model=model)


def log(step: int, loss: Tensor | float = 0.0) -> None:
    """The end of a step."""
    if _monitor is not None:
        _monitor.log_step(step, 0, loss, 1.0, 0.1)


def data(steps: int = STEPS, samples: int = 3) -> Iterable[Tensor]:
    """Batches of a generator of their own: what a program draws in forward does not move them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(samples, WIDTH, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def train(
    model: nn.Module,
    *,
    steps: int = STEPS,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: loss_of(model(x)),
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """The usual loop: `before` and `after` each step, `call` gives its loss."""
    watch(model)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, x in enumerate(data(steps), start=1):
        before(step)
        loss = call(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(step, loss.detach())
        after(step)


def finish(*models: nn.Module) -> None:
    """The end of a program: write what must be the same."""
    if _monitor is not None:
        _monitor.close()
    sys.stdout.flush()
    record = {
        "weights": [_hash_of(model) for model in models or _watched],
        "torch random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy random state": hashlib.sha256(repr(np.random.get_state()).encode()).hexdigest(),
        "python random state": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "noted": _noted,
    }
    Path(os.environ["OBSERVED_RECORD"]).write_text(json.dumps(record), "utf-8")


def _hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        tensor = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {model.training}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
