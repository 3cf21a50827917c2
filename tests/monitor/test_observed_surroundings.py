"""An observed step beside other monitors, threads, forks and failures: its FLOPs are right or unknown.

Its mode leaves the stack in all of them.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset

from truemfu import TrainingMonitor
from truemfu.flops.observe import observation
from truemfu.monitor.step_recorder import StepRecorder

PEAK = 1e12
CONFIG = {"monitoring": {"peak_tflops": PEAK / 1e12}}
ROWS, WIDTH = 16, 32
pytestmark = pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))


def flops(hidden: int) -> int:
    """Two products forward, three backward: the inputs need no gradient."""
    return 5 * 2 * ROWS * WIDTH * hidden


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "training_log.json").read_text())


def known(folder: Path) -> list[int | None]:
    return [
        None if "perf/mfu" not in row else round(row["perf/mfu"] * row["perf/step_time"] * PEAK)
        for row in rows(folder)
    ]


def reasons(folder: Path) -> set[str]:
    return {row["perf/mfu_unknown"] for row in rows(folder) if "perf/mfu" not in row}


def modes() -> list[Any]:
    return _get_current_dispatch_mode_stack()


def train(model: nn.Module) -> None:
    model(torch.randn(ROWS, WIDTH)).sum().backward()


def test_two_monitors_that_observe_at_once_each_see_the_whole_thread(tmp_path: Path) -> None:
    models = [mlp(64), mlp(128)]
    monitors = [TrainingMonitor(tmp_path / str(n), CONFIG, model=models[n]) for n in range(2)]
    for step in range(1, 9):
        losses = [model(torch.randn(ROWS, WIDTH)).sum() for model in models]
        for loss in losses:
            loss.backward()
        for monitor in monitors:
            monitor.log_step(step, 0, None, None, None)
    for monitor in monitors:
        monitor.close()
    assert modes() == []
    for number in range(2):
        assert set(known(tmp_path / str(number))[1:]) == {flops(64) + flops(128)}


def test_steps_logged_by_another_thread_are_unknown(tmp_path: Path) -> None:
    model, weight = mlp(64), torch.randn(8, 8, requires_grad=True)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)

    def log(step: int) -> None:
        (weight @ weight).sum()  # what this thread multiplies is not the step
        monitor.log_step(step, 0, None, None, None)

    with ThreadPoolExecutor(1) as other:
        for step in range(1, 9):
            train(model)
            other.submit(log, step).result()
            assert len(modes()) <= (step == 1)
    monitor.close()
    assert set(known(tmp_path)) == {None}
    assert reasons(tmp_path) == {
        "the step's forward pass began on a different thread from the one that calls log_step"
    }


class Modes(Dataset[int]):
    """How many modes a worker has on its stack."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return len(modes())


def test_a_worker_that_is_forked_in_an_observed_step_is_not_observed(tmp_path: Path) -> None:
    model = mlp(64)
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        train(model)
        monitor.log_step(1, 0, None, None, None)
        assert len(modes()) == 1
        loader = DataLoader(Modes(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        assert next(iter(loader)).tolist() == [0, 0, 0, 0]
        assert len(modes()) == 1


def test_a_monitor_that_fails_in_an_observed_step_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(64)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    train(model)
    monitor.log_step(1, 0, None, None, None)
    assert len(modes()) == 1
    monkeypatch.setattr(StepRecorder, "note_batch", lambda *args: 1 / 0)
    train(model)
    assert modes() == []
    monitor.close()


def test_a_step_that_does_not_end_keeps_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "_MOST_OPERATORS", 1000)
    model = mlp(64)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    train(model)
    monitor.log_step(1, 0, None, None, None)
    for _ in range(200):
        train(model)
    [mode] = modes()
    assert mode._tally.entries == []
    monitor.log_step(2, 0, None, None, None)
    monitor.close()
    assert known(tmp_path)[1] is None
    assert "is log_step called after each step?" in rows(tmp_path)[1]["perf/mfu_unknown"]


def test_another_model_of_the_same_form_has_its_own_flops(tmp_path: Path) -> None:
    first, second = mlp(64), mlp(256)
    monitor = TrainingMonitor(tmp_path, CONFIG, model=first)
    for step in range(1, 13):
        if step == 7:
            monitor.attach(second)
        train(first if step < 7 else second)
        monitor.log_step(step, 0, None, None, None)
    monitor.close()
    assert known(tmp_path) == [flops(64)] * 6 + [flops(256)] * 6


def test_a_model_that_changes_back_and_forth_is_known_in_both_states(tmp_path: Path) -> None:
    model = nn.Sequential(mlp(64), mlp(64), mlp(64))
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    frozen, trained = 3 * 6 - 1 - 2, 3 * 6 - 1
    for step in range(1, 601):
        model[1].requires_grad_(step % 2 == 0)
        train(model)
        monitor.log_step(step, 0, None, None, None)
    monitor.close()
    product = 2 * ROWS * WIDTH * 64
    found = known(tmp_path)
    assert set(found[0::2]) == {frozen * product}
    assert set(found[1::2]) == {trained * product}
