"""Observed steps of a real training: what their rows say, and that the observer is always gone afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from truemfu import TrainingMonitor
from truemfu.flops.observe.observer import _ObserverMode
from truemfu.monitor.step_flops.watch import StepSignals, StepWatch
from truemfu.monitor.watching.gradients import MOST_PARAMETERS, gradients_found

WIDTH, ROWS = 8, 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH
STEP = 2 * PRODUCT
"""Forward, and the gradient of the weight."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(WIDTH, WIDTH, bias=False), False

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.layer(x)
        if self.fails:
            raise RuntimeError("in the middle")
        return mixed.sum()


class Recording(TorchDispatchMode):
    """A mode of the program, which notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Unreadable(torch.nn.Parameter):
    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        raise RuntimeError("no gradient is read here")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        pass


def test_which_parameters_have_a_gradient_is_seen_at_few_of_them_without_an_operator() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3000)]
    groups = [{"params": parameters[:20]}, {"params": parameters[20:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for used in (parameters[19], parameters[-1]):
        used.grad = torch.zeros(1)
    with Recording() as recording:
        found = gradients_found(optimizer)
    assert (recording.seen, sum(found)) == ([], 2)  # the last one of each group is among them
    assert 50 <= len(found) <= 102


def test_an_optimizer_on_another_thread_in_a_pause_or_unreadable_is_not_seen() -> None:
    signals, weight = StepSignals(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    signals.optimizer_steps(optimizer)  # no step has begun
    signals.begin()
    other = threading.Thread(target=signals.optimizer_steps, args=(optimizer,))
    other.start()
    other.join()
    signals.suspend()
    signals.optimizer_steps(optimizer)
    signals.resume()
    optimizer.param_groups[0]["params"] = [Unreadable(torch.zeros(1))]
    signals.optimizer_steps(optimizer)
    assert signals.gradients is None
    optimizer.param_groups[0]["params"] = [weight]
    for _ in range(1000):
        signals.optimizer_steps(optimizer)
    assert signals.gradients == bytes(2 * MOST_PARAMETERS)  # not more than these, however many optimizers
    signals.begin()
    assert signals.gradients is None


def test_the_hook_on_optimizers_is_gone_after_the_run(tmp_path: Path, model: Model) -> None:
    before, before_post = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)
    for step in (1, 2):
        model(torch.randn(ROWS, WIDTH)).backward()
        optimizer.step()
        monitor.log_step(step, 0, 1.0, None, None)
    assert len(_global_optimizer_pre_hooks) == len(before) + 2  # signals of the step, and its phases
    assert len(_global_optimizer_post_hooks) == len(before_post) + 1
    monitor.close()
    assert dict(_global_optimizer_pre_hooks) == before
    assert dict(_global_optimizer_post_hooks) == before_post


def test_a_monitor_may_begin_in_a_hook_after_an_optimizer_step(tmp_path: Path, model: Model) -> None:
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), iter(range(1, 9))
    monitors: list[TrainingMonitor] = []

    def stepped(*_: Any) -> None:
        if not monitors:
            monitors.append(TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model))
        monitors[0].log_step(next(steps), 0, 1.0, None, None)

    hook = register_optimizer_step_post_hook(stepped)
    for _ in range(4):
        model(torch.randn(ROWS, WIDTH)).backward()
        optimizer.step()
    hook.remove()
    monitors[0].close()
    rows = json.loads((tmp_path / "training_log.json").read_text("utf-8"))
    assert rows[-1]["perf/phase/optimizer"] > 0


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def monitor(tmp_path: Path, model: Model) -> TrainingMonitor:
    return TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model)


def inputs() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def log(monitor: TrainingMonitor, step: int) -> None:
    monitor.log_step(step, 0, 1.0, 1.0, 0.1)


def modes() -> list[str]:
    """Dispatch modes of this thread that would handle the next operator; ours by the name of its base."""
    stack = [mode for mode in _get_current_dispatch_mode_stack() if not getattr(mode, "is_finished", False)]
    return [(_ObserverMode if isinstance(mode, _ObserverMode) else type(mode)).__name__ for mode in stack]


def rows_of(monitor: TrainingMonitor, folder: Path) -> list[dict[str, Any]]:
    monitor.close()
    rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text("utf-8"))
    return rows


def flops(row: dict[str, Any]) -> int | None:
    rate = row.get("perf/tflops_per_gpu")
    return None if rate is None else round(rate * row["perf/step_time"] * 1e12)


def test_the_first_steps_and_early_checks_are_observed_and_their_time_is_in_no_median(
    monitor: TrainingMonitor, model: Model, tmp_path: Path
) -> None:
    observed = []
    for step in range(1, 12):
        model(inputs()).backward()
        observed.append(modes())
        log(monitor, step)
    assert [step for step, seen in enumerate(observed, start=1) if seen == ["_ObserverMode"]] == [1, 2, 10]
    rows = rows_of(monitor, tmp_path)
    assert [row["global_step"] for row in rows if row.get("perf/observed")] == [1, 2, 10]
    assert all(row["perf/warmup"] for row in (*rows[:3], rows[9]))
    assert [flops(row) for row in rows] == [STEP] * 11
    assert monitor.summary()["monitor_cost"]["observed_steps"] == [1, 2, 10]


def test_a_later_observed_step_is_no_measurement_either(
    monitor: TrainingMonitor, model: Model, tmp_path: Path
) -> None:
    for step in range(1, 14):
        model(inputs()).backward()
        if step == 5:
            assert monitor._live is not None
            monitor._live.steps.watch.plan.ask("an observation of the sixth step")
        log(monitor, step)
        monitor.save_logs()
    rows = rows_of(monitor, tmp_path)
    observed = {row["global_step"] for row in rows if row.get("perf/observed")}
    assert {1, 2, 6} <= observed
    assert {row["global_step"] for row in rows if row.get("perf/warmup")} == {1, 2, 3} | observed
    measured = [row["perf/step_time"] for row in rows if row["global_step"] not in {1, 2, 3} | observed]
    assert monitor.summary()["median_step_time_s"] == pytest.approx(median(measured))


@pytest.mark.parametrize("step", [1, 2])
def test_an_exception_in_forward_leaves_no_mode_behind(
    monitor: TrainingMonitor, model: Model, tmp_path: Path, step: int
) -> None:
    for number in range(1, 6):
        if number == step:
            model.fails = True
            with pytest.raises(RuntimeError, match="in the middle"):
                model(inputs())
            model.fails = False
        model(inputs()).backward()
        log(monitor, number)
    found = [flops(row) for row in rows_of(monitor, tmp_path)]
    assert modes() == []
    assert found[step - 1] == STEP + PRODUCT  # with the pass that failed
    assert set(found[3:]) <= {STEP, None}


def test_a_run_that_ends_in_an_observed_step_leaves_no_mode_behind(
    monitor: TrainingMonitor, model: Model
) -> None:
    model(inputs()).backward()
    assert modes() == ["_ObserverMode"]
    monitor.close()
    assert modes() == []


def test_steps_logged_on_another_thread_leave_no_mode_behind(
    monitor: TrainingMonitor, model: Model, tmp_path: Path
) -> None:
    for step in range(1, 6):
        model(inputs()).backward()
        thread = threading.Thread(target=log, args=(monitor, step))
        thread.start()
        thread.join()
        assert modes() == []
    for row in rows_of(monitor, tmp_path):
        assert flops(row) is None
        assert "on a different thread from" in row["perf/mfu_unknown"]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_what_runs_in_a_pause_is_not_the_steps_work(
    monitor: TrainingMonitor, model: Model, tmp_path: Path, step: int
) -> None:
    for number in range(1, 6):
        loss = model(inputs())
        if number == step:
            with monitor.pause():
                model(inputs()).backward()
                model.layer(inputs())
        loss.backward()
        log(monitor, number)
    assert [flops(row) for row in rows_of(monitor, tmp_path)] == [STEP] * 5


def test_modes_of_the_program_see_what_they_see_without_a_monitor(tmp_path: Path) -> None:
    def train(call: Callable[[Model, int], None]) -> list[str]:
        model, mode = Model(), Recording()
        with mode:
            for step in range(1, 5):
                model(inputs()).backward()
                call(model, step)
        return mode.seen

    alone = train(lambda model, step: None)
    monitors: list[TrainingMonitor] = []

    def logged(model: Model, step: int) -> None:
        log(monitors[0], step)

    def watched(model: Model, step: int) -> None:
        if not monitors:
            monitors.append(TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1}}, model=model))
        logged(model, step)

    assert train(watched) == alone
    assert modes() == []
    found = [flops(row) for row in rows_of(monitors[0], tmp_path)]
    assert found[1:] == [STEP] * 3


@pytest.mark.parametrize("leaves_first", [True, False], ids=["left before log_step", "left after log_step"])
def test_modes_entered_within_an_observed_step_are_left_in_any_order(
    monitor: TrainingMonitor, model: Model, tmp_path: Path, leaves_first: bool
) -> None:
    for step in range(1, 5):
        mode = Recording()
        mode.__enter__()
        model(inputs()).backward()
        if leaves_first:
            mode.__exit__(None, None, None)
        log(monitor, step)
        if not leaves_first:
            mode.__exit__(None, None, None)
        assert "aten.mm.default" in mode.seen
    assert modes() == []
    assert [flops(row) for row in rows_of(monitor, tmp_path)] == [STEP] * 4


def test_an_estimate_never_takes_the_place_of_a_count(
    monitor: TrainingMonitor, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepWatch, "_enter", lambda self, is_whole: None)
    for step in range(1, 4):
        model(inputs()).backward()
        log(monitor, step)
    for row in rows_of(monitor, tmp_path):
        assert not any(name in row for name in ("perf/mfu", "perf/tflops_per_gpu", "perf/hfu"))
        assert row["perf/mfu_estimate"] * row["perf/step_time"] * 1e12 == pytest.approx(STEP)
        assert row["perf/mfu_unknown"].startswith("no step with the same batch shapes was observed")
    assert "perf/mfu" not in monitor.last


def test_a_change_of_the_model_is_noted_with_its_steps(
    monitor: TrainingMonitor, model: Model, tmp_path: Path
) -> None:
    for step in range(1, 61):
        if step == 21:
            model.layer = nn.Linear(WIDTH, WIDTH)
        model(inputs()).backward()
        log(monitor, step)
    rows_of(monitor, tmp_path)
    (said,) = monitor.summary()["warnings"]
    words = said.split()
    first, last = int(words[words.index("steps") + 1]), int(words[words.index("and") + 1].rstrip(":"))
    assert said.startswith("the model changed between the logged steps")
    assert first <= 20 < last
