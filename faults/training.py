"""A small training run under a monitor, and all that must hold after it whatever happened around it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truemfu import TrainingMonitor
from truemfu.monitor import monitor as monitor_module

LOG = "training_log.json"
CLOSE_LIMIT_S = 40.0
"""close() gives rows 5 s, its thread 5 s, trackers their time limit; the rest is for a busy machine."""
_TRACKERS_S = 2.0
"""The time limit of close() for trackers, shortened here: those that hang take all of it."""
_LOST = re.compile(
    r"([\d,]+) (?:(?P<steps>steps)|rows of tracker (?P<tracker>\w+)|rows that were in (?P<gone>\S+):)"
)


class Net(nn.Module):
    """Two layers; `extra` is for arguments that a model ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return self.two(torch.relu(self.one(x))).square().mean()


class Kept:
    """A tracker in good health, beside whatever else there is: no fault of another may cost it a row."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def start(self, run: Mapping[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append(step)

    def flush(self) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


@dataclass
class Circumstance:
    """What surrounds a run; every part of it does nothing unless given."""

    before: Callable[[Path], None] = lambda folder: None
    """Before the monitor is made; gets the run's folder, which is not there yet."""
    trackers: Callable[[], Sequence[Any]] = lambda: ()
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Net
    arguments: Callable[[int], dict[str, Any]] = lambda step: {}
    """Further arguments of the forward pass."""
    values: Callable[[int], dict[str, Any]] = lambda step: {}
    """Arguments of `log_step` in the place of the usual ones."""
    after_step: Callable[[int, Path, TrainingMonitor], None] = lambda step, folder, monitor: None
    after_close: Callable[[], None] = lambda: None
    is_harmless: bool = True
    """Whether every row must be in the log; else rows may be lost, and must be counted."""
    log_must_load: bool = True


def together(parts: Sequence[Circumstance]) -> Circumstance:
    """Several circumstances at once."""

    def before(folder: Path) -> None:
        for part in parts:
            part.before(folder)

    def after_step(step: int, folder: Path, monitor: TrainingMonitor) -> None:
        for part in parts:
            part.after_step(step, folder, monitor)

    def after_close() -> None:
        for part in parts:
            part.after_close()

    models = [part.model for part in parts if part.model is not Net]
    return Circumstance(
        before=before,
        trackers=lambda: [tracker for part in parts for tracker in part.trackers()],
        config={key: value for part in parts for key, value in part.config.items()},
        model=models[0] if models else Net,
        arguments=lambda step: {key: value for part in parts for key, value in part.arguments(step).items()},
        values=lambda step: {key: value for part in parts for key, value in part.values(step).items()},
        after_step=after_step,
        after_close=after_close,
        is_harmless=all(part.is_harmless for part in parts),
        log_must_load=all(part.log_must_load for part in parts),
    )


def weights_after(
    around: Circumstance,
    steps: int,
    seed: int,
    after: Callable[[int, torch.Tensor], None] = lambda step, loss: None,
) -> list[list[torch.Tensor]]:
    """Train; the weights before the first step and after each."""
    torch.manual_seed(seed)
    model = around.model()
    return trained(model, around, range(1, steps + 1), after)


def trained(
    model: nn.Module, around: Circumstance, steps: range, after: Callable[[int, torch.Tensor], None]
) -> list[list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = [_copy(model)]
    for step in steps:
        loss = model(torch.randn(2, 8), **around.arguments(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(_copy(model))
        after(step, loss)
    return weights


def _copy(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_run(around: Circumstance, folder: Path, *, steps: int, seed: int) -> None:
    """Train without a monitor, then with one under these circumstances, and compare."""
    expected = weights_after(around, steps, seed)
    monitor_module._CLOSE_TIMEOUT_S = _TRACKERS_S
    out, kept = folder / "out", Kept()
    around.before(out)
    torch.manual_seed(seed)
    model = around.model()
    monitor = TrainingMonitor(
        out,
        {"monitoring": {"peak_tflops": 10.0, **around.config}},
        model=model,
        trackers=[*around.trackers(), kept],
    )

    def log(step: int, loss: torch.Tensor) -> None:
        values = {"epoch": 0, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, **around.values(step)}
        monitor.log_step(**{"step": step, **values})
        around.after_step(step, out, monitor)

    found = trained(model, around, range(1, steps + 1), log)
    close_in_time(monitor)
    around.after_close()
    assert_same(expected, found)
    check_account(
        monitor, out, kept, steps, is_harmless=around.is_harmless, log_must_load=around.log_must_load
    )


def close_in_time(monitor: TrainingMonitor) -> None:
    """Close it, within what close() promises."""
    began = time.monotonic()
    monitor.close()
    took_s = time.monotonic() - began
    assert took_s < CLOSE_LIMIT_S, f"close() took {took_s:.1f} s"


def assert_same(expected: Sequence[Sequence[torch.Tensor]], found: Sequence[Sequence[torch.Tensor]]) -> None:
    """The weights after each step, bit by bit."""
    assert len(expected) >= len(found)
    for step, (one, other) in enumerate(zip(expected, found, strict=False)):
        assert all(map(torch.equal, one, other)), f"the weights differ after step {step}"


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """The rows of the log; none where there is no log."""
    path = folder / LOG
    if not path.is_file() or not path.stat().st_size:  # made, and nothing could be written
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_bytes())
    return rows


def check_account(
    monitor: TrainingMonitor,
    folder: Path,
    kept: Kept,
    steps: int,
    *,
    is_harmless: bool,
    log_must_load: bool = True,
) -> None:
    """Every step is a row in the log and in the tracker in good health, or counted as lost."""
    lost = monitor.summary()["lost"]
    counted: dict[str, int] = {}
    for text in lost:
        if found := _LOST.match(text):
            of = found["steps"] or found["tracker"] or "file"
            counted[of] = counted.get(of, 0) + int(found[1].replace(",", ""))
    of_steps = counted.get("steps", 0)
    if log_must_load:
        rows = rows_in(folder)
        account = len(rows) + counted.get("file", 0) + of_steps
        assert account == steps, f"{steps} steps, {len(rows)} rows in the log, lost: {lost}"
        assert len(rows) == steps or lost, "rows are missing, and nothing says so"
        if is_harmless:
            assert len(rows) == steps, f"{len(rows)} of {steps} rows, lost: {lost}"
    else:
        assert counted.get("file", 0) + of_steps <= steps, lost
    # What a tracker took and could not flush is lost as far as anybody knows.
    account = len(kept.steps) + counted.get("Kept", 0) + of_steps
    assert account >= steps, f"{steps} steps, {len(kept.steps)} rows in a healthy tracker, lost: {lost}"
    assert is_harmless is False or len(kept.steps) == steps, f"a healthy tracker lost rows: {lost}"
