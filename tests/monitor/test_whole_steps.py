"""Work without gradients, and the MFU of whole steps: each row against a count by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_notes import wait_until_learned
from torch import Tensor, nn

from truemfu import TrainingMonitor
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.step_flops.apart import _NOT_REPEATED, _VARIES
from truemfu.monitor.step_flops.known import FORM

PEAK_TFLOPS = 1.0
SAMPLES = 16


def product(samples: int, layer: nn.Linear) -> int:
    return 2 * samples * layer.in_features * layer.out_features


def rows_of(
    folder: Path, step: Callable[[int, Callable[..., Any]], None], models: Any, steps: int = 8
) -> list[dict[str, Any]]:
    """The rows of a run; `step` gets its number and the monitor's `pause`."""
    config = {"monitoring": {"peak_tflops": PEAK_TFLOPS, "mfu_calculation_mode": "smart"}}
    rows = []
    with TrainingMonitor(folder, config, model=models) as monitor:
        for number in range(1, steps + 1):
            step(number, monitor.pause)
            monitor.log_step(number, 0, 0.0, None, 0.1)
            wait_until_learned(monitor)
            monitor.save_logs()
            rows.append(monitor.last)
    return rows


def train(model: nn.Module, x: Tensor, target: Tensor) -> None:
    (model(x) - target).square().mean().backward()
    model.zero_grad()


def test_a_teacher_is_counted_apart_and_in_the_whole_step(tmp_path: Path) -> None:
    student, teacher = nn.Linear(8, 4), nn.Linear(8, 4)

    def step(number: int, pause: Any) -> None:
        x = torch.randn(SAMPLES, 8)
        with torch.no_grad() if number % 2 else torch.inference_mode():
            target = teacher(x).clone()
        train(student, x, target.clone())

    rows = rows_of(tmp_path, step, student)
    known = [row for row in rows if "perf/no_grad_flops" in row]
    assert {row["perf/no_grad_flops"] for row in known} == {product(SAMPLES, teacher)}
    assert {row["perf/no_grad_method"] for row in known} == {OBSERVED}
    others = [row for row in rows[1:] if row not in known]
    assert {row["perf/no_grad_unknown"] for row in others} <= {_NOT_REPEATED}
    assert rows[4:] == known[-4:]
    training = 2 * product(SAMPLES, student)
    for row in known:
        seconds = row["perf/step_time"]
        assert row["perf/mfu"] * seconds * 1e12 == pytest.approx(training)
        assert row["perf/mfu_whole_step"] * seconds * 1e12 == pytest.approx(
            training + product(SAMPLES, teacher)
        )
    assert not any("perf/observed" in row for row in rows[4:])  # known for steps like it


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_operators_that_are_made_of_others_are_counted(context: Any, tmp_path: Path) -> None:
    student, conv, q = nn.Linear(8, 4), nn.Conv2d(3, 8, 3, padding=1), torch.randn(1, 2, 16, 8)

    def step(number: int, pause: Any) -> None:
        with context():
            conv(torch.randn(2, 3, 16, 16))
            nn.functional.scaled_dot_product_attention(q, q, q)
        train(student, torch.randn(SAMPLES, 8), torch.zeros(SAMPLES, 4))

    row = rows_of(tmp_path, step, student)[-1]
    assert row["perf/no_grad_flops"] == 2 * 2 * 8 * 3 * 9 * 16 * 16 + 4 * 2 * 16 * 16 * 8


def test_work_of_steps_that_are_not_logged_is_per_step(tmp_path: Path) -> None:
    """As the step time is, so that the row's own figures give its MFU."""
    student, teacher = nn.Linear(8, 4), nn.Linear(8, 4)
    config = {"monitoring": {"peak_tflops": PEAK_TFLOPS, "mfu_calculation_mode": "smart"}}
    with TrainingMonitor(tmp_path, config, model=student) as monitor:
        for number in range(1, 33):
            x = torch.randn(SAMPLES, 8)
            with torch.no_grad():
                target = teacher(x)
            train(student, x, target)
            if number % 4 == 0:
                monitor.log_step(number, 0, 0.0, None, 0.1)
                wait_until_learned(monitor)
                monitor.save_logs()
        row = monitor.last
    assert row["perf/no_grad_flops"] == product(SAMPLES, teacher)
    whole = (row["perf/mfu_whole_step"] - row["perf/mfu"]) * row["perf/step_time"] * 1e12
    assert whole == pytest.approx(product(SAMPLES, teacher))


def test_other_sizes_follow_from_the_form(tmp_path: Path) -> None:
    student, teacher = nn.Linear(8, 4), nn.Linear(8, 4)
    sizes = [3, 3, 5, 7, 9, 4, 8, 6, 5]

    def step(number: int, pause: Any) -> None:
        x = torch.randn(sizes[number - 1], 8)
        with torch.no_grad():
            target = teacher(x)
        train(student, x, target)

    rows = rows_of(tmp_path, step, student, len(sizes))
    found = [(row.get("perf/no_grad_flops"), row.get("perf/no_grad_method")) for row in rows]
    known = [(n, flops) for n, (flops, _) in zip(sizes, found, strict=True) if flops is not None]
    assert all(flops == product(n, teacher) for n, flops in known)
    assert FORM in {method for _, method in found}


def test_passes_of_the_trained_model_tell_steps_apart(tmp_path: Path) -> None:
    """Every third step runs the model once more without gradients: its rows have twice the work apart."""
    model = nn.Linear(8, 4)

    def step(number: int, pause: Any) -> None:
        x = torch.randn(SAMPLES, 8)
        with torch.no_grad():
            for _ in range(1 + (number % 3 == 0)):
                target = model(x)
        train(model, x, target)

    rows = rows_of(tmp_path, step, model, 12)
    for number, row in enumerate(rows, 1):
        if number > 1 and "perf/no_grad_flops" in row:
            assert row["perf/no_grad_flops"] == product(SAMPLES, model) * (1 + (number % 3 == 0))
    assert all("perf/no_grad_flops" in row for number, row in enumerate(rows, 1) if number > 3 and number % 3)


def test_work_that_changes_unseen_becomes_unknown(tmp_path: Path) -> None:
    """Step 10 is observed to check what is known."""
    model, teacher = nn.Linear(8, 4), nn.Linear(8, 4)

    def step(number: int, pause: Any) -> None:
        x = torch.randn(SAMPLES, 8)
        with torch.no_grad():
            for _ in range(1 + (number > 5)):
                target = teacher(x)
        train(model, x, target)

    with pytest.warns(match="work without gradients has changed"):
        rows = rows_of(tmp_path, step, model, 12)
    assert rows[9]["perf/no_grad_flops"] == 2 * product(SAMPLES, teacher)
    assert {row["perf/no_grad_unknown"] for row in rows[10:]} == {_VARIES}
    assert not any("perf/mfu_whole_step" in row for row in rows[10:])
    assert all("perf/mfu" in row for row in rows[10:])


def test_a_teacher_in_every_other_step_is_told_apart(tmp_path: Path) -> None:
    """Steps look alike but for the blocks without gradients that they enter."""
    model, teacher = nn.Linear(8, 4), nn.Linear(8, 4)

    def step(number: int, pause: Any) -> None:
        x, target = torch.randn(SAMPLES, 8), torch.zeros(SAMPLES, 4)
        if number % 2:
            with torch.no_grad():
                target = teacher(x)
        train(model, x, target)

    rows = rows_of(tmp_path, step, model, 16)
    known = {n: row["perf/no_grad_flops"] for n, row in enumerate(rows, 1) if "perf/no_grad_flops" in row}
    assert known == {n: product(SAMPLES, teacher) * (n % 2) for n in known}
    assert {n % 2 for n in known if "perf/observed" not in rows[n - 1]} == {0, 1}


def test_mfu_of_training_is_of_its_own_phases(tmp_path: Path) -> None:
    student, teacher = nn.Linear(8, 4), nn.Linear(8, 4)

    def step(number: int, pause: Any) -> None:
        x = torch.randn(SAMPLES, 8)
        with torch.no_grad():
            target = teacher(x)
            time.sleep(0.02)
        train(student, x, target)

    for row in rows_of(tmp_path, step, student)[4:]:
        training_s = row["perf/step_time"] - row["perf/phase/no_grad"]
        assert row["perf/mfu_training"] * training_s * 1e12 == pytest.approx(2 * product(SAMPLES, student))
        assert row["perf/mfu_training"] > row["perf/mfu"]
        assert row["perf/phase/no_grad"] > 0.02


def test_training_outside_of_the_watched_model_has_its_time(tmp_path: Path) -> None:
    """A frozen encoder that is called with gradients counts as training, and runs before the first phase."""
    encoder, head = nn.Linear(256, 512).requires_grad_(False), nn.Linear(512, 4)

    def step(number: int, pause: Any) -> None:
        features = encoder(torch.randn(SAMPLES, 256))
        time.sleep(0.02)
        train(head, features, torch.zeros(SAMPLES, 4))

    for row in rows_of(tmp_path, step, head)[4:]:
        work = row["perf/mfu"] * row["perf/step_time"] * 1e12
        assert work == pytest.approx(product(SAMPLES, encoder) + 2 * product(SAMPLES, head))
        assert row["perf/mfu_training"] * 0.02 * 1e12 < work


def test_without_phases_there_is_no_mfu_of_training(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    config = {"monitoring": {"peak_tflops": PEAK_TFLOPS, "step_phases": False}}
    with TrainingMonitor(tmp_path, config, model=model) as monitor:
        for number in range(6):
            train(model, torch.randn(4, 8), torch.zeros(4, 4))
            monitor.log_step(number, 0, 0.0, None, 0.1)
        monitor.save_logs()
        assert "perf/mfu" in monitor.last
        assert "perf/mfu_training" not in monitor.last


def test_a_declared_pause_is_outside_of_the_whole_step(tmp_path: Path) -> None:
    model, teacher = nn.Linear(8, 4), nn.Linear(8, 4)

    def step(number: int, pause: Any) -> None:
        x = torch.randn(SAMPLES, 8)
        with torch.no_grad():
            target = teacher(x)
        if number % 2:
            with pause("evaluation"), torch.no_grad():
                model(torch.randn(100, 8))
        train(model, x, target)

    rows = rows_of(tmp_path, step, model, 8)
    assert {row.get("perf/no_grad_flops") for row in rows[4:]} == {product(SAMPLES, teacher)}


def test_runs_without_such_work_have_no_keys_for_it(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    rows = rows_of(tmp_path, lambda number, pause: train(model, torch.randn(4, 8), torch.zeros(4, 4)), model)
    assert not any("no_grad" in key or "whole" in key for row in rows for key in row)


def test_other_sizes_without_such_work_are_no_failure(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, sizes = nn.Linear(8, 4), [30, 26, 27, 37, 38, 29, 32, 33, 31]

    def step(number: int, pause: Any) -> None:
        n = sizes[number - 1]
        train(model, torch.randn(n, 8), torch.zeros(n, 4))

    rows_of(tmp_path, step, model, len(sizes))
    assert not [str(one.message) for one in recwarn if "could not be counted" in str(one.message)]
